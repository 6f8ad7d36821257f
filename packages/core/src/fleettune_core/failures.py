"""Which rank failed first, and why: from what the ranks wrote, and from what the launcher saw of those that wrote
nothing more.

When one rank fails, the others fail after it, because their partner is gone; the report names the first alone.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleettune_core.errors import ExitCode
from fleettune_core.launchers.subprocess_job import describe_exit

_PARTNER_GONE = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|(?:closed|reset) by (?:remote )?peer|broken pipe"
    r"|remote process exited|pair closure|gloo/transport|rendezvousclosed|socket timeout|recvvalue failed"
    r"|dist(?:network|store|backend)error|store.*timed? ?out|timed out (?:after|waiting).*(?:client|rank|store|gloo)"
    r"|ncclremoteerror|ncclsystemerror|watchdog caught collective",
    re.IGNORECASE,
)
"""What a rank says when another one, which it was talking to, has gone: gloo, NCCL, TCPStore and the sockets below."""

_SUMMARY_ENTRY = re.compile(
    r"time\s+: (?P<time>\S+)\s+host\s+: (?P<host>\S+)\s+rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+"
    r"exitcode\s+: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
"""One process in the summary that torchrun prints at its end (`torch.distributed.elastic.multiprocessing.errors`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What one rank last said of itself (`ranks/rank<k>.json`). Times are seconds since the epoch."""

    rank: int
    host: str
    pid: int
    world_size: int
    stage: str
    started_at: float
    updated_at: float
    first_step_at: float | None
    facts: Mapping[str, Any]
    failure: RankFailure | None
    peak_memory_bytes: int | None
    held: Mapping[str, int] | None = None
    """`weight_bytes` and `optimizer_bytes` that it holds between two steps."""
    reduction: Mapping[str, Any] | None = None
    """How near the gradients that its optimizer reads are to the ranks' mean: `weight`, `distance`."""

    @property
    def done(self) -> bool:
        return self.stage == "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The exception that ended a rank."""

    at: float
    kind: str
    message: str
    hint: str | None
    problems: tuple[str, ...]
    exit_code: int
    mendable: bool
    """Whether it was an `FtError`: told in its own words and with its own exit code."""

    @property
    def partner_gone(self) -> bool:
        """Whether it only tells that another rank had gone before."""
        return bool(_PARTNER_GONE.search(f"{self.kind}: {self.message}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How the launcher saw a rank's process end."""

    rank: int
    code: int
    at: float
    first: bool = False
    """Whether the launcher calls it the root cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """The rank that failed first, or the launcher (`rank` is None)."""

    rank: int | None
    host: str | None
    cause: str
    hint: str | None
    problems: tuple[str, ...] = ()
    exit_code: int


def read_rank(record: Mapping[str, Any]) -> RankState:
    """A rank's record, typed."""
    failure = record.get("failure")
    return RankState(
        rank=int(record["rank"]),
        host=str(record["host"]),
        pid=int(record["pid"]),
        world_size=int(record["world_size"]),
        stage=str(record["stage"]),
        started_at=float(record["started_at"]),
        updated_at=float(record["updated_at"]),
        first_step_at=record.get("first_step_at"),
        facts=record.get("facts") or {},
        failure=None
        if failure is None
        else RankFailure(
            at=float(failure["at"]),
            kind=str(failure["kind"]),
            message=str(failure["message"]),
            hint=failure.get("hint"),
            problems=tuple(failure.get("problems") or ()),
            exit_code=int(failure["exit_code"]),
            mendable=bool(failure["mendable"]),
        ),
        peak_memory_bytes=record.get("peak_memory_bytes"),
        held=record.get("held"),
        reduction=record.get("reduction"),
    )


def read_summary(launcher_log: str) -> list[ProcessEnd]:
    """The processes that torchrun's last summary names; empty for any other log.

    It names those that torchrun ended itself, after the first failure, as well.
    """
    _, _, last = launcher_log.rpartition("Failures:")
    root = last.find("Root Cause")
    ends: list[ProcessEnd] = []
    for match in _SUMMARY_ENTRY.finditer(last):
        try:
            at = time.mktime(time.strptime(match["time"], "%Y-%m-%d_%H:%M:%S"))
        except ValueError:
            at = time.time()
        ends.append(
            ProcessEnd(rank=int(match["rank"]), code=int(match["code"]), at=at, first=0 <= root < match.start())
        )
    return ends


def first_failure(
    states: Sequence[RankState], *, expected: Iterable[int], ends: Sequence[ProcessEnd]
) -> FirstFailure | None:
    """The failure that the others follow from; None when no rank failed.

    In this order: the earliest own failure (an exception that is not about a lost partner, or a process that the
    launcher saw die by a signal); a rank that ended without a word; the earliest of the lost partners.
    """
    by_rank = {state.rank: state for state in states}
    own: list[tuple[float, FirstFailure]] = []
    lost: list[tuple[float, FirstFailure]] = []
    for state in states:
        if state.failure is not None:
            (lost if state.failure.partner_gone else own).append((state.failure.at, _told(state, state.failure)))
    seen = {end.rank: end for end in ends}
    if (killed := _killed(ends, by_rank)) is not None:
        own.append((killed.at, _silent(killed.rank, by_rank.get(killed.rank), killed)))
    if own:
        return min(own, key=lambda item: item[0])[1]
    silent = [
        _silent(rank, by_rank.get(rank), seen.get(rank))
        for rank in sorted(expected)
        if (state := by_rank.get(rank)) is None or (not state.done and state.failure is None)
    ]
    if silent:
        return silent[0]
    return min(lost, key=lambda item: item[0])[1] if lost else None


def _killed(ends: Sequence[ProcessEnd], by_rank: Mapping[int, RankState]) -> ProcessEnd | None:
    """The process that died by a signal before it could say why. One that the launcher itself ended (SIGTERM, after
    another's failure) is taken only where the launcher saw nothing before it."""
    silent = [end for end in ends if end.code < 0 and ((told := by_rank.get(end.rank)) is None or told.failure is None)]
    struck = [end for end in silent if end.code != -signal.SIGTERM]
    roots = [end for end in silent if end.first]
    return next(iter([*(end for end in struck if end.first), *struck, *roots]), None)


def _told(state: RankState, failure: RankFailure) -> FirstFailure:
    mendable = failure.mendable
    hint = failure.hint
    if hint is None and ("OutOfMemory" in failure.kind or "out of memory" in failure.message.lower()):
        hint = "out of memory: lower --micro-batch or --max-length, or add --gradient-checkpointing or --lora"
    return FirstFailure(
        rank=state.rank,
        host=state.host,
        cause=failure.message if mendable else f"{failure.kind}: {failure.message}".rstrip(": "),
        hint=hint,
        problems=failure.problems,
        exit_code=failure.exit_code if mendable else ExitCode.TRAINING,
    )


def _silent(rank: int, state: RankState | None, end: ProcessEnd | None) -> FirstFailure:
    where = f"in the stage {state.stage}" if state is not None else "before it said anything"
    how = f": {describe_exit(end.code)}" if end is not None else ""
    hint = None
    if end is not None and end.code == -signal.SIGKILL:
        hint = "SIGKILL often means out of memory (see `dmesg`): lower --micro-batch or --max-length"
    elif end is not None and end.code == -signal.SIGBUS:
        hint = "SIGBUS often means that shared memory is full: look at `df /dev/shm`"
    return FirstFailure(
        rank=rank,
        host=state.host if state is not None else None,
        cause=f"ended without a word {where}{how}",
        hint=hint,
        exit_code=ExitCode.TRAINING,
    )
