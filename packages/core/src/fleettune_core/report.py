"""The report of a run that has ended: assembled from what the ranks and the launcher left in the run folder."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleettune_core.errors import ExitCode
from fleettune_core.failures import (
    FirstFailure,
    ProcessEnd,
    RankState,
    first_failure,
    read_rank,
    read_summary,
)
from fleettune_core.launchers.subprocess_job import describe_exit, read_tail
from fleettune_core.masking import mask
from fleettune_core.rundir import RunDir
from fleettune_core.types import JobState, JobStatus, Layout

_LAST_LINES = 20
_TAIL_BYTES = 64_000
_OTHERS_FINISH_SECONDS = 60.0
_OTHERS_FAIL_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the optimizer steps add up to. `seconds` is spent in steps, without loading and saving."""

    steps: int
    rows: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    """Of the rank that used most."""
    last_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldMember:
    """One rank of the world that really formed."""

    rank: int
    host: str
    pid: int
    wrapper: str | None
    sharding: str | None
    world_size: int
    stage: str
    weight_bytes: int | None = None
    """Of the weights, what this rank holds between two steps."""
    optimizer_bytes: int | None = None
    trainable_parameters: int | None = None
    initial_weights: str | None = None
    """Checksum of the weights that training began with: the same on every layout and backend."""
    reduction: str | None = None
    """What the optimizer reads, as the backend says: the `mean` over ranks, or a `lossy` one."""
    gradient_distance: float | None = None
    """Of what it read in the first steps from the mean over ranks that core computed itself, relative to its norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a run ended; `report.json` is its JSON form."""

    run_id: str
    status: str
    """`done`, `failed` or `interrupted`."""
    exit_code: int
    world: tuple[WorldMember, ...]
    seconds_to_first_step: float | None
    """From the command to the end of rank 0's first optimizer step."""
    totals: Totals
    first_failure: FirstFailure | None
    last_lines: tuple[str, ...]
    """Of the log of what failed first; secrets masked."""
    log: Path | None
    """Where these lines come from."""
    launcher: JobStatus

    def to_dict(self) -> dict[str, Any]:
        """The form of `report.json`."""
        failure = None
        if self.first_failure is not None:
            failure = {
                **dataclasses.asdict(self.first_failure),
                "exit_code": int(self.first_failure.exit_code),
                "last_lines": list(self.last_lines),
                "log": None if self.log is None else str(self.log),
            }
        return {
            "run_id": self.run_id,
            "status": self.status,
            "exit_code": int(self.exit_code),
            "world": [dataclasses.asdict(member) for member in self.world],
            "seconds_to_first_step": self.seconds_to_first_step,
            "totals": dataclasses.asdict(self.totals),
            "first_failure": failure,
            "launcher": {
                "state": self.launcher.state.value,
                "exit_code": self.launcher.exit_code,
                "reason": self.launcher.reason,
            },
        }


def expected_ranks(
    layout: Layout, *, node_rank: int, by_hand: bool, restarts: bool, states: Sequence[RankState]
) -> set[int]:
    """The ranks that must have finished, as seen from this machine.

    Machines that are started by hand may each have a run folder of their own, so a machine answers for its own ranks
    and for those whose records it can see. An elastic or restarted world has the size that it formed last with.
    """
    seen = {state.rank for state in states}
    if layout.elastic or restarts:
        newest = max(states, key=lambda state: state.started_at, default=None)
        size = newest.world_size if newest is not None else layout.procs_per_node
        seen = {rank for rank in seen if rank < size}
        return seen if by_hand else set(range(size))
    if by_hand:
        own = range(node_rank * layout.procs_per_node, (node_rank + 1) * layout.procs_per_node)
        return seen | set(own)
    return set(range(layout.ranks))


def assemble(
    run_dir: RunDir,
    *,
    run_id: str,
    started_at: float,
    job: JobStatus,
    logs: Iterable[Path],
    expected: Iterable[int],
) -> Report:
    """Read the run folder and judge. Done means: the launcher ended with 0, and every expected rank says so itself."""
    states = [read_rank(record) for record in run_dir.read_ranks()]
    expected = set(expected)
    by_rank = {state.rank: state for state in states}
    logs = list(logs)
    launcher_log = "\n".join(read_tail(path, _TAIL_BYTES) for path in logs)
    all_done = bool(expected) and all(rank in by_rank and by_rank[rank].done for rank in expected)

    failure: FirstFailure | None = None
    if job.state is JobState.DONE and all_done:
        status, code = "done", ExitCode.OK
    else:
        relevant = [state for state in states if state.rank in expected]
        if any(state.failure and state.failure.exit_code == ExitCode.STOPPED for state in relevant):
            status, code = "interrupted", ExitCode.STOPPED
        elif job.state is JobState.CANCELLED:
            status, code = "interrupted", ExitCode.INTERRUPTED
        else:
            # How ranks end that were told to end is no failure of theirs.
            failure = _failure(relevant, expected, job, launcher_log, all_done=all_done)
            status, code = "failed", _failure_code(failure)
    log = _log_of(run_dir, failure, logs)
    first_steps = [state.first_step_at for state in states if state.first_step_at is not None]
    return Report(
        run_id=run_id,
        status=status,
        exit_code=code,
        world=tuple(_member(state) for state in states),
        seconds_to_first_step=round(min(first_steps) - started_at, 3) if first_steps else None,
        totals=_totals(run_dir.read_metrics(), states),
        first_failure=failure,
        last_lines=_last_lines(log) if log is not None else (),
        log=log,
        launcher=job,
    )


def assemble_by_rank_0(run_dir: RunDir, *, run_id: str, ranks: int, code: ExitCode) -> Report:
    """The report of ranks that something else started, so that no control process follows them: told by rank 0 at its
    own end, with which exit `code` that is.

    The others are given a moment to end too; one that has said nothing by then counts as failed.
    """
    deadline = time.monotonic() + (_OTHERS_FINISH_SECONDS if code is ExitCode.OK else _OTHERS_FAIL_SECONDS)
    while True:
        states = [read_rank(record) for record in run_dir.read_ranks()]
        ended = [state for state in states if state.done or state.failure is not None]
        if len(ended) >= ranks or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return assemble(
        run_dir,
        run_id=run_id,
        started_at=min(state.started_at for state in states),
        job=JobStatus(state=JobState.DONE if code is ExitCode.OK else JobState.FAILED, exit_code=int(code)),
        logs=(),
        expected=range(ranks),
    )


def with_places(report: Report, run_dir: RunDir) -> dict[str, Any]:
    """The report as `report.json` has it, and where the run and its model are: what `--json` prints."""
    model = model_of(report, run_dir)
    return {**report.to_dict(), "run_dir": str(run_dir.path), "model": None if model is None else str(model)}


def model_of(report: Report, run_dir: RunDir) -> Path | None:
    """Where the result is; None for a run that is not done, and on a machine without rank 0 and a shared disk."""
    return run_dir.model if report.status == "done" and run_dir.model.is_dir() else None


def _failure(
    states: Sequence[RankState], expected: set[int], job: JobStatus, launcher_log: str, *, all_done: bool
) -> FirstFailure:
    ended = job.reason or (describe_exit(job.exit_code) if job.exit_code is not None else job.state.value)
    if not states:
        return FirstFailure(
            rank=None,
            host=None,
            cause=f"the launcher ended before any rank began: {ended}",
            hint=None,
            exit_code=ExitCode.LAUNCH,
        )
    if all_done:
        return FirstFailure(
            rank=None,
            host=None,
            cause=f"every rank finished its work, but the launcher did not end well: {ended}",
            hint="the result in the run folder is whole; the launcher's log tells more",
            exit_code=ExitCode.TRAINING,
        )
    ends = read_summary(launcher_log)
    if not ends and len(expected) == 1 and job.exit_code is not None and job.exit_code < 0:
        # One process, started directly: how the job ended is how its rank ended.
        ends = [ProcessEnd(rank=min(expected), code=job.exit_code, at=states[0].updated_at, first=True)]
    found = first_failure(states, expected=expected, ends=ends)
    assert found is not None, "a rank that is not done has failed or is silent"
    return found


def _failure_code(failure: FirstFailure) -> ExitCode:
    try:
        code = ExitCode(failure.exit_code)
    except ValueError:
        return ExitCode.TRAINING
    return ExitCode.TRAINING if code is ExitCode.OK else code


def _member(state: RankState) -> WorldMember:
    return WorldMember(
        rank=state.rank,
        host=state.host,
        pid=state.pid,
        wrapper=state.facts.get("wrapper"),
        sharding=state.facts.get("sharding"),
        world_size=int(state.facts.get("world_size", state.world_size)),
        stage=state.stage,
        trainable_parameters=state.facts.get("trainable_parameters"),
        initial_weights=state.facts.get("initial_weights"),
        reduction=state.facts.get("reduction"),
        gradient_distance=(state.reduction or {}).get("distance"),
        **(state.held or {}),
    )


def _totals(lines: Iterable[Mapping[str, Any]], states: Sequence[RankState]) -> Totals:
    steps = [line for line in lines if "step_seconds" in line]
    tokens = sum(int(line["tokens"]) for line in steps)
    seconds = sum(float(line["step_seconds"]) for line in steps)
    peaks = [int(line["peak_memory_bytes"]) for line in steps if line.get("peak_memory_bytes")]
    peaks += [state.peak_memory_bytes for state in states if state.peak_memory_bytes]
    return Totals(
        steps=len({int(line["step"]) for line in steps}),
        rows=sum(int(line["samples"]) for line in steps),
        tokens=tokens,
        seconds=round(seconds, 3),
        tokens_per_second=round(tokens / seconds, 2) if seconds > 0 else None,
        peak_memory_bytes=max(peaks, default=None),
        last_loss=steps[-1].get("loss") if steps else None,
    )


def _log_of(run_dir: RunDir, failure: FirstFailure | None, logs: Sequence[Path]) -> Path | None:
    """The log to look at: the failing rank's, or the launcher's where that one holds nothing."""
    if failure is None:
        return None
    if failure.rank is not None and failure.host is not None:
        own = run_dir.rank_log(failure.host, failure.rank)
        if own.is_file() and own.stat().st_size:
            return own
    return next((path for path in logs if path.is_file() and path.stat().st_size), None)


def _last_lines(log: Path) -> tuple[str, ...]:
    lines = [line for line in read_tail(log, _TAIL_BYTES).splitlines() if line.strip()]
    return tuple(mask(line) for line in lines[-_LAST_LINES:])
