"""The plugins of a run, chosen and with their options checked, as far as what was said can be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleettune_core.config.source import LoadedConfig
from fleettune_core.errors import nearest
from fleettune_core.plan.mistakes import Mistakes
from fleettune_core.plan.options import misspelt_settings, options_of_no_plugin, plugin_options
from fleettune_core.plugins.catalog import Catalog
from fleettune_core.plugins.detection import detect
from fleettune_core.plugins.entries import PluginKind
from fleettune_core.plugins.relay import Relay, open_relay
from fleettune_core.plugins.selection import Selection, asked_for, choose_backend, choose_launcher
from fleettune_core.types import Devices, Environment, ProcessInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Launcher and backend, and what surrounds their choice. What is None has left its mistake."""

    launcher: Selection | None
    launcher_name: str
    """The chosen one, or the one that was probably meant; empty where nobody knows."""
    launcher_options: Any
    """An instance of its `Options`; None where it has none."""
    backend: Selection | None
    backend_options: Any
    """An instance of its `Options`; None where it has none, or they are a mistake."""
    relay: Relay | None
    """None unless both are chosen."""
    launch_is_told: bool
    """Whether nothing under `launch:` is a mistake already, so that the launcher can judge what it is asked for."""
    backend_is_told: bool
    """Whether nothing under `backend:` is a mistake already."""
    misspelt: frozenset[str]
    """Core's settings under `launch:` that misspelt keys probably stand for."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def process(self) -> ProcessInfo | None:
        """Set when this process already is a rank of the chosen launcher."""
        return self.launcher.process if self.launcher is not None else None


def choose_plugins(
    loaded: LoadedConfig,
    env: Environment,
    devices: Devices,
    catalog: Catalog,
    nodes: tuple[int, int] | None,
    mistakes: Mistakes,
) -> Chosen:
    """Choose launcher and backend and check their options; what is wrong goes to `mistakes`.

    `nodes`: (min, max) of the machines, None where that is a mistake already.
    """
    launchers = catalog.entries(PluginKind.LAUNCHER)
    detections, troubles = detect(launchers, env, catalog.load)
    asked = asked_for(PluginKind.LAUNCHER, loaded, env)
    launcher = backend = relay = options = backend_options = None
    misspelt = misspelt_settings(loaded, "launch")
    unclear = {path for path in loaded.wrong | misspelt if path.startswith("launch.")}
    with mistakes:
        launcher = choose_launcher(
            entries=launchers,
            asked=asked,
            detections=detections,
            devices=devices.count,
            nproc_per_node=loaded.config.launch.nproc_per_node,
            nodes=nodes[1] if nodes is not None else 1,
        )
    with mistakes:
        backend = choose_backend(
            entries=catalog.entries(PluginKind.BACKEND), asked=asked_for(PluginKind.BACKEND, loaded, env)
        )
    # A launcher that numbers chose is another one than the one that was meant, where the numbers are mistakes.
    by_numbers = launcher is not None and not asked and launcher.process is None
    unknown = launcher is None or "launch.launcher" in unclear or (by_numbers and (bool(unclear) or nodes is None))
    wrong_options = Mistakes()
    with wrong_options:
        if launcher is None or unknown:
            options_of_no_plugin(catalog, PluginKind.LAUNCHER, loaded, "launch")
        else:
            options = plugin_options(catalog, launcher.entry, loaded, "launch")
    told = not (wrong_options or unclear) and nodes is not None
    with mistakes:
        wrong_options.raise_all()
    wrong_options = Mistakes()
    with wrong_options:
        if backend is not None and "backend.backend" not in loaded.wrong:
            backend_options = plugin_options(catalog, backend.entry, loaded, "backend")
        else:
            options_of_no_plugin(catalog, PluginKind.BACKEND, loaded, "backend")
    backend_told = not wrong_options
    with mistakes:
        wrong_options.raise_all()
    if launcher is not None and backend is not None:
        relay = open_relay(catalog, launcher=launcher.entry, backend=backend.entry)
    close = nearest(asked[0].name, [entry.name for entry in launchers]) if asked else []
    return Chosen(
        launcher=launcher,
        launcher_name=launcher.entry.name if launcher is not None else next(iter(close), ""),
        launcher_options=options,
        backend=backend,
        backend_options=backend_options,
        relay=relay,
        launch_is_told=told,
        backend_is_told=backend_told,
        misspelt=misspelt,
        notes=tuple(note for choice in (launcher, backend) if choice is not None for note in choice.notes),
        warnings=tuple(
            str(trouble) for trouble in (*catalog.troubles, *troubles, *(relay.troubles if relay is not None else ()))
        ),
    )
