"""The batch equation: `global_batch = micro_batch × accumulation × ranks`, solved, or refused with what would work.

One of two spellings is used: the global batch (with a micro-batch, or without), from which the rest is solved; or the
per-device batch size and accumulation of TRL and others, from which the global batch follows.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleettune_core.config.source import Source
from fleettune_core.errors import FtError
from fleettune_core.types import BatchPlan

DEFAULT_GLOBAL_BATCH = 8
DEFAULT_MAX_MICRO_BATCH = 8
"""Largest micro-batch that is chosen unasked: larger ones rarely run faster and always need more memory."""

_PER_DEVICE = "per_device_train_batch_size"
_ACCUMULATION = "gradient_accumulation_steps"


def solve_batch(
    *,
    ranks: int,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    per_device: int | None = None,
    accumulation: int | None = None,
    sources: Mapping[str, Source | str] | None = None,
    ranks_source: str = "solved",
    max_micro_batch: int | None = None,
    default_global: int = DEFAULT_GLOBAL_BATCH,
) -> BatchPlan:
    """Solve the batch equation for `ranks` data-parallel ranks; every number is in rows, None means "not said".

    `sources` says where each given number came from, by the setting's name (`global_batch`, `micro_batch`,
    `per_device_train_batch_size`, `gradient_accumulation_steps`, with or without `batch.` before it);
    `ranks_source` is a phrase such as `2 nodes × 4`. `max_micro_batch` bounds a micro-batch that nobody gave (from
    memory, say; default 8). Raises `FtError` (exit code 5) with the equation when the numbers contradict each other,
    and with the nearest ones that work when they cannot be dealt.
    """
    assert ranks >= 1, ranks
    where = _Where(sources or {})
    micro, micro_key = micro_batch, "micro_batch"
    if per_device is not None:
        if micro is not None and micro != per_device:
            raise FtError(
                f"two sizes for one micro-batch: {micro} rows ({where('micro_batch')}) and {per_device} rows"
                f" ({where(_PER_DEVICE)})",
                hint="micro-batch and per-device batch size are the same number: leave one of them out",
            )
        micro, micro_key = per_device, _PER_DEVICE
    reasons = {"ranks": ranks_source}
    if global_batch is not None:
        reasons["global_batch"] = where("global_batch")
        _check_divisible(global_batch, ranks, where("global_batch"), ranks_source)
    elif micro is not None and accumulation is not None:
        global_batch = micro * accumulation * ranks
        reasons["global_batch"] = "follows"
    elif per_device is not None:
        accumulation = 1
        global_batch = per_device * ranks
        reasons |= {"global_batch": "follows", "accumulation": "default"}
    else:
        global_batch, reasons["global_batch"] = _default_global(
            default_global, ranks, unit=micro or accumulation or 1, what="micro-batch" if micro else "accumulation"
        )
    share = global_batch // ranks
    if micro is not None and accumulation is not None:
        if micro * accumulation != share:
            _refuse_contradiction(
                (global_batch, where("global_batch")),
                (micro, where(micro_key)),
                (accumulation, where(_ACCUMULATION)),
                (ranks, ranks_source),
            )
        reasons.setdefault("accumulation", where(_ACCUMULATION))
        reasons["micro_batch"] = where(micro_key)
    elif micro is not None:
        if share % micro:
            _refuse_part(global_batch, ranks, micro, "micro-batch", "--micro-batch", where(micro_key))
        accumulation = share // micro
        reasons |= {"micro_batch": where(micro_key), "accumulation": "solved"}
    elif accumulation is not None:
        if share % accumulation:
            option = "--gradient-accumulation-steps"
            _refuse_part(global_batch, ranks, accumulation, "accumulation", option, where(_ACCUMULATION))
        micro = share // accumulation
        reasons |= {"micro_batch": "solved", "accumulation": where(_ACCUMULATION)}
    else:
        limit = DEFAULT_MAX_MICRO_BATCH if max_micro_batch is None else max(1, max_micro_batch)
        micro = max(divisor for divisor in _divisors(share) if divisor <= limit)
        accumulation = share // micro
        reasons["micro_batch"] = "solved" if micro == share else f"solved: at most {limit}"
        reasons["accumulation"] = "solved"
    return BatchPlan(
        global_batch=global_batch, micro_batch=micro, accumulation=accumulation, ranks=ranks, reasons=reasons
    )


def resolve_for_world(batch: BatchPlan, world_size: int) -> BatchPlan:
    """The same global batch for another number of ranks: after an elastic restart, or on resuming elsewhere.

    The micro-batch stays when it still divides a rank's share, else it is the largest divisor below it: what fitted
    in memory still fits. Raises `FtError` (exit code 5) when the global batch cannot be dealt to `world_size` ranks.
    """
    if world_size == batch.ranks:
        return batch
    here = f"{world_size} ranks formed"
    _check_divisible(batch.global_batch, world_size, batch.reasons.get("global_batch", "the run's plan"), here)
    share = batch.global_batch // world_size
    micro = max(divisor for divisor in _divisors(share) if divisor <= batch.micro_batch)
    kept = micro == batch.micro_batch
    return BatchPlan(
        global_batch=batch.global_batch,
        micro_batch=micro,
        accumulation=share // micro,
        ranks=world_size,
        reasons={
            "global_batch": "kept",
            "micro_batch": "kept" if kept else f"solved: at most {batch.micro_batch}, as planned",
            "accumulation": "solved",
            "ranks": here,
        },
    )


class _Where:
    """Where a given number came from, as a phrase."""

    def __init__(self, sources: Mapping[str, Source | str]) -> None:
        self._sources = sources

    def __call__(self, name: str) -> str:
        source = self._sources.get(name) or self._sources.get(f"batch.{name}")
        if source is None:
            return "given"
        return source if isinstance(source, str) else source.where


def _default_global(default: int, ranks: int, *, unit: int, what: str) -> tuple[int, str]:
    """The default, or the next number of rows above it that can be dealt; and where it comes from."""
    step = ranks * unit
    if default % step == 0:
        return default, "default"
    by = f"{ranks} ranks" if unit == 1 else f"{what} {unit} × {ranks} {'ranks' if ranks > 1 else 'rank'}"
    return _above(default, step), f"default {default}, raised to a multiple of {by}"


def _check_divisible(global_batch: int, ranks: int, where: str, ranks_where: str) -> None:
    if global_batch % ranks == 0:
        return
    works = _nearest_multiples(global_batch, ranks)
    fewer = max(divisor for divisor in _divisors(global_batch) if divisor <= ranks)
    raise FtError(
        f"a global batch of {global_batch} rows ({where}) cannot be dealt evenly to {ranks} ranks ({ranks_where})",
        hint=f"the nearest that can: --global-batch {works}; or {fewer} {'ranks' if fewer > 1 else 'rank'}",
    )


def _refuse_part(global_batch: int, ranks: int, part: int, what: str, option: str, where: str) -> None:
    share = global_batch // ranks
    divisors = _divisors(share)
    below = [divisor for divisor in divisors if divisor < part][-1:]
    above = [divisor for divisor in divisors if divisor > part][:1]
    parts = " or ".join(str(value) for value in (*below, *above))
    totals = _nearest_multiples(global_batch, ranks * part)
    raise FtError(
        f"{global_batch} rows ÷ {ranks} {'ranks' if ranks > 1 else 'rank'} = {share} rows per rank, which"
        f" {what} {part} ({where}) does not divide",
        hint=f"the nearest that work: {option} {parts}, or --global-batch {totals}",
    )


def _refuse_contradiction(
    total: tuple[int, str], micro: tuple[int, str], accumulation: tuple[int, str], ranks: tuple[int, str]
) -> None:
    product = micro[0] * accumulation[0] * ranks[0]
    raise FtError(
        f"the batch sizes contradict each other: {total[0]} ≠ {micro[0]} × {accumulation[0]} × {ranks[0]} = {product}",
        problems=[
            f"global batch                {total[0]:>6}  {total[1]}",
            f"micro-batch (per device)    {micro[0]:>6}  {micro[1]}",
            f"accumulation                {accumulation[0]:>6}  {accumulation[1]}",
            f"ranks                       {ranks[0]:>6}  {ranks[1]}",
        ],
        hint=f"leave one of them out and it is solved, or say --global-batch {product}",
    )


def _nearest_multiples(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


def _above(value: int, step: int) -> int:
    return -(-value // step) * step


def _divisors(value: int) -> list[int]:
    small = [divisor for divisor in range(1, int(value**0.5) + 1) if value % divisor == 0]
    return sorted({*small, *(value // divisor for divisor in small)})
