"""The launcher plugin: detection and argv from their own modules, and the start of the child."""

from __future__ import annotations

from pathlib import Path

from fleettune_core.hookspecs import hookimpl
from fleettune_core.launchers.local import RANK_VARIABLES
from fleettune_core.launchers.subprocess_job import SubprocessJob
from fleettune_core.rundir import RunDir
from fleettune_core.types import Detection, Environment, Job, LaunchPlan, LaunchRequest
from fleettune_launcher_torchrun import argv, environment, meeting

TORCHRUN_VARIABLES: tuple[str, ...] = (
    "PYTHON_EXEC",
    "PET_LOCAL_ADDR",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_MODULE",
    "PET_NODE_RANK",
    "PET_NO_PYTHON",
    "PET_RDZV_CONF",
    "PET_RUN_PATH",
    "PET_STANDALONE",
    "PET_VIRTUAL_LOCAL_RANK",
)
"""Variables through which torchrun takes options that the argv does not say, so that a forgotten one would change the
layout or the command behind the plan's back."""


class TorchrunLauncher:
    """Starts one process per device through `python -m torch.distributed.run`."""

    Options = argv.Options

    @hookimpl
    def detect_environment(self, env: Environment) -> Detection | None:
        """Whether this process is one of torchrun's, or a rank set by hand."""
        return environment.detect(env)

    @hookimpl
    def plan_launch(self, request: LaunchRequest) -> LaunchPlan:
        """The argv; raises `FtError` (exit code 4) for machines that could not meet."""
        where = argv.meeting_of(request)
        notes: list[str] = []
        if where is None and request.rdzv_endpoint:
            notes.append(f"--rdzv-endpoint {request.rdzv_endpoint} is not used: one machine meets at a free port")
        if where is not None and (request.layout.elastic or request.max_restarts):
            notes.append(
                "torchrun numbers the machines of an elastic or restarting run itself: rank 0, which writes the"
                " results, may be on any of them, so the run folder must be on a disk that they share"
            )
        return LaunchPlan(
            launcher="torchrun",
            argv=argv.build_argv(request),
            environment=dict(request.environment),
            unset=(*RANK_VARIABLES, *TORCHRUN_VARIABLES),
            run_dir=request.run_dir,
            notes=tuple(notes),
        )

    @hookimpl
    def launch(self, plan: LaunchPlan) -> Job:
        """Start torchrun; its log is `logs/launcher.log`, on machine k > 0 `logs/launcher.node<k>.log`.

        For several machines it first makes sure that they can meet, and raises `FtError` (exit code 4) within
        seconds if not.
        """
        where = argv.read_meeting(plan.argv)
        if where is None:
            return SubprocessJob.start(plan)
        meeting.check(where)
        return SubprocessJob.start(plan, log=_log(plan.run_dir, where.node_rank), explain=meeting.explainer(where))


def _log(run_dir: Path, node_rank: int) -> Path:
    """A log of its own for each machine, because they may share the run folder."""
    folder = RunDir(run_dir)
    return folder.launcher_log if node_rank == 0 else folder.logs / f"launcher.node{node_rank}.log"
