"""The launcher plugin. In this version it tells what SLURM made of this process, and submits nothing."""

from __future__ import annotations

from dataclasses import dataclass

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.hookspecs import hookimpl
from fleettune_core.types import Detection, Environment, Job, LaunchPlan, LaunchRequest
from fleettune_launcher_slurm import environment


class SlurmLauncher:
    """Recognises a task that `srun` started."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        """`slurm` has no settings in this version."""

    @hookimpl
    def detect_environment(self, env: Environment) -> Detection | None:
        """A rank of an `srun`, or nothing."""
        return environment.detect(env)

    @hookimpl
    def plan_launch(self, request: LaunchRequest) -> LaunchPlan:  # noqa: ARG002 - named by the contract
        """Always raises `FtError` (exit code 4), which says what works on SLURM in this version."""
        raise FtError(
            "this version of the launcher slurm does not submit jobs",
            hint="start every rank with srun, in a batch script of your own: `srun ft train RUN.yaml --run-dir DIR`,"
            " with a DIR that all nodes share; on one node, `ft train` alone takes all its devices",
            exit_code=ExitCode.LAUNCH,
        )

    @hookimpl
    def launch(self, plan: LaunchPlan) -> Job:  # noqa: ARG002 - named by the contract
        """Never reached with a plan of this launcher: it makes none."""
        raise FtError("this version of the launcher slurm does not submit jobs", exit_code=ExitCode.LAUNCH)
