"""What the hooks pass to each other: frozen dataclasses and protocols, standard library only.

Tensors and modules appear as `Any`, because this module is imported where torch is not installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable


class Score(IntEnum):
    """How strongly an environment speaks for a launcher; the strongest one is chosen."""

    AVAILABLE = 10
    """It could be used from here (`sbatch` exists). Never wins by itself: it is offered in one line."""
    INSIDE = 20
    """We are inside its allocation."""
    STARTED_BY = 30
    """This process was started by it and is one of its ranks."""
    STARTED_BY_INNER = 40
    """As STARTED_BY, by a launcher that others start (torchrun inside a SLURM task)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """Which rank this process is. Counts are over the whole run unless their name says local."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    restart_count: int = 0
    """How often the group was restarted by an elastic agent; 0 in the first life."""
    group: str | None = None
    """A name that all ranks of this run share and no other run has, where the launcher gives one (a job id)."""

    @property
    def num_nodes(self) -> int:
        return max(1, self.world_size // max(1, self.local_world_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """What one launcher sees in the environment, and why."""

    score: Score
    reason: str
    process: ProcessInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many processes on how many machines. `nodes` is (min, max); they differ only for elastic runs."""

    min_nodes: int = 1
    max_nodes: int = 1
    procs_per_node: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of the largest layout: what the plan is made for."""
        return self.max_nodes * self.procs_per_node

    @property
    def elastic(self) -> bool:
        return self.min_nodes != self.max_nodes

    def __str__(self) -> str:
        nodes = f"{self.min_nodes}:{self.max_nodes}" if self.elastic else str(self.max_nodes)
        ranks = f"{self.ranks} {'ranks' if self.ranks > 1 else 'rank'}"
        return f"{nodes} node{'s' if self.max_nodes > 1 else ''} × {self.procs_per_node} = {ranks}"


class DeviceKind(str, Enum):
    """What a rank computes on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What this machine has, counted without torch."""

    kind: DeviceKind
    count: int
    """Devices that a process can own: GPUs, or 1 for a machine without any."""
    name: str
    memory_bytes: int
    """Of one device: a GPU's memory, or the machine's (or its cgroup's) for the CPU."""
    bf16: bool
    """Whether it multiplies bf16 natively (tensor cores from compute capability 8.0; AVX512_BF16, AMX, SVE BF16)."""
    cpu_cores: int
    """Cores that this process may run on."""
    bf16_by: str = ""
    """What decides `bf16`, for messages: `AVX512_BF16`, `compute capability 7.5`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """`global_batch = micro_batch × accumulation × ranks`, in rows, with where each number came from."""

    global_batch: int
    micro_batch: int
    accumulation: int
    ranks: int
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """Per number (`global_batch`, `micro_batch`, `accumulation`, `ranks`): flag, file:line, default or solved."""

    def __post_init__(self) -> None:
        assert self.global_batch == self.micro_batch * self.accumulation * self.ranks, self

    def __str__(self) -> str:
        return (
            f"{self.global_batch} rows = {self.micro_batch} per micro-batch × {self.accumulation} accumulation"
            f" × {self.ranks} {'ranks' if self.ranks > 1 else 'rank'}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file that a launch needs, written into the run folder before it starts."""

    path: str
    """Relative to the run folder."""
    text: str
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What a launcher is asked to start: the same worker command on every device of the layout."""

    run_id: str
    run_dir: Path
    command: tuple[str, ...]
    """Arguments for a Python interpreter, without it: `("-m", "fleettune_core.worker", "/runs/x")`."""
    python: str
    """The interpreter, absolute (`sys.executable`)."""
    layout: Layout
    devices: Devices
    options: Any
    """An instance of the plugin's own `Options` dataclass."""
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    max_restarts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables to set for the workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Exactly what `launch` will do; `--dry-run` prints it."""

    launcher: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables set on top of the inherited ones. A value never holds a secret."""
    unset: tuple[str, ...] = ()
    """Inherited variables that are removed for the child."""
    files: tuple[PlannedFile, ...] = ()
    run_dir: Path
    notes: tuple[str, ...] = ()
    """One line each for the plan: what was decided by the launcher itself, and why."""


class JobState(str, Enum):
    """Where a launched run stands, in the words of every launcher."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job's state, and how it ended."""

    state: JobState
    exit_code: int | None = None
    """Of the launcher's own process: negative for a signal, as `subprocess` gives it."""
    reason: str | None = None


@runtime_checkable
class Job(Protocol):
    """A launched run, as its launcher sees it. `id` is what the launcher's own tools call it (a pid, a job id)."""

    @property
    def id(self) -> str: ...

    def status(self) -> JobStatus:
        """The state now; never blocks for long."""
        ...

    def wait(self, timeout_seconds: float | None = None) -> JobStatus:
        """Wait until it ends, at most `timeout_seconds`; then the state as it is."""
        ...

    def log_files(self) -> Sequence[Path]:
        """The launcher's own logs; the ranks' logs are the run folder's."""
        ...

    def cancel(self, grace_seconds: float = 10.0) -> None:
        """End it, politely, then by force after the grace. A second call, or one after the end, does nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """For what a backend is asked how it divides memory: nothing is loaded, and there may be no device here."""

    options: Any
    """An instance of the backend's own `Options` dataclass."""
    ranks: int
    device_kind: DeviceKind
    lora: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDivision:
    """Over how many ranks each part of the training state is divided, what leaves the device, and what the backend
    keeps besides. Of every buffer its largest size is meant, at the peak of a step."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    gathered_layers: int = 0
    """Layers whose whole weights a rank holds at the same time, besides its shards."""
    gathered_root: bool = False
    """Whether embeddings and head are gathered with them, and stay so until their backward."""
    gathered_elements: int = 0
    """Weights that may be gathered at the same time, whatever layers they belong to (besides `gathered_layers`)."""
    gathered_in_half: bool = False
    """Whether, under autocast, fp32 weights are gathered in its 16 bits, so that the forward casts nothing."""
    weights_offloaded: bool = False
    """Whether weights and gradients rest in the machine's memory, so that a GPU holds gathered layers alone."""
    gradients_offloaded: bool = False
    """Whether gradients rest there once they are reduced, wherever the weights are."""
    optimizer_offloaded: bool = False
    gradient_copies: int = 1
    """Times that a rank holds its share of the gradients while it accumulates micro-batches."""
    gradients_whole_between: bool = False
    """Whether gradients are divided only by the last micro-batch of a step, and are whole in those before."""
    bucket_elements: int = 0
    """Numbers of the buffer, fp32, in which gradients are put for reduction; no more than the trained weights."""
    bucket_fixed: bool = False
    """Whether the buffer is as large as that however few weights are trained."""
    bucket_lives: Literal["backward", "step", "run"] = "backward"
    """How long: only in each backward (when the logits are gone), over the micro-batches of a step, or always."""
    master_copies: int = 0
    """fp32 copies of the trained weights on which the optimizer works, divided as its state is."""
    step_copies: int = 1
    """Temporary copies of a rank's share of the trained weights, fp32, while the optimizer steps. PyTorch's AdamW makes
    one (`foreach`, on a GPU)."""
    note: str = ""
    """One line for the plan."""


def _unheard(_what: Any) -> None:
    """Where nobody watches a run, and nothing waits for its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """What a backend may look at before the model exists, and how it speaks and cleans up."""

    config: Any
    """`fleettune_core.config.schema.RunConfig`, frozen."""
    options: Any
    """An instance of the backend's own `Options` dataclass."""
    process: ProcessInfo
    batch: BatchPlan
    precision: str
    """`fp32`, `bf16` or `fp16`, already decided."""
    device_kind: DeviceKind
    run_dir: Path
    model_folder: Path | None = None
    """Where the model's files are on this disk (config.json, weights)."""
    announce: Callable[[str], None] = _unheard
    """Shows one line to whoever watches the run, at once: for what takes long. Ranks that say the same show it once."""
    at_end: Callable[[Callable[[], None]], object] = _unheard
    """Takes what to call when this rank's training ends, also in an error; not when the process is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """What a backend gets with the model: the run, and the device that this rank owns."""

    run: TrainingRun
    device: Any
    """`torch.device` of this rank."""
    lora: bool
    gradient_checkpointing: bool

    @property
    def options(self) -> Any:
        return self.run.options

    @property
    def process(self) -> ProcessInfo:
        return self.run.process


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapFacts:
    """What a backend promises, or says it has done. Core compares the promise with what it finds on every rank."""

    wrapper: str
    """Class name of the wrapped model (`DistributedDataParallel`), or of the plain one. In a promise, `FSDP*` stands
    for every class whose name begins so."""
    world_size: int
    """Ranks over which gradients are reduced."""
    sharding: str = "none"
    """`none`, or what is divided over ranks: `zero-1`, `zero-2`, `zero-3`, `fsdp`, …"""
    reduction: str = "mean"
    """What the optimizer reads: the `mean` of the ranks' gradients, or a `lossy` one, compressed on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedModel:
    """A model and its optimizer, ready for the loop.

    The optional callables are for engines that own the step: `backward(loss)`;
    `clip_grad_norm(max_norm) -> total norm before clipping, of the step that is about to be taken`; and, where
    gradients do not stand in `parameter.grad`, `read_gradient(parameter) -> the whole gradient that the optimizer is
    about to read, or None` (collective, called between a `sync=True` gate and the step).
    """

    model: Any
    optimizer: Any
    facts: WrapFacts
    backward: Callable[[Any], None] | None = None
    clip_grad_norm: Callable[[float], Any] | None = None
    read_gradient: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShard:
    """This rank's place among the data-parallel ranks."""

    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedData:
    """What a sampler needs to know of the data: sizes, never rows."""

    num_rows: int
    lengths: Any
    """Tokens per row: an integer array of `num_rows`, indexable by an array (numpy, memory-mapped)."""
    seed: int
    batch: BatchPlan


class BatchSampler(Protocol):
    """This rank's micro-batches, in order. A row of -1 is a filler: it pads a last, short global batch and weighs
    nothing."""

    def __iter__(self) -> Iterator[list[int]]: ...

    def __len__(self) -> int:
        """Micro-batches per epoch, the same on every rank."""
        ...

    def set_epoch(self, epoch: int) -> None: ...

    def seek(self, step: int) -> None:
        """Start the next iteration at optimizer step `step` of the epoch, in constant time."""
        ...


ReduceGate = AbstractContextManager[None]
"""What `reduce_grads` returns: entered before a micro-batch's forward, left after its backward."""

Environment = Mapping[str, str]
"""Environment variables, handed over: a hook never reads `os.environ` itself."""


def current_environment() -> dict[str, str]:
    """A copy of this process's environment, for handing to `detect_environment`."""
    return dict(os.environ)
