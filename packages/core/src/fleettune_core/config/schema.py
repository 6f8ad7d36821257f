"""The run file, typed: every section and setting, declared once, with its help.

Sections and names are those of the flags: `--lora-r 16` is `model: {lora_r: 16}`. `None` means "not said": the plan
decides, and says why. A section may be written as its first setting alone (`backend: ddp`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, cast

from fleettune_core.config.fields import setting


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Where the run happens: which launcher, how many machines and processes."""

    launcher: str | None = setting(
        None, "Launcher plugin: local, torchrun, … Default: every device of this machine.", metavar="NAME"
    )
    nodes: str | None = setting(
        None, "Machines: a number, or MIN:MAX for an elastic run.", aliases=("--nnodes",), metavar="N|MIN:MAX"
    )
    nproc_per_node: int | None = setting(
        None,
        "Processes per machine; one process drives one device. On a machine without GPUs: as many as you say.",
        aliases=("--gpus-per-node",),
        at_least=1,
    )
    node_rank: int = setting(0, "Which machine this is, from 0, when you start each one by hand.", at_least=0)
    rdzv_endpoint: str | None = setting(
        None, "Where the machines meet: HOST:PORT of machine 0. Needed for more than one.", metavar="HOST:PORT"
    )
    max_restarts: int = setting(0, "How often a group that lost a rank is started again.", at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """How the model is spread over the ranks. Further keys are the chosen backend's own options."""

    backend: str | None = setting(None, "Backend plugin: ddp, … Default: ddp.", metavar="NAME")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Which model, and which part of it is trained."""

    model: str | None = setting(
        None,
        "Hub id, local folder, .gguf file, or package:NAME/FILE for a file inside an installed Python package.",
        aliases=("--model-name", "--model-name-or-path"),
        metavar="MODEL",
    )
    revision: str | None = setting(None, "Branch, tag or commit of a hub model.", flag="--model-revision")
    trust_remote_code: bool = setting(False, "Run Python code that a hub model brings along.")
    attn_implementation: str | None = setting(
        None, "Attention kernel, as transformers names it: sdpa, eager, flash_attention_2, …", metavar="NAME"
    )
    lora: bool = setting(False, "Train a low-rank adapter instead of all weights.", aliases=("--use-peft",))
    lora_r: int = setting(16, "Rank of the adapter.", at_least=1)
    lora_alpha: float | None = setting(None, "Scale of the adapter, over its rank. Default: twice the rank.", above=0)
    lora_dropout: float = setting(
        0.0, "Dropout in the adapter. Above 0, layouts no longer agree to the digit.", at_least=0, at_most=0.99
    )
    lora_target: str | None = setting(
        None,
        "Modules that get an adapter: all-linear, or names with commas (q_proj,v_proj). Default: all-linear.",
        aliases=("--lora-target-modules",),
        metavar="NAMES",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Which rows, and how they become tokens."""

    dataset: str | None = setting(
        None,
        "Hub id, or a file, folder or glob of json, jsonl, csv or parquet.",
        aliases=("--dataset-name",),
        metavar="DATA",
    )
    dataset_config: str | None = setting(None, "Configuration of a hub data set.", metavar="NAME")
    dataset_split: str = setting("train", "Split of a hub data set.", aliases=("--dataset-train-split",))
    format: Literal["messages", "prompt-completion", "text", "alpaca"] | None = setting(
        None, "How rows are read. Default: detected from the columns.", flag="--data-format"
    )
    eval_dataset: str | None = setting(None, "Rows to evaluate on, of the same kinds.", metavar="DATA")
    eval_split: float = setting(
        0.0, "Part of the rows kept for evaluation: below 1 a share, from 1 a count.", at_least=0
    )
    max_rows: int | None = setting(None, "Use the first N rows only.", at_least=1)
    max_length: int = setting(
        1024, "Longest row, in tokens; longer ones are cut at the end.", at_least=2, aliases=("--max-seq-length",)
    )
    train_on: Literal["completion", "all"] = setting(
        "completion", "Which tokens are supervised: the completion (every assistant turn), or all."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """The training itself. Any other field of TRL's config class may stand here under its own name."""

    method: Literal["sft"] = setting("sft", "Training method.")
    max_steps: int | None = setting(None, "Optimizer steps; wins over epochs.", at_least=1)
    epochs: float | None = setting(None, "Passes over the rows. Default: 1.", above=0, aliases=("--num-train-epochs",))
    learning_rate: float | None = setting(
        None, "Peak learning rate. Default: 2e-4 with LoRA, 2e-5 without.", above=0, aliases=("--lr",)
    )
    lr_scheduler_type: str = setting(
        "linear", "Learning-rate schedule, as transformers names it: linear, cosine, constant, …", metavar="NAME"
    )
    warmup_steps: float = setting(0, "Warm-up: steps from 1, or a share of all steps below 1.", at_least=0)
    weight_decay: float = setting(0.0, "Weight decay of the optimizer.", at_least=0)
    max_grad_norm: float = setting(1.0, "Clip gradients to this norm; 0 for no clipping.", at_least=0)
    optim: str = setting("adamw_torch", "Optimizer, as transformers names it.", metavar="NAME")
    seed: int = setting(42, "Seed of the rows' order, the adapter's start and dropout.", at_least=0, at_most=2**32 - 1)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = setting(
        "auto", "Arithmetic. auto: bf16 where the device multiplies bf16 natively, else fp32."
    )
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass to save memory.")
    eval_steps: int | None = setting(
        None, "Evaluate every N steps. Default: at the end, when there are rows to evaluate on.", at_least=1
    )
    extra: Mapping[str, Any] = field(default_factory=_nothing)
    """Further fields of TRL's config class, by name (`--set train.NAME=VALUE`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """How many rows one optimizer step sees, and how they are cut."""

    global_batch: int | None = setting(
        None, "Rows per optimizer step, over all ranks. Default: 8.", at_least=1, aliases=("--global-batch-size",)
    )
    micro_batch: int | None = setting(
        None,
        "Rows per rank and forward pass. Default: solved.",
        at_least=1,
        aliases=("--micro-batch-size",),
    )
    per_device_train_batch_size: int | None = setting(
        None, "Rows per rank and forward pass; the global batch is what follows.", at_least=1, aliases=("--batch-size",)
    )
    gradient_accumulation_steps: int | None = setting(
        None, "Micro-batches per optimizer step; the global batch is what follows.", at_least=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What is saved on the way."""

    save_every: int | None = setting(None, "Save a checkpoint every N steps.", at_least=1, aliases=("--save-steps",))
    keep_checkpoints: int | None = setting(
        None, "Keep the newest N checkpoints. Default: all.", at_least=1, aliases=("--save-total-limit",)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run file."""

    name: str | None = setting(None, "Name of the run; its folder is runs/NAME-DATE.", metavar="NAME")
    run_dir: str | None = setting(
        None, "This run's own folder, which must not exist yet.", metavar="DIR", aliases=("--output-dir",)
    )
    launch: Launch = field(default_factory=Launch)
    backend: Backend = field(default_factory=Backend)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    batch: Batch = field(default_factory=Batch)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    launcher_options: Mapping[str, Any] = field(default_factory=_nothing)
    """Keys under `launch:` that are the chosen launcher's own options."""
    backend_options: Mapping[str, Any] = field(default_factory=_nothing)
    """Keys under `backend:` that are the chosen backend's own options."""


SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "launch": Launch,
        "backend": Backend,
        "model": Model,
        "data": Data,
        "train": Train,
        "batch": Batch,
        "checkpoint": Checkpoint,
    }
)
"""Sections of the run file. The first setting of each is what a bare value sets (`model: some/folder`)."""

TOP_LEVEL: tuple[str, ...] = ("name", "run_dir")


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain, JSON-ready form of a config, in the shape of a run file (plugin options under their section)."""

    def plain(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        items = cast("Mapping[str, Any]", value).items()
        return {key: plain(item) for key, item in items}

    tree: dict[str, Any] = {name: getattr(config, name) for name in TOP_LEVEL}
    for section, owner in SECTIONS.items():
        values = getattr(config, section)
        tree[section] = {
            item.name: plain(getattr(values, item.name)) for item in dataclasses.fields(owner) if item.name != "extra"
        }
    tree["train"].update(plain(config.train.extra))
    tree["launch"].update(plain(config.launcher_options))
    tree["backend"].update(plain(config.backend_options))
    return tree
