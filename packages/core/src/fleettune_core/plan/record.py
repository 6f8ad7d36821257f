"""`run.json`: the frozen config, each value with its source, and the decisions that a worker follows.

Control writes it, the worker reads it, perhaps days later on another machine; it is the only thing that passes
between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from fleettune_core.config.known import settings_by_path
from fleettune_core.config.load import build_config
from fleettune_core.config.schema import SECTIONS, TOP_LEVEL, RunConfig, to_dict
from fleettune_core.config.source import Source
from fleettune_core.errors import FtError
from fleettune_core.plan.model import Choice, Plan
from fleettune_core.types import BatchPlan, DeviceKind, Layout

FORMAT = 1
"""Version of the file's shape; raised by a change that an older reader would misread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a worker knows of its run."""

    run_id: str
    config: RunConfig
    sources: Mapping[str, Source]
    launcher: Choice
    backend: Choice
    """Its `distribution` is what the plan was made with."""
    layout: Layout
    batch: BatchPlan
    precision: str
    """`fp32`, `bf16` or `fp16`."""
    precision_reason: str
    device_kind: DeviceKind
    threads_per_rank: int
    fleettune: str
    """Version that wrote the record."""


def run_record(plan: Plan) -> dict[str, Any]:
    """The content of `run.json`, JSON-ready; `read_run_record` gives it back exactly."""
    from fleettune_core import __version__

    return {
        "format": FORMAT,
        "fleettune": __version__,
        "run_id": plan.run_id,
        "config": to_dict(plan.config),
        "sources": sources_to_json(plan.sources),
        "launcher": _choice_to_json(plan.launcher),
        "backend": _choice_to_json(plan.backend),
        "layout": _fields(plan.layout),
        "batch": {**_fields(plan.batch), "reasons": dict(plan.batch.reasons)},
        "precision": plan.precision.name,
        "precision_reason": plan.precision.reason,
        "device_kind": plan.devices.kind.value,
        "threads_per_rank": plan.threads_per_rank,
    }


def read_run_record(content: Any) -> RunRecord:
    """The record in the parsed `run.json`. Raises `FtError` for one that is incomplete or of another version."""
    record = cast("dict[str, Any]", content)
    if not isinstance(content, dict) or "format" not in record:
        raise FtError("run.json is not a run's record: it has no format")
    if record["format"] != FORMAT:
        raise FtError(
            f"run.json has the format {record['format']!r}, and this version reads {FORMAT}",
            hint=f"use the version that wrote it: fleettune-core {record.get('fleettune', '?')}",
        )
    try:
        return RunRecord(
            run_id=str(record["run_id"]),
            config=_config_from_json(record["config"]),
            sources=MappingProxyType({path: _source_from_json(item) for path, item in record["sources"].items()}),
            launcher=Choice(**record["launcher"]),
            backend=Choice(**record["backend"]),
            layout=Layout(**record["layout"]),
            batch=BatchPlan(**record["batch"]),
            precision=str(record["precision"]),
            precision_reason=str(record["precision_reason"]),
            device_kind=DeviceKind(record["device_kind"]),
            threads_per_rank=int(record["threads_per_rank"]),
            fleettune=str(record["fleettune"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FtError(f"run.json is incomplete or was changed by hand: {type(error).__name__}: {error}") from error


def sources_to_json(sources: Mapping[str, Source]) -> dict[str, Any]:
    """Sources by path, JSON-ready."""
    return {
        path: {"kind": source.kind, "where": source.where, "beat": [[where, value] for where, value in source.beat]}
        for path, source in sources.items()
    }


def _source_from_json(item: Mapping[str, Any]) -> Source:
    beat = tuple((str(where), value) for where, value in item["beat"])
    return Source(kind=item["kind"], where=item["where"], beat=beat)


def _config_from_json(tree: Mapping[str, Any]) -> RunConfig:
    """A config in the shape of a run file; nothing in it is checked again: control did."""
    values: dict[str, Any] = {name: tree[name] for name in TOP_LEVEL}
    for section in SECTIONS:
        values.update({f"{section}.{name}": value for name, value in tree[section].items()})
    missing = [path for path in settings_by_path() if path not in values]
    if missing:
        raise KeyError(missing[0])
    return build_config(values)


def _choice_to_json(choice: Choice) -> dict[str, Any]:
    return {"name": choice.name, "reason": choice.reason, "distribution": choice.distribution}


def _fields(value: Any) -> dict[str, Any]:
    return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
