"""The backend `deepspeed`: ZeRO divides optimizer state, gradients and weights over the ranks, stage by stage."""

from fleettune_backend_deepspeed.backend import DeepSpeedBackend

__version__ = "0.1.0"
__all__ = ["DeepSpeedBackend"]
