"""Config and detections become a plan: the one place where everything is decided before anything starts.

Pure apart from reading the model's config, the data and the machine; nothing is written and nothing is started.
Independent mistakes are told together.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from fleettune_core.config.schema import RunConfig
from fleettune_core.config.source import LoadedConfig
from fleettune_core.plan.batch import solve_batch
from fleettune_core.plan.chosen import Chosen, choose_plugins
from fleettune_core.plan.data_facts import data_notes, look_at_data
from fleettune_core.plan.filled import fill_config
from fleettune_core.plan.layout import SolvedLayout, batch_is_told, elastic_warnings, parse_nodes, solve_layout
from fleettune_core.plan.mistakes import Mistakes, said_at
from fleettune_core.plan.model import DataSummary, Plan
from fleettune_core.plan.model_facts import ModelFacts, estimate_memory, look_at_model, model_notes, model_warnings
from fleettune_core.plan.naming import check_free, name_run
from fleettune_core.plan.precision import choose_precision
from fleettune_core.plugins.catalog import Catalog, load_catalog
from fleettune_core.types import (
    BatchPlan,
    Devices,
    Environment,
    LaunchPlan,
    LaunchRequest,
    MemoryDivision,
    MemoryRequest,
    ProcessInfo,
)

WORKER = ("-m", "fleettune_core.worker")


def make_plan(
    loaded: LoadedConfig,
    *,
    env: Environment,
    devices: Devices | None = None,
    catalog: Catalog | None = None,
    now: datetime | None = None,
    python: str | None = None,
) -> Plan:
    """Decide the run that `loaded` describes.

    Mistakes that `loaded` brings are told together with those that are found here.
    `devices`, `catalog`, `now` and `python` (the workers' interpreter) replace what this machine has. Raises `FtError`
    with all independent mistakes: exit code 5 for configuration and data, 2 for the command line, 3 for a plugin,
    4 for a layout that the launcher cannot start.
    """
    devices = devices or _detect_devices(env)
    catalog = catalog or load_catalog()
    mistakes = Mistakes(loaded)
    nodes = laid_out = batch = precision = model = named = launch = division = None
    with mistakes:
        nodes = parse_nodes(loaded)
    chosen = choose_plugins(loaded, env, devices, catalog, nodes, mistakes)
    if "launch.nproc_per_node" not in loaded.wrong | chosen.misspelt:
        with mistakes:
            laid_out = solve_layout(
                loaded, nodes=nodes or (1, 1), devices=devices, launcher=chosen.launcher_name, process=chosen.process
            )
    if laid_out is not None and batch_is_told(loaded, nodes_known=nodes is not None and not chosen.misspelt):
        with mistakes:
            batch = _solve_batch(loaded, laid_out)
    with mistakes, said_at(loaded.source("train.precision")):
        precision = choose_precision(loaded.config.train.precision, devices)
    if loaded.config.model.model is not None:
        with mistakes:
            model = look_at_model(loaded, env)
    data = look_at_data(loaded, mistakes)
    if "run_dir" not in loaded.wrong:
        with mistakes, said_at(loaded.source("run_dir")):
            named = _name(loaded, chosen.process, model, now)
    if chosen.relay is not None and chosen.launch_is_told and laid_out is not None and nodes is not None:
        with mistakes:
            # Where the name is a mistake already, the launcher still says what it thinks of the layout.
            run_id, run_dir = named or ("run", Path("run").absolute())
            launch = _plan_launch(loaded, chosen, laid_out, devices, env, run_id, run_dir, python)
    if chosen.relay is not None and chosen.backend_is_told and laid_out is not None:
        with mistakes:
            division = _divide_memory(loaded, chosen, laid_out, devices)
    mistakes.raise_all()
    # A step without a result has left its mistake.
    assert chosen.launcher is not None
    assert chosen.backend is not None
    assert laid_out is not None
    assert batch is not None
    assert precision is not None
    assert model is not None
    assert data is not None
    assert named is not None

    run_id, run_dir = named
    config, sources = fill_config(
        loaded,
        launcher=chosen.launcher.choice.name,
        backend=chosen.backend.choice.name,
        layout=laid_out.layout,
        batch=batch,
        model=model.ref,
        data=data,
        run_dir=run_dir,
    )
    memory, memory_unknown = estimate_memory(config, model, batch, precision.name, division)
    return Plan(
        run_id=run_id,
        run_dir=run_dir,
        config=config,
        sources=sources,
        launcher=chosen.launcher.choice,
        backend=chosen.backend.choice,
        precision=precision,
        layout=laid_out.layout,
        devices=devices,
        batch=batch,
        threads_per_rank=_threads(devices, laid_out),
        process=chosen.process,
        launch=launch,
        memory=memory,
        memory_unknown=memory_unknown,
        data=data,
        notes=tuple(_notes(config, loaded, chosen, laid_out, env, _threads(devices, laid_out), model, data)),
        warnings=(
            *chosen.warnings,
            *laid_out.warnings,
            *elastic_warnings(laid_out.layout, batch),
            *model_warnings(config, model, memory, devices, laid_out.layout),
        ),
    )


def _name(
    loaded: LoadedConfig, process: ProcessInfo | None, model: ModelFacts | None, now: datetime | None
) -> tuple[str, Path]:
    run_id, run_dir = name_run(
        name=loaded.config.name,
        run_dir=loaded.config.run_dir,
        model_label=model.ref.label if model is not None else "run",
        method=loaded.config.train.method,
        now=now or datetime.now().astimezone(),
        process=process,
    )
    # The other ranks, and the machines of a run that is started on each by hand, find a folder that one of them has
    # made; `run.start` tells whether it is theirs.
    if process is None and loaded.config.launch.rdzv_endpoint is None:
        check_free(run_dir)
    return run_id, run_dir


def _divide_memory(
    loaded: LoadedConfig, chosen: Chosen, laid_out: SolvedLayout, devices: Devices
) -> MemoryDivision | None:
    """How the backend divides what a rank holds; it checks its options against the layout on the way."""
    assert chosen.relay is not None
    request = MemoryRequest(
        options=chosen.backend_options,
        ranks=laid_out.layout.ranks,
        device_kind=devices.kind,
        lora=loaded.config.model.lora,
    )
    return chosen.relay.call("divide_memory", request=request)


def _plan_launch(
    loaded: LoadedConfig,
    chosen: Chosen,
    laid_out: SolvedLayout,
    devices: Devices,
    env: Environment,
    run_id: str,
    run_dir: Path,
    python: str | None,
) -> LaunchPlan | None:
    """What the launcher would start, or None where this process already is a rank."""
    if chosen.process is not None:
        return None
    assert chosen.relay is not None
    said = loaded.config.launch
    request = LaunchRequest(
        run_id=run_id,
        run_dir=run_dir,
        command=(*WORKER, str(run_dir)),
        python=python or sys.executable,
        layout=laid_out.layout,
        devices=devices,
        options=chosen.launcher_options,
        node_rank=said.node_rank,
        rdzv_endpoint=said.rdzv_endpoint,
        max_restarts=said.max_restarts,
        environment=worker_environment(env, _threads(devices, laid_out)),
    )
    plan: LaunchPlan = chosen.relay.call("plan_launch", request=request)
    return plan


def _threads(devices: Devices, laid_out: SolvedLayout) -> int:
    return max(1, devices.cpu_cores // laid_out.layout.procs_per_node)


def worker_environment(env: Environment, threads: int) -> Mapping[str, str]:
    """Variables for the workers: their threads, and no telemetry of the libraries unless the user chose otherwise."""
    chosen = {"OMP_NUM_THREADS": str(threads)}
    if "HF_HUB_DISABLE_TELEMETRY" not in env:
        chosen["HF_HUB_DISABLE_TELEMETRY"] = "1"
    return MappingProxyType(chosen)


def _detect_devices(env: Environment) -> Devices:
    from fleettune_core.plan.devices import detect_devices

    return detect_devices(env)


def _solve_batch(loaded: LoadedConfig, laid_out: SolvedLayout) -> BatchPlan:
    said = loaded.config.batch
    return solve_batch(
        ranks=laid_out.layout.ranks,
        global_batch=said.global_batch,
        micro_batch=said.micro_batch,
        per_device=said.per_device_train_batch_size,
        accumulation=said.gradient_accumulation_steps,
        sources=loaded.sources,
        ranks_source=laid_out.reason,
    )


def _notes(
    config: RunConfig,
    loaded: LoadedConfig,
    chosen: Chosen,
    laid_out: SolvedLayout,
    env: Environment,
    threads: int,
    model: ModelFacts,
    data: DataSummary,
) -> list[str]:
    notes = [*chosen.notes, *laid_out.notes]
    train = config.train
    if train.max_steps is not None and train.epochs is not None:
        notes.append(f"max_steps {train.max_steps} wins over epochs {train.epochs:g}")
    if env.get("OMP_NUM_THREADS", str(threads)) != str(threads) and chosen.process is None:
        notes.append(f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']} of the environment becomes {threads} for the workers")
    if laid_out.layout.max_nodes > 1 and loaded.config.run_dir is None and chosen.process is None:
        notes.append(
            "without --run-dir each machine writes a run folder of its own, and the result is in machine 0's; on a disk"
            " that they share, give all of them one folder"
        )
    return [*notes, *model_notes(loaded, model), *data_notes(loaded, data), *_without_effect(loaded, laid_out)]


def _without_effect(loaded: LoadedConfig, laid_out: SolvedLayout) -> list[str]:
    """Settings that were said and that this run has no use for."""
    notes: list[str] = []
    if loaded.config.checkpoint.keep_checkpoints is not None and loaded.config.checkpoint.save_every is None:
        where = loaded.source("checkpoint.keep_checkpoints").where
        notes.append(f"keep_checkpoints ({where}) has no effect here: without --save-every there are no checkpoints")
    compression = loaded.config.backend_options.get("grad_compression", "none")
    if compression != "none" and laid_out.layout.ranks == 1:
        where = loaded.source("backend.grad_compression").where
        notes.append(f"grad_compression ({where}) has no effect here: one rank exchanges no gradients")
    return notes
