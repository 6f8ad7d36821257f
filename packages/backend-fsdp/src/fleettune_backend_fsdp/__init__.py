"""The backend `fsdp`: weights, gradients and optimizer state divided over the ranks by PyTorch's FSDP2."""

from fleettune_backend_fsdp.backend import FsdpBackend

__version__ = "0.1.0"
__all__ = ["FsdpBackend"]
