"""One rank's training from prepared data to saved model. `fleettune_core.worker` calls it with the log in place."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
import transformers

from fleettune_core.cache import cache_folder
from fleettune_core.data.prepare import PreparedData, lengths_of, prepare
from fleettune_core.data.preview import preview
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.models.load import ModelSource, keep_base, load_model, load_tokenizer, materialise
from fleettune_core.models.resolve import resolve_model
from fleettune_core.plan.record import RunRecord
from fleettune_core.plugins.relay import Relay
from fleettune_core.rankrecord import RankRecord
from fleettune_core.rundir import RunDir
from fleettune_core.training import agreement, build
from fleettune_core.training.checkpoints import CheckpointWriter
from fleettune_core.training.metrics import MetricsWriter, peak_memory_bytes
from fleettune_core.training.session import Session
from fleettune_core.types import BatchPlan, DeviceKind, ProcessInfo, ShardedData, TrainingContext, TrainingRun


def train_run(
    run_dir: RunDir,
    plan: RunRecord,
    process: ProcessInfo,
    batch: BatchPlan,
    relay: Relay,
    record: RankRecord,
    say: Callable[[str], None],
    at_end: Callable[[Callable[[], None]], object],
) -> None:
    """Do the run as rank `process.rank`. Raises FtError for what a user can mend."""
    torch.set_num_threads(plan.threads_per_rank)
    transformers.utils.logging.disable_progress_bar()  # a log file is no terminal
    config = plan.config
    assert config.model.model is not None, "control has checked that a model was given"
    model_ref = resolve_model(config.model.model)

    record.stage("preparing")
    # Before the process group exists: tokenising for an hour must not run into a collective's time-out. Ranks of a
    # machine meet at a file lock instead; the first one works, the others wait and read its result.
    source = materialise(model_ref, config.model, cache_folder())
    tokenizer = load_tokenizer(source, config.model)
    data = prepare(config.data, seed=config.train.seed, tokenizer=tokenizer, cache_dir=cache_folder(), log=print)
    example = preview(config.data, tokenizer, detected=data.report.detected)
    record.data({**asdict(data.report), "preview": asdict(example)})

    record.stage("loading")
    device = _join_process_group(plan, process)
    if config.checkpoint.save_every is not None and process.num_nodes > 1:
        agreement.check_shared_folder(run_dir.path)
    run = TrainingRun(
        config=config,
        options=relay.options_of(plan.backend.name, config.backend_options),
        process=process,
        batch=batch,
        precision=plan.precision,
        device_kind=plan.device_kind,
        run_dir=run_dir.path,
        model_folder=source.folder,
        announce=_announcer(record, say),
        at_end=at_end,
    )
    configured = build.configured_by(relay, run, plan.sources)
    transformers.set_seed(config.train.seed)
    model = load_model(source, config.model, dtype=build.training_dtype(run))
    build.check_targets(model, config.model.lora_target if config.model.lora else None)

    _train(run, run_dir, plan, device, relay, record, say, data, source, model, tokenizer, configured)


def _train(
    run: TrainingRun,
    run_dir: RunDir,
    plan: RunRecord,
    device: torch.device,
    relay: Relay,
    record: RankRecord,
    say: Callable[[str], None],
    data: PreparedData,
    source: ModelSource,
    model: Any,
    tokenizer: Any,
    configured: dict[str, Any],
) -> None:
    config, process = run.config, run.process
    context = TrainingContext(
        run=run, device=device, lora=config.model.lora, gradient_checkpointing=config.train.gradient_checkpointing
    )
    session = Session(
        relay=relay,
        backend=plan.backend.name,
        context=context,
        data=ShardedData(
            num_rows=len(data.train), lengths=lengths_of(data.train), seed=config.train.seed, batch=run.batch
        ),
        eval_lengths=lengths_of(data.eval) if data.eval is not None else None,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        record=record,
        metrics=MetricsWriter(run_dir, device) if process.rank == 0 else None,
        say=say,
    )
    writer = CheckpointWriter(run_dir=run_dir, relay=relay, context=context, keep=config.checkpoint.keep_checkpoints)
    columns = ["input_ids", "labels"]
    trainer = build.make_trainer(
        binding=session,
        run=run,
        arguments=build.training_arguments(run, configured, has_eval=data.eval is not None),
        model=model,
        tokenizer=tokenizer,
        train_dataset=data.train.select_columns(columns),
        eval_dataset=data.eval.select_columns(columns) if data.eval is not None else None,
    )
    if source.cached and config.model.lora and process.rank == 0:
        base = keep_base(source, run_dir.base)
        for adapter in trainer.model.peft_config.values():
            adapter.base_model_name_or_path = base.name
    if config.checkpoint.save_every is not None:
        every = config.checkpoint.save_every
        session.after_step = _saver(every, writer=writer, session=session, trainer=trainer, tokenizer=tokenizer)
    result = trainer.train()
    if data.eval is not None and (config.train.eval_steps is None or result.global_step % config.train.eval_steps):
        trainer.evaluate()

    session.finish()
    record.stage("saving")
    assert session.wrapped is not None
    place = writer.save_result(wrapped=session.wrapped, model=trainer.model, tokenizer=tokenizer)
    say(f"model: {place}")
    if dist.is_initialized():
        dist.destroy_process_group()
    record.finish(peak_memory_bytes(device))


def _saver(
    every: int, *, writer: CheckpointWriter, session: Session, trainer: Any, tokenizer: Any
) -> Callable[[Any], None]:
    """What saves a checkpoint after every `every`-th optimizer step."""

    def save(state: Any) -> None:
        if state.global_step % every:
            return
        assert session.wrapped is not None
        run = session.context.run
        writer.save_checkpoint(
            step=state.global_step,
            wrapped=session.wrapped,
            model=trainer.model,
            tokenizer=tokenizer,
            position={
                "step": state.global_step,
                "epoch": state.epoch,
                "global_batch": run.batch.global_batch,
                "steps_per_epoch": session.steps_per_epoch,
                "seed": run.config.train.seed,
                "scheduler": trainer.lr_scheduler.state_dict(),
            },
        )

    return save


def _announcer(record: RankRecord, say: Callable[[str], None]) -> Callable[[str], None]:
    """What shows a line in `ft`, which follows the rank's record, or where this rank speaks for itself."""

    def announce(line: str) -> None:
        record.announce(line)
        say(line)

    return announce


def _join_process_group(plan: RunRecord, process: ProcessInfo) -> torch.device:
    """This rank's device, with the process group up when there is more than one rank."""
    on_gpu = plan.device_kind is DeviceKind.CUDA
    if on_gpu:
        if not torch.cuda.is_available():
            raise FtError(
                "the plan is for GPUs, and torch sees none here",
                hint="install a CUDA build of torch, or check the driver with `ft doctor`",
                exit_code=ExitCode.LAUNCH,
            )
        device = torch.device("cuda", process.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if process.world_size > 1:
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
            rank=process.rank,
            world_size=process.world_size,
            timeout=datetime.timedelta(minutes=30),
        )
    return device
