"""Where a value came from, so that a plan can say it and an error can point at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleettune_core.config.schema import RunConfig
from fleettune_core.errors import ExitCode, FtError


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
class ValueMistake:
    """A value or a key that cannot be used, as one line that begins with its place."""

    text: str
    line: int = 0
    """Line of the run file; 0 for a mistake that has none."""
    in_file: bool = False
    """Whether the run file is (also) to be mended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A frozen config and the source of each value, by dotted path (`model.lora_r`)."""

    config: RunConfig
    sources: Mapping[str, Source]
    file: Path | None = None
    """The run file, where there is one."""
    mistakes: tuple[ValueMistake, ...] = ()
    """What cannot be used, in the order of the run file. `config` has the defaults in place of it."""
    wrong: frozenset[str] = frozenset()
    """Paths that have a mistake already, also those that a misspelt key stands for: what follows from their defaults
    is nobody's mistake."""

    def source(self, path: str) -> Source:
        return self.sources.get(path, DEFAULT)

    def is_set(self, path: str) -> bool:
        """Whether somebody said it, rather than the default."""
        return self.source(path).kind != "default"

    @property
    def exit_code(self) -> ExitCode:
        """Of its mistakes: 5 when the run file has one, 2 when only the command line has."""
        return ExitCode.CONFIG if any(mistake.in_file for mistake in self.mistakes) else ExitCode.USAGE

    def raise_mistakes(self) -> None:
        """Raise `FtError` with every mistake in `problems`; do nothing when there is none."""
        if not self.mistakes:
            return
        place = str(self.file) if self.exit_code is ExitCode.CONFIG else "the command line"
        raise FtError(
            f"{len(self.mistakes)} mistake{'s' if len(self.mistakes) > 1 else ''} in {place}",
            exit_code=self.exit_code,
            problems=[mistake.text for mistake in self.mistakes],
        )
