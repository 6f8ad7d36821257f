"""What `ft doctor` looks at: each check is one function from the environment to findings, and changes nothing.

Nothing heavy is imported: torch and its kin are looked up by their metadata.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from fleettune_cli import __version__
from fleettune_cli.plugin_rows import all_entries, listed
from fleettune_cli.units import format_bytes
from fleettune_cli.versions import OWN, version_of
from fleettune_core.errors import FtError

NUM_GIB_FREE = 5
"""Below this much free disk a run's model, checkpoints and caches may not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor. `state` is `ok`, `note` (training works, but look) or `bad` (training cannot work)."""

    topic: str
    state: str
    text: str
    hint: str | None = None
    """What to type."""


Check = Callable[[Mapping[str, str]], Iterator[Finding]]


def python(_env: Mapping[str, str]) -> Iterator[Finding]:
    """The interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 10) <= sys.version_info[:2] < (3, 14)
    yield Finding(
        topic="python",
        state="ok" if fits else "bad",
        text=f"{version} at {sys.executable}",
        hint=None if fits else "use Python 3.10 to 3.13",
    )


def own_distributions(_env: Mapping[str, str]) -> Iterator[Finding]:
    """Fleettune's own distributions: all of one version."""
    found = {name: version_of(name) for name in OWN}
    others = [f"{name} {version}" for name, version in found.items() if version not in (None, __version__)]
    missing = [name for name in ("fleettune-core",) if found[name] is None]
    text = ", ".join(f"{name} {version}" for name, version in found.items() if version is not None)
    if others or missing:
        packages = " ".join(f"{name}=={__version__}" for name in OWN if found[name] or name in missing)
        yield Finding(
            topic="fleettune",
            state="bad",
            text=f"{text or 'not installed'}; ft is {__version__}, and all of them must be",
            hint=f"pip install {packages}",
        )
    else:
        yield Finding(topic="fleettune", state="ok", text=text)


def training_libraries(_env: Mapping[str, str]) -> Iterator[Finding]:
    """Everything that the extra `[train]` names, by metadata: whether it is there, not whether it imports."""
    names = _names_of_extra("fleettune-core", "train")
    found = {name: version_of(name) for name in names}
    missing = [name for name, version in found.items() if version is None]
    present = ", ".join(f"{name} {version}" for name, version in found.items() if version is not None)
    if missing:
        yield Finding(
            topic="training",
            state="bad",
            text=f"not installed: {', '.join(missing)}",
            hint="pip install 'fleettune[train]'",
        )
    if present:
        yield Finding(topic="training", state="ok", text=present)
    from fleettune_core.config.trl_fields import made_from

    table, installed = made_from().get("trl"), found.get("trl")
    if installed is not None and table is not None and installed != table:
        yield Finding(
            topic="training",
            state="note",
            text=f"trl {installed} is installed; the names of its settings were taken from trl {table}",
            hint=f"pip install trl=={table}",
        )


def devices(env: Mapping[str, str]) -> Iterator[Finding]:
    """What a rank would own, whether it multiplies bf16, and how many cores this process may use."""
    from fleettune_core.plan.devices import detect_devices

    try:
        found = detect_devices(env)
    except FtError as error:
        yield Finding(topic="devices", state="bad", text=error.message, hint=error.hint)
        return
    count = f"{found.count} × " if found.count > 1 else ""
    yield Finding(
        topic="devices",
        state="ok",
        text=f"{count}{found.kind.value}: {found.name}, {format_bytes(found.memory_bytes)} of memory",
    )
    native = "multiplies bf16 natively" if found.bf16 else "does not multiply bf16 natively, so auto is fp32"
    yield Finding(topic="precision", state="ok", text=native)
    cores = os.cpu_count() or 1
    yield Finding(
        topic="cores",
        state="ok" if found.cpu_cores >= cores else "note",
        text=f"{found.cpu_cores} of {cores} cores may be used by this process",
        hint=None if found.cpu_cores >= cores else "a CPU binding or a cgroup limits it; see `taskset -p $$`",
    )


def folders(env: Mapping[str, str]) -> Iterator[Finding]:
    """Where runs and caches are written."""
    from fleettune_core.cache import cache_folder

    runs = Path.cwd() / "runs"
    yield _folder("runs", runs, "give a folder that you may write to with --run-dir DIR")
    yield _folder("cache", cache_folder(dict(env)), "set FT_CACHE_DIR to a folder that you may write to")


def hub(env: Mapping[str, str]) -> Iterator[Finding]:
    """What the environment says about the hub and telemetry."""
    offline = is_offline(env)
    yield Finding(
        topic="hub",
        state="note" if offline else "ok",
        text="HF_HUB_OFFLINE is set: models and data come from this machine alone" if offline else "may be asked",
        hint="unset HF_HUB_OFFLINE to download from the hub" if offline else None,
    )
    chosen = env.get("HF_HUB_DISABLE_TELEMETRY")
    yield Finding(
        topic="telemetry",
        state="ok",
        text="workers run with HF_HUB_DISABLE_TELEMETRY=1" if chosen is None else f"HF_HUB_DISABLE_TELEMETRY={chosen}",
    )


def plugins(env: Mapping[str, str]) -> Iterator[Finding]:
    """Every plugin: launchers with what they detect here, and what is wrong with one."""
    from fleettune_core.plugins.catalog import load_catalog
    from fleettune_core.plugins.detection import detect
    from fleettune_core.plugins.entries import PluginKind

    catalog = load_catalog()
    rows, others = listed(catalog, check=True, env=env)
    for entry, row in zip(all_entries(catalog), rows, strict=True):
        head = f"{row.name} [{row.source}]"
        if row.state != "ok":
            # A run that does not ask for this plugin is not harmed, so trouble is never `bad`.
            yield Finding(topic=row.kind, state="note", text=f"{head}: {row.state}", hint=row.hint)
            continue
        seen = None
        if entry.kind is PluginKind.LAUNCHER:
            try:
                seen = detect([entry], env, catalog.load)[0].get(entry.name)
            except FtError as error:
                yield Finding(topic=row.kind, state="bad", text=f"{head}: {error.message}", hint=error.hint)
                continue
        yield Finding(topic=row.kind, state="ok", text=head + (f": {seen.reason}" if seen is not None else ""))
    for trouble in others:
        text = f"{trouble.kind.value}: {trouble.plugin} ({trouble.distribution}): {trouble.message}"
        yield Finding(topic="plugin", state="note", text=" ".join(text.split()), hint=trouble.hint)


def is_offline(env: Mapping[str, str]) -> bool:
    """Whether the environment forbids to ask the hub, as huggingface_hub reads it."""
    return env.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


CHECKS: tuple[Check, ...] = (python, own_distributions, training_libraries, devices, folders, hub, plugins)


def _folder(topic: str, folder: Path, hint: str) -> Finding:
    """Whether a folder, or the nearest one above it that exists, can be written to, and has room."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Finding(topic=topic, state="bad", text=f"{folder} cannot be written: {error.strerror}", hint=hint)
    free = shutil.disk_usage(existing).free
    scarce = free < NUM_GIB_FREE * 2**30
    return Finding(
        topic=topic,
        state="note" if scarce else "ok",
        text=f"{folder} can be written, {format_bytes(free)} free",
        hint="make room: a run writes a model and its checkpoints" if scarce else None,
    )


def _names_of_extra(distribution: str, extra: str) -> list[str]:
    """Names of the distributions that an extra asks for."""
    import re

    try:
        requirements = requires(distribution) or []
    except PackageNotFoundError:
        return []
    mark = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    return [re.split(r"[^A-Za-z0-9._-]", item, maxsplit=1)[0] for item in requirements if mark.search(item)]
