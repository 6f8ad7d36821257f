"""From the run's settings to TRL's objects: training arguments, adapter, trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from fleettune_core.config.schema import Model, RunConfig
from fleettune_core.errors import FtError
from fleettune_core.types import BatchPlan, DeviceKind, TrainingRun

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


def training_arguments(run: TrainingRun, configured: Mapping[str, Any], *, has_eval: bool) -> dict[str, Any]:
    """Every argument for TRL's config class. `configured`: what the backend's `configure_training` asked for.

    Raises FtError when the backend needs a value that the user set to another one.
    """
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
    arguments.update(config.train.extra)
    for name, value in configured.items():
        if name in config.train.extra and config.train.extra[name] != value:
            raise FtError(
                f"train.{name} is {config.train.extra[name]!r}, and the backend needs {value!r}",
                hint=f"leave train.{name} out",
            )
        arguments[name] = value
    return arguments


def lora_config(model: Model) -> LoraConfig:
    """PEFT's config for the adapter; all linear layers but the LM head unless modules were named."""
    from peft import LoraConfig

    target = model.lora_target or "all-linear"
    return LoraConfig(
        r=model.lora_r,
        # PEFT's annotation says int; it divides by the rank, and a fraction is as good.
        lora_alpha=model.lora_alpha if model.lora_alpha is not None else 2 * model.lora_r,  # pyright: ignore[reportArgumentType]
        lora_dropout=model.lora_dropout,
        target_modules=target if target == "all-linear" else [name.strip() for name in target.split(",")],
        task_type="CAUSAL_LM",
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
    callbacks: list[TrainerCallback],
) -> Any:
    """TRL's trainer for the run's method, hooked."""
    from transformers import PrinterCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from fleettune_core.training.seam import hooked

    try:
        args = SFTConfig(**arguments)
    except (TypeError, ValueError) as error:
        raise FtError(f"TRL refuses the training arguments: {error}", hint="see the values under train:") from error
    trainer = hooked(SFTTrainer, binding)(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        peft_config=lora_config(run.config.model) if run.config.model.lora else None,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.use_summed_loss()
    return trainer


def check_targets(model: Any, lora_target: str | None) -> None:
    """Raise FtError when an adapter target names no module of the model."""
    if lora_target is None or lora_target == "all-linear":
        return
    from fleettune_core.errors import did_you_mean

    leaves = {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    leaves |= {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if type(part).__name__ == "Conv1D"}
    problems = [
        f"{name} is no linear layer of this model{did_you_mean(name, leaves)}"
        for name in (part.strip() for part in lora_target.split(","))
        if name not in leaves
    ]
    if problems:
        raise FtError(
            "--lora-target names unknown modules", problems=problems, hint=f"there are {', '.join(sorted(leaves))}"
        )


def steps_in_total(run: TrainingRun, num_rows: int) -> int:
    """Optimizer steps of the whole run."""
    train = run.config.train
    if train.max_steps is not None:
        return int(train.max_steps)
    batch: BatchPlan = run.batch
    return math.ceil((train.epochs or 1.0) * math.ceil(num_rows / batch.global_batch))
