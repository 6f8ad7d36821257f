"""A plan as JSON: what `plan.json` holds and `--json` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, cast

from fleettune_core.config.schema import RunConfig
from fleettune_core.config.schema import to_dict as config_to_dict
from fleettune_core.masking import MASK, is_secret, mask_tokens
from fleettune_core.plan.model import MemoryEstimate, Plan
from fleettune_core.plan.record import sources_to_json
from fleettune_core.types import BatchPlan, Layout


def to_dict(plan: Plan) -> dict[str, Any]:
    """The whole plan, JSON-ready, under the names of its fields.

    The config stands in the shape of a run file. Added are the numbers that follow: `layout.ranks`, `batch.equation`,
    `memory.total`. What a name tells to be a secret is
    masked: this is for reading, and workers read `run.json`.
    """
    tree = {item.name: _plain(getattr(plan, item.name)) for item in dataclasses.fields(plan)}
    return {**tree, "sources": _masked_sources(sources_to_json(plan.sources))}


def _plain(value: Any) -> Any:
    if isinstance(value, RunConfig):
        return _plain(config_to_dict(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return {**fields, **_derived(value)}
    if isinstance(value, Mapping):
        return {str(key): _masked(str(key), _plain(item)) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    return mask_tokens(value) if isinstance(value, str) else value


def _masked(key: str, value: Any) -> Any:
    """A value that is ready for JSON, or a mask where the key names a secret."""
    return value if value is None or value == "" or isinstance(value, bool) or not is_secret(key) else MASK


def _masked_sources(sources: Mapping[str, Any]) -> dict[str, Any]:
    """Sources also hold the values that were beaten."""
    return {
        path: {**source, "beat": [[where, _masked(path, _plain(value))] for where, value in source["beat"]]}
        if source.get("beat")
        else source
        for path, source in sources.items()
    }


def _derived(value: Any) -> dict[str, Any]:
    if isinstance(value, Layout):
        return {"ranks": value.ranks}
    if isinstance(value, BatchPlan):
        return {"equation": str(value)}
    if isinstance(value, MemoryEstimate):
        return {"total": value.total}
    return {}
