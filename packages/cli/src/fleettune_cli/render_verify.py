"""What a verification compares and what it found, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

from fleettune_cli import terminal
from fleettune_cli.tables import print_table
from fleettune_cli.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from fleettune_core.verify.combinations import Verification
    from fleettune_core.verify.comparison import Compared, Tolerance

_LOSS_COLUMNS = 10
"""Of one loss with the gap before it."""


def print_combinations(verification: Verification, stream: IO[str]) -> None:
    """What would run, and on which batch."""
    rows: list[tuple[str, ...]] = []
    for item in verification.combinations:
        plan = item.plan
        memory = "" if plan.memory is None else format_bytes(plan.memory.total)
        rows.append((item.backend.text, str(item.layout), plan.launcher.name, str(plan.batch), memory))
    print_table(("backend", "layout", "launcher", "batch", "memory"), rows, stream)
    stream.write(
        f"{verification.steps} steps each in {verification.precision}, compared with"
        f" {verification.combinations[0].title}; nothing was started\n"
    )
    for note in verification.notes:
        stream.write(f"note: {note}\n")


def print_result(verification: Verification, compared: Sequence[Compared], stream: IO[str]) -> None:
    """The table of distances, the losses step by step, what differs, and the verdict in one line."""
    from fleettune_core.verify.comparison import TOLERANCES

    print_table(
        ("backend", "layout", "loss", "norm", "weights", "held", "peak", "time", "verdict"),
        [_row(item) for item in compared],
        stream,
    )
    _print_losses(verification, compared, stream)
    tolerance = TOLERANCES[verification.precision]
    for line in (*_legend(tolerance), *_reasons(compared)):
        stream.write(line + "\n")
    stream.write(verdict(verification, compared) + "\n")


def line_of(item: Compared) -> str:
    """One run as it ends: `deepspeed:3 2x1: same, 14 s`."""
    return f"{item.figures.title}: {item.verdict}, {format_seconds(item.figures.seconds)}"


def verdict(verification: Verification, compared: Sequence[Compared]) -> str:
    """`all 9 agree`, or which do not."""
    wrong = [item.figures.title for item in compared if not item.agrees]
    missing = len(verification.combinations) - len(compared)
    if wrong:
        return f"{len(wrong)} of {len(compared)} disagree: {', '.join(wrong)}"
    if missing:
        return f"{len(compared)} of {len(verification.combinations)} were compared, and they agree"
    return f"all {len(compared)} agree" if len(compared) > 1 else "one run alone: nothing was compared"


def _row(item: Compared) -> tuple[str, ...]:
    figures = item.figures
    backend, _, layout = figures.title.rpartition(" ")
    known = [value for value in (figures.weight_bytes, figures.optimizer_bytes) if value is not None]
    held, peak = sum(known) if known else None, figures.peak_memory_bytes
    is_reference = item.verdict == "reference"
    return (
        backend,
        layout,
        *("-" if is_reference else _distance(value) for value in (item.loss_distance, item.norm_distance)),
        "-" if is_reference else _distance(None if item.weight_distance is None else item.weight_distance.rms),
        *("" if value is None else format_bytes(value) for value in (held, peak)),
        format_seconds(figures.seconds),
        item.verdict,
    )


def _distance(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def _print_losses(verification: Verification, compared: Sequence[Compared], stream: IO[str]) -> None:
    """Losses by step: as many steps as fit, always the last one and those that differ most."""
    run = [item for item in compared if item.figures.losses]
    if not run:
        return
    width = max(len(item.figures.title) for item in run)
    room = max(1, (terminal.columns() - width) // _LOSS_COLUMNS)
    steps = _chosen_steps(verification.steps, room, [item.loss_step for item in run])
    headings = ("loss of step", *map(str, steps))
    rows = [(item.figures.title, *(_loss(item.figures.losses, step) for step in steps)) for item in run]
    print_table(headings, rows, stream)


def _chosen_steps(total: int, room: int, worst: Iterable[int | None]) -> list[int]:
    if total <= room:
        return list(range(1, total + 1))
    wanted = [total, 1, *(step for step in worst if step is not None)]
    even = [1 + round(number * (total - 1) / max(1, room - 1)) for number in range(room)]
    return sorted(list(dict.fromkeys([*wanted, *even]))[:room])


def _loss(losses: Sequence[float | None], step: int) -> str:
    if step > len(losses):
        return ""
    value = losses[step - 1]
    return "not finite" if value is None else f"{value:.6f}"


def _legend(tolerance: Tolerance) -> list[str]:
    weights = "not judged" if math.isinf(tolerance.weights) else f"{tolerance.weights:g} × the learning rate"
    return [
        "loss, norm: the largest relative distance of a step from the first run's",
        f"(allowed: {tolerance.loss:.0e}, {tolerance.grad_norm:.0e}); weights: root mean square of their distances",
        f"at the end (allowed: {weights}); held: weights and optimizer state per rank.",
    ]


def _reasons(compared: Sequence[Compared]) -> list[str]:
    return [f"{item.figures.title}: {reason}" for item in compared for reason in item.reasons]
