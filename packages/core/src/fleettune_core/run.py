"""The control story: a plan becomes a folder, a job, and a report. Start reading Fleettune here.

    plan = make_plan(load_config(...), env=...)     what will happen; nothing has happened yet
    run = start(plan)                               the run folder is written and the launcher has accepted
    run.wait(timeout), run.metrics(), run.ranks()   follow it as long as you like
    outcome = run.finish()                          the report, and the exit code that tells the truth

Nothing here prints or exits, so a tool that embeds Fleettune calls the same functions as `ft train`.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from fleettune_core import report as reporting
from fleettune_core.envinfo import describe_environment
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.failures import RankState, read_rank
from fleettune_core.plan.model import Plan
from fleettune_core.plan.record import run_record
from fleettune_core.plan.serialise import to_dict
from fleettune_core.plan.solve import WORKER
from fleettune_core.plugins.catalog import Catalog, load_catalog
from fleettune_core.plugins.entries import PluginKind
from fleettune_core.plugins.relay import open_relay
from fleettune_core.rundir import RunDir
from fleettune_core.types import Job, JobStatus, LaunchPlan, ProcessInfo, current_environment

_FOLDER_WAIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended. `exit_code` is 0 only when every rank has finished its work."""

    exit_code: int
    report: reporting.Report


class Run:
    """A started run."""

    def __init__(self, plan: Plan, run_dir: RunDir, job: Job, *, started_at: float, writes_report: bool) -> None:
        self.plan = plan
        self.run_dir = run_dir
        self.job = job
        self._started_at = started_at
        self._writes_report = writes_report

    def status(self) -> JobStatus:
        """The launcher's view, now."""
        return self.job.status()

    def wait(self, timeout_seconds: float | None = None) -> JobStatus:
        """Wait until the job ends, at most `timeout_seconds`; then the state as it is."""
        return self.job.wait(timeout_seconds)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of `metrics.jsonl` so far."""
        return self.run_dir.read_metrics()

    def ranks(self) -> list[RankState]:
        """What every rank last said of itself, by rank."""
        return [read_rank(record) for record in self.run_dir.read_ranks()]

    def cancel(self, grace_seconds: float = 10.0) -> None:
        """End it, politely, then by force after the grace. A second call does nothing."""
        self.job.cancel(grace_seconds)

    def finish(self) -> Outcome:
        """Wait for the end, and write `report.json`."""
        status = self.job.wait()
        launch, layout = self.plan.config.launch, self.plan.layout
        report = reporting.assemble(
            self.run_dir,
            run_id=self.plan.run_id,
            started_at=self._started_at,
            job=status,
            logs=self.job.log_files(),
            expected=reporting.expected_ranks(
                layout,
                node_rank=launch.node_rank,
                by_hand=_by_hand(self.plan),
                restarts=launch.max_restarts > 0,
                states=self.ranks(),
            ),
        )
        if self._writes_report:
            self.run_dir.write_json(self.run_dir.report_json, report.to_dict())
        return Outcome(exit_code=int(report.exit_code), report=report)


def start(plan: Plan, *, env: Mapping[str, str] | None = None, catalog: Catalog | None = None) -> Run:
    """Write the run folder and start the plan; returns once the launcher has accepted it.

    `env`: what `env.json` describes; this process's environment by default. Raises `FtError`: exit code 5 for a run
    folder that is in use, 4 for what the launcher refuses, 3 for a broken plugin. `plan.process` must not be set: a
    process that already is a rank calls `become_worker`.
    """
    assert plan.launch is not None, "this process already is a rank: call become_worker"
    started_at = time.time()
    catalog = catalog or load_catalog()
    relay = open_relay(catalog, launcher=catalog.find(PluginKind.LAUNCHER, plan.launcher.name))
    run_dir = RunDir(plan.run_dir)
    node_rank = plan.config.launch.node_rank if _by_hand(plan) else None
    owner = True
    if node_rank is None:
        run_dir.create()
    else:
        owner = run_dir.create_or_join(node_rank)
    try:
        if owner:
            _write_records(plan, run_dir, current_environment() if env is None else env)
        _write_files(plan.launch, run_dir)
        job: Job = relay.call("launch", plan=plan.launch)
    except FtError:
        run_dir.withdraw(node_rank)
        raise
    return Run(plan, run_dir, job, started_at=started_at, writes_report=owner)


def become_worker(plan: Plan, *, as_json: bool = False) -> NoReturn:
    """Turn this process, which already is a rank, into the worker; it does not return.

    Rank 0 writes the run folder, the other ranks wait for it; at its end rank 0 writes the report and prints where the
    model is, or with `as_json` the report. Raises `FtError`: exit code 5 for a folder that is in
    use, and for one that does not appear within two minutes because the ranks do not share it.
    """
    process = plan.process
    assert process is not None, "this process is no rank: call start"
    run_dir = RunDir(plan.run_dir)
    if process.rank == 0 and process.restart_count == 0:
        run_dir.create()
        _write_records(plan, run_dir, current_environment())
    else:
        _wait_for_folder(run_dir, process)
    # Whoever started the ranks may have chosen these; what launched them set nothing else for us.
    environment = {"OMP_NUM_THREADS": str(plan.threads_per_rank), "HF_HUB_DISABLE_TELEMETRY": "1", **os.environ}
    # Nobody follows the run folder of ranks that were started elsewhere, so rank 0 tells its progress itself.
    command = [sys.executable, *WORKER, str(run_dir.path), "--console", *(["--json"] if as_json else [])]
    os.execve(sys.executable, command, environment)  # noqa: S606


def _by_hand(plan: Plan) -> bool:
    """Whether this command is typed on each of several machines."""
    return plan.layout.max_nodes > 1 and plan.config.launch.rdzv_endpoint is not None


def _write_records(plan: Plan, run_dir: RunDir, env: Mapping[str, str]) -> None:
    plugins = [choice.distribution.split()[0] for choice in (plan.launcher, plan.backend) if choice.distribution]
    run_dir.write_json(run_dir.env_json, describe_environment(env, devices=plan.devices, distributions=plugins))
    run_dir.write_json(run_dir.plan_json, to_dict(plan))
    # Last: whoever waits for the folder waits for this file.
    run_dir.write_json(run_dir.run_json, run_record(plan))


def _write_files(launch: LaunchPlan, run_dir: RunDir) -> None:
    root = run_dir.path.resolve()
    for planned in launch.files:
        path = (root / planned.path).resolve()
        if not path.is_relative_to(root):
            raise FtError(
                f"the launcher {launch.launcher} wants to write {planned.path}, outside of the run folder",
                exit_code=ExitCode.PLUGIN,
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(planned.text, encoding="utf-8")
        path.chmod(0o755 if planned.executable else 0o644)


def _wait_for_folder(run_dir: RunDir, process: ProcessInfo, timeout_seconds: float = _FOLDER_WAIT_SECONDS) -> None:
    first_life = process.restart_count == 0
    if first_life and (run_dir.report_json.exists() or run_dir.rank_record(process.rank).exists()):
        raise FtError(
            f"the run folder {run_dir.path} is another run's: it already has a rank {process.rank}",
            hint="give another one with --run-dir DIR",
        )
    deadline = time.monotonic() + timeout_seconds
    while not run_dir.run_json.is_file():
        if time.monotonic() > deadline:
            raise FtError(
                f"rank {process.rank} on {socket.gethostname()} waited {timeout_seconds:.0f} s for rank 0 to write"
                f" {run_dir.run_json}",
                hint="give --run-dir DIR on a disk that all machines share, the same for every rank",
            )
        time.sleep(0.1)
