"""DeepSpeed behind Fleettune's hooks.

Imported by the control process too, so torch and deepspeed are imported inside the hooks that a worker calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleettune_backend_deepspeed.ds_config import ds_config, read_user_config, with_bucket
from fleettune_backend_deepspeed.memory import divide
from fleettune_backend_deepspeed.options import DeepSpeedOptions, check_options, uses_nvme
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.hookspecs import hookimpl
from fleettune_core.types import (
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
        user = read_user_config(options.deepspeed_config) if options.deepspeed_config is not None else {}
        return divide(options, user, ranks=request.ranks, device_kind=request.device_kind)

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

        # A weight that stage 3 has divided is empty, and knows its whole size.
        trained = (weight for weight in model.parameters() if weight.requires_grad)
        num_trained = sum(getattr(weight, "ds_numel", weight.numel()) for weight in trained)
        config = self._config or ds_config(context.run)
        return engine.wrap(model, optimizer, with_bucket(config, num_trained))

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
