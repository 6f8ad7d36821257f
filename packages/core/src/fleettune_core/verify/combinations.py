"""Which layouts and backends a verification runs, and the plan of each. Nothing is started here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fleettune_core.config.load import vary
from fleettune_core.config.source import LoadedConfig, Source
from fleettune_core.config.yaml_file import YamlFileError, parse
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plan.batch import solve_batch
from fleettune_core.plan.devices import detect_devices
from fleettune_core.plan.layout import parse_nodes
from fleettune_core.plan.mistakes import Mistakes, said_at
from fleettune_core.plan.model import Choice, Plan
from fleettune_core.plan.naming import check_free, file_name, name_run
from fleettune_core.plan.precision import choose_precision
from fleettune_core.plan.solve import make_plan
from fleettune_core.plugins.catalog import Catalog, find_entry
from fleettune_core.plugins.detection import strongest_process
from fleettune_core.plugins.entries import PluginKind
from fleettune_core.plugins.options import describe_options
from fleettune_core.plugins.selection import VARIABLES
from fleettune_core.types import DeviceKind, Devices, Environment

LAYOUTS = "1x1,2x1,1x2"
"""What is verified where nobody says it: the run on one process, on two, and with accumulation."""

_LEFT_OUT = (
    "launch",
    "checkpoint",
    "run_dir",
    "name",
    "batch",
    "data.eval_dataset",
    "data.eval_split",
    "train.eval_steps",
    "train.warmup_steps",
    "train.epochs",
)
"""What has no part in the comparison: where the run happens, what it saves and evaluates, and a warm-up, in which a few
steps would move nothing."""


@dataclass(frozen=True, slots=True)
class ProcessLayout:
    """Processes × micro-batches that each of them accumulates; written `2x4`."""

    processes: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.processes}x{self.accumulation}"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend with options; `text` is how it was written: `deepspeed:3`, `fsdp:shard_group=2`."""

    text: str
    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One run of a verification."""

    backend: BackendChoice
    layout: ProcessLayout
    plan: Plan

    @property
    def title(self) -> str:
        """`deepspeed:3 2x1`."""
        return f"{self.backend.text} {self.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Everything that will run, in order; the first one is what the others are compared with."""

    folder: Path
    """Of the whole verification; each run's own folder is below it."""
    combinations: tuple[Combination, ...]
    steps: int
    precision: str
    notes: tuple[str, ...]


def parse_layouts(text: str) -> tuple[ProcessLayout, ...]:
    """`1x1,2x4`: PROCESSES×ACCUMULATION, with commas. Raises FtError (exit code 2)."""
    layouts: list[ProcessLayout] = []
    for word in _words(text):
        match = re.fullmatch(r"([1-9]\d*)[x×*]([1-9]\d*)", word)
        if match is None:
            raise FtError(
                f"--layouts: {word!r} is no layout",
                hint="write PROCESSESxACCUMULATION with commas: --layouts 1x1,2x1,1x2",
                exit_code=ExitCode.USAGE,
            )
        layouts.append(ProcessLayout(int(match[1]), int(match[2])))
    return _no_twice(layouts, "--layouts")


def parse_backends(text: str, catalog: Catalog) -> tuple[BackendChoice, ...]:
    """`ddp,deepspeed:3,fsdp:shard_group=2`: names with commas; a value after a colon is the backend's first option.

    Raises FtError: exit code 2 for what cannot be read, 3 for a backend that is broken or not installed.
    """
    choices = [_backend_choice(word, catalog) for word in _words(text)]
    return _no_twice(choices, "--backends")


def _backend_choice(word: str, catalog: Catalog) -> BackendChoice:
    name, *said = word.split(":")
    entries = catalog.entries(PluginKind.BACKEND)
    entry = find_entry(entries, PluginKind.BACKEND, name, where="--backends", unknown=ExitCode.USAGE)
    known = [option.name for option in describe_options(catalog.load(entry))]
    options: dict[str, Any] = {}
    for item in said:
        key, equals, value = item.rpartition("=")
        key = key.replace("-", "_") if equals else next(iter(known), "")
        if key not in known or not value:
            raise FtError(
                f"--backends {word}: "
                + (f"{name} has no option {key!r}" if key and value else f"{item!r} says nothing"),
                hint=f"its options: {', '.join(known) or 'none'}; `ft plugins show {name}` explains them",
                exit_code=ExitCode.USAGE,
            )
        try:
            read = parse(value)
        except YamlFileError as error:
            raise FtError(f"--backends {word}: {error.message}", exit_code=ExitCode.USAGE) from error
        options[key] = None if read is None else read.value
    return BackendChoice(word, name, MappingProxyType(options))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _no_twice(items: list[Any], flag: str) -> tuple[Any, ...]:
    names = [str(getattr(item, "text", item)) for item in items]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None or not items:
        said = f"{flag}: {twice} is given twice" if twice is not None else f"{flag}: nothing is given"
        raise FtError(said, hint="give each one once", exit_code=ExitCode.USAGE)
    return tuple(items)


def plan_verification(
    loaded: LoadedConfig,
    *,
    layouts: Sequence[ProcessLayout],
    backends: Sequence[BackendChoice],
    steps: int,
    env: Environment,
    catalog: Catalog,
    devices: Devices | None = None,
    now: datetime | None = None,
) -> Verification:
    """Plan every combination of layout and backend for the run that `loaded` describes, with its global batch.

    Raises FtError with all mistakes, each with the combination that it belongs to, before anything runs.
    """
    loaded.raise_mistakes()
    process = strongest_process(catalog, env)
    if process is not None:
        raise FtError(
            f"ft verify starts its own processes, and this one is rank {process.rank} of {process.world_size}",
            hint="type it outside of torchrun and srun",
            exit_code=ExitCode.USAGE,
        )
    now = now or datetime.now().astimezone()
    devices = devices or detect_devices(env)
    # The comparison is the verification's own choice: no variable may replace a backend in it.
    plain = {name: value for name, value in env.items() if name not in VARIABLES.values()}
    with said_at(loaded.source("train.precision")):
        own_precision = choose_precision(loaded.config.train.precision, devices)
    _, folder = name_run(
        name=loaded.config.name,
        run_dir=loaded.config.run_dir,
        model_label=loaded.config.model.model or "run",
        method="verify",
        now=now,
        process=None,
    )
    check_free(folder)
    precision = own_precision.name if loaded.source("train.precision").kind == "flag" else "fp32"
    global_batch = _global_batch(loaded, devices)
    mistakes = Mistakes()
    found: list[Combination] = []
    for layout in layouts:
        for backend in backends:
            # Options in the run file are the run's own backend's, and mean nothing to another.
            others = () if loaded.config.backend.backend == backend.name else ("backend",)
            laid_out = vary(
                loaded,
                {
                    "launch.nproc_per_node": layout.processes,
                    "batch.global_batch": global_batch,
                    "batch.gradient_accumulation_steps": layout.accumulation,
                },
                _source(f"--layouts {layout}"),
                without=(*_LEFT_OUT, *others),
            )
            varied = vary(
                laid_out,
                {
                    "run_dir": str(folder / file_name(f"{backend.text}-{layout}")),
                    "train.max_steps": steps,
                    "train.precision": precision,
                    **({"model.lora_dropout": 0.0} if loaded.config.model.lora else {}),
                    "backend.backend": backend.name,
                    **{f"backend.{key}": value for key, value in backend.options.items()},
                },
                _source(f"--backends {backend.text}"),
            )
            with mistakes:
                plan = make_plan(varied, env=plain, catalog=catalog, now=now, devices=devices)
                found.append(Combination(backend=backend, layout=layout, plan=plan))
    mistakes.raise_all()
    return Verification(
        folder=folder,
        combinations=tuple(found),
        steps=steps,
        precision=precision,
        notes=tuple(_notes(loaded, own_precision, precision)),
    )


def _source(where: str) -> Source:
    return Source(kind="flag", where=where)


def _global_batch(loaded: LoadedConfig, devices: Devices) -> int:
    """Rows per optimizer step of the run itself, on as many ranks as it asks for: they need not be on this machine."""
    said = loaded.config.batch
    processes = loaded.config.launch.nproc_per_node or (devices.count if devices.kind is DeviceKind.CUDA else 1)
    ranks = parse_nodes(loaded)[1] * processes
    return solve_batch(
        ranks=ranks,
        global_batch=said.global_batch,
        micro_batch=said.micro_batch,
        per_device=said.per_device_train_batch_size,
        accumulation=said.gradient_accumulation_steps,
        sources=loaded.sources,
        ranks_source="the run's own layout",
    ).global_batch


def _notes(loaded: LoadedConfig, own: Choice, precision: str) -> list[str]:
    """What is compared otherwise than the run itself would train."""
    notes: list[str] = []
    said = loaded.source("train.precision")
    if precision == "fp32" and own.name != "fp32":
        where = said.where if said.kind != "default" else own.reason
        notes.append(
            f"compared in fp32, where rounding hides nothing; the run itself trains in {own.name} ({where}):"
            f" --precision {own.name} compares that"
        )
    if loaded.config.model.lora and loaded.config.model.lora_dropout > 0:
        dropout = loaded.config.model.lora_dropout
        notes.append(f"without dropout: lora_dropout {dropout:g} drops other numbers on each layout")
    if loaded.config.train.warmup_steps:
        notes.append("without warm-up, in which the first steps would move little")
    if any(path.startswith("launch.") for path in loaded.sources):
        notes.append("on this machine, whatever the run says under launch:")
    return notes
