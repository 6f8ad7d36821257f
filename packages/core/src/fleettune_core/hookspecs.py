"""THE contract between Fleettune and its plugins, in the order in which a run calls it.

A launcher implements the first three hooks, a backend the rest; an extension may implement any. Only the chosen
launcher, the chosen backend and the extensions are registered, so a `firstresult` hook has one owner. A hook that a
plugin leaves out falls back to what its text says. Entry-point groups: `fleettune.launchers`, `fleettune.backends`,
`fleettune.extensions`; the entry point's name is what users type, its object a class (called without arguments) or
an instance. A plugin's settings are a frozen dataclass named `Options` on it, each field made with
`fleettune_core.config.setting`.

What a hook raises: `FtError` for what a user can mend, and it is shown as it is. Anything else is reported as this
plugin's fault, with the plugin, the hook and the line that raised, and ends the run with exit code 3; so is an answer
of another type. The whole traceback is in the rank's log, for the hooks that workers call; of the hooks that control
calls (the first three) it is not kept. A `detect_environment` that raises something else than `FtError` ends no run:
it detects nothing, and the plan warns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pluggy

from fleettune_core.types import (
    BatchSampler,
    DataShard,
    Detection,
    Environment,
    Job,
    LaunchPlan,
    LaunchRequest,
    MemoryDivision,
    MemoryRequest,
    ReduceGate,
    ShardedData,
    TrainingContext,
    TrainingRun,
    WrapFacts,
    WrappedModel,
)

PROJECT = "fleettune"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def detect_environment(env: Environment) -> Detection | None:
    """Say what `env` tells about this launcher, or None where it tells nothing.

    Called: in control before the choice, and in every worker. Pure: it looks at the mapping alone (no files, no
    commands, no network; `PATH` is in the mapping, and looking for an executable along it is allowed) and answers
    within 5 ms; slower than that is recorded as trouble. `process` is set when this process *already is* a rank:
    then nothing is launched again. Raises `FtError` (exit code 4) where `env` contradicts itself about that.
    """
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def plan_launch(request: LaunchRequest) -> LaunchPlan:
    """Turn a request into the argv to start and the files to write, and start nothing.

    Called: in control, also for `--dry-run`, which prints exactly this. Pure and deterministic: the same request
    gives the same plan. Raises `FtError` (exit code 4) for a layout that this launcher cannot start.
    """
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def launch(plan: LaunchPlan) -> Job:
    """Start `plan`, whose files are already in the run folder, and return once it is accepted.

    Called: in control, once. Raises `FtError` (exit code 4) with the scheduler's own words when it is refused.
    """
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def divide_memory(request: MemoryRequest) -> MemoryDivision | None:
    """How this backend divides weights, gradients and optimizer state, for the estimate in the plan.

    Called: in control, for every plan. Pure. None, or no implementation: every rank holds everything.
    """
    raise AssertionError("a specification is never called")


@hookspec
def configure_training(run: TrainingRun) -> Mapping[str, Any] | None:
    """Training arguments (TRL config fields) that must be set before the model exists, or None.

    Called: in every worker after the process group is up and before the model is made (ZeRO-3 and FSDP change how
    it is created). A name that the user set to another value is an error that names both sides.
    """
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def expect_wrapped(run: TrainingRun) -> WrapFacts:
    """What `wrap_model` will have done, told before it does it: the promise that the plan shows.

    Called: in every worker before `wrap_model`. Core compares it with what it finds on the wrapped model on every
    rank and ends the run with an error on any difference: nothing falls back silently.
    """
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def wrap_model(context: TrainingContext, model: Any, optimizer: Any) -> WrappedModel:
    """Make model and optimizer, together, ready for many ranks.

    `model`: a `torch.nn.Module` on `context.device`, autocast already applied. `optimizer`: a
    `torch.optim.Optimizer` over its trainable parameters. Called: in every worker, once per training; wrapping a
    wrapped model again returns it unchanged. Weights may be divided and must not be changed: core compares their
    checksum before and after. `WrappedModel.facts` says what was really done.
    """
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def shard_data(context: TrainingContext, dataset: ShardedData, shard: DataShard) -> BatchSampler | None:
    """This rank's micro-batches, in order, from any step.

    `shard` is (index, count) among the data-parallel ranks. Optimizer step t must see the same rows on every layout,
    and the shards of a step must be disjoint and cover it. None, or no implementation: core's own sampler, which
    deals global batches by length (`fleettune_core.data.sharding`).
    """
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def reduce_grads(context: TrainingContext, model: Any, sync: bool) -> ReduceGate:
    """A context manager around one micro-batch: entered before its forward, left after its backward.

    `model` is the wrapped one. After a gate with `sync=True`, the gradients that the optimizer reads are the mean
    over ranks of everything accumulated since the last step; core looks at them in the first steps
    (`WrappedModel.read_gradient` where they do not stand in `parameter.grad`). With `sync=False` nothing needs to be
    communicated.
    A gate, not a call after backward, because DDP decides in the forward, ZeRO-2/3 reduce inside the backward, FSDP2
    toggles a flag, and a hand-written reduction acts on leaving.
    """
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def save_state(context: TrainingContext, wrapped: WrappedModel, folder: Path) -> None:
    """Write optimizer state, and whatever else this backend owns, into `folder`.

    Called: on every rank, collectively, at a step boundary, with an empty folder of the checkpoint that all ranks
    share. The form does not depend on the world size or the backend: optimizer state by parameter name, fp32. Weights
    are written by core beside it (`iterate_weights`).
    """
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def load_state(context: TrainingContext, wrapped: WrappedModel, folder: Path) -> None:
    """Read what `save_state` wrote, under any world size and by any backend.

    On every rank, collectively, after `wrap_model` and before the first step. Not called in this version, which does
    not resume yet.
    """
    raise AssertionError("a specification is never called")


@hookspec(firstresult=True)
def iterate_weights(context: TrainingContext, wrapped: WrappedModel) -> Iterator[tuple[str, Any]] | None:
    """The trained weights by name, one full tensor on the CPU at a time, for an ordinary model folder.

    Called: on every rank, collectively, for a checkpoint and for the result; every rank yields the same names in the
    same order, and tensors of ranks other than 0 are ignored. Names are those of the unwrapped model's
    `state_dict`; with LoRA only the trainable ones are wanted. None, or no implementation: the unwrapped model's own
    `state_dict`, which must then be whole on rank 0.
    """
    raise AssertionError("a specification is never called")
