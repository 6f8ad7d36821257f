"""The built-in backend `ddp`: every rank holds the whole model, gradients are averaged in buckets while they appear.

With one process there is nothing to average, and the model stays the plain one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fleettune_core.config import setting
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.hookspecs import hookimpl
from fleettune_core.types import (
    DeviceKind,
    MemoryDivision,
    MemoryRequest,
    ReduceGate,
    TrainingContext,
    TrainingRun,
    WrapFacts,
    WrappedModel,
)

WRAPPER = "DistributedDataParallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpOptions:
    """Options of the backend ddp."""

    grad_compression: Literal["none", "bf16", "powersgd"] = setting(
        "none",
        "Compress gradients on the wire: bf16 halves the bytes; powersgd sends rank-r factors (Vogels et al. 2019) and "
        "is lossy. Either one changes the numbers between layouts.",
    )
    powersgd_rank: int = setting(2, "Rank of PowerSGD's factors.", at_least=1, flag=False)
    bucket_mb: float = setting(25.0, "Size of a gradient bucket, in MiB.", above=0, flag=False)
    static_graph: Literal["auto", "on", "off"] = setting(
        "auto",
        "Tell DDP that every step uses the same parameters in the same order. auto: on where it holds, which is "
        "without gradient accumulation.",
        flag=False,
    )


class DdpBackend:
    """PyTorch's DistributedDataParallel behind the hooks."""

    Options = DdpOptions

    @hookimpl
    def divide_memory(self, request: MemoryRequest) -> MemoryDivision:
        return MemoryDivision(
            # In micro-batches that are not reduced, autograd keeps gradients of its own beside DDP's buckets.
            gradient_copies=2 if request.ranks > 1 else 1,
            # PyTorch's AdamW takes weights one by one on a CPU, and all at once on a GPU.
            step_copies=1 if request.device_kind is DeviceKind.CUDA else 0,
        )

    @hookimpl
    def configure_training(self, run: TrainingRun) -> Mapping[str, Any] | None:
        options: DdpOptions = run.options
        if options.static_graph == "on" and not holds_static_graph(run):
            raise FtError(
                f"backend.static_graph: on does not hold with {run.batch.accumulation} micro-batches per step: "
                "DistributedDataParallel would lose gradients",
                hint="leave static_graph at auto, or raise --micro-batch until accumulation is 1",
                exit_code=ExitCode.CONFIG,
            )
        return None

    @hookimpl
    def expect_wrapped(self, run: TrainingRun) -> WrapFacts:
        # Without a process group there is nothing to reduce over, so one rank keeps the plain model.
        wrapper = WRAPPER if run.process.world_size > 1 else ""
        return WrapFacts(wrapper=wrapper, world_size=run.process.world_size, reduction=_reduction(run))

    @hookimpl
    def wrap_model(self, context: TrainingContext, model: Any, optimizer: Any) -> WrappedModel:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        world_size = context.process.world_size
        if world_size == 1:
            facts = WrapFacts(wrapper=type(model).__name__, world_size=1, reduction=_reduction(context.run))
            return WrappedModel(model=model, optimizer=optimizer, facts=facts)
        if isinstance(model, DistributedDataParallel):
            return WrappedModel(model=model, optimizer=optimizer, facts=_facts(model, context.run))
        options: DdpOptions = context.options
        on_gpu = context.run.device_kind is DeviceKind.CUDA
        wrapped = DistributedDataParallel(
            model,
            device_ids=[torch.device(context.device).index] if on_gpu else None,
            bucket_cap_mb=options.bucket_mb,
            # Gradients live in the buckets themselves: no copy in or out, and one gradient's memory saved.
            gradient_as_bucket_view=True,
            **_no_buffer_sync(),  # pyright: ignore[reportArgumentType]
            static_graph=options.static_graph != "off" and holds_static_graph(context.run),
        )
        _register_compression(wrapped, options)
        return WrappedModel(model=wrapped, optimizer=optimizer, facts=_facts(wrapped, context.run))

    @hookimpl
    def reduce_grads(self, context: TrainingContext, model: Any, sync: bool) -> ReduceGate:
        if sync or context.process.world_size == 1:
            return contextlib.nullcontext()
        return model.no_sync()

    @hookimpl
    def save_state(self, context: TrainingContext, wrapped: WrappedModel, folder: Path) -> None:
        from fleettune_core.backend_kit.optimizer_state import save_optimizer

        save_optimizer(wrapped.model, wrapped.optimizer, folder)

    @hookimpl
    def load_state(self, context: TrainingContext, wrapped: WrappedModel, folder: Path) -> None:
        from fleettune_core.backend_kit.optimizer_state import load_optimizer

        load_optimizer(wrapped.model, wrapped.optimizer, folder)


def _no_buffer_sync() -> dict[str, bool]:
    """Language models have no running statistics to keep equal in every forward. The switch changed its name."""
    import inspect

    from torch.nn.parallel import DistributedDataParallel

    new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if new else "broadcast_buffers": False}


def holds_static_graph(run: TrainingRun) -> bool:
    """Whether DDP's static graph may be used for this run.

    Not with gradient accumulation: under `no_sync`, DDP with a static graph fails in its first backward or, in other
    releases, stops averaging gradients without a word (pytorch/pytorch#143580, #187732).
    """
    return run.batch.accumulation == 1


def _facts(wrapped: Any, run: TrainingRun) -> WrapFacts:
    import torch.distributed as dist

    return WrapFacts(
        wrapper=type(wrapped).__name__,
        world_size=dist.get_world_size(wrapped.process_group),
        reduction=_reduction(run),
    )


def _reduction(run: TrainingRun) -> str:
    """One rank exchanges nothing, so nothing is compressed there."""
    return "mean" if run.options.grad_compression == "none" or run.process.world_size == 1 else "lossy"


def _register_compression(wrapped: Any, options: DdpOptions) -> None:
    if options.grad_compression == "bf16":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        def compress_bf16(state, bucket):  # DDP reads annotations, and accepts none rather than a string
            return default_hooks.bf16_compress_hook(state, bucket)

        # DDP refuses torch's own hook by its name where there is no NCCL, though gloo reduces bf16 as well.
        wrapped.register_comm_hook(None, compress_bf16)
    elif options.grad_compression == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        # The first steps are exact: DDP rebuilds its buckets after the first one, and early gradients compress badly.
        state = powersgd.PowerSGDState(
            process_group=None, matrix_approximation_rank=options.powersgd_rank, start_powerSGD_iter=10
        )
        wrapped.register_comm_hook(state, powersgd.powerSGD_hook)
