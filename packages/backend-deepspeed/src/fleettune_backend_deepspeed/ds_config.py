"""The DeepSpeed JSON: what follows from the plan, and a user's own file merged over it. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from fleettune_backend_deepspeed.options import DeepSpeedOptions
from fleettune_core.errors import ExitCode, FtError, did_you_mean
from fleettune_core.types import TrainingRun

OWNED: Mapping[str, str] = {
    "train_batch_size": "--global-batch",
    "train_micro_batch_size_per_gpu": "--micro-batch",
    "gradient_accumulation_steps": "--gradient-accumulation-steps",
    "gradient_clipping": "--set train.max_grad_norm=N",
    "zero_optimization.stage": "--zero-stage",
    "zero_optimization.offload_optimizer.device": "--offload-optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "--nvme-path",
    "zero_optimization.offload_param.device": "--offload-params",
    "zero_optimization.offload_param.nvme_path": "--nvme-path",
    "fp16.enabled": "--precision",
    "bf16.enabled": "--precision",
}
"""Keys that follow from the plan, and what sets them there. `auto`, which transformers knows, means the same."""

PARAMS_ON_DISK: Mapping[str, int] = MappingProxyType(
    {
        "zero_optimization.offload_param.max_in_cpu": 0,
        "zero_optimization.stage3_prefetch_bucket_size": 0,
        "zero_optimization.stage3_max_live_parameters": 0,
        "zero_optimization.stage3_max_reuse_distance": 0,
    }
)
"""What keeps weights on a disk. By its defaults DeepSpeed keeps a billion of them in memory, and those on the disk hold
their buffers until none is left ("Not enough buffers", deepspeedai/DeepSpeed#3062); its look-ahead wants a weight twice
that the forward uses last and the backward first ("already assigned swap buffer")."""

REFUSED: Mapping[str, str] = {
    "optimizer": "the optimizer is the run's: --set train.optim=NAME",
    "scheduler": "the schedule is the run's: --set train.lr_scheduler_type=NAME",
    "amp": "see --precision",
    "torch_autocast": "see --precision",
    "data_types": "see --precision",
    "checkpoint": "checkpoints are written by Fleettune: --save-every",
    "elasticity": "elastic runs are the launcher's: --nnodes MIN:MAX",
    "autotuning": "it is not in this version",
    "tensor_parallel": "it is not in this version",
    "pipeline": "it is not in this version",
}

SECTIONS: frozenset[str] = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "bf16",
        "comms_logger",
        "communication_data_type",
        "compile",
        "csv_monitor",
        "dump_state",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "gradient_predivide_factor",
        "memory_breakdown",
        "prescale_gradients",
        "sparse_gradients",
        "steps_per_print",
        "tensorboard",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "wall_clock_breakdown",
        "wandb",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)
"""Top-level keys that a user's file may hold, besides `REFUSED`."""

ZERO_KEYS: frozenset[str] = frozenset(
    {
        *("allgather_bucket_size", "allgather_partitions", "stage3_allgather_sequential", "contiguous_gradients"),
        *("elastic_checkpoint", "ignore_unused_parameters", "legacy_stage1", "load_from_fp32_weights"),
        *("log_trace_cache_warnings", "memory_efficient_linear", "offload_optimizer", "offload_param", "overlap_comm"),
        *(
            "override_module_apply",
            "parameter_alignment",
            "pipeline_loading_checkpoint",
            "reduce_bucket_size",
            "reduce_scatter",
        ),
        *("round_robin_gradients", "stage", "stage3_gather_16bit_weights_on_model_save"),
        *("stage3_gather_fp16_weights_on_model_save", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
        *("stage3_model_persistence_threshold", "stage3_module_granularity_threshold"),
        *(
            "stage3_param_persistence_threshold",
            "stage3_prefetch_bucket_size",
            "stage3_use_all_reduce_for_fetch_params",
        ),
        *("sub_group_size", "use_multi_rank_bucket_allreduce", "zero_hpz_partition_size", "zero_quantized_gradients"),
        *("zero_quantized_nontrainable_weights", "zero_quantized_weights"),
    }
)
"""Keys of `zero_optimization`, as DeepSpeed 0.19 spells them in JSON."""


LARGEST_BUCKET = 50_000_000
"""Gradients that are reduced at once, at most. DeepSpeed allocates the bucket whole, whatever the model needs, and its
default of 500 million is 2 GB of fp32 on every rank. A tenth of it is still a message of 200 MB, which fills any
network. A weight with more elements is reduced by itself."""


def derive(run: TrainingRun) -> dict[str, Any]:
    """The JSON that follows from the plan alone."""
    options: DeepSpeedOptions = run.options
    zero: dict[str, Any] = {"stage": options.zero_stage}
    if options.offload_optimizer != "none":
        zero["offload_optimizer"] = _offload(options.offload_optimizer, options.nvme_path)
    if options.offload_params != "none":
        zero["offload_param"] = _offload(options.offload_params, options.nvme_path)
    return {
        "train_batch_size": run.batch.global_batch,
        "train_micro_batch_size_per_gpu": run.batch.micro_batch,
        "gradient_accumulation_steps": run.batch.accumulation,
        "gradient_clipping": float(run.config.train.max_grad_norm),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # The optimizer is torch's own, the same as on every other backend; DeepSpeed's would have to be compiled.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def _offload(device: str, nvme_path: str | None) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": nvme_path} if device == "nvme" else {})}


def read_user_config(path: str) -> dict[str, Any]:
    """The user's JSON. Raises FtError (exit code 5) for a file that is none, and for keys that DeepSpeed has not."""
    file = Path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FtError(f"--deepspeed-config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FtError(f"--deepspeed-config {path}: not a text file") from error
    except json.JSONDecodeError as error:
        raise FtError(f"{path}:{error.lineno}: broken JSON: {error.msg}") from error
    if not isinstance(content, dict):
        raise FtError(f"--deepspeed-config {path}: a DeepSpeed config is a JSON object")
    config = cast("dict[str, Any]", content)
    zero = config.get("zero_optimization", {})
    problems = [
        f"{path}: {key}: {REFUSED[key]}"
        if key in REFUSED
        else f"{path}: unknown key {key}{did_you_mean(key, SECTIONS)}"
        for key in config
        if key not in SECTIONS
    ]
    if not isinstance(zero, dict):
        problems.append(f"{path}: zero_optimization is an object, not {zero!r}")
    else:
        problems += [
            f"{path}: unknown key zero_optimization.{key}{did_you_mean(key, ZERO_KEYS)}"
            for key in cast("dict[str, Any]", zero)
            if key not in ZERO_KEYS
        ]
    _raise(problems, path)
    return config


def merge(
    derived: Mapping[str, Any], user: Mapping[str, Any], path: str, owned: Mapping[str, str] = OWNED
) -> dict[str, Any]:
    """`user` over `derived`. Raises FtError naming both sides where the file contradicts the plan.

    `owned`: the keys that the plan sets, and what is typed for each.
    """
    problems: list[str] = []
    planned = dict(_flat(derived))
    merged: dict[str, Any] = json.loads(json.dumps(derived))
    for key, value in _flat(user):
        if value == "auto" and key in owned:
            continue
        if key in owned:
            ours = planned.get(key, False if key.endswith("enabled") else None)
            if key.endswith(".device"):
                ours = planned.get(key, "none")
            if value != ours and not (key.endswith("enabled") and value is False):
                problems.append(f"{path}: {key} is {value!r}, and the plan says {ours!r} ({owned[key]})")
            continue
        _put(merged, key, value)
    _raise(problems, path)
    return merged


def ds_config(run: TrainingRun) -> dict[str, Any]:
    """The whole JSON of a run."""
    options: DeepSpeedOptions = run.options
    derived, owned = derive(run), dict(OWNED)
    if options.offload_params == "nvme":
        for key, value in PARAMS_ON_DISK.items():
            _put(derived, key, value)
            owned[key] = "--offload-params nvme"
    if options.deepspeed_config is None:
        return derived
    return merge(derived, read_user_config(options.deepspeed_config), options.deepspeed_config, owned)


def with_bucket(config: dict[str, Any], num_trained: int) -> dict[str, Any]:
    """`config` with a bucket that fits `num_trained` trained weights, where the user's own JSON has named none."""
    zero = config["zero_optimization"]
    if zero["stage"] == 0:
        return config
    fitting = max(1, min(LARGEST_BUCKET, num_trained))
    return {**config, "zero_optimization": {"reduce_bucket_size": fitting, **zero}}


def _raise(problems: list[str], path: str) -> None:
    if problems:
        raise FtError(
            problems[0] if len(problems) == 1 else f"{len(problems)} mistakes in {path}",
            problems=problems if len(problems) > 1 else (),
            hint="leave those keys out of the file, or set them where the plan takes them from",
            exit_code=ExitCode.CONFIG,
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves += _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[leaf] = value
