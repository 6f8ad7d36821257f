"""The launcher `slurm`. This version recognises SLURM; it does not submit to it yet."""

from fleettune_launcher_slurm.launcher import SlurmLauncher

__version__ = "0.1.0"
__all__ = ["SlurmLauncher"]
