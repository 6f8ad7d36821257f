"""Wrapping with `fully_shard`, clipping across shards, and whole weights one at a time. Worker side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fleettune_core.backend_kit.whole_weights import whole_weights
from fleettune_core.types import DataShard, DeviceKind, TrainingContext, WrapFacts, WrappedModel

if TYPE_CHECKING:
    from fleettune_backend_fsdp.backend import FsdpOptions


def wrap(context: TrainingContext, model: Any, optimizer: Any, mesh: DeviceMesh) -> WrappedModel:
    """Shard `model` over `mesh` in place, block by block, and point `optimizer` to the shards."""
    if not isinstance(model, FSDPModule):
        options: FsdpOptions = context.options
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        rules: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": _precision(context),
            "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
            "reshard_after_forward": options.reshard_after_forward,
        }
        for block in blocks(model):
            fully_shard(block, **rules)
        # What is left (embeddings, the last norm, the head) is the root's, and stays gathered until the backward.
        fully_shard(model, **rules)
        _repoint(optimizer, names, dict(model.named_parameters()))
    facts = WrapFacts(wrapper=type(model).__name__, world_size=dist.get_world_size(), sharding="fsdp")

    def clip(max_norm: float) -> torch.Tensor:
        return clip_grad_norm([item for group in optimizer.param_groups for item in group["params"]], max_norm)

    return WrappedModel(model=model, optimizer=optimizer, facts=facts, clip_grad_norm=clip)


def data_shard(mesh: DeviceMesh) -> DataShard:
    """This rank's place among those that see other rows: the axes `replicate` and `shard` of the mesh are."""
    index, count = 0, 1
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name in ("replicate", "shard"):
            index, count = index * mesh.size(axis) + mesh.get_local_rank(axis), count * mesh.size(axis)
    return DataShard(index=index, count=count)


def blocks(model: Any) -> list[torch.nn.Module]:
    """The transformer blocks: what the model itself says must not be split. The whole model where it says nothing."""
    causal_lm = model.get_base_model() if hasattr(model, "peft_config") else model
    kinds = set(getattr(causal_lm, "_no_split_modules", None) or ())
    return [part for part in model.modules() if type(part).__name__ in kinds]


def clip_grad_norm(parameters: list[Any], max_norm: float) -> torch.Tensor:
    """Scale gradients to a total norm of at most `max_norm`; returns the norm before, a scalar tensor, on every rank.

    A norm over DTensors is itself one whose parts are not summed yet: `full_tensor` sums them.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def full_weights(model: Any, *, trained_only: bool, keep: bool) -> Iterator[tuple[str, Any]]:
    """Every weight by name, gathered one at a time and moved to the CPU where `keep` is true (collective)."""

    def gather(weight: Any) -> torch.Tensor:
        whole = weight.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        return whole.to("cpu") if keep else torch.empty(0)

    return whole_weights(model, gather, trained_only=trained_only)


def make_mesh(device_kind: DeviceKind, options: FsdpOptions) -> DeviceMesh:
    """All ranks on one axis, or groups that are copies of each other × the ranks of a group (collective)."""
    kind = "cuda" if device_kind is DeviceKind.CUDA else "cpu"
    ranks = dist.get_world_size()
    group = options.shard_group or ranks
    if group == ranks:
        return init_device_mesh(kind, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (ranks // group, group), mesh_dim_names=("replicate", "shard"))


def _precision(context: TrainingContext) -> MixedPrecisionPolicy:
    """Gather weights in 16 bits where the forward casts them anyway, and reduce gradients in 32.

    Weights that are loaded in bf16 (the frozen base under an adapter) keep their own type.
    """
    if context.run.precision == "bf16" and not context.lora:
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy()


def _repoint(optimizer: Any, names: dict[int, str], sharded: dict[str, Any]) -> None:
    """Give every group its parameters again, by name: `fully_shard` has replaced them by their shards."""
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[id(parameter)]] for parameter in group["params"]]
    assert not optimizer.state, "an optimizer that has run holds state of parameters that are gone"
