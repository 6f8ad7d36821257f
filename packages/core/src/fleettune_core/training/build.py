"""From the run's settings to TRL's objects: training arguments, adapter, trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from fleettune_core.config.schema import Model, RunConfig
from fleettune_core.config.source import Source
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plugins.relay import Relay
from fleettune_core.types import DeviceKind, TrainingRun

if TYPE_CHECKING:
    from peft import LoraConfig


def training_dtype(run: TrainingRun) -> torch.dtype:
    """The dtype in which the weights are loaded.

    Full fine-tuning keeps fp32 master weights and computes in lower precision through autocast. With an adapter the
    base is frozen: it is loaded in the lower precision itself, and only the adapter stays fp32.
    """
    if run.config.model.lora and run.precision == "bf16":
        return torch.bfloat16
    return torch.float32


def needs_autocast(run: TrainingRun) -> bool:
    """Whether the forward runs under autocast: whenever the weights are not already in the lower precision."""
    return run.precision != "fp32" and training_dtype(run) is torch.float32


SETTING_OF: Mapping[str, str] = MappingProxyType(
    {
        "num_train_epochs": "epochs",
        "activation_checkpointing": "gradient_checkpointing",
        "bf16": "precision",
        "fp16": "precision",
        **{
            name: name
            for name in (
                *("max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm"),
                *("optim", "seed", "eval_steps"),
            )
        },
    }
)
"""Arguments of TRL that follow from a setting of our own under `train:`, and which."""


_SAID = ("flag", "file", "environment")


def configured_by(relay: Relay, run: TrainingRun, sources: Mapping[str, Source]) -> dict[str, Any]:
    """What the backend and the extensions ask for before the model exists, by TRL's name.

    Raises FtError, naming both sides, when a plugin needs a value that the user set to another one, or two plugins
    ask for different values.
    """
    configured: dict[str, Any] = {}
    decided = training_arguments(run, {}, has_eval=True)
    for asked in relay.call("configure_training", run=run):
        for name, value in asked.items():
            if configured.setdefault(name, value) != value:
                raise FtError(
                    f"two plugins want train.{name} to be {configured[name]!r} and {value!r}",
                    hint="leave one of the extensions out; `ft plugins list` shows them",
                    exit_code=ExitCode.PLUGIN,
                )
            source = sources.get(f"train.{SETTING_OF.get(name, name)}")
            if source is not None and source.kind in _SAID and decided.get(name) != value:
                raise FtError(
                    f"{source.where}: train.{SETTING_OF.get(name, name)} makes {name} {decided.get(name)!r}, and the "
                    f"backend needs {value!r}",
                    hint=f"leave train.{SETTING_OF.get(name, name)} out, or choose another backend",
                )
    return configured


def training_arguments(run: TrainingRun, configured: Mapping[str, Any], *, has_eval: bool) -> dict[str, Any]:
    """Every argument for TRL's config class. `configured`: what `configured_by` gave, which wins."""
    config: RunConfig = run.config
    train, batch = config.train, run.batch
    autocast = needs_autocast(run)
    evaluate = has_eval and train.eval_steps is not None
    arguments: dict[str, Any] = {
        "output_dir": str(run.run_dir),
        "per_device_train_batch_size": batch.micro_batch,
        "per_device_eval_batch_size": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "max_steps": train.max_steps if train.max_steps is not None else -1,
        "num_train_epochs": train.epochs if train.epochs is not None else 1.0,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.lr_scheduler_type,
        "warmup_steps": train.warmup_steps if train.warmup_steps < 1 else int(train.warmup_steps),
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "optim": train.optim,
        "seed": train.seed,
        "activation_checkpointing": train.gradient_checkpointing,
        "bf16": autocast and run.precision == "bf16",
        "fp16": autocast and run.precision == "fp16",
        "use_cpu": run.device_kind is DeviceKind.CPU,
        "dataloader_pin_memory": run.device_kind is DeviceKind.CUDA,
        "eval_strategy": "steps" if evaluate else "no",
        "eval_steps": train.eval_steps if evaluate else None,
        # Every step is logged: metrics.jsonl has one line per step, and a loss that is NaN must be seen as such.
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        # Fleettune writes checkpoints, shows progress and tokenises itself.
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "max_length": None,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "remove_unused_columns": False,
        "average_tokens_across_devices": True,
    }
    return {**arguments, **config.train.extra, **configured}


def lora_config(model: Model) -> LoraConfig:
    """PEFT's config for the adapter; all linear layers but the LM head unless modules were named.

    It names the base's revision too: the adapter belongs to those weights, not to what the hub holds later.
    """
    from peft import LoraConfig

    target = model.lora_target or "all-linear"
    return LoraConfig(
        r=model.lora_r,
        # PEFT's annotation says int; it divides by the rank, and a fraction is as good.
        lora_alpha=model.lora_alpha if model.lora_alpha is not None else 2 * model.lora_r,  # pyright: ignore[reportArgumentType]
        lora_dropout=model.lora_dropout,
        target_modules=target if target == "all-linear" else [name.strip() for name in target.split(",")],
        task_type="CAUSAL_LM",
        revision=model.revision,
    )


def make_trainer(
    *,
    binding: Any,
    run: TrainingRun,
    arguments: Mapping[str, Any],
    model: Any,
    tokenizer: Any,
    train_dataset: Any,
    eval_dataset: Any | None,
) -> Any:
    """TRL's trainer for the run's method, hooked."""
    from transformers import PrinterCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from fleettune_core.training.seam import hooked

    try:
        args = SFTConfig(**_as_spelt_by(SFTConfig, arguments))
    except (TypeError, ValueError) as error:
        raise FtError(f"TRL refuses the training arguments: {error}", hint="see the values under train:") from error
    # One process drives one device. Trainer counts the others that it can see, and would spread each micro-batch over
    # them with nn.DataParallel, past every hook.
    args._n_gpu = min(args.n_gpu, 1)  # noqa: SLF001 - there is no public name for it
    trainer = hooked(SFTTrainer, binding)(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        peft_config=lora_config(run.config.model) if run.config.model.lora else None,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.use_summed_loss()
    return trainer


_OLDER_NAMES: Mapping[str, str] = MappingProxyType({"activation_checkpointing": "gradient_checkpointing"})
"""Arguments by their names in transformers 5.24, and what they are called before it (which Python 3.10 still gets)."""


def _as_spelt_by(config_class: type[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    known = {item.name for item in dataclasses.fields(config_class)}
    return {name if name in known else _OLDER_NAMES.get(name, name): value for name, value in arguments.items()}


def check_targets(model: Any, lora_target: str | None) -> None:
    """Raise FtError when an adapter target names no module of the model."""
    if lora_target is None or lora_target == "all-linear":
        return
    from fleettune_core.errors import did_you_mean

    kinds = ("Linear", "Conv1D", "Embedding")
    places = [
        name
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) or type(part).__name__ in kinds
    ]
    leaves = {name.rsplit(".", 1)[-1] for name in places}
    # A target is the end of a module's full name, as PEFT reads it: q_proj, or layers.0.self_attn.q_proj.
    problems = [
        f"{name} is no layer of this model that takes an adapter{did_you_mean(name, leaves)}"
        for name in (part.strip() for part in lora_target.split(","))
        if not any(f".{place}".endswith(f".{name}") for place in places)
    ]
    if "lm_head" in lora_target.split(","):
        problems.append("lm_head takes no adapter: TRL computes the loss from its weight, past the adapter")
    if problems:
        raise FtError(
            "--lora-target names modules that take no adapter",
            problems=problems,
            hint=f"there are {', '.join(sorted(leaves))}",
        )
