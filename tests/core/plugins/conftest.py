"""Real distributions, made on the spot: metadata and modules in a folder that stands on `sys.path`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from fake_distribution import write_distribution
from fleettune_core.plugins.entries import PluginEntry, PluginKind


class Install(Protocol):
    def __call__(
        self,
        distribution: str,
        entry_points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str] = ...,
        *,
        version: str = ...,
        requires: Sequence[str] = ...,
        site: str = ...,
    ) -> Path: ...


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution: `install("acme", {"fleettune.launchers": {"acme": "acme:Acme"}}, {"acme": source})`.

    Returns the folder on `sys.path`. Modules that a test imports from there are forgotten after it.
    """
    before = set(sys.modules)

    def put(
        distribution: str,
        entry_points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
        site: str = "site",
    ) -> Path:
        folder = tmp_path / site
        write_distribution(folder, distribution, entry_points, modules, version=version, requires=requires)
        if str(folder) not in sys.path:
            monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        return folder

    yield put
    for name in set(sys.modules) - before:
        source = getattr(sys.modules[name], "__file__", None)
        if source and Path(source).is_relative_to(tmp_path):
            del sys.modules[name]


def make_entry(
    name: str, kind: PluginKind = PluginKind.LAUNCHER, distribution: str = "acme", *, builtin: bool = False
) -> PluginEntry:
    return PluginEntry(
        name=name, kind=kind, distribution=distribution, version="1.0", value=f"{name}:Plugin", builtin=builtin
    )


@pytest.fixture(name="make_entry")
def make_entry_fixture() -> object:
    """`make_entry(name, kind, distribution)`: a catalog entry that nothing is installed for."""
    return make_entry
