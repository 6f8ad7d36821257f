"""Following a run from its start to its end, and ending it when the user asks.

The run's processes are in a session of their own, so Ctrl-C reaches `ft` alone: it ends the run politely, waits, and
still writes the report. A second Ctrl-C changes nothing, because the run is ended by force after the grace anyway.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from fleettune_cli import terminal
from fleettune_cli.metrics_tail import MetricsTail
from fleettune_cli.progress import Display, Progress
from fleettune_cli.render_preview import CLOSE, OPEN, first_lines
from fleettune_core.data.preview_main import from_dict
from fleettune_core.run import Run
from fleettune_core.types import JobState

if TYPE_CHECKING:
    from typing_extensions import Self

POLL_SECONDS = 0.2
RANKS_EVERY_SECONDS = 1.0
"""How often the ranks' own records are read: one small file per rank."""

GRACE_SECONDS = 10.0
NUM_EXAMPLE_LINES = 12
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class Interrupts:
    """Within it, signals that would end `ft` are remembered, so that none falls between a launch and its follower."""

    received: signal.Signals | None = None
    _before: dict[signal.Signals, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        for number in _ENDS:
            # One that is ignored on purpose (SIGHUP under nohup) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)


def follow(run: Run, display: Display, interrupts: Interrupts) -> None:
    """Show a run's progress until it has ended; end it when a signal was received."""
    follower = _Follower(run, display)
    while True:
        ended = run.wait(POLL_SECONDS).state not in (JobState.PENDING, JobState.RUNNING)
        follower.look(last=ended)
        if ended:
            return
        if interrupts.received is not None:
            display.say(f"{interrupts.received.name}: ending the run, which may take {GRACE_SECONDS:.0f} s …")
            run.cancel(GRACE_SECONDS)
            follower.look(last=True)
            return


class _Follower:
    """Reads what is new in the run folder and shows it."""

    def __init__(self, run: Run, display: Display) -> None:
        self._run = run
        self._display = display
        self._progress = Progress()
        self._progress.total(run.plan.config.train.max_steps)
        self._tail = MetricsTail(run.run_dir.metrics_jsonl)
        self._ranks_read_at = -math.inf
        self._data_told = False
        self._announced: set[str] = set()

    def look(self, *, last: bool) -> None:
        now = time.monotonic()
        lines = list(self._tail.read())
        # A rank knows how many steps there are when it logs its first one, and says so before.
        unknown = bool(lines) and self._progress.snapshot.total_steps is None
        if last or unknown or now - self._ranks_read_at >= RANKS_EVERY_SECONDS:
            self._ranks_read_at = now
            self._look_at_ranks()
        for line in lines:
            self._display.show(self._progress.add(line))
        self._display.show(self._progress.snapshot)

    def _look_at_ranks(self) -> None:
        run_dir = self._run.run_dir
        if self._progress.snapshot.step:
            # While they train, one rank speaks for all; a world of a thousand ranks is a thousand files.
            first = run_dir.rank_record(0)
            records = [run_dir.read_json(first)] if first.is_file() else []
        else:
            records = run_dir.read_ranks()
        self._progress.stage([str(record["stage"]) for record in records])
        self._tell_announcements(records)
        prepared = next((record["data"] for record in records if record.get("data")), None)
        if prepared is not None and not self._data_told:
            self._data_told = True
            self._tell_data(prepared)
        total = next((record["total_steps"] for record in records if record.get("total_steps")), None)
        if total is not None:
            self._progress.total(total)

    def _tell_announcements(self, records: Sequence[Mapping[str, Any]]) -> None:
        """What ranks announce, in the order of time; what several of them say is told once."""
        said = [line for record in records for line in record.get("announcements") or ()]
        for line in sorted(said, key=lambda line: line["at"]):
            if line["text"] not in self._announced:
                self._announced.add(line["text"])
                self._display.say(line["text"])

    def _tell_data(self, prepared: Mapping[str, Any]) -> None:
        self._display.say(data_line(prepared))
        if "preview" not in prepared:
            return
        plain = terminal.is_plain(sys.stderr)
        how = f"between {OPEN} and {CLOSE}" if plain else "in green"
        for example in from_dict(prepared["preview"]).examples[:1]:
            self._display.say(f"first example ({example.where}), the supervised part {how}:")
            for line in first_lines(example, plain=plain, num_lines=NUM_EXAMPLE_LINES):
                self._display.say(f"  {line}")


def data_line(prepared: Mapping[str, Any]) -> str:
    """What the data turned out to be, from a rank's record (`fleettune_core.data.prepare.PrepareReport`)."""
    kept, tokens = int(prepared["kept"]), int(prepared["tokens"])
    supervised = 100 * prepared["supervised_tokens"] / max(1, tokens)
    parts = [f"{kept:,} rows", f"{tokens:,} tokens", f"{supervised:.0f} % supervised"]
    if prepared["truncated"]:
        parts.append(f"{prepared['truncated']:,} rows cut at the end")
    if prepared["dropped"]:
        parts.append(f"{prepared['dropped']:,} rows left out: nothing to learn in them")
    return f"data: {prepared['format']} ({prepared['reason']}): {', '.join(parts)}"
