"""Checks that all ranks have, and do, the same: run-time guards against a backend that quietly does something else."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fleettune_core.data.sharding import check_coverage
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import ShardedData, WrapFacts

_SHARED_DISK_SECONDS = 10.0


def gather(value: Any) -> list[Any]:
    """`value` of every rank, by rank (collective; small objects only)."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_wrapped(expected: WrapFacts, model: Any, said: WrapFacts, backend: str) -> list[WrapFacts]:
    """Compare what was asked with what is there, on every rank (collective). Returns the facts of each rank.

    What is there is read off the model itself as far as it shows (`observe`); a backend's own word is compared with
    it, not trusted.
    """
    problems: list[str] = []
    ranks: list[WrapFacts] = []
    for rank, (facts, word) in enumerate(gather((observe(model, said), said))):
        ranks.append(facts)
        for name, got in asdict(facts).items():
            if getattr(word, name) != got:
                problems.append(f"rank {rank}: the backend says {name} {getattr(word, name)}, and it is {got}")
        for name, wanted in asdict(expected).items():
            got = getattr(facts, name)
            # An empty wrapper in the expectation means: the plain model, whatever its class.
            plain = name == "wrapper" and wanted == "" and facts.world_size == 1
            if not plain and not _fits(got, wanted):
                problems.append(f"rank {rank}: {name} is {got}, not {wanted or 'the plain model'}")
    if problems:
        raise FtError(
            f"backend {backend}: what was asked is not what ran",
            problems=problems,
            hint="nothing was trained; this is a fault of the backend, or of the library under it",
            exit_code=ExitCode.PLUGIN,
        )
    return ranks


def check_kept(backend: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """`wrap_model` may divide weights and must not change them. Raises FtError (exit code 3) with what has changed."""
    problems = [
        f"{name}: {before[name]} before, {value} after" for name, value in after.items() if value != before[name]
    ]
    if problems:
        raise FtError(
            f"backend {backend}: its wrap_model has changed the model",
            problems=problems,
            hint="nothing was trained; this is a fault of the backend",
            exit_code=ExitCode.PLUGIN,
        )


def _fits(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, str) and wanted.endswith("*"):
        return str(got).startswith(wanted[:-1])
    return got == wanted


def observe(model: Any, said: WrapFacts) -> WrapFacts:
    """The facts of a wrapped model as it shows them: its class, the ranks of its process group, what it divides.

    A DeepSpeed engine tells its stage; parameters that are DTensors are sharded; DistributedDataParallel divides
    nothing. Where a wrapper of another kind shows nothing, the backend's word stands.
    """
    sharding, ranks = said.sharding, said.world_size
    stage = getattr(model, "zero_optimization_stage", None)
    if callable(stage):
        sharding = f"zero-{stage()}" if stage() else "none"
        ranks = int(model.dp_world_size)
    elif isinstance(model, torch.nn.parallel.DistributedDataParallel):
        sharding, ranks = "none", dist.get_world_size(model.process_group)
    elif (mesh := _mesh_of(model)) is not None:
        sharding, ranks = "fsdp", mesh.size()
    elif not dist.is_initialized():
        sharding, ranks = "none", 1
    # How gradients are exchanged shows in no model: the promise stands, and the gradients themselves are looked at.
    return WrapFacts(wrapper=type(model).__name__, world_size=ranks, sharding=sharding, reduction=said.reduction)


def _mesh_of(model: torch.nn.Module) -> Any | None:
    """The device mesh that the trainable parameters are sharded over; None where one of them is whole."""
    meshes = [getattr(item, "device_mesh", None) for item in model.parameters() if item.requires_grad]
    return None if not meshes or None in meshes else meshes[0]


def check_shared_folder(folder: Path) -> None:
    """Every machine must see the run folder of rank 0, or a checkpoint would be written in pieces (collective).

    Raises FtError (exit code 5) naming the machines that do not. A file may take a moment to show on a network disk.
    """
    name = gather(f".shared-{uuid.uuid4().hex}")[0]
    if dist.get_rank() == 0:
        (folder / name).touch()
    dist.barrier()
    deadline = time.monotonic() + _SHARED_DISK_SECONDS
    while not (seen := (folder / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = sorted({host for host, sees in gather((socket.gethostname(), seen)) if not sees})
    if dist.get_rank() == 0:
        (folder / name).unlink()
    if blind:
        raise FtError(
            f"checkpoints need one run folder that all machines see: rank 0's {folder} is not on {', '.join(blind)}",
            hint="give every machine the same --run-dir on a shared disk, or leave --save-every out",
            exit_code=ExitCode.CONFIG,
        )


def check_shards(data: ShardedData, first_batches: Sequence[Sequence[int]], epoch: int = 0) -> None:
    """The ranks' shares of an epoch's first optimizer step must be disjoint and cover it (collective).

    `first_batches`: this rank's micro-batches of that step. Finds data that is sharded twice (each rank sees a
    fraction), or not at all (every rank sees everything). Raises FtError (exit code 3).
    """
    shares = gather([row for batch in first_batches for row in batch])
    check_coverage(data, epoch=epoch, step=0, rows_by_rank=shares)
