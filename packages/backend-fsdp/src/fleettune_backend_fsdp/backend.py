"""FSDP2 behind Fleettune's hooks.

Imported by the control process too, so torch is imported inside the hooks that a worker calls.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleettune_core.config import setting
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.hookspecs import hookimpl
from fleettune_core.types import (
    BatchSampler,
    DataShard,
    DeviceKind,
    MemoryDivision,
    MemoryRequest,
    ReduceGate,
    ShardedData,
    TrainingContext,
    TrainingRun,
    WrapFacts,
    WrappedModel,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpOptions:
    """Options of the backend fsdp."""

    shard_group: int | None = setting(
        None,
        "Hybrid sharding: divide over groups of N ranks (those of one machine, say), and keep the groups as copies of "
        "each other. Default: all ranks are one group.",
        at_least=1,
        metavar="N",
    )
    cpu_offload: bool = setting(
        False, "Keep weights, gradients and optimizer state in the machine's memory, not on the GPU.", flag=False
    )
    reshard_after_forward: bool = setting(
        True,
        "Free a block's gathered weights between its forward and its backward: less memory, one more all-gather.",
        flag=False,
    )


class FsdpBackend:
    """PyTorch's `fully_shard`, per transformer block."""

    Options = FsdpOptions

    def __init__(self) -> None:
        self._mesh: Any = None

    @hookimpl
    def divide_memory(self, request: MemoryRequest) -> MemoryDivision:
        options: FsdpOptions = request.options
        group = _group(options, request.ranks)
        offloaded = options.cpu_offload and request.device_kind is DeviceKind.CUDA
        return MemoryDivision(
            weights=group,
            gradients=group,
            optimizer=group,
            weights_offloaded=offloaded,
            optimizer_offloaded=offloaded,
            gathered_layers=2,
            gathered_root=True,
            gathered_elements=0 if options.reshard_after_forward else sys.maxsize,
            gathered_in_half=not request.lora,  # see `wrapping._precision`
            # Without a reduction (see `reduce_grads`), FSDP2 keeps the gradients of whole weights.
            gradients_whole_between=True,
            # PyTorch's AdamW takes weights one by one on a CPU, and all at once on a GPU.
            step_copies=1 if request.device_kind is DeviceKind.CUDA else 0,
            note=f"weights, gradients and optimizer state divided over {group} ranks (fsdp)",
        )

    @hookimpl
    def configure_training(self, run: TrainingRun) -> Mapping[str, Any] | None:
        options: FsdpOptions = run.options
        _group(options, run.process.world_size)
        if run.precision == "fp16":
            raise FtError(
                "the backend fsdp does not train in fp16: its loss scaling does not see sharded gradients",
                hint="--precision bf16, or --precision fp32",
                exit_code=ExitCode.CONFIG,
            )
        if options.cpu_offload and run.device_kind is DeviceKind.CPU:
            raise FtError(
                "backend.cpu_offload: there is no GPU here whose memory could be saved",
                hint="leave cpu_offload out on a machine without GPUs",
                exit_code=ExitCode.CONFIG,
            )
        from fleettune_core.backend_kit.process_group import ensure_process_group

        ensure_process_group(run.device_kind)
        from fleettune_backend_fsdp.wrapping import make_mesh

        self._mesh = make_mesh(run.device_kind, options)
        return None

    @hookimpl
    def expect_wrapped(self, run: TrainingRun) -> WrapFacts:
        return WrapFacts(wrapper="FSDP*", world_size=run.process.world_size, sharding="fsdp")

    @hookimpl
    def wrap_model(self, context: TrainingContext, model: Any, optimizer: Any) -> WrappedModel:
        from fleettune_backend_fsdp.wrapping import wrap

        return wrap(context, model, optimizer, self._mesh)

    @hookimpl
    def shard_data(self, context: TrainingContext, dataset: ShardedData, shard: DataShard) -> BatchSampler:
        from fleettune_backend_fsdp.wrapping import data_shard
        from fleettune_core.backend_kit.row_dealing import deal_rows

        return deal_rows(dataset, data_shard(self._mesh))

    @hookimpl
    def reduce_grads(self, context: TrainingContext, model: Any, sync: bool) -> ReduceGate:
        model.set_requires_gradient_sync(sync)
        return contextlib.nullcontext()

    @hookimpl
    def save_state(self, context: TrainingContext, wrapped: WrappedModel, folder: Path) -> None:
        from fleettune_core.backend_kit.optimizer_state import save_optimizer

        save_optimizer(wrapped.model, wrapped.optimizer, folder)

    @hookimpl
    def load_state(self, context: TrainingContext, wrapped: WrappedModel, folder: Path) -> None:
        from fleettune_core.backend_kit.optimizer_state import load_optimizer

        load_optimizer(wrapped.model, wrapped.optimizer, folder)

    @hookimpl
    def iterate_weights(self, context: TrainingContext, wrapped: WrappedModel) -> Iterator[tuple[str, Any]]:
        from fleettune_backend_fsdp.wrapping import full_weights

        return full_weights(wrapped.model, trained_only=context.lora, keep=context.process.rank == 0)


def _group(options: FsdpOptions, ranks: int) -> int:
    """Ranks that divide one copy of the model. Raises FtError where the groups do not come out even."""
    group = options.shard_group or ranks
    if ranks % group:
        fitting = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        raise FtError(
            f"--shard-group {group}: {ranks} ranks do not make groups of {group}",
            hint=f"{ranks} ranks make groups of {fitting}",
            exit_code=ExitCode.CONFIG,
        )
    return group
