"""The chosen plugins' own options, as the run file and the flags give them."""

from __future__ import annotations

import contextlib
from typing import Any

from fleettune_core.config.known import PLUGIN_SECTIONS, probably_meant, why_misspelt, why_no_option
from fleettune_core.config.source import LoadedConfig, Source
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plan.layout import exit_code_for
from fleettune_core.plan.mistakes import Mistakes
from fleettune_core.plugins.catalog import Catalog
from fleettune_core.plugins.entries import PluginEntry, PluginKind
from fleettune_core.plugins.options import build_options, describe_options


def plugin_options(catalog: Catalog, entry: PluginEntry, loaded: LoadedConfig, section: str) -> Any:
    """An instance of the plugin's `Options`, or None where it has none.

    `section` is `launch` or `backend`. Raises `FtError`: exit code 3 for a plugin that cannot be loaded, 5 for options
    of the run file that it does not have or take, 2 where only the command line is wrong.
    """
    plugin = catalog.load(entry)
    values = getattr(loaded.config, PLUGIN_SECTIONS[section])
    names = [item.name for item in describe_options(plugin)]

    def where(name: str) -> Source:
        return loaded.source(f"{section}.{name}")

    mistakes = Mistakes()
    for name in values:
        if name not in names:
            with mistakes:
                raise FtError(
                    f"{_place(where(name), section, name)}: {why_no_option(section, name, names, entry.title)}",
                    exit_code=exit_code_for(where(name)),
                )
    options = None
    with mistakes:
        known = {name: value for name, value in values.items() if name in names}
        try:
            options = build_options(plugin, known, where, title=entry.title)
        except FtError as error:
            only_typed = error.exit_code is ExitCode.CONFIG and all(where(name).kind == "flag" for name in known)
            if only_typed and known:
                error.exit_code = ExitCode.USAGE
            raise
    mistakes.raise_all()
    return options


def options_of_no_plugin(catalog: Catalog, kind: PluginKind, loaded: LoadedConfig, section: str) -> None:
    """Check the keys of a section whose plugin is not known: against core's names and the options of every plugin.

    Raises `FtError` for a key that is near one of them, or belongs elsewhere. Any other one may be an option of the
    plugin that was meant.
    """
    known: list[str] = []
    for entry in catalog.entries(kind):
        # Only names are asked of them: one that is broken has none here.
        with contextlib.suppress(FtError):
            known += [item.name for item in describe_options(catalog.load(entry))]
    mistakes = Mistakes()
    for name in getattr(loaded.config, PLUGIN_SECTIONS[section]):
        said = None if name in known else why_misspelt(section, name, known)
        if said is not None:
            source = loaded.source(f"{section}.{name}")
            with mistakes:
                raise FtError(f"{_place(source, section, name)}: {said}", exit_code=exit_code_for(source))
    mistakes.raise_all()


def misspelt_settings(loaded: LoadedConfig, section: str) -> frozenset[str]:
    """Paths of core's settings that misspelt keys of a plugin's section probably stand for."""
    names = getattr(loaded.config, PLUGIN_SECTIONS[section])
    meant = {probably_meant(section, name) for name in names}
    return frozenset(path for path in meant if path is not None and not loaded.is_set(path))


def _place(source: Source, section: str, name: str) -> str:
    return f"{source.where}: {section}.{name}" if source.kind == "file" else source.where
