"""The progress of a run: what its files say, as a live view on a terminal or as plain lines elsewhere.

`Progress` turns new metrics into a `Snapshot`; a display shows snapshots. Nothing here knows who trains.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, Protocol

from fleettune_cli import terminal
from fleettune_cli.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from types import TracebackType

    from rich.live import Live
    from rich.table import Table
    from typing_extensions import Self

NUM_PLAIN_LINES = 20
"""About how many step lines a run of known length prints where there is no terminal."""
NUM_RECENT_STEPS = 20
"""Steps over which the time left is averaged."""

STAGE_WORDS: Mapping[str, str] = {
    "starting": "starting",
    "preparing": "preparing data",
    "loading": "loading the model",
    "wrapping": "spreading the model over the ranks",
    "training": "training",
    "saving": "saving the model",
    "done": "done",
    "failed": "failed",
}
"""Stages of a rank's record, in the order in which a run passes through them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Where a run is."""

    stage: str = "starting"
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    seconds_left: float | None = None


@dataclass(slots=True)
class Progress:
    """Accumulates metrics lines into the newest snapshot."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    _recent_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_STEPS))

    def stage(self, stages: Sequence[str]) -> Snapshot:
        """Take the stages of all ranks: the run is where its slowest rank is."""
        order = list(STAGE_WORDS)
        known = [stage for stage in stages if stage in STAGE_WORDS]
        if known:
            slowest = "failed" if "failed" in known else min(known, key=order.index)
            self.snapshot = replace(self.snapshot, stage=slowest)
        return self.snapshot

    def total(self, total_steps: int | None) -> None:
        self.snapshot = replace(self.snapshot, total_steps=total_steps)

    def add(self, line: Mapping[str, Any]) -> Snapshot:
        """Take one line of `metrics.jsonl`: an optimizer step, or an evaluation."""
        if "eval_loss" in line:
            self.snapshot = replace(self.snapshot, eval_loss=line["eval_loss"])
            return self.snapshot
        if line.get("step_seconds") is not None:
            self._recent_seconds.append(float(line["step_seconds"]))
        step, total = int(line["step"]), self.snapshot.total_steps
        left = None
        if total is not None and self._recent_seconds:
            left = max(0, total - step) * sum(self._recent_seconds) / len(self._recent_seconds)
        self.snapshot = replace(
            self.snapshot,
            stage="training" if self.snapshot.stage not in ("saving", "done", "failed") else self.snapshot.stage,
            step=step,
            loss=line.get("loss"),
            learning_rate=line.get("learning_rate"),
            tokens_per_second=line.get("tokens_per_second"),
            peak_memory_bytes=line.get("peak_memory_bytes"),
            seconds_left=left,
        )
        return self.snapshot


class Display(Protocol):
    """Shows snapshots; entered before the first and left after the last."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, snapshot: Snapshot) -> None: ...

    def say(self, line: str) -> None:
        """A line that stays."""
        ...


def display_for(stream: IO[str], *, quiet: bool = False) -> Display:
    """The display that suits `stream`."""
    if quiet:
        return QuietDisplay()
    return PlainDisplay(stream) if terminal.is_plain(stream) else LiveDisplay(stream)


class QuietDisplay:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, snapshot: Snapshot) -> None:  # noqa: ARG002 - it shows nothing
        return None

    def say(self, line: str) -> None:  # noqa: ARG002 - it says nothing
        return None


class PlainDisplay(QuietDisplay):
    """One line per stage, and one per some steps: the first, the last, and about twenty in between."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._stage = ""
        self._last_step = 0
        self._eval_loss: float | None = None

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.stage != self._stage:
            self._stage = snapshot.stage
            if snapshot.stage != "done":
                self.say(STAGE_WORDS[snapshot.stage])
        if snapshot.step > self._last_step and self._wants(snapshot):
            self._last_step = snapshot.step
            self.say(step_line(snapshot))
        if snapshot.eval_loss is not None and snapshot.eval_loss != self._eval_loss:
            self._eval_loss = snapshot.eval_loss
            self.say(f"step {snapshot.step}  eval loss {snapshot.eval_loss:.4f}")

    def say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def _wants(self, snapshot: Snapshot) -> bool:
        if snapshot.step in (1, snapshot.total_steps):
            return True
        every = 10 if snapshot.total_steps is None else max(1, snapshot.total_steps // NUM_PLAIN_LINES)
        return snapshot.step % every == 0


class LiveDisplay(QuietDisplay):
    """A small table that is drawn anew in place."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = terminal.rich_console(stream)
        self._live: Live | None = None
        self._started = time.monotonic()
        self._snapshot = Snapshot()

    def __enter__(self) -> Self:
        from rich.live import Live

        # `get_renderable` lets the clock run on between steps.
        self._live = Live(
            get_renderable=lambda: live_view(self._snapshot, time.monotonic() - self._started),
            console=self._console,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._live is not None, "left without being entered"
        self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def say(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(line))


def step_line(snapshot: Snapshot) -> str:
    """`step 12/50  loss 1.2345  353 tokens/s  lr 1.9e-04  1.2 GiB  8.1 s left`: one step in one plain line."""
    return f"step {_step(snapshot)}  " + "  ".join(f"{name} {value}".strip() for name, value in _figures(snapshot))


def live_view(snapshot: Snapshot, elapsed_seconds: float) -> Table:
    """The view of a run on a terminal: its stage or its step with a bar, and the figures below."""
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    view = Table.grid(padding=(0, 1))
    clock = Text(format_seconds(elapsed_seconds), style="dim")
    if snapshot.step == 0 or snapshot.stage in ("saving", "failed"):
        view.add_row(Spinner("dots", style="cyan"), Text(STAGE_WORDS[snapshot.stage] + " …"), clock)
        return view
    bar = ProgressBar(total=snapshot.total_steps, completed=snapshot.step, width=24, pulse=snapshot.total_steps is None)
    head = Table.grid(padding=(0, 2))
    head.add_row(Text(f"step {_step(snapshot)}", style="bold"), bar, clock)
    figures = Text()
    for name, value in _figures(snapshot):
        figures.append(f"{name} " if name else "", style="dim")
        figures.append(f"{value}  ", style="bold" if name == "loss" else "")
    view.add_row(head)
    view.add_row(figures)
    return view


def _step(snapshot: Snapshot) -> str:
    return str(snapshot.step) if snapshot.total_steps is None else f"{snapshot.step}/{snapshot.total_steps}"


def _figures(snapshot: Snapshot) -> list[tuple[str, str]]:
    figures: list[tuple[str, str]] = []
    figures.append(("loss", "not finite" if snapshot.loss is None else f"{snapshot.loss:.4f}"))
    if snapshot.tokens_per_second is not None:
        figures.append(("", f"{format_rate(snapshot.tokens_per_second)} tokens/s"))
    if snapshot.learning_rate is not None:
        figures.append(("lr", f"{snapshot.learning_rate:.1e}"))
    if snapshot.peak_memory_bytes:
        figures.append(("", format_bytes(snapshot.peak_memory_bytes)))
    if snapshot.seconds_left is not None and snapshot.step != snapshot.total_steps:
        figures.append(("", f"{format_seconds(snapshot.seconds_left)} left"))
    return figures
