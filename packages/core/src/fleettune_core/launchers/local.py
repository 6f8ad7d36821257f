"""The built-in launcher `local`: one process, in the interpreter that typed the command."""

from __future__ import annotations

from dataclasses import dataclass

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.hookspecs import hookimpl
from fleettune_core.launchers.subprocess_job import SubprocessJob
from fleettune_core.types import Detection, Environment, Job, LaunchPlan, LaunchRequest

RANK_VARIABLES: tuple[str, ...] = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)
"""What tells a process which rank it is. Left over in a shell, they would make a new run's only process believe that
it is one rank of another run, so a launcher that starts processes anew removes them."""


class LocalLauncher:
    """Starts the worker as one child process of this one."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        """`local` has no settings."""

    @hookimpl
    def detect_environment(self, env: Environment) -> Detection | None:  # noqa: ARG002 - named by the contract
        """Nothing in an environment speaks for it: it is what remains."""
        return None

    @hookimpl
    def plan_launch(self, request: LaunchRequest) -> LaunchPlan:
        """One process on this machine; any other layout is refused with exit code 4."""
        layout = request.layout
        if layout.ranks != 1:
            raise FtError(
                f"the launcher local starts one process, and {layout} were asked for",
                hint="use --launcher torchrun for several processes, or --nodes 1 --nproc-per-node 1",
                exit_code=ExitCode.LAUNCH,
            )
        problems = [
            problem
            for asked, problem in (
                (request.node_rank != 0, f"--node-rank {request.node_rank}: there is one machine, number 0"),
                (request.max_restarts != 0, f"--max-restarts {request.max_restarts}: local does not restart"),
            )
            if asked
        ]
        if problems:
            raise FtError(
                "the launcher local cannot do what was asked",
                problems=problems,
                hint="leave these out, or use --launcher torchrun",
                exit_code=ExitCode.LAUNCH,
            )
        notes = ("--rdzv-endpoint is not used: one process meets nobody",) if request.rdzv_endpoint else ()
        return LaunchPlan(
            launcher="local",
            argv=(request.python, *request.command),
            environment=dict(request.environment),
            unset=RANK_VARIABLES,
            run_dir=request.run_dir,
            notes=notes,
        )

    @hookimpl
    def launch(self, plan: LaunchPlan) -> Job:
        """Start the process; its output goes to `logs/launcher.log` of the run folder."""
        return SubprocessJob.start(plan)
