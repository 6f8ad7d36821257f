"""Whole weights, and optimizer state by parameter name, from what ZeRO has divided. Worker side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from fleettune_core.backend_kit.optimizer_state import load_optimizer, save_optimizer
from fleettune_core.backend_kit.whole_weights import whole_weights
from fleettune_core.types import WrappedModel

MOMENTS = ("exp_avg", "exp_avg_sq")


def full_weights(model: Any, *, trained_only: bool, keep: bool) -> Iterator[tuple[str, Any]]:
    """Every weight by name, gathered one at a time and copied to the CPU where `keep` is true (collective)."""
    import deepspeed

    def gather(weight: Any) -> torch.Tensor:
        # Buffers are not divided. A copy: a gathered weight is freed when the block is left.
        divided = [weight] if hasattr(weight, "ds_id") else []
        with deepspeed.zero.GatheredParameters(divided, enabled=bool(divided)):
            return weight.detach().to("cpu", copy=True) if keep else torch.empty(0)

    return whole_weights(model, gather, trained_only=trained_only)


def save(wrapped: WrappedModel, folder: Path) -> None:
    """Write moments by parameter name, whole, in the form of `backend_kit.optimizer_state` (collective)."""
    engine: Any = wrapped.model
    if not engine.zero_optimization():
        save_optimizer(engine.module, engine.optimizer, folder)
        return
    state = _whole_state(engine)
    if dist.get_rank() == 0:
        state_dict_saver.save({"optimizer": state}, checkpoint_id=folder, no_dist=True)
    dist.barrier()


def load(wrapped: WrappedModel, folder: Path) -> None:
    """Read what `save`, or any other backend, wrote (collective)."""
    from deepspeed.utils import safe_set_full_optimizer_state

    engine: Any = wrapped.model
    if not engine.zero_optimization():
        load_optimizer(engine.module, engine.optimizer, folder)
        return
    state: dict[str, Any] = {"optimizer": _whole_state(engine)}
    state_dict_loader.load(state, checkpoint_id=folder, no_dist=True)
    for name, parameter in _trained(engine):
        for moment in MOMENTS:
            safe_set_full_optimizer_state(parameter, state["optimizer"][f"state.{name}.{moment}"], moment)
    steps = {key: value for key, value in state["optimizer"].items() if key.endswith(".step")}
    for kept in _base_optimizer(engine).state.values():
        if "step" in kept and steps:
            kept["step"] = next(iter(steps.values())).clone()


def _whole_state(engine: Any) -> dict[str, Any]:
    """`state.<name>.<moment>` and the hyperparameters `param_groups.<name>.<key>`, whole, fp32."""
    from deepspeed.utils import safe_get_full_optimizer_state

    _make_moments(engine.optimizer)
    _link(engine.optimizer)
    base = _base_optimizer(engine)
    step = next((kept["step"] for kept in base.state.values() if "step" in kept), torch.tensor(0.0))
    hyper = {key: value for key, value in base.param_groups[0].items() if key != "params"}
    whole: dict[str, Any] = {}
    for name, parameter in _trained(engine):
        for moment in MOMENTS:
            full = safe_get_full_optimizer_state(parameter, moment)
            shape = getattr(parameter, "ds_shape", parameter.shape)
            whole[f"state.{name}.{moment}"] = (
                torch.zeros(shape) if full is None else full.detach().float().cpu().reshape(shape).clone()
            )
        whole[f"state.{name}.step"] = torch.as_tensor(float(step))
        whole.update({f"param_groups.{name}.{key}": value for key, value in hyper.items()})
    return whole


def _make_moments(zero: Any) -> None:
    """Give the optimizer the moments that it makes in its first step, so that others can be loaded before it."""
    at_stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
    flats = zero.fp32_partitioned_groups_flat if at_stage_3 else zero.single_partition_of_fp32_groups
    for number, flat in enumerate(flats):
        state = zero.optimizer.state[flat]
        if any(moment in state for moment in MOMENTS):
            continue
        on_disk = at_stage_3 and zero._swappable_optimizer_subgroup(number)  # noqa: SLF001 - there is no public way
        if on_disk:
            zero._optimizer_states_and_gradient_swap_in(number)  # noqa: SLF001
        state["step"] = torch.tensor(0.0)
        state.update({moment: torch.zeros_like(flat, requires_grad=False) for moment in MOMENTS})
        if on_disk:
            zero._optimizer_states_and_gradient_swap_out(number)  # noqa: SLF001


def _link(zero: Any) -> None:
    """Let every parameter know its part of the moments.

    Stages 1 and 2 do it once, after the first group's first step, when the groups behind it have no moments yet
    (`_optimizer_step` of DeepSpeed 0.19): those would never be found.
    """
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False  # noqa: SLF001 - there is no public way
        zero._lazy_init_hp_params_optimizer_state()  # noqa: SLF001


def _trained(engine: Any) -> list[tuple[str, Any]]:
    return [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]


def _base_optimizer(engine: Any) -> Any:
    return engine.optimizer.optimizer
