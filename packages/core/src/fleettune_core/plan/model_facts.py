"""What control can see of the model: which one it is, how large, and whether the settings fit it."""

from __future__ import annotations

from dataclasses import dataclass

from fleettune_core.config.schema import RunConfig
from fleettune_core.config.source import LoadedConfig
from fleettune_core.errors import FtError, did_you_mean
from fleettune_core.models.gguf_header import check_gguf_whole
from fleettune_core.models.resolve import ModelRef, check_config, resolve_model
from fleettune_core.models.shape import ModelShape, find_shape, linear_modules
from fleettune_core.plan.layout import exit_code_for
from fleettune_core.plan.memory import estimate
from fleettune_core.plan.mistakes import said_at
from fleettune_core.plan.model import MemoryEstimate
from fleettune_core.types import BatchPlan, DeviceKind, Devices, Environment, Layout, MemoryDivision

_GIB = 2**30
_ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model, as far as control can see it without loading it."""

    ref: ModelRef
    shape: ModelShape | None
    reason: str
    """Where the shape was read, or why there is none."""


def look_at_model(loaded: LoadedConfig, env: Environment) -> ModelFacts:
    """Find the model and its shape. Raises `FtError` for one that is not there or is broken, and for adapter targets
    that it does not have."""
    said = loaded.config.model
    assert said.model is not None, "load_config requires it"
    with said_at(loaded.source("model.model")):
        ref = resolve_model(said.model)
        check_config(ref)
        if ref.gguf_path is not None:
            check_gguf_whole(ref.gguf_path)
    found = find_shape(ref, env=env, revision=said.revision)
    if found.shape is not None and said.lora and said.lora_target is not None:
        _check_lora_target(loaded, said.lora_target, found.shape)
    return ModelFacts(ref=ref, shape=found.shape, reason=found.reason)


def _check_lora_target(loaded: LoadedConfig, target: str, shape: ModelShape) -> None:
    """Names that no layer has. Only where the family is known, and its layers with it; the worker checks the rest."""
    if target == _ALL_LINEAR or not shape.known or shape.num_experts:
        return
    names = [module.name for module in linear_modules(shape)]
    given = [name.strip() for name in target.split(",")]
    unknown = [name for name in given if name.isidentifier() and name not in (*names, "embed_tokens")]
    if unknown or not any(given):
        source = loaded.source("model.lora_target")
        said = ", ".join(f"{name!r}{did_you_mean(name, [*names, _ALL_LINEAR])}" for name in unknown) or "nothing"
        raise FtError(
            f"{source.where}: lora_target names {said}, which a {shape.model_type} model does not have",
            hint=f"--lora-target {_ALL_LINEAR}, or some of {','.join(names)}",
            exit_code=exit_code_for(source),
        )


def estimate_memory(
    config: RunConfig, model: ModelFacts, batch: BatchPlan, precision: str, division: MemoryDivision | None
) -> tuple[MemoryEstimate | None, str | None]:
    """Bytes per rank, or None and why there is no estimate."""
    if model.shape is None:
        return None, model.reason
    said = config.model
    figure = estimate(
        model.shape,
        batch=batch,
        max_length=config.data.max_length,
        precision=precision,
        lora=said.lora,
        lora_r=said.lora_r,
        lora_target=said.lora_target,
        gradient_checkpointing=config.train.gradient_checkpointing,
        attn=said.attn_implementation,
        optimizer=config.train.optim,
        division=division,
    )
    return figure, None


def model_notes(loaded: LoadedConfig, model: ModelFacts) -> list[str]:
    """Settings of hub models that a local one does not have."""
    if model.ref.kind == "hub" or loaded.config.model.revision is None:
        return []
    where = loaded.source("model.revision").where
    return [f"revision ({where}) has no effect here: {model.ref.label} is read from this machine's files"]


def model_warnings(
    config: RunConfig, model: ModelFacts, memory: MemoryEstimate | None, devices: Devices, layout: Layout
) -> list[str]:
    """What will hardly work, told before the run: rows longer than the model's positions, more memory than there is."""
    warnings: list[str] = []
    positions = model.shape.max_positions if model.shape is not None else 0
    if positions and config.data.max_length > positions:
        warnings.append(f"max_length {config.data.max_length} is beyond the {positions} positions of {model.ref.label}")
    # The ranks of a CPU host share its memory; a GPU belongs to one rank.
    on_cpu = devices.kind is DeviceKind.CPU
    sharers = layout.procs_per_node if on_cpu else 1
    if memory is not None and 0 < devices.memory_bytes < memory.total * sharers:
        what = "this machine" if on_cpu else f"one {devices.name}"
        for_ranks = f" for {sharers} ranks" if sharers > 1 else ""
        warnings.append(
            f"up to {memory.total * sharers / _GIB:.1f} GiB are needed{for_ranks}, and {what} has"
            f" {devices.memory_bytes / _GIB:.1f} GiB; a smaller --micro-batch or --max-length, --lora and"
            " --gradient-checkpointing need less"
        )
    return warnings
