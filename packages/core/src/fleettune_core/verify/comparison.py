"""What a verification found: each run's figures, how far they are from the first run's, and the verdict. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Up to where figures count as the same."""

    loss: float
    """Relative, step by step."""
    grad_norm: float
    """Relative, step by step."""
    weights: float
    """Root mean square of the weights' differences, over the learning rate: AdamW moves a weight by about that much in
    a step. The largest difference is no measure: where a gradient is as small as its rounding, AdamW moves a weight by
    a whole learning rate in either direction."""


TOLERANCES: Mapping[str, Tolerance] = MappingProxyType(
    {
        "fp32": Tolerance(loss=1e-5, grad_norm=1e-4, weights=0.02),
        "bf16": Tolerance(loss=2e-2, grad_norm=2e-1, weights=math.inf),
        "fp16": Tolerance(loss=2e-2, grad_norm=2e-1, weights=math.inf),
    }
)
"""By precision. In 16 bits most small gradients are rounding, so that the weights' distance is shown and not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDistance:
    """How far two models' weights are apart; infinite where they hold other weights."""

    rms: float
    """Root of the mean squared difference of all weights."""
    largest: float
    """Largest absolute difference of one."""


ZERO = WeightDistance(rms=0.0, largest=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """One run's figures, from its run folder."""

    title: str
    exit_code: int
    cause: str | None
    """Why it failed, or None."""
    problems: tuple[str, ...]
    losses: tuple[float | None, ...]
    """By step; None where it was not finite."""
    grad_norms: tuple[float | None, ...]
    wrapper: str | None
    sharding: str | None
    ranks: int
    initial_weights: str | None
    """Checksum of the weights that it began with."""
    weight_bytes: int | None
    """Held between two steps, of the rank that holds most; so `optimizer_bytes`."""
    optimizer_bytes: int | None
    peak_memory_bytes: int | None
    seconds: float
    """From the start of the command to the saved model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run beside the first one. The distances are None where there is nothing to compare."""

    figures: RunFigures
    loss_distance: float | None
    """Largest relative difference of a step's loss."""
    loss_step: int | None
    """The step that has it, from 1."""
    norm_distance: float | None
    weight_distance: WeightDistance | None
    """Between the weights at the end."""
    verdict: str
    """`reference`, `same`, `differs` or `failed`."""
    reasons: tuple[str, ...] = ()
    """What differs, one line each."""

    @property
    def agrees(self) -> bool:
        return self.verdict in ("reference", "same")


def compare(
    reference: RunFigures,
    figures: RunFigures,
    weight_distance: WeightDistance | None,
    *,
    tolerance: Tolerance,
    learning_rate: float,
) -> Compared:
    """Judge `figures` beside the first run's. `weight_distance`: None where one of them has no model."""
    if figures.exit_code:
        why = f"{figures.cause or 'unknown cause'} (exit code {figures.exit_code})"
        return _failed(figures, why, *figures.problems)
    if figures is reference:
        return Compared(
            figures=figures,
            loss_distance=0.0,
            loss_step=None,
            norm_distance=0.0,
            weight_distance=ZERO,
            verdict="reference",
        )
    if reference.exit_code:
        return _failed(figures, f"there is nothing to compare with: {reference.title} failed")
    loss, loss_step = largest_distance(reference.losses, figures.losses)
    norm, norm_step = largest_distance(reference.grad_norms, figures.grad_norms)
    allowed = tolerance.weights * learning_rate
    began = (reference.initial_weights, figures.initial_weights)
    reasons: list[str] = []
    # Unknown where weights rest on a disk.
    if None not in began and began[0] != began[1]:
        reasons.append(
            f"it began with other weights: checksum {figures.initial_weights}, not {reference.initial_weights}"
        )
    if len(figures.losses) != len(reference.losses):
        reasons.append(f"{len(figures.losses)} steps, not {len(reference.losses)}")
    if loss > tolerance.loss:
        reasons.append(f"the loss of step {loss_step} is {loss:.1e} away (allowed: {tolerance.loss:.0e})")
    if norm > tolerance.grad_norm:
        reasons.append(f"the gradient norm of step {norm_step} is {norm:.1e} away (allowed: {tolerance.grad_norm:.0e})")
    if weight_distance is not None and weight_distance.rms > allowed:
        reasons.append(
            f"the weights are {weight_distance.rms:.1e} away"
            f" (allowed: {allowed:.0e}, {tolerance.weights:g} × the learning rate)"
        )
    return Compared(
        figures=figures,
        loss_distance=loss,
        loss_step=loss_step,
        norm_distance=norm,
        weight_distance=weight_distance,
        verdict="differs" if reasons else "same",
        reasons=tuple(reasons),
    )


def _failed(figures: RunFigures, *reasons: str) -> Compared:
    return Compared(
        figures=figures,
        loss_distance=None,
        loss_step=None,
        norm_distance=None,
        weight_distance=None,
        verdict="failed",
        reasons=reasons,
    )


def largest_distance(reference: Sequence[float | None], values: Sequence[float | None]) -> tuple[float, int]:
    """The largest relative difference, and the step (from 1) that has it; infinite where one alone is not finite."""
    worst, place = 0.0, 1
    for step, (wanted, value) in enumerate(zip(reference, values, strict=False), start=1):
        if wanted is None or value is None:
            distance = 0.0 if wanted is value else math.inf
        else:
            distance = abs(value - wanted) / max(abs(wanted), 1e-12)
        if distance > worst:
            worst, place = distance, step
    return worst, place
