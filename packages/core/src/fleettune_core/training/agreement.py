"""Checks that all ranks have, and do, the same: run-time guards against a backend that quietly does something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from fleettune_core.data.sharding import check_coverage
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import ShardedData, WrapFacts


def gather(value: Any) -> list[Any]:
    """`value` of every rank, by rank (collective; small objects only)."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_wrapped(expected: WrapFacts, model: Any, said: WrapFacts, backend: str) -> list[WrapFacts]:
    """Compare what was asked with what is there, on every rank (collective). Returns the facts of each rank.

    The class name is read off the model itself; a backend's own word is compared with it, not trusted.
    """
    found = WrapFacts(wrapper=type(model).__name__, world_size=said.world_size, sharding=said.sharding)
    problems: list[str] = []
    ranks: list[WrapFacts] = []
    for rank, (facts, word) in enumerate(gather((found, said))):
        ranks.append(facts)
        if word.wrapper != facts.wrapper:
            problems.append(f"rank {rank}: the backend says {word.wrapper}, the model is a {facts.wrapper}")
        for name, wanted in asdict(expected).items():
            got = getattr(facts, name)
            # An empty wrapper in the expectation means: the plain model, whatever its class.
            if wanted not in ("", got):
                problems.append(f"rank {rank}: {name} is {got}, not {wanted}")
    if problems:
        raise FtError(
            f"backend {backend}: what was asked is not what ran",
            problems=problems,
            hint="nothing was trained; this is a fault of the backend, or of the library under it",
            exit_code=ExitCode.PLUGIN,
        )
    return ranks


def check_shards(data: ShardedData, first_batches: Sequence[Sequence[int]], epoch: int = 0) -> None:
    """The ranks' shares of an epoch's first optimizer step must be disjoint and cover it (collective).

    `first_batches`: this rank's micro-batches of that step. Finds data that is sharded twice (each rank sees a
    fraction), or not at all (every rank sees everything). Raises FtError (exit code 3).
    """
    shares = gather([row for batch in first_batches for row in batch])
    check_coverage(data, epoch=epoch, step=0, rows_by_rank=shares)


def check_replicas(model: torch.nn.Module, backend: str, when: str) -> None:
    """Every rank must hold the same trainable weights (collective). Only for backends that do not shard them.

    Finds gradients that were not reduced: after the first step the ranks would have drifted apart.
    """
    sums = gather(checksum(model))
    if all(value == sums[0] for value in sums):
        return
    raise FtError(
        f"backend {backend}: the ranks' weights differ {when}",
        problems=[f"rank {rank}: checksum {value}" for rank, value in enumerate(sums)],
        hint="the gradients were not averaged over the ranks; this is a fault of the backend",
        exit_code=ExitCode.PLUGIN,
    )


def checksum(model: torch.nn.Module) -> str:
    """A digest of the trainable weights' bits: equal weights, equal digest; order and shape count."""
    total = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        bits = parameter.detach().contiguous().view(torch.uint8).view(-1)
        padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(torch.int64)
        # Position matters through the weights of the sum; wrapping arithmetic is fine for a digest.
        positions = torch.arange(1, padded.numel() + 1, device=padded.device, dtype=torch.int64)
        total = (total * 1_000_003 + int((padded * positions).sum())) & (2**64 - 1)
    return f"{total:016x}"
