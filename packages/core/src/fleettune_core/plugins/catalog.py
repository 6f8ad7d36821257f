"""What is installed: plugin names, read from the metadata of distributions without importing any plugin.

Two rules keep a bad plugin from harming a good one. A built-in of `fleettune-core` keeps its name whatever else is
installed, and a name that two other distributions share is an error only for who asks for it.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fleettune_core.errors import ExitCode, FtError, did_you_mean, nearest
from fleettune_core.plugins.entries import CORE_DISTRIBUTION, OPTIONAL, PluginEntry, PluginKind
from fleettune_core.plugins.trouble import PluginTroubleError, Trouble, TroubleKind


class Catalog:
    """The installed plugins and the trouble that their metadata shows; `load` imports one, once."""

    def __init__(self, entries: Iterable[PluginEntry], troubles: Iterable[Trouble] = ()) -> None:
        self._entries = tuple(entries)
        self._loaded: dict[PluginEntry, Any] = {}
        self.troubles = tuple(troubles)

    def entries(self, kind: PluginKind | str) -> tuple[PluginEntry, ...]:
        """The plugins of a kind (or of an entry-point group), built-ins first, then by name.

        A name that two distributions share is in it twice; `find_entry` refuses it.
        """
        return tuple(entry for entry in self._entries if entry.kind is PluginKind(kind))

    def find(self, kind: PluginKind | str, name: str) -> PluginEntry:
        """The one plugin of that name; raises as `find_entry` does."""
        return find_entry(self.entries(kind), PluginKind(kind), name)

    def load(self, entry: PluginEntry) -> Any:
        """Import a plugin, check it against the contract and return its object, the same one on every call.

        Raises PluginTroubleError, which carries the record.
        """
        # Imported here, because listing names needs neither pluggy nor the contract.
        from fleettune_core.plugins.loading import load_plugin

        if entry not in self._loaded:
            try:
                self._loaded[entry] = load_plugin(entry)
            except PluginTroubleError as error:
                self._loaded[entry] = error
        loaded = self._loaded[entry]
        if isinstance(loaded, PluginTroubleError):
            raise loaded
        return loaded


def find_entry(
    entries: Sequence[PluginEntry],
    kind: PluginKind,
    name: str,
    *,
    where: str | None = None,
    unknown: ExitCode = ExitCode.PLUGIN,
) -> PluginEntry:
    """The one entry named `name`.

    Raises FtError: with the exit code `unknown` and the nearest and all valid names when there is none, and with exit
    code 3 when two distributions share the name. `where` is what asked for it (`--launcher`, `run.yaml:3`).
    """
    found = [entry for entry in entries if entry.name == name]
    said = f"{where}: " if where else ""
    if not found:
        valid = sorted({entry.name for entry in entries})
        if (kind, name) in OPTIONAL:
            raise FtError(
                f"{said}the {kind.label} {name} is not installed",
                hint=f"pip install {OPTIONAL[kind, name]}; installed {kind.label}s: {', '.join(valid) or 'none'}",
                exit_code=unknown,
            )
        raise FtError(
            f"{said}no {kind.label} is named {name!r}{did_you_mean(name, valid)}",
            hint=f"installed {kind.label}s: {', '.join(valid) or 'none'}",
            exit_code=unknown,
        )
    if len(found) > 1:
        raise PluginTroubleError(_clash(found))
    return found[0]


def load_catalog(entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> Catalog:
    """Read what is installed; `entry_points` replaces what the distributions on `sys.path` say.

    Imports no plugin and never raises for a broken one: what is wrong is in `Catalog.troubles`.
    """
    troubles: list[Trouble] = []
    points = _installed_entry_points(troubles) if entry_points is None else entry_points
    by_name: dict[tuple[PluginKind, str], list[PluginEntry]] = {}
    groups = {kind.value: kind for kind in PluginKind}
    for point in points:
        distribution, version = _origin(point.dist)
        if point.group in groups:
            entry = PluginEntry(
                name=point.name,
                kind=groups[point.group],
                distribution=distribution,
                version=version,
                value=point.value,
                builtin=_normalised(distribution) == CORE_DISTRIBUTION,
            )
            same_name = by_name.setdefault((entry.kind, entry.name), [])
            if entry not in same_name:
                same_name.append(entry)
        elif _means_fleettune(point.group):
            troubles.append(_wrong_group(point, f"{distribution} {version}"))

    entries: list[PluginEntry] = []
    for claimants in by_name.values():
        builtins = [entry for entry in claimants if entry.builtin]
        if builtins:
            entries.append(builtins[0])
            troubles += [_shadowed(entry, builtins[0]) for entry in claimants if entry is not builtins[0]]
            continue
        entries += claimants
        if len(claimants) > 1:
            troubles.append(_clash(claimants))
    order = list(PluginKind)
    entries.sort(key=lambda entry: (order.index(entry.kind), not entry.builtin, entry.name, entry.distribution))
    return Catalog(entries, troubles)


def _installed_entry_points(troubles: list[Trouble]) -> Iterator[importlib.metadata.EntryPoint]:
    """Entry points of the distributions that mention Fleettune, each distribution once.

    The raw text is looked at first: parsing the metadata of everything that is installed would cost more than the
    rest of a short command. A distribution that stands on `sys.path` twice (editable and installed) counts as its
    first place, which is the one that an import finds.
    """
    seen: set[str] = set()
    for found in importlib.metadata.distributions():
        text = (found.read_text("entry_points.txt") or "").lower()
        if "fleettune" not in text and "fleetune" not in text:
            continue
        name, _ = _origin(found)
        if _normalised(name) in seen:
            continue
        seen.add(_normalised(name))
        try:
            first = importlib.metadata.distribution(name)
        except (importlib.metadata.PackageNotFoundError, ValueError):
            first = found
        try:
            yield from first.entry_points
        except Exception as error:  # noqa: BLE001 - a damaged file of somebody else costs one record, whatever it raises
            troubles.append(
                Trouble(
                    kind=TroubleKind.IMPORT_ERROR,
                    plugin="entry_points.txt",
                    distribution=" ".join(_origin(first)),
                    message=f"its entry points cannot be read: {type(error).__name__}: {error}",
                    hint="write each entry point as NAME = package.module:Object",
                )
            )


def _origin(distribution: importlib.metadata.Distribution | None) -> tuple[str, str]:
    """Name and version; a distribution that is damaged or unknown still gets a name that can be shown."""
    metadata = None if distribution is None else distribution.metadata
    if not metadata:
        return "unknown", "?"
    # Before Python 3.12 the metadata promise no get().
    name = metadata["Name"] if "Name" in metadata else "unknown"  # noqa: SIM401
    version = metadata["Version"] if "Version" in metadata else "?"  # noqa: SIM401
    return name, version


def _normalised(name: str) -> str:
    """A distribution's name in the form in which names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _means_fleettune(group: str) -> bool:
    """Whether a group that is not ours was meant to be: `fleettune.launcher`, `fleettune_backends`."""
    valid = [kind.value for kind in PluginKind]
    # The cutoff lets a plugin keep entry-point groups of its own, such as `fleettune_mycluster.queues`.
    return group.startswith("fleettune.") or bool(difflib.get_close_matches(group, valid, n=1, cutoff=0.85))


def _wrong_group(point: importlib.metadata.EntryPoint, source: str) -> Trouble:
    valid = [kind.value for kind in PluginKind]
    close = nearest(point.group, valid)
    return Trouble(
        kind=TroubleKind.WRONG_GROUP,
        plugin=f"plugin {point.name}",
        distribution=source,
        message=f"there is no entry-point group {point.group}{did_you_mean(point.group, valid)}, so it is not used",
        hint=f"declare it in the group {close[0]}" if close else f"groups: {', '.join(valid)}",
    )


def _shadowed(entry: PluginEntry, builtin: PluginEntry) -> Trouble:
    return entry.trouble(
        TroubleKind.DUPLICATE_NAME,
        f"its name belongs to the built-in of {builtin.source}, which stays; this one is not used",
        f"uninstall {entry.distribution}, or ask its author for another name",
    )


def _clash(claimants: Sequence[PluginEntry]) -> Trouble:
    places = [f"{entry.source} ({entry.value})" for entry in claimants]
    distributions = sorted({entry.distribution for entry in claimants})
    return Trouble(
        kind=TroubleKind.DUPLICATE_NAME,
        plugin=claimants[0].title,
        distribution=" and ".join(dict.fromkeys(entry.source for entry in claimants)),
        message=f"its name is claimed by {' and by '.join(places)}",
        hint=f"uninstall one: pip uninstall {distributions[-1]}" if len(distributions) > 1 else None,
    )
