"""One training, as its hooks see it: the place where the seam's calls meet the backend's answers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from fleettune_core.data.sharding import FILLER, GlobalBatchSampler, rows_of_step, steps_per_epoch
from fleettune_core.plugins.relay import Relay
from fleettune_core.rankrecord import RankRecord
from fleettune_core.training import agreement
from fleettune_core.training.checksum import agreed_checksum
from fleettune_core.training.metrics import MetricsWriter, held_bytes, state_bytes
from fleettune_core.training.reduction import EXACT, ROUNDED, ReductionProbe
from fleettune_core.types import (
    BatchSampler,
    DataShard,
    ReduceGate,
    ShardedData,
    TrainingContext,
    WrapFacts,
    WrappedModel,
)


class Session:
    """Binds the hooked trainer (`training.seam.Binding`) to one backend, one data set and one run folder."""

    def __init__(
        self,
        *,
        relay: Relay,
        backend: str,
        context: TrainingContext,
        data: ShardedData,
        eval_lengths: Any | None,
        pad_token_id: int,
        record: RankRecord,
        metrics: MetricsWriter | None,
        say: Callable[[str], None],
    ) -> None:
        self.pad_token_id = pad_token_id
        self.context = context
        self.wrapped: WrappedModel | None = None
        self._relay = relay
        self._backend = backend
        self._data = data
        self._eval_lengths = eval_lengths
        self._record = record
        self._metrics = metrics
        self._say = say
        self.after_step: Callable[[Any], None] | None = None
        """Called on every rank after each optimizer step, with the trainer's state."""
        self._steps_seen = 0
        self._initial_checksum: str | None = None  # of the trained weights, until a step has changed them
        self._probe: ReductionProbe | None = None  # until it has seen enough
        self._expected: WrapFacts = relay.call("expect_wrapped", run=context.run)
        self.sampler: BatchSampler = self._sampler()

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self._data)

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> WrappedModel:
        self._record.stage("wrapping")
        trainable = _trainable(model)
        built = agreed_checksum(
            model.parameters(), self._backend, "before training", hint="every rank must build the same model"
        )
        head = getattr(model, "get_output_embeddings", lambda: None)()
        wrapped: WrappedModel = self._relay.call("wrap_model", context=self.context, model=model, optimizer=optimizer)
        agreement.check_wrapped(self._expected, wrapped.model, wrapped.facts, self._backend)
        kept = agreed_checksum(wrapped.model.parameters(), self._backend, "after wrap_model")
        agreement.check_kept(
            self._backend,
            {"the weights' checksum": built, "trainable parameters": trainable},
            {"the weights' checksum": kept, "trainable parameters": _trainable(wrapped.model)},
        )
        self._record.facts(
            WrapFacts(**{**asdict(wrapped.facts), "wrapper": type(wrapped.model).__name__}),
            trainable_parameters=trainable,
            initial_weights=built,
        )
        self._initial_checksum = self._trained_checksum(wrapped, "after wrap_model")
        exact = self.context.run.precision == "fp32" and self._expected.reduction == "mean"
        self._probe = ReductionProbe(wrapped, backend=self._backend, tolerance=EXACT if exact else ROUNDED, head=head)
        self._record.stage("training")
        self.wrapped = wrapped
        return wrapped

    def gate(self, model: Any, sync: bool) -> ReduceGate:
        assert self.wrapped is not None, "Trainer did not hand model and optimizer to wrap_model together"
        gate: ReduceGate = self._relay.call("reduce_grads", context=self.context, model=model, sync=sync)
        return gate if self._probe is None else self._probed(gate, self._probe, sync)

    @contextlib.contextmanager
    def _probed(self, gate: ReduceGate, probe: ReductionProbe, sync: bool) -> Iterator[None]:
        probe.begin_micro_batch()
        with gate:
            yield
        probe.end_micro_batch(sync=sync)
        if probe.done:
            self._probe = None
            if probe.finding is not None:
                self._record.reduction(weight=probe.finding.weight, distance=probe.finding.distance)

    def finish(self) -> None:
        """Once more before the result is saved: the ranks still hold the same weights (collective)."""
        assert self.wrapped is not None
        self._trained_checksum(self.wrapped, "at the end of the training")

    def _trained_checksum(self, wrapped: WrappedModel, when: str) -> str | None:
        trained = (parameter for parameter in wrapped.model.parameters() if parameter.requires_grad)
        return agreed_checksum(trained, self._backend, when)

    def on_log(self, logs: dict[str, float], state: Any) -> None:
        if "loss" in logs:
            self._judge_and_record(logs, state)
            # Only now: what is saved was judged, and its time is not counted as the step's.
            if self.after_step is not None:
                self.after_step(state)
                self.restart_clock()
        elif self._metrics is not None and any(name.startswith("eval_") for name in logs):
            self._metrics.evaluation(step=state.global_step, epoch=state.epoch or 0.0, logs=logs)
            self._say(f"step {state.global_step}: eval_loss {logs['eval_loss']:.4f}")

    def restart_clock(self) -> None:
        if self._metrics is not None:
            self._metrics.restart_clock()

    def evaluation_batches(self) -> Iterator[list[int]]:
        """Rows by length, cut into micro-batches, dealt to the ranks; fillers make every rank do as many.

        Forward passes of a sharded model are collective, so no rank may do fewer than the others.
        """
        assert self._eval_lengths is not None
        size = self._data.batch.micro_batch
        order = np.argsort(np.asarray(self._eval_lengths), kind="stable")
        batches = [order[start : start + size].tolist() for start in range(0, len(order), size)]
        process = self.context.process
        while len(batches) % process.world_size:
            batches.append([FILLER])
        yield from batches[process.rank :: process.world_size]

    def _sampler(self) -> BatchSampler:
        process = self.context.process
        shard = DataShard(index=process.rank, count=process.world_size)
        given = None
        if self._relay.has("shard_data"):
            given = self._relay.call("shard_data", context=self.context, dataset=self._data, shard=shard)
        sampler: BatchSampler = given if given is not None else GlobalBatchSampler(self._data, shard)
        # A sampler that gives too few is found by what is missing then.
        agreement.check_shards(self._data, list(itertools.islice(sampler, self._data.batch.accumulation)))
        return sampler

    def _judge_and_record(self, logs: dict[str, float], state: Any) -> None:
        self._steps_seen += 1
        if self._steps_seen == 1:
            assert self.wrapped is not None
            self._record.first_step(state.max_steps)
            self._record.held(
                weight_bytes=held_bytes(self.wrapped.model.parameters()),
                optimizer_bytes=state_bytes(self.wrapped.optimizer),
            )
        if self._initial_checksum is not None:
            assert self.wrapped is not None
            # A warm-up begins with a learning rate of 0: such a step shows nothing, and the next one is looked at.
            now = self._trained_checksum(self.wrapped, f"after optimizer step {state.global_step}")
            if now != self._initial_checksum:
                self._initial_checksum = None
        if self._metrics is None:
            return
        epoch, index = divmod(state.global_step - 1, self.steps_per_epoch)
        rows = rows_of_step(self._data, epoch, index)
        tokens = int(np.asarray(self._data.lengths[rows]).sum())
        self._metrics.step(step=state.global_step, epoch=state.epoch, logs=logs, tokens=tokens, samples=len(rows))
        self._say(f"step {state.global_step}/{state.max_steps}: loss {logs['loss']:.4f}")


def _trainable(model: torch.nn.Module) -> int:
    """Trained numbers. A weight that ZeRO-3 has divided is empty, and knows its whole size."""
    return sum(getattr(item, "ds_numel", item.numel()) for item in model.parameters() if item.requires_grad)
