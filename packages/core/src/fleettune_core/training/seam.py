"""The one file that touches the insides of Trainer and Accelerate.

`hooked(SFTTrainer, binding)` is that trainer, unmodified, with Fleettune's hooks in four places: the accelerator that
it built is adopted (so that a backend wraps model and optimizer), each micro-batch runs inside the backend's gate,
the rows come from Fleettune's sampler, and the loss is the sum over supervised positions divided by the global
batch's.

What upstream must keep for this to hold is listed in `UPSTREAM`; `tests/core/training/test_seam_guard.py` fails in a
plain sentence when it moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.data import DataLoader

from fleettune_core.data.sharding import FillerDataset
from fleettune_core.training import losses
from fleettune_core.types import BatchSampler, ReduceGate, WrappedModel

UPSTREAM: dict[str, tuple[str, ...]] = {
    "transformers.Trainer": (
        "create_accelerator_and_postprocess",
        "training_step",
        "get_train_dataloader",
        "get_batch_samples",
        "compute_loss",
        "evaluate",
        "log",
    ),
    "accelerate.Accelerator": ("prepare", "prepare_model", "backward", "clip_grad_norm_", "no_sync", "unwrap_model"),
}
"""Methods that the seam overrides or calls, by class."""


class Binding(Protocol):
    """What the seam asks of the run. Implemented by `fleettune_core.training.session.Session`."""

    sampler: BatchSampler
    pad_token_id: int

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> WrappedModel:
        """Call the backend's `wrap_model` and check what came back, on every rank."""
        ...

    def gate(self, model: Any, sync: bool) -> ReduceGate: ...

    def on_log(self, logs: dict[str, float], state: Any) -> None:
        """One optimizer step's figures (`loss` is in them), or an evaluation's."""
        ...

    def evaluation_batches(self) -> Iterator[list[int]]:
        """This rank's part of the rows to evaluate on, in batches of row numbers."""
        ...


class HookedAccelerator(Accelerator):
    """An accelerator that leaves the distributed part to the backend's hooks."""

    fleettune_binding: Binding
    fleettune_wrapped: WrappedModel | None

    @classmethod
    def adopt(cls, accelerator: Accelerator, binding: Binding) -> HookedAccelerator:
        """A hooked accelerator that shares the state of the one that Trainer built, which takes no other.

        Both objects see one `__dict__`, so bound methods that Trainer took from the old one stay right.
        """
        adopted = object.__new__(cls)
        adopted.__dict__ = accelerator.__dict__
        adopted.fleettune_binding = binding
        adopted.fleettune_wrapped = None
        return adopted

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Model and optimizer go to the backend together; everything else to Accelerate.

        Objects are told apart by what they are, not by their number or order: DeepSpeed passes a scheduler too.
        """
        models = [item for item in objects if isinstance(item, torch.nn.Module)]
        optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
        if not (models and optimizers):
            return super().prepare(*objects, device_placement=device_placement)
        if len(models) > 1 or len(optimizers) > 1:
            raise TypeError(f"one model and one optimizer go together, not {len(models)} and {len(optimizers)}")
        # evaluation_mode: place the model on its device and apply autocast, but do not wrap it.
        placed = super().prepare_model(models[0], evaluation_mode=True)
        wrapped = self.fleettune_binding.wrap(placed, optimizers[0])
        self.fleettune_wrapped = wrapped
        self._models = [wrapped.model if item is placed else item for item in self._models]
        results = {id(models[0]): wrapped.model, id(optimizers[0]): self._accelerated(wrapped.optimizer)}
        return tuple(results[id(item)] if id(item) in results else super().prepare(item) for item in objects)

    def _accelerated(self, optimizer: Any) -> AcceleratedOptimizer:
        # Not through prepare_optimizer: with device placement it round-trips the optimizer's state dict, which the
        # optimizers of ZeRO do not survive (KeyError).
        wrapped = AcceleratedOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        self._optimizers.append(wrapped)
        return wrapped

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        wrapped = self.fleettune_wrapped
        if wrapped is not None and wrapped.backward is not None:
            wrapped.backward(loss)
        else:
            super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        wrapped = self.fleettune_wrapped
        if wrapped is not None and wrapped.clip_grad_norm is not None:
            return wrapped.clip_grad_norm(max_norm)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        # The gate around the whole micro-batch decides; a second opinion here would undo it.
        yield


class _EpochLoader(DataLoader):
    """A loader that tells its batch sampler which epoch begins: Trainer looks for `set_epoch` on the loader."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue]


class HookedTrainer:
    """Mixin in front of any Trainer class; see the module's text. `hooked` makes the class."""

    fleettune: Binding
    _summed_loss = False

    accelerator: Any
    model: Any
    args: Any

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # pyright: ignore[reportAttributeAccessIssue]
        self.accelerator = HookedAccelerator.adopt(self.accelerator, self.fleettune)

    def use_summed_loss(self) -> bool:
        """Compute the loss at supervised positions only, where the model's head allows it; tells whether it does."""
        causal_lm = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        plain = getattr(self.args, "loss_type", "nll") == "nll" and not self.args.label_smoothing_factor
        if plain and losses.plain_head(causal_lm) and losses.agrees_with_logits(causal_lm):
            losses.add_summed_loss(causal_lm)
            self._summed_loss = True
        # The divisor is the global batch's count of supervised tokens, always: not a mean per micro-batch.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        return self._summed_loss

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        sync = self.accelerator.gradient_state.sync_gradients
        with self.fleettune.gate(model, sync):
            return super().training_step(model, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not self._summed_loss or return_outputs:
            return super().compute_loss(  # pyright: ignore[reportAttributeAccessIssue]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        summed = model(**inputs, summed_loss=True)
        # Gradients are averaged over ranks, the loss is a sum over them: hence the factor.
        # The count stays on its device: reading it here would make a GPU wait in every micro-batch.
        return summed * (self.accelerator.num_processes / num_items_in_batch.clamp(min=1))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The micro-batches of one optimizer step, and the supervised tokens of the global batch."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        count = sum((batch["labels"][..., 1:] != losses.IGNORED).sum() for batch in batches)
        count = torch.as_tensor(count).to(device)
        if self.accelerator.num_processes > 1:
            dist.all_reduce(count)
        return batches, count

    def get_train_dataloader(self) -> DataLoader:
        return self._loader(self.train_dataset, self.fleettune.sampler)  # pyright: ignore[reportAttributeAccessIssue]

    def _loader(self, dataset: Any, batches: Any) -> DataLoader:
        args = self.args
        return _EpochLoader(
            FillerDataset(dataset, pad_token_id=self.fleettune.pad_token_id),  # pyright: ignore[reportArgumentType]
            batch_sampler=batches,
            collate_fn=self.data_collator,  # pyright: ignore[reportAttributeAccessIssue]
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory,
        )

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Mean loss per supervised token over all evaluation rows: the same number on every layout.

        Trainer's own loop averages per batch and then over ranks, so its figure depends on the layout.
        """
        self.model.eval()
        device = self.args.device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        loader = self._loader(self.eval_dataset, list(self.fleettune.evaluation_batches()))  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad(), self.accelerator.autocast():
            for collated in loader:
                batch = {name: value.to(device) for name, value in collated.items()}
                count = (batch["labels"][..., 1:] != losses.IGNORED).sum()
                totals[0] += self._evaluation_nll(batch)
                totals[1] += count
        if self.accelerator.num_processes > 1:
            dist.all_reduce(totals)
        metrics = {"eval_loss": float(totals[0] / totals[1].clamp(min=1)), "eval_tokens": int(totals[1])}
        self.model.train()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)  # pyright: ignore[reportAttributeAccessIssue]
        return metrics

    def _evaluation_nll(self, batch: dict[str, Any]) -> torch.Tensor:
        # The unwrapped model: a wrapper's forward may expect a backward.
        if self._summed_loss:
            return self.model(**batch, summed_loss=True).double()
        labels = batch.pop("labels")
        logits = self.model(**batch).logits[:, :-1]
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=losses.IGNORED, reduction="sum"
        ).double()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self.fleettune.on_log(logs, self.state)  # pyright: ignore[reportAttributeAccessIssue]


def hooked(trainer_class: type[Any], binding: Binding) -> type[Any]:
    """`trainer_class` with Fleettune's hooks, bound to one run.

    The binding must be a class attribute: Trainer builds its accelerator inside `__init__`, before an instance could
    be given anything.
    """
    return type(f"Hooked{trainer_class.__name__}", (HookedTrainer, trainer_class), {"fleettune": binding})
