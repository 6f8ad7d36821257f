"""The plan: everything that is decided before anything starts. Pure data; `plan.json` is its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleettune_core.config.schema import RunConfig
from fleettune_core.config.source import Source
from fleettune_core.types import BatchPlan, Devices, LaunchPlan, Layout, ProcessInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A chosen plugin (or value) and why: every choice is printed with its reason."""

    name: str
    reason: str
    distribution: str | None = None
    """`fleettune-core 0.1.0`: what the plugin comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes per rank, by part, at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    parameters: int
    """Number of parameters, all of them."""
    trainable: int
    """Number of trainable parameters."""
    assumptions: tuple[str, ...] = ()
    """One line each: what the figure takes for granted (sequence length, checkpointing, precision)."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """What a look at the data told before the run."""

    format: str
    reason: str
    rows: int | None
    """Rows seen; None where the look stopped early or could not be taken."""
    complete: bool
    """Whether all rows were looked at here; otherwise the worker looks at the rest before it loads a model."""
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run, decided."""

    run_id: str
    run_dir: Path
    config: RunConfig
    """With every `None` that the plan decides filled in."""
    sources: Mapping[str, Source]
    launcher: Choice
    backend: Choice
    precision: Choice
    layout: Layout
    devices: Devices
    batch: BatchPlan
    threads_per_rank: int
    process: ProcessInfo | None
    """Set when this process already is a rank: then nothing is launched."""
    launch: LaunchPlan | None
    """None exactly when `process` is set."""
    memory: MemoryEstimate | None
    memory_unknown: str | None = None
    """Why there is no estimate, when there is none."""
    data: DataSummary | None = None
    notes: tuple[str, ...] = ()
    """One line each, for the reader: `sbatch found; add --launcher slurm to submit`."""
    warnings: tuple[str, ...] = ()
