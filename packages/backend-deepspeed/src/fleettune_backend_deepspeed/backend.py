"""DeepSpeed behind Fleettune's hooks.

Imported by the control process too, so torch and deepspeed are imported inside the hooks that a worker calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleettune_backend_deepspeed.ds_config import ds_config, read_user_config
from fleettune_backend_deepspeed.options import DeepSpeedOptions, check_options, uses_nvme
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

WRAPPER = "DeepSpeedEngine"


class DeepSpeedBackend:
    """ZeRO, stages 0 to 3."""

    Options = DeepSpeedOptions

    def __init__(self) -> None:
        self._zero3_switch: Any = None
        self._config: dict[str, Any] | None = None

    @hookimpl
    def divide_memory(self, request: MemoryRequest) -> MemoryDivision:
        options: DeepSpeedOptions = request.options
        check_options(options)
        if options.deepspeed_config is not None:
            read_user_config(options.deepspeed_config)
        stage, ranks = options.zero_stage, request.ranks
        on_gpu = request.device_kind is DeviceKind.CUDA
        divided = {0: "nothing", 1: "optimizer state", 2: "gradients and optimizer state", 3: "everything"}[stage]
        return MemoryDivision(
            weights=ranks if stage == 3 else 1,
            gradients=ranks if stage >= 2 else 1,
            optimizer=ranks if stage >= 1 else 1,
            gathered_layers=2 if stage == 3 and ranks > 1 else 0,
            weights_offloaded=options.offload_params == "nvme" or (on_gpu and options.offload_params == "cpu"),
            optimizer_offloaded=options.offload_optimizer == "nvme" or (on_gpu and options.offload_optimizer == "cpu"),
            note=f"ZeRO stage {stage} divides {divided} over {ranks} ranks",
        )

    @hookimpl
    def configure_training(self, run: TrainingRun) -> Mapping[str, Any] | None:
        options: DeepSpeedOptions = run.options
        check_options(options)
        if run.precision == "fp16":
            raise FtError(
                "the backend deepspeed does not train in fp16 in this version",
                hint="--precision bf16, or --precision fp32",
                exit_code=ExitCode.CONFIG,
            )
        config = ds_config(run)
        from fleettune_backend_deepspeed import engine

        engine.prepare_libraries(run)
        if uses_nvme(options):
            from fleettune_backend_deepspeed import nvme

            config = nvme.prepared(config, run)
        self._config = config
        if options.zero_stage == 3:
            # While it lives, from_pretrained makes each weight as this rank's shard; no rank holds the model whole.
            self._zero3_switch = engine.sharded_creation(run, config)
        return None

    @hookimpl
    def expect_wrapped(self, run: TrainingRun) -> WrapFacts:
        stage = run.options.zero_stage
        return WrapFacts(
            wrapper=WRAPPER, world_size=run.process.world_size, sharding=f"zero-{stage}" if stage else "none"
        )

    @hookimpl
    def wrap_model(self, context: TrainingContext, model: Any, optimizer: Any) -> WrappedModel:
        from fleettune_backend_deepspeed import engine

        return engine.wrap(model, optimizer, self._config or ds_config(context.run))

    @hookimpl
    def reduce_grads(self, context: TrainingContext, model: Any, sync: bool) -> ReduceGate:
        model.set_gradient_accumulation_boundary(sync)
        return contextlib.nullcontext()

    @hookimpl
    def save_state(self, context: TrainingContext, wrapped: WrappedModel, folder: Path) -> None:
        from fleettune_backend_deepspeed import state

        state.save(wrapped, folder)

    @hookimpl
    def load_state(self, context: TrainingContext, wrapped: WrappedModel, folder: Path) -> None:
        from fleettune_backend_deepspeed import state

        state.load(wrapped, folder)

    @hookimpl
    def iterate_weights(self, context: TrainingContext, wrapped: WrappedModel) -> Iterator[tuple[str, Any]] | None:
        if context.options.zero_stage < 3:
            return None
        from fleettune_backend_deepspeed import state

        return state.full_weights(wrapped.model.module, trained_only=context.lora, keep=context.process.rank == 0)
