"""Run by two ranks at once; rank 0 writes what happened as JSON. The tests beside it only read that record."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fleettune_core.backends.ddp import DdpBackend, DdpOptions
from fleettune_core.data.sharding import GlobalBatchSampler
from fleettune_core.errors import FtError
from fleettune_core.training import agreement
from fleettune_core.training.checksum import agreed_checksum, checksums
from fleettune_core.types import (
    BatchPlan,
    DataShard,
    DeviceKind,
    ProcessInfo,
    ShardedData,
    TrainingContext,
    TrainingRun,
    WrapFacts,
    WrappedModel,
)

STEPS = 12


def context(options: DdpOptions, accumulation: int) -> TrainingContext:
    world = dist.get_world_size()
    process = ProcessInfo(rank=dist.get_rank(), local_rank=dist.get_rank(), world_size=world, local_world_size=world)
    batch = BatchPlan(global_batch=4 * accumulation * world, micro_batch=4, accumulation=accumulation, ranks=world)
    run = TrainingRun(
        config=None,
        options=options,
        process=process,
        batch=batch,
        precision="fp32",
        device_kind=DeviceKind.CPU,
        run_dir=Path(),
    )
    return TrainingContext(run=run, device=torch.device("cpu"), lora=False, gradient_checkpointing=False)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def train(options: DdpOptions, accumulation: int) -> tuple[torch.nn.Module, WrappedModel, TrainingContext]:
    """A few steps through the hooks, on rows that are cut by (micro-batch, rank)."""
    ctx = context(options, accumulation)
    model = network()
    backend = DdpBackend()
    wrapped = backend.wrap_model(ctx, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    rows = ctx.run.batch.global_batch
    inputs, targets = data(rows)
    world, rank = ctx.process.world_size, ctx.process.rank
    for step in range(STEPS):
        for micro in range(accumulation):
            start = (micro * world + rank) * 4
            part = slice(start, start + 4)
            with backend.reduce_grads(ctx, wrapped.model, micro == accumulation - 1):
                loss = (wrapped.model(inputs[step, part]) - targets[step, part]).square().sum() / rows
                (loss * world).backward()
        wrapped.optimizer.step()
        wrapped.optimizer.zero_grad()
    return model, wrapped, ctx


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, rows, 16, generator=generator), torch.randn(STEPS, rows, 4, generator=generator)


def alone(accumulation: int, world: int) -> torch.nn.Module:
    """The same steps in one process, without any of it."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = 4 * accumulation * world
    inputs, targets = data(rows)
    for step in range(STEPS):
        ((model(inputs[step]) - targets[step]).square().sum() / rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def distance(left: torch.nn.Module, right: torch.nn.Module) -> float:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def refused(check, *arguments) -> str | None:
    try:
        check(*arguments)
    except FtError as error:
        return str(error)
    return None


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    record: dict[str, object] = {}

    for name, options, accumulation in (
        ("plain", DdpOptions(), 1),
        ("accumulated", DdpOptions(), 3),
        ("bf16", DdpOptions(grad_compression="bf16"), 2),
        ("powersgd", DdpOptions(grad_compression="powersgd"), 2),
    ):
        model, wrapped, ctx = train(options, accumulation)
        record[name] = {
            "distance_to_one_process": distance(model, alone(accumulation, world)),
            "checksums": checksums(model.parameters()),
            "static_graph": wrapped.model.static_graph,
            "wrapper": wrapped.facts.wrapper,
            "world_size": wrapped.facts.world_size,
            "again_is_the_same": DdpBackend().wrap_model(ctx, wrapped.model, wrapped.optimizer).model is wrapped.model,
        }
    backend = DdpBackend()
    backend.save_state(ctx, wrapped, folder / "optimizer")
    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    backend.load_state(
        ctx, WrappedModel(model=wrapped.model, optimizer=fresh, facts=wrapped.facts), folder / "optimizer"
    )
    record["optimizer_restored"] = [
        torch.equal(fresh.state[item]["exp_avg"], wrapped.optimizer.state[item]["exp_avg"])
        and torch.equal(fresh.state[item]["exp_avg_sq"], wrapped.optimizer.state[item]["exp_avg_sq"])
        for item in model.parameters()
    ]
    record["learning_rate_restored"] = fresh.param_groups[0]["lr"]

    sharded = ShardedData(num_rows=22, lengths=np.arange(1, 23), seed=3, batch=ctx.run.batch)

    def first_step(shard: DataShard) -> list[list[int]]:
        batches = iter(GlobalBatchSampler(sharded, shard))
        return [next(batches) for _ in range(ctx.run.batch.accumulation)]

    mine = first_step(DataShard(index=rank, count=world))
    halves = [batch[rank::world] for batch in mine]
    record["shards_right"] = refused(agreement.check_shards, sharded, mine)
    record["sharded_twice"] = refused(agreement.check_shards, sharded, halves)
    record["not_sharded"] = refused(agreement.check_shards, sharded, first_step(DataShard(index=0, count=world)))

    same = network()
    record["replicas_right"] = refused(agreed_checksum, list(same.parameters()), "b", "now")
    with torch.no_grad():
        same[0].weight[0, 0] += rank * 1e-7
    record["replicas_drifted"] = refused(agreed_checksum, list(same.parameters()), "b", "now")

    whole = torch.arange(3 * 5 * 7, dtype=torch.float32).reshape(5, 3, 7)
    mesh = init_device_mesh("cpu", (world,))
    record["whole_checksum"] = checksums([whole])
    record["divided_checksum"] = checksums([distribute_tensor(whole, mesh, [Shard(0)])])

    asked = WrapFacts(wrapper="DistributedDataParallel", world_size=world, sharding="zero-3")
    posing = WrapFacts(wrapper="DeepSpeedEngine", world_size=world, sharding="zero-3")
    record["wrapped_right"] = refused(agreement.check_wrapped, wrapped.facts, wrapped.model, wrapped.facts, "b")
    record["not_sharded_as_asked"] = refused(agreement.check_wrapped, asked, wrapped.model, wrapped.facts, "b")
    record["posing"] = refused(agreement.check_wrapped, asked, wrapped.model, posing, "b")

    if rank == 0:
        (folder / "record.json").write_text(json.dumps(record))
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads can abort an interpreter that is shutting down (pytorch/pytorch#179291)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
