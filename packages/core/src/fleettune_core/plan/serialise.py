"""A plan as JSON: what `plan.json` holds and `--json` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, cast

from fleettune_core.config.schema import RunConfig
from fleettune_core.config.schema import to_dict as config_to_dict
from fleettune_core.plan.model import MemoryEstimate, Plan
from fleettune_core.plan.record import sources_to_json
from fleettune_core.types import BatchPlan, Layout


def to_dict(plan: Plan) -> dict[str, Any]:
    """The whole plan, JSON-ready, under the names of its fields.

    The config stands in the shape of a run file. Added are the numbers that follow: `layout.ranks`, `batch.equation`,
    `memory.total`.
    """
    tree = {item.name: _plain(getattr(plan, item.name)) for item in dataclasses.fields(plan)}
    return {**tree, "sources": sources_to_json(plan.sources)}


def _plain(value: Any) -> Any:
    if isinstance(value, RunConfig):
        return config_to_dict(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return {**fields, **_derived(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[Any]", value)]
    return value


def _derived(value: Any) -> dict[str, Any]:
    if isinstance(value, Layout):
        return {"ranks": value.ranks}
    if isinstance(value, BatchPlan):
        return {"equation": str(value)}
    if isinstance(value, MemoryEstimate):
        return {"total": value.total}
    return {}
