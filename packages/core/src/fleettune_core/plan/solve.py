"""Config and detections become a plan: the one place where everything is decided before anything starts.

Pure apart from reading the model's config, the data and the machine; nothing is written and nothing is started.
Independent mistakes are told together.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fleettune_core.config.schema import RunConfig
from fleettune_core.config.source import LoadedConfig
from fleettune_core.data.peek import peek
from fleettune_core.plan.batch import solve_batch
from fleettune_core.plan.filled import fill_config
from fleettune_core.plan.layout import SolvedLayout, elastic_warnings, parse_nodes, solve_layout
from fleettune_core.plan.mistakes import Mistakes
from fleettune_core.plan.model import Plan
from fleettune_core.plan.model_facts import ModelFacts, estimate_memory, look_at_model, model_warnings
from fleettune_core.plan.naming import check_free, name_run
from fleettune_core.plan.options import plugin_options
from fleettune_core.plan.precision import choose_precision
from fleettune_core.plugins.catalog import Catalog, PluginKind, load_catalog
from fleettune_core.plugins.detection import detect
from fleettune_core.plugins.relay import Relay, open_relay
from fleettune_core.plugins.selection import Selection, asked_for, choose_backend, choose_launcher
from fleettune_core.types import (
    BatchPlan,
    Devices,
    Environment,
    LaunchPlan,
    LaunchRequest,
    MemoryDivision,
    MemoryRequest,
)

WORKER = ("-m", "fleettune_core.worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The plugins of the run, and what surrounds their choice."""

    launcher: Selection
    backend: Selection
    relay: Relay
    warnings: tuple[str, ...]


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

    `devices`, `catalog`, `now` and `python` (the workers' interpreter) replace what this machine has. Raises `FtError`
    with all independent mistakes: exit code 5 for configuration and data, 2 for the command line, 3 for a plugin,
    4 for a layout that the launcher cannot start.
    """
    devices = devices or _detect_devices(env)
    catalog = catalog or load_catalog()
    mistakes = Mistakes()
    chosen = laid_out = batch = precision = model = data = named = launch = division = None
    with mistakes:
        nodes = parse_nodes(loaded)
        chosen = _choose_plugins(loaded, env, devices, catalog, nodes)
        process = chosen.launcher.process
        laid_out = solve_layout(
            loaded, nodes=nodes, devices=devices, launcher=chosen.launcher.entry.name, process=process
        )
    if laid_out is not None:
        with mistakes:
            batch = _solve_batch(loaded, laid_out)
    with mistakes:
        precision = choose_precision(loaded.config.train.precision, devices)
    with mistakes:
        model = look_at_model(loaded, env)
    with mistakes:
        data = peek(loaded.config.data)
    if chosen is not None:
        with mistakes:
            division = _divide_memory(
                chosen, plugin_options(catalog, chosen.backend.entry, loaded, "backend"), laid_out, devices, loaded
            )
        with mistakes:
            named = _name(loaded, chosen, model, now)
    if chosen is not None and laid_out is not None:
        with mistakes:
            options = plugin_options(catalog, chosen.launcher.entry, loaded, "launch")
            # Where the name is a mistake already, the launcher still says what it thinks of the layout.
            run_id, run_dir = named or ("run", Path("run").absolute())
            launch = _plan_launch(loaded, chosen, laid_out, devices, env, run_id, run_dir, options, python)
    mistakes.raise_all()
    # A step without a result has left its mistake.
    assert chosen is not None
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
        process=chosen.launcher.process,
        launch=launch,
        memory=memory,
        memory_unknown=memory_unknown,
        data=data,
        notes=tuple(_notes(config, loaded, chosen, laid_out, env, _threads(devices, laid_out))),
        warnings=(
            *chosen.warnings,
            *laid_out.warnings,
            *elastic_warnings(laid_out.layout, batch),
            *model_warnings(config, model, memory, devices, laid_out.layout),
        ),
    )


def _name(loaded: LoadedConfig, chosen: _Chosen, model: ModelFacts | None, now: datetime | None) -> tuple[str, Path]:
    process = chosen.launcher.process
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


def _plan_launch(
    loaded: LoadedConfig,
    chosen: _Chosen,
    laid_out: SolvedLayout,
    devices: Devices,
    env: Environment,
    run_id: str,
    run_dir: Path,
    options: Any,
    python: str | None,
) -> LaunchPlan | None:
    """What the launcher would start, or None where this process already is a rank."""
    if chosen.launcher.process is not None:
        return None
    said = loaded.config.launch
    request = LaunchRequest(
        run_id=run_id,
        run_dir=run_dir,
        command=(*WORKER, str(run_dir)),
        python=python or sys.executable,
        layout=laid_out.layout,
        devices=devices,
        options=options,
        node_rank=said.node_rank,
        rdzv_endpoint=said.rdzv_endpoint,
        max_restarts=said.max_restarts,
        environment=worker_environment(env, _threads(devices, laid_out)),
    )
    plan: LaunchPlan = chosen.relay.call("plan_launch", request=request)
    return plan


def _divide_memory(
    chosen: _Chosen, options: Any, laid_out: SolvedLayout | None, devices: Devices, loaded: LoadedConfig
) -> MemoryDivision | None:
    """How the backend divides what a rank holds; it checks its options against the layout on the way."""
    if laid_out is None:
        return None
    ranks, lora = laid_out.layout.ranks, loaded.config.model.lora
    request = MemoryRequest(options=options, ranks=ranks, device_kind=devices.kind, lora=lora)
    return chosen.relay.call("divide_memory", request=request)


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


def _choose_plugins(
    loaded: LoadedConfig, env: Environment, devices: Devices, catalog: Catalog, nodes: tuple[int, int]
) -> _Chosen:
    """Launcher and backend. Raises `FtError` with what is wrong with either."""
    launchers = catalog.entries(PluginKind.LAUNCHER)
    detections, troubles = detect(launchers, env, catalog.load)
    mistakes = Mistakes()
    launcher = backend = None
    with mistakes:
        launcher = choose_launcher(
            entries=launchers,
            asked=asked_for(PluginKind.LAUNCHER, loaded, env),
            detections=detections,
            devices=devices.count,
            nproc_per_node=loaded.config.launch.nproc_per_node,
            nodes=nodes[1],
        )
    with mistakes:
        backend = choose_backend(
            entries=catalog.entries(PluginKind.BACKEND), asked=asked_for(PluginKind.BACKEND, loaded, env)
        )
    mistakes.raise_all()
    assert launcher is not None
    assert backend is not None
    relay = open_relay(catalog, launcher=launcher.entry, backend=backend.entry)
    return _Chosen(
        launcher=launcher,
        backend=backend,
        relay=relay,
        warnings=tuple(str(trouble) for trouble in (*catalog.troubles, *troubles, *relay.troubles)),
    )


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
    chosen: _Chosen,
    laid_out: SolvedLayout,
    env: Environment,
    threads: int,
) -> list[str]:
    notes = [*chosen.launcher.notes, *chosen.backend.notes, *laid_out.notes]
    train = config.train
    if train.max_steps is not None and train.epochs is not None:
        notes.append(f"max_steps {train.max_steps} wins over epochs {train.epochs:g}")
    if env.get("OMP_NUM_THREADS", str(threads)) != str(threads) and chosen.launcher.process is None:
        notes.append(f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']} of the environment becomes {threads} for the workers")
    if laid_out.layout.max_nodes > 1 and loaded.config.run_dir is None and chosen.launcher.process is None:
        notes.append(
            "without --run-dir each machine writes a run folder of its own, and the result is in machine 0's; on a disk"
            " that they share, give all of them one folder"
        )
    return notes
