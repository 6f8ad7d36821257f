"""Where a value came from, so that a plan can say it and an error can point at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleettune_core.config.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The origin of one value: `where` reads as `--lora-r`, `run.yaml:12`, `FT_BACKEND`, `default` or `solved`."""

    kind: str
    """`flag`, `file`, `environment`, `default` or `solved`."""
    where: str
    beat: tuple[tuple[str, Any], ...] = ()
    """Losing values, as (where, value), strongest first."""


DEFAULT = Source(kind="default", where="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A frozen config and the source of each value, by dotted path (`model.lora_r`)."""

    config: RunConfig
    sources: Mapping[str, Source]

    def source(self, path: str) -> Source:
        return self.sources.get(path, DEFAULT)

    def is_set(self, path: str) -> bool:
        """Whether somebody said it, rather than the default."""
        return self.source(path).kind != "default"
