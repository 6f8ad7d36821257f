"""Every plugin as one row: what it is, and what is wrong with it; this project's own that are not installed too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fleettune_core.errors import FtError

if TYPE_CHECKING:
    from fleettune_core.plugins.catalog import Catalog
    from fleettune_core.plugins.entries import PluginEntry
    from fleettune_core.plugins.trouble import Trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One line of the list."""

    name: str
    kind: str
    distribution: str
    version: str | None
    """None where it is not installed."""
    builtin: bool
    state: str
    """`installed` (not looked at), `ok` (imported and checked), `not installed`, or what is wrong."""
    hint: str | None = None

    @property
    def source(self) -> str:
        """`fleettune-core 0.1.0`; `-` where it is not installed."""
        return "-" if self.version is None else f"{self.distribution} {self.version}"

    @property
    def at_fault(self) -> bool:
        """Whether a check ends with an error for it. What is not installed is no fault."""
        return self.state not in ("ok", "not installed")

    def concerns(self, trouble: Trouble) -> bool:
        """Whether a record is about this plugin."""
        return trouble.plugin == f"{self.kind} {self.name}" and self.source in trouble.distribution


def all_entries(catalog: Catalog) -> list[PluginEntry]:
    """The plugins of every kind, in the order of the kinds."""
    from fleettune_core.plugins.entries import PluginKind

    return [entry for kind in PluginKind for entry in catalog.entries(kind)]


def listed(
    catalog: Catalog, *, check: bool, env: Mapping[str, str] | None = None
) -> tuple[list[Listed], list[Trouble]]:
    """The rows of what is installed, and the troubles that belong to none of them.

    With `check` every plugin is imported, and every launcher asked what it detects in `env` (by default this
    process's environment).
    """
    from fleettune_core.plugins.completeness import incomplete

    troubles = list(catalog.troubles)
    rows: list[Listed] = []
    for entry in all_entries(catalog):
        row = Listed(
            name=entry.name,
            kind=entry.kind.label,
            distribution=entry.distribution,
            version=entry.version,
            builtin=entry.builtin,
            state="ok" if check else "installed",
        )
        mine = next((trouble for trouble in troubles if row.concerns(trouble)), None)
        mine = mine or incomplete(entry)
        if mine is None and check:
            mine = _checked(catalog, entry, env)
        if mine is not None:
            row = replace(row, state=" ".join(f"{mine.kind.value}: {mine.message}".split()), hint=mine.hint)
        rows.append(row)
    return rows, [trouble for trouble in troubles if not any(row.concerns(trouble) for row in rows)]


def not_installed(rows: Sequence[Listed]) -> list[Listed]:
    """This project's plugins that `rows` lacks, with what installs each."""
    from fleettune_core.plugins.entries import OPTIONAL

    there = {(row.kind, row.name) for row in rows}
    return [
        Listed(
            name=name,
            kind=kind.label,
            distribution=distribution,
            version=None,
            builtin=False,
            state="not installed",
            hint=f"pip install {distribution}",
        )
        for (kind, name), distribution in OPTIONAL.items()
        if (kind.label, name) not in there
    ]


def _checked(catalog: Catalog, entry: PluginEntry, env: Mapping[str, str] | None) -> Trouble | None:
    from fleettune_core.plugins.detection import detect
    from fleettune_core.plugins.entries import PluginKind
    from fleettune_core.plugins.trouble import PluginTroubleError
    from fleettune_core.types import current_environment

    try:
        catalog.load(entry)
    except PluginTroubleError as error:
        return error.trouble
    if entry.kind is not PluginKind.LAUNCHER:
        return None
    try:
        _, troubles = detect([entry], current_environment() if env is None else env, catalog.load)
    except FtError:
        return None  # What it says is about this environment, and no trouble with the plugin.
    return next(iter(troubles), None)
