"""The config with what the plan decides in place of every None, and where those values came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fleettune_core.config.schema import RunConfig
from fleettune_core.config.source import DEFAULT, LoadedConfig, Source
from fleettune_core.data.files import find_files
from fleettune_core.models.resolve import ModelRef
from fleettune_core.plan.model import DataSummary
from fleettune_core.types import BatchPlan, Layout

LEARNING_RATE_LORA = 2e-4
LEARNING_RATE_FULL = 2e-5
SOLVED = Source(kind="solved", where="solved")


def fill_config(
    loaded: LoadedConfig,
    *,
    launcher: str,
    backend: str,
    layout: Layout,
    batch: BatchPlan,
    model: ModelRef,
    data: DataSummary,
    run_dir: Path,
) -> tuple[RunConfig, Mapping[str, Source]]:
    """The filled config and the source of every value that is not a constant default.

    Local files become absolute, because the worker may start in another folder; their source stays.
    """
    said = loaded.config
    values: dict[str, Any] = {}
    sources = dict(loaded.sources)
    for path, (value, source) in _decided(said, launcher, backend, layout, batch, run_dir).items():
        if _get(said, path) is None:
            values[path] = value
            sources[path] = source
    values |= {"run_dir": str(run_dir), **_absolute(said, model, data)}
    return _replaced(said, values), MappingProxyType(sources)


def _decided(
    said: RunConfig, launcher: str, backend: str, layout: Layout, batch: BatchPlan, run_dir: Path
) -> dict[str, tuple[Any, Source]]:
    """What stands in place of None, by path."""
    nodes = f"{layout.min_nodes}:{layout.max_nodes}" if layout.elastic else str(layout.max_nodes)
    lora = said.model.lora
    decided: dict[str, tuple[Any, Source]] = {
        "run_dir": (str(run_dir), DEFAULT),
        "launch.launcher": (launcher, SOLVED),
        "launch.nodes": (nodes, SOLVED),
        "launch.nproc_per_node": (layout.procs_per_node, SOLVED),
        "backend.backend": (backend, SOLVED),
        "train.learning_rate": (LEARNING_RATE_LORA if lora else LEARNING_RATE_FULL, DEFAULT),
        "batch.global_batch": (batch.global_batch, SOLVED),
        "batch.micro_batch": (batch.micro_batch, SOLVED),
    }
    if lora:
        decided["model.lora_alpha"] = (2.0 * said.model.lora_r, DEFAULT)
        decided["model.lora_target"] = ("all-linear", DEFAULT)
    if said.train.max_steps is None:
        decided["train.epochs"] = (1.0, DEFAULT)
    return decided


def _absolute(said: RunConfig, model: ModelRef, data: DataSummary) -> dict[str, str]:
    """Local paths of the config, absolute. Hub ids and files inside packages stay as they are."""
    places: dict[str, str] = {}
    if model.path is not None and not model.spec.startswith("package:"):
        places["model.model"] = str(model.gguf_path or model.path)
    if data.files and said.data.dataset is not None:
        places["data.dataset"] = _absolute_path(said.data.dataset)
    evaluation = said.data.eval_dataset
    if evaluation is not None and find_files(evaluation) is not None:
        places["data.eval_dataset"] = _absolute_path(evaluation)
    return places


def _absolute_path(spec: str) -> str:
    return str(Path(spec).expanduser().absolute())


def _get(config: RunConfig, path: str) -> Any:
    section, _, name = path.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def _replaced(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """`config` with values by dotted path."""
    by_section: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        by_section.setdefault(section, {})[name] = value
    top = by_section.pop("", {})
    parts = {section: dataclasses.replace(getattr(config, section), **own) for section, own in by_section.items()}
    return dataclasses.replace(config, **top, **parts)
