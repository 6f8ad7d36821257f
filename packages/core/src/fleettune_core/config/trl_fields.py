"""TRL's config fields, known without importing TRL: a generated table, and the names in it that Fleettune sets itself.

`tools/generate_trl_fields.py` writes `trl_fields.json`; a test holds it equal to the installed TRL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fleettune_core.config.fields import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlField:
    """One field of a TRL config class."""

    name: str
    type: str
    """Parts joined by ` | `: bool, int, float, str, dict, list, list[str], None."""
    default: str
    """The default's `repr`."""
    help: str
    choices: tuple[str, ...] = ()
    """Values of an enum field; empty for any other."""

    @property
    def annotation(self) -> Any:
        """The type as Python has it: `int | None`, …"""
        joined = None
        for part in self.type.split(" | "):
            joined = _TYPES[part] if joined is None else joined | _TYPES[part]
        return joined


_TYPES: Mapping[str, Any] = MappingProxyType(
    {
        "bool": bool,
        "int": int,
        "float": float,
        "str": str,
        "dict": dict[str, Any],
        "list": list[Any],
        "list[str]": list[str],
        "None": type(None),
    }
)


@cache
def _table() -> Mapping[str, Any]:
    return MappingProxyType(json.loads(Path(__file__).with_name("trl_fields.json").read_text(encoding="utf-8")))


@cache
def fields_for(method: str) -> Mapping[str, TrlField]:
    """The fields of the config class that `method` trains with, by name. Raises KeyError for an unknown method."""
    return MappingProxyType(
        {
            name: TrlField(
                name=name,
                type=entry["type"],
                default=entry["default"],
                help=entry["help"],
                choices=tuple(entry.get("choices", ())),
            )
            for name, entry in _table()["methods"][method].items()
        }
    )


def made_from() -> Mapping[str, str]:
    """Versions of the libraries that the table was made from."""
    return MappingProxyType(dict(_table()["made_from"]))


LIMITS: Mapping[str, Limits] = MappingProxyType(
    {
        "adam_beta1": Limits(at_least=0, below=1),
        "adam_beta2": Limits(at_least=0, below=1),
        "adam_epsilon": Limits(above=0),
        "dataloader_num_workers": Limits(at_least=0),
        "dataloader_prefetch_factor": Limits(at_least=1),
        "neftune_noise_alpha": Limits(at_least=0),
        "torch_empty_cache_steps": Limits(at_least=1),
        "eval_delay": Limits(at_least=0),
        "router_aux_loss_coef": Limits(at_least=0),
        "pad_to_multiple_of": Limits(at_least=1),
    }
)
"""Bounds of fields whose meaning leaves no doubt: beyond them torch or transformers fail after the model is loaded."""

_BATCH = "use --global-batch N, or --per-device-train-batch-size and --gradient-accumulation-steps"
_PRECISION = "use --precision auto|fp32|bf16|fp16"
_EVERY_STEP = "metrics.jsonl in the run folder holds every step"
_NO_TRACKER = f"reporting to a tracker is not in this version; {_EVERY_STEP}"
_SAVING = "use --save-every N and --keep-checkpoints N"
_EVALUATION = "evaluation is Fleettune's own: the mean loss over the supervised tokens of all evaluation rows"
_NO_HUB = "pushing to the hub is not in this version; the run's model/ folder is an ordinary one to upload"
_SAMPLER = "rows are ordered and dealt by Fleettune, the same on every layout"
_NO_PACKING = "packing is not in this version; rows of like length share a micro-batch instead"
_SUPERVISED = "use --train-on completion|all"
_BACKEND = "it is the backend's; use --backend NAME and the options that `ft plugins show NAME` lists"
_LAUNCHER = "the launcher decides it; use --launcher NAME"
_LOSS = "the loss is Fleettune's own in this version: the mean over the global batch's supervised tokens"
_DATA = "Fleettune reads and tokenises the rows; see --data-format, --max-length and --train-on"
_TEMPLATE = "the model's own chat template and special tokens are used in this version"

OWNED: Mapping[str, str] = MappingProxyType(
    {
        "output_dir": "use --run-dir DIR",
        "run_name": "use --name NAME",
        "per_device_train_batch_size": _BATCH,
        "gradient_accumulation_steps": _BATCH,
        "auto_find_batch_size": _BATCH,
        "num_train_epochs": "use --epochs N",
        "bf16": _PRECISION,
        "fp16": _PRECISION,
        "tf32": _PRECISION,
        "bf16_full_eval": _PRECISION,
        "fp16_full_eval": _PRECISION,
        "use_cpu": "the devices decide it; CUDA_VISIBLE_DEVICES= (empty) hides the GPUs",
        "activation_checkpointing": "use --gradient-checkpointing",
        "save_steps": _SAVING,
        "save_strategy": _SAVING,
        "save_total_limit": _SAVING,
        "save_only_model": _SAVING,
        "save_on_each_node": _SAVING,
        "enable_jit_checkpoint": "saving when a signal comes is not in this version; use --save-every N",
        "load_best_model_at_end": "choosing the best checkpoint is not in this version; see --keep-checkpoints",
        "resume_from_checkpoint": "resuming is a matter of the run folder, not of the training arguments",
        "restore_callback_states_from_checkpoint": "resuming is a matter of the run folder",
        "ignore_data_skip": "a run that is resumed goes on at its own row",
        "per_device_eval_batch_size": "evaluation uses the micro-batch; see --micro-batch",
        "eval_accumulation_steps": _EVALUATION,
        "prediction_loss_only": _EVALUATION,
        "batch_eval_metrics": _EVALUATION,
        "include_for_metrics": _EVALUATION,
        "eval_do_concat_batches": _EVALUATION,
        "metric_for_best_model": "choosing the best checkpoint is not in this version; see --keep-checkpoints",
        "greater_is_better": "choosing the best checkpoint is not in this version; see --keep-checkpoints",
        "gradient_checkpointing_kwargs": "use --gradient-checkpointing, which takes no further options in this version",
        "eval_strategy": "use --eval-steps N, with --eval-split or --eval-dataset",
        "logging_steps": _EVERY_STEP,
        "logging_strategy": _EVERY_STEP,
        "logging_first_step": _EVERY_STEP,
        "logging_nan_inf_filter": _EVERY_STEP,
        "disable_tqdm": "progress is Fleettune's own; NO_COLOR=1 or CI=1 gives plain lines",
        "report_to": _NO_TRACKER,
        "project": _NO_TRACKER,
        "trackio_space_id": _NO_TRACKER,
        "trackio_bucket_id": _NO_TRACKER,
        "trackio_static_space_id": _NO_TRACKER,
        "push_to_hub": _NO_HUB,
        "hub_token": "set HF_TOKEN in the environment; a secret does not belong into a run file",
        "hub_private_repo": _NO_HUB,
        "hub_model_id": _NO_HUB,
        "hub_strategy": _NO_HUB,
        "hub_always_push": _NO_HUB,
        "hub_revision": _NO_HUB,
        "deepspeed": _BACKEND,
        "fsdp": _BACKEND,
        "fsdp_config": _BACKEND,
        "parallelism_config": _BACKEND,
        "accelerator_config": _BACKEND,
        "ddp_find_unused_parameters": _BACKEND,
        "ddp_bucket_cap_mb": _BACKEND,
        "ddp_broadcast_buffers": _BACKEND,
        "ddp_static_graph": _BACKEND,
        "ddp_backend": _BACKEND,
        "ddp_timeout": _BACKEND,
        "local_rank": _LAUNCHER,
        "log_on_each_node": "every rank has its own log in the run folder",
        "do_train": "`ft train` trains",
        "do_eval": "use --eval-split or --eval-dataset",
        "do_predict": "`ft train` trains; generate with the result in model/",
        "data_seed": "use --seed N: one seed orders the rows",
        "average_tokens_across_devices": _LOSS,
        "loss_type": _LOSS,
        "label_smoothing_factor": _LOSS,
        "completion_only_loss": _SUPERVISED,
        "assistant_only_loss": _SUPERVISED,
        "packing": _NO_PACKING,
        "packing_strategy": _NO_PACKING,
        "padding_free": _NO_PACKING,
        "eval_packing": _NO_PACKING,
        "max_length": "use --max-length N (max_length under data:)",
        "truncation_mode": "rows longer than --max-length are cut at the end",
        "shuffle_dataset": _SAMPLER,
        "train_sampling_strategy": _SAMPLER,
        "length_column_name": _SAMPLER,
        "dataloader_drop_last": _SAMPLER,
        "dataset_text_field": _DATA,
        "dataset_kwargs": _DATA,
        "dataset_num_proc": _DATA,
        "remove_unused_columns": _DATA,
        "label_names": _DATA,
        "model_init_kwargs": "what it is loaded with stands under model:; see --attn-implementation and --precision",
        "trust_remote_code": "use --trust-remote-code (trust_remote_code under model:)",
        "chat_template_path": _TEMPLATE,
        "eos_token": _TEMPLATE,
        "pad_token": _TEMPLATE,
    }
)
"""Fields that Fleettune sets itself, each with what to use instead."""
