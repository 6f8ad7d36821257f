"""The launcher `torchrun`: `python -m torch.distributed.run`, one process per device, on one machine or several."""

from fleettune_launcher_torchrun.launcher import TorchrunLauncher

__version__ = "0.1.0"
__all__ = ["TorchrunLauncher"]
