"""A digest of a model's weights that is the same however they are divided over ranks.

Every weight's bits are summed as 64-bit numbers, wrapping; so the parts that ranks hold add up to the digest of the
whole, and one number per rank is all that is exchanged. It tells models apart that differ by accident; it is no
defence against malice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.training.agreement import gather

_WORD_BYTES = 8
_STRIDE = 61
"""Every so many words are weighed by their position too, so that weights in another order differ."""
_MASK = (1 << 64) - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NOT_REDUCED = "the gradients were not averaged over the ranks; this is a fault of the backend"


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank holds of one weight."""

    values: torch.Tensor
    """Flat: [numbers held here]."""
    start: int = 0
    """Where they begin in the whole weight, as a flat index."""
    divided: bool = False
    """Whether the rest is on the other ranks of `group`."""
    group: int = 0
    """Which copy of the whole weight this part belongs to, where groups of ranks hold one each."""


def checksums(parameters: Iterable[Any]) -> list[str] | None:
    """The digest of all `parameters` as each rank sees it, by rank (collective).

    Equal weights in the same order give equal digests on any number of ranks, whole or divided. None where a rank
    cannot see its part: weights that rest on a disk.
    """
    whole = divided = group = 0
    for number, parameter in enumerate(parameters, start=1):
        part = held_part(parameter)
        if part is None:
            # All ranks offload alike, so all of them return here and none waits.
            return None
        # An odd factor per weight: the same bits in another weight count differently.
        value = _digest(part.values, part.start) * (2 * number * 1_000_003 + 1)
        if part.divided:
            divided, group = divided + value, part.group
        else:
            whole += value
    ranks: list[tuple[int, int, int]] = gather((whole & _MASK, divided & _MASK, group))
    sums = [
        mine + sum(shard for _, shard, other in ranks if other == group_of_rank) for mine, _, group_of_rank in ranks
    ]
    return [f"{value & _MASK:016x}" for value in sums]


def agreed_checksum(parameters: Iterable[Any], backend: str, when: str, hint: str = _NOT_REDUCED) -> str | None:
    """The digest on which all ranks agree (collective), or None where it cannot be told.

    Finds ranks that hold other weights: models that were built differently and, after a step, gradients that were not
    reduced. Raises FtError (exit code 3), naming every rank's digest.
    """
    sums = checksums(parameters)
    if sums is None or all(value == sums[0] for value in sums):
        return sums[0] if sums else None
    raise FtError(
        f"backend {backend}: the ranks' weights differ {when}",
        problems=[f"rank {rank}: checksum {value}" for rank, value in enumerate(sums)],
        hint=hint,
        exit_code=ExitCode.PLUGIN,
    )


def held_part(parameter: Any) -> Part | None:
    """What this rank holds of `parameter`: a DTensor, a weight that ZeRO-3 divides, or a plain tensor.

    None for one that is not in memory. Raises NotImplementedError for a DTensor that is divided in another way than
    along its first dimension.
    """
    if hasattr(parameter, "ds_tensor"):
        return _part_of_zero3(parameter)
    if isinstance(parameter, DTensor):
        return _part_of_dtensor(parameter)
    return Part(parameter.detach().reshape(-1))


def _part_of_zero3(parameter: Any) -> Part | None:
    shard = parameter.ds_tensor
    length = int(shard.ds_numel)
    if shard.numel() < length:
        return None  # Its place is on a disk.
    start = length * dist.get_rank(parameter.ds_process_group)
    # The last parts are padded, so that all are of one length.
    return Part(shard.detach().reshape(-1)[: max(0, parameter.ds_numel - start)], start, divided=True)


def _part_of_dtensor(parameter: DTensor) -> Part:
    local = parameter.to_local().detach()
    mesh = parameter.device_mesh
    start, divided, group = 0, False, 0
    for axis, placement in enumerate(parameter.placements):
        coordinate = mesh.get_local_rank(axis)
        if placement.is_replicate():
            group = group * mesh.size(axis) + coordinate
        elif isinstance(placement, Shard) and placement.dim == 0 and not divided:
            # As torch.chunk cuts: all parts of one length, the last ones shorter or empty.
            rows = -(-parameter.shape[0] // mesh.size(axis))
            start, divided = (
                min(rows * coordinate, parameter.shape[0]) * (parameter.numel() // parameter.shape[0]),
                True,
            )
        else:
            raise NotImplementedError(f"a weight is divided as {parameter.placements}")
    return Part(local.reshape(-1), start, divided, group)


def _digest(values: torch.Tensor, start: int) -> int:
    """The sum of the words that `values` are, as they lie in the whole weight from flat index `start` on."""
    if not values.numel():
        return 0
    size = values.element_size()
    per_word = _WORD_BYTES // size
    bits = values.contiguous().view(_INTEGERS[size])
    # Filled up to whole words of the whole weight; parts that share a word add up to it.
    first, before = divmod(start, per_word)
    after = -(before + bits.numel()) % per_word
    if before or after or bits.storage_offset() % per_word:
        bits = F.pad(bits, (before, after))
    words = bits.view(torch.int64)
    skipped = -first % _STRIDE
    sampled = words[skipped::_STRIDE]
    places = first + skipped + 1 + _STRIDE * torch.arange(len(sampled), device=words.device)
    return int(words.sum()) + int((sampled * places).sum())
