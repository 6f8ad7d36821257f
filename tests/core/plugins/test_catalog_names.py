"""What is installed is read from metadata alone, and quickly."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from typing import Any

import pytest

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plugins.catalog import find_entry, load_catalog
from fleettune_core.plugins.entries import PluginKind

LAUNCHERS = PluginKind.LAUNCHER


def test_the_built_ins_come_from_installed_metadata_like_anybody_elses() -> None:
    catalog = load_catalog()
    local = catalog.find("fleettune.launchers", "local")
    ddp = catalog.find("fleettune.backends", "ddp")
    assert local.value == "fleettune_core.launchers.local:LocalLauncher"
    assert ddp.value == "fleettune_core.backends.ddp:DdpBackend"
    for entry in (local, ddp):
        assert entry.builtin
        assert entry.source == f"fleettune-core {importlib.metadata.version('fleettune-core')}"
        assert type(catalog.load(entry)).__name__ == entry.value.partition(":")[2]


def test_reading_names_imports_no_plugin(install: Any) -> None:
    install("acme-plugin", {LAUNCHERS.value: {"acme": "acme_module:Launcher"}}, {"acme_module": "imported = True\n"})
    catalog = load_catalog()
    assert catalog.find(LAUNCHERS, "acme").source == "acme-plugin 1.0"
    assert "acme_module" not in sys.modules


def test_reading_names_imports_nothing_heavy_and_not_even_pluggy() -> None:
    program = (
        "import json, sys; from fleettune_core.plugins.catalog import load_catalog;"
        "load_catalog().find('fleettune.launchers', 'local'); print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "fleettune_core" in modules
    assert not modules & {"pluggy", "pydantic", "ruamel", "torch", "transformers", "trl", "accelerate", "datasets"}


def test_a_distribution_that_stands_on_the_path_twice_is_no_clash(install: Any) -> None:
    for site, version in (("old", "1.0"), ("new", "2.0")):
        names = {LAUNCHERS.value: {"acme": "acme_module:Launcher"}, "fleettune.launcher": {"typo": "acme_module:X"}}
        install("acme.Plugin" if site == "old" else "acme-plugin", names, version=version, site=site)
    catalog = load_catalog()
    assert catalog.find(LAUNCHERS, "acme").version == "2.0", "the first one on sys.path is what an import finds"
    assert [trouble.plugin for trouble in catalog.troubles if "acme" in trouble.distribution] == ["plugin typo"]


def test_what_a_shadowed_installation_offers_is_not_there(install: Any) -> None:
    install("acme-plugin", {LAUNCHERS.value: {"acme": "acme_module:Launcher"}}, version="1.0", site="old")
    install("acme-plugin", {"console_scripts": {"acme": "acme_module:main"}}, version="2.0", site="new")
    assert "acme" not in [entry.name for entry in load_catalog().entries(LAUNCHERS)]


def test_a_distribution_without_a_name_still_gives_its_plugins(install: Any) -> None:
    folder = install("acme-plugin", {LAUNCHERS.value: {"acme": "acme_module:Launcher"}})
    (folder / "acme_plugin-1.0.dist-info" / "METADATA").unlink()
    assert load_catalog().find(LAUNCHERS, "acme").source == "unknown ?"


def test_built_ins_come_first_then_names_in_order(install: Any) -> None:
    names = {LAUNCHERS.value: {"aaa": "acme_module:Launcher", "zzz": "acme_module:Launcher"}}
    install("acme-plugin", names)
    found = [entry.name for entry in load_catalog().entries(LAUNCHERS)]
    assert found[0] == "local"
    assert found[1:] == sorted(found[1:])
    assert {"aaa", "zzz"} <= set(found)


def test_entry_points_can_be_handed_over() -> None:
    point = importlib.metadata.EntryPoint(name="acme", value="acme:Acme", group="fleettune.backends")
    catalog = load_catalog([point])
    assert [entry.name for entry in catalog.entries(PluginKind.BACKEND)] == ["acme"]
    assert catalog.entries(LAUNCHERS) == ()


def test_an_unknown_name_gets_the_nearest_and_all_valid_ones(make_entry: Any) -> None:
    entries = [make_entry("local"), make_entry("torchrun")]
    with pytest.raises(FtError) as caught:
        find_entry(entries, LAUNCHERS, "torchrn", where="--launcher", unknown=ExitCode.USAGE)
    assert caught.value.exit_code is ExitCode.USAGE
    assert str(caught.value) == (
        "--launcher: no launcher is named 'torchrn' (did you mean torchrun?)\n"
        "hint: installed launchers: local, torchrun"
    )


def test_a_loaded_plugin_is_made_once(install: Any) -> None:
    source = """
        from fleettune_core.hookspecs import hookimpl

        class Launcher:
            @hookimpl
            def plan_launch(self, request): ...

        instance = Launcher()
    """
    names = {LAUNCHERS.value: {"acme": "acme_module:Launcher", "made": "acme_module:instance"}}
    install("acme-plugin", names, {"acme_module": source})
    catalog = load_catalog()
    plugin = catalog.load(catalog.find(LAUNCHERS, "acme"))
    assert catalog.load(catalog.find(LAUNCHERS, "acme")) is plugin
    instance = catalog.load(catalog.find(LAUNCHERS, "made"))
    assert instance is sys.modules["acme_module"].instance
