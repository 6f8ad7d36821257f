"""Whether the optimizer reads what it should: the mean over ranks of all that was accumulated since the last step.

Checksums of replicas see gradients that were not exchanged, but not a sum in place of the mean (AdamW divides the
factor out again) nor micro-batches that were lost, and nothing at all of sharded weights. So in the first optimizer
steps a few rows of one weight's gradient are collected where autograd makes them, micro-batch by micro-batch, averaged
over the ranks by core itself, and compared with what the backend hands to the optimizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.training.agreement import gather
from fleettune_core.types import WrappedModel

NUM_ROWS = 8
NUM_STEPS = 2
"""Optimizer steps that are looked at: some engines change their ways after the first one (DDP's static graph does)."""
MAX_STEPS = 10
"""Steps after which a weight that has had no gradient yet is given up."""
EXACT = 1e-3
"""Distance that counts as equal, relative to the norm, where gradients are exchanged in fp32."""
ROUNDED = 5e-2
"""The same where they are rounded to 16 bits or compressed on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one look has shown."""

    weight: str
    distance: float
    """Between what the optimizer reads and the mean, relative to the mean's norm."""


class ReductionProbe:
    """Looks at one weight of a wrapped model; `done` when it has seen enough."""

    def __init__(self, wrapped: WrappedModel, *, backend: str, tolerance: float, head: torch.nn.Module | None) -> None:
        """`head`: the output embeddings, whose weight is used without calling the module."""
        self._wrapped = wrapped
        self._backend = backend
        self._tolerance = tolerance
        self._step = 0
        self._seen = 0
        self._hooks: list[Any] = []
        self._micro_batches: list[torch.Tensor] = []
        self._watched: set[int] = set()
        found = _weight_to_watch(wrapped.model, head)
        self.done = found is None
        self.finding: Finding | None = None
        """The worst of those so far."""
        if found is not None:
            self._name, self._module, self._attribute = found
            self._removal = self._module.register_forward_pre_hook(self._watch)

    def begin_micro_batch(self) -> None:
        """Call before a micro-batch's forward."""
        self._micro_batches.append(torch.zeros(()))

    def end_micro_batch(self, *, sync: bool) -> None:
        """Call after its backward and after the backend's gate (collective when `sync`).

        Raises FtError (exit code 3) when the optimizer would read something else than the mean.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._watched.clear()
        if sync:
            self._step += 1
            self._judge()
            self._micro_batches.clear()
            if self._seen >= NUM_STEPS or self._step >= MAX_STEPS:
                self.done = True
                self._removal.remove()

    def _watch(self, module: torch.nn.Module, _inputs: Any) -> None:
        # The engine's own stand-in for the weight: FSDP swaps the gathered one in before a block runs.
        weight = getattr(module, self._attribute)
        if not torch.is_grad_enabled() or not weight.requires_grad or id(weight) in self._watched:
            return
        self._watched.add(id(weight))
        self._hooks.append(weight.register_hook(self._collect))

    def _collect(self, gradient: torch.Tensor) -> None:
        # A leaf's hook gets the whole gradient of this backward, whatever uses the weight.
        self._micro_batches[-1] = self._micro_batches[-1].to(gradient.device) + gradient.detach()[:NUM_ROWS].float()

    def _judge(self) -> None:
        parameter = getattr(self._module, self._attribute)
        read = self._read(parameter)
        local = sum(self._micro_batches, torch.zeros(()))
        flows = gather((bool(local.any()), None if read is None else bool(read.any())))
        if not any(given or taken for given, taken in flows):
            return  # Nothing reaches this weight yet.
        if read is None or any(taken is None for _, taken in flows):
            raise self._fault(
                "the optimizer reads no gradient", [f"{self._name} has one, and it is None after the gate"]
            )
        local, last = (value.to(read.device).expand(read.shape) for value in (local, self._micro_batches[-1]))
        mean, mean_of_last = _mean(local), _mean(last)
        # Gradients that are scaled for fp16 may overflow until the scale has come down.
        if not mean.isfinite().all():
            return
        # Every rank judges what its own optimizer reads, and all of them hear of the worst.
        worst = max(gather(_distance(read, mean)))
        if worst > self._tolerance:
            told = gather(_explain(read, mean, mean_of_last, local, self._tolerance))
            raise self._fault(
                "what the optimizer reads is not the mean over ranks of what was accumulated",
                [f"rank {rank}: {words}" for rank, words in enumerate(told)],
            )
        self._seen += 1
        if self.finding is None or worst > self.finding.distance:
            self.finding = Finding(weight=self._name, distance=worst)

    def _read(self, parameter: Any) -> torch.Tensor | None:
        """The first rows of the gradient that the optimizer reads."""
        if self._wrapped.read_gradient is not None:
            gradient = self._wrapped.read_gradient(parameter)
        else:
            groups = self._wrapped.optimizer.param_groups
            if all(item is not parameter for group in groups for item in group["params"]):
                raise self._fault(
                    "the optimizer does not hold the wrapped model's weights",
                    [f"{self._name} is in none of its groups"],
                )
            gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        return None if gradient is None else gradient.detach()[:NUM_ROWS].float()

    def _fault(self, what: str, problems: list[str]) -> FtError:
        return FtError(
            f"backend {self._backend}: in optimizer step {self._step}, {what}",
            problems=problems,
            hint=f"seen at {self._name}; this is a fault of the backend's reduce_grads, and nothing was saved",
            exit_code=ExitCode.PLUGIN,
        )


def _weight_to_watch(model: torch.nn.Module, head: torch.nn.Module | None) -> tuple[str, torch.nn.Module, str] | None:
    """The last trained matrix by name, with its module and attribute; of an adapter that is `lora_B`, since `lora_A`
    gets no gradient before `lora_B` has left zero. The last trained vector where there is no matrix."""
    matrix = vector = None
    for place, module in model.named_modules():
        if module is head:
            continue
        for attribute, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            found = (f"{place}.{attribute}".lstrip("."), module, attribute)
            if len(getattr(parameter, "ds_shape", parameter.shape)) > 1:
                matrix = found
            else:
                vector = found
    return matrix or vector


def _mean(local: torch.Tensor) -> torch.Tensor:
    total = local.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    distance = float((left - right).norm() / right.norm().clamp(min=torch.finfo(torch.float32).tiny))
    return distance if math.isfinite(distance) else math.inf


def _explain(read: torch.Tensor, mean: torch.Tensor, last: torch.Tensor, local: torch.Tensor, tolerance: float) -> str:
    """What `read` is, where it is something that backends are known to do."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    known = {
        "as it should be": mean,
        f"it is the sum over {ranks} ranks": mean * ranks,
        "it is this rank's own gradient: nothing was reduced": local,
        "it is the last micro-batch alone: what was accumulated before it is lost": last,
        "it is zero": torch.zeros_like(mean),
    }
    for words, value in known.items():
        if float((read - value).norm()) <= tolerance * float(value.norm()):
            return words
    along = float((read * mean).sum() / (mean * mean).sum().clamp(min=torch.finfo(torch.float32).tiny))
    return f"it is off by {_distance(read, mean):.3g} of the mean's norm, and {along:.3g} times as large along it"
