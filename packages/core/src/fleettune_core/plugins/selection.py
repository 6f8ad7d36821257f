"""Which launcher and which backend: one pure function, and the reason with every choice.

flag > `FT_LAUNCHER` or `FT_BACKEND` > run file > strongest detection (of launchers) > default. What is merely available
never wins by itself: it is offered in one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fleettune_core.config.source import LoadedConfig, Source
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plan.model import Choice
from fleettune_core.plugins.catalog import find_entry
from fleettune_core.plugins.entries import PluginEntry, PluginKind
from fleettune_core.types import Detection, Environment, ProcessInfo, Score

VARIABLES: Mapping[PluginKind, str] = MappingProxyType(
    {PluginKind.LAUNCHER: "FT_LAUNCHER", PluginKind.BACKEND: "FT_BACKEND"}
)
"""Environment variables that choose."""

_PATHS: Mapping[PluginKind, str] = MappingProxyType(
    {PluginKind.LAUNCHER: "launch.launcher", PluginKind.BACKEND: "backend.backend"}
)
_STRENGTH = ("flag", "environment", "file")
_NO_DETECTIONS: Mapping[str, Detection] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A plugin that somebody asked for by name, and where."""

    name: str
    source: Source
    """Of kind `flag`, `environment` or `file`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A choice and what surrounds it."""

    choice: Choice
    entry: PluginEntry
    notes: tuple[str, ...] = ()
    """One line each: what could be used from here, and how."""
    beat: tuple[tuple[str, str], ...] = ()
    """What lost, as (where or why, name), strongest first; only names other than the chosen one."""
    process: ProcessInfo | None = None
    """Set when this process already is a rank of the chosen launcher: nothing is launched then."""


def asked_for(kind: PluginKind, loaded: LoadedConfig, env: Environment) -> tuple[Asked, ...]:
    """Everybody who named a launcher or backend: the config's value, what it beat, and the environment variable."""
    path, variable = _PATHS[kind], VARIABLES[kind]
    section, _, name = path.partition(".")
    value = getattr(getattr(loaded.config, section), name)
    source = loaded.source(path)
    found: list[Asked] = []
    if value is not None and source.kind in _STRENGTH:
        found.append(Asked(name=value, source=source))
    for where, beaten in source.beat:
        origin = "flag" if where.startswith("-") else "environment" if where == variable else "file"
        if beaten is not None:
            found.append(Asked(name=str(beaten), source=Source(kind=origin, where=where)))
    if env.get(variable) and not any(item.source.kind == "environment" for item in found):
        found.append(Asked(name=env[variable], source=Source(kind="environment", where=variable)))
    return tuple(found)


def choose(
    *,
    kind: PluginKind,
    entries: Sequence[PluginEntry],
    asked: Sequence[Asked] = (),
    detections: Mapping[str, Detection] = _NO_DETECTIONS,
    default: str,
    default_reason: str,
) -> Selection:
    """Choose one of `entries`.

    Raises FtError: exit code 2 for a name that a flag or the environment got wrong, and for a launcher that is asked
    for where this process already is a rank of another; 5 for a wrong name in the run file; 3 for two equal
    detections, for a name that two distributions share, and for a default that is not installed.
    """
    ordered = sorted(asked, key=lambda item: _STRENGTH.index(item.source.kind))
    ranked = sorted(detections.items(), key=lambda item: -item[1].score)
    strong = [(name, found) for name, found in ranked if found.score > Score.AVAILABLE]

    if ordered:
        winner = ordered[0]
        wrong = ExitCode.CONFIG if winner.source.kind == "file" else ExitCode.USAGE
        entry = find_entry(entries, kind, winner.name, where=winner.source.where, unknown=wrong)
        _refuse_second_launch(kind, winner, strong)
        reason, losers = winner.source.where, [(item.source.where, item.name) for item in ordered[1:]]
        losers += [(found.reason, name) for name, found in strong]
    elif strong:
        name, found = strong[0]
        _refuse_tie(kind, entries, [item for item in strong if item[1].score == found.score])
        entry = find_entry(entries, kind, name, where=found.reason)
        reason, losers = found.reason, [(other.reason, name) for name, other in strong[1:]]
    else:
        if all(entry.name != default for entry in entries):
            raise FtError(
                f"{default_reason}, but the {kind.label} {default} is not installed",
                hint=f"pip install fleettune-{kind.label}-{default}, or choose another with --{kind.label} NAME:"
                f" {', '.join(sorted({entry.name for entry in entries})) or 'none is installed'}",
                exit_code=ExitCode.PLUGIN,
            )
        entry = find_entry(entries, kind, default, where=default_reason)
        reason, losers = default_reason, []

    beat = tuple((why, name) for why, name in losers if name != entry.name)
    if beat:
        reason += f"; wins over {', '.join(f'{name} ({why})' for why, name in beat)}"
    notes = tuple(
        f"{found.reason}; add --{kind.label} {name} to submit"
        for name, found in ranked
        if found.score <= Score.AVAILABLE and name != entry.name
    )
    own = detections.get(entry.name)
    return Selection(
        choice=Choice(name=entry.name, reason=reason, distribution=entry.source),
        entry=entry,
        notes=notes,
        beat=beat,
        process=own.process if own is not None and own.score > Score.AVAILABLE else None,
    )


def choose_launcher(
    *,
    entries: Sequence[PluginEntry],
    asked: Sequence[Asked] = (),
    detections: Mapping[str, Detection] = _NO_DETECTIONS,
    devices: int = 1,
    nproc_per_node: int | None = None,
    nodes: int = 1,
) -> Selection:
    """Choose the launcher; raises as `choose` does.

    `devices` counts this machine's, `nproc_per_node` is what was asked for, `nodes` the most machines of the run. The
    default is torchrun where they make more than one process, else local.
    """
    per_node = devices if nproc_per_node is None else nproc_per_node
    if nodes > 1:
        default, reason = "torchrun", f"default: {nodes} machines"
    elif per_node > 1:
        what = (
            f"{per_node} processes"
            if nproc_per_node is not None
            else f"{devices} devices on this machine, one process each"
        )
        default, reason = "torchrun", f"default: {what}"
    else:
        default, reason = "local", "default: one process"
    return choose(
        kind=PluginKind.LAUNCHER,
        entries=entries,
        asked=asked,
        detections=detections,
        default=default,
        default_reason=reason,
    )


def choose_backend(
    *,
    entries: Sequence[PluginEntry],
    asked: Sequence[Asked] = (),
) -> Selection:
    """Choose the backend, ddp by default; raises as `choose` does. Nothing detects backends."""
    return choose(
        kind=PluginKind.BACKEND,
        entries=entries,
        asked=asked,
        default="ddp",
        default_reason="default",
    )


def _refuse_second_launch(kind: PluginKind, winner: Asked, strong: Sequence[tuple[str, Detection]]) -> None:
    """A rank of one launcher cannot be launched again by another. A group of one (an interactive shell of a
    scheduler) is no obstacle: nobody else waits for its ranks."""
    for name, found in strong:
        process = found.process
        if process is None or process.world_size < 2:
            continue
        if name == winner.name:
            return
        where = winner.source.where
        leave = {
            "flag": f"leave --{kind.label} out",
            "environment": f"unset {where}",
            "file": f"leave the {kind.label} out of {where}",
        }
        raise FtError(
            f"{where} asks for {winner.name}, but this process already is rank {process.rank} of"
            f" {process.world_size}, started by {name}",
            hint=f"{leave[winner.source.kind]}, or run ft outside of it",
            exit_code=ExitCode.USAGE,
        )


def _refuse_tie(kind: PluginKind, entries: Sequence[PluginEntry], winners: Sequence[tuple[str, Detection]]) -> None:
    if len(winners) < 2:
        return
    sources = {entry.name: entry.source for entry in entries}
    raise FtError(
        f"{len(winners)} {kind.label}s speak equally strongly for this environment",
        problems=[f"{name} ({sources.get(name, 'unknown')}): {found.reason}" for name, found in winners],
        hint=f"say which one: {' or '.join(f'--{kind.label} {name}' for name, _ in winners)}",
        exit_code=ExitCode.PLUGIN,
    )
