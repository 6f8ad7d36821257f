"""The commands that look and change nothing: `ft plugins`, `ft doctor`."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fake_distribution import write_distribution
from fleettune_cli import checks
from fleettune_cli.checks import Finding
from fleettune_cli.commands.doctor import lines
from fleettune_cli.commands.plugins import listed
from fleettune_cli.main import cli
from fleettune_cli.plugin_flags import PLUGIN_FLAGS
from fleettune_core.cache import cache_folder
from fleettune_core.errors import ExitCode
from fleettune_core.plugins.catalog import load_catalog
from fleettune_core.plugins.entries import PluginKind
from fleettune_core.plugins.options import describe_options

FIRST_PARTY = "fleettune-"


def ft(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), prog_name="ft")


@pytest.fixture
def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution on `sys.path` whose launcher cannot be imported."""
    info = tmp_path / "broken_launcher-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-launcher\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[fleettune.launchers]\nbroken = broken_launcher:Launcher\n")
    (tmp_path / "broken_launcher.py").write_text("raise RuntimeError('the cluster library is too old')\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_the_list_names_what_is_installed_without_importing_it(broken_plugin: None) -> None:
    sys.modules.pop("broken_launcher", None)
    result = ft("plugins", "list")
    assert result.exit_code == 0
    heading, *rows = result.stdout.splitlines()
    assert heading.split() == ["name", "kind", "from", "state"]
    assert [row.split(maxsplit=4) for row in rows if row.startswith(("local ", "broken "))] == [
        ["local", "launcher", "fleettune-core", "0.1.0", "installed (built in)"],
        ["broken", "launcher", "broken-launcher", "1.2", "installed"],
    ]
    assert "broken_launcher" not in sys.modules


def test_the_check_tells_which_plugin_is_broken_and_why_and_hides_no_good_one(broken_plugin: None) -> None:
    result = ft("plugins", "list", "--check", "--json")
    assert result.exit_code == ExitCode.PLUGIN
    states = {row["name"]: row["state"] for row in json.loads(result.stdout)["plugins"]}
    assert states["broken"].startswith("import-error: ")
    assert "the cluster library is too old" in states["broken"]
    assert states["local"] == states["ddp"] == "ok"


@pytest.fixture
def deepspeed_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our backend as pip leaves it with --no-deps: a distribution on `sys.path` that requires what is not there."""
    entry_points = {"fleettune.backends": {"deepspeed": "fleettune_backend_deepspeed:DeepSpeedBackend"}}
    requires = ["no-such-library<0.20,>=0.19.8"]
    write_distribution(tmp_path, "fleettune-backend-deepspeed", entry_points, version="0.1.0", requires=requires)
    monkeypatch.syspath_prepend(tmp_path)


def test_the_list_tells_what_a_plugin_lacks(deepspeed_without_its_library: None) -> None:
    result = ft("plugins", "list")
    assert result.exit_code == 0
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("deepspeed ")]
    assert row.split(maxsplit=4) == [
        *("deepspeed", "backend", "fleettune-backend-deepspeed", "0.1.0"),
        "incomplete: no-such-library is not installed",
    ]
    assert result.stderr == "hint: backend deepspeed: pip install 'no-such-library<0.20,>=0.19.8'\n"
    assert ft("plugins", "list", "--check").exit_code == ExitCode.PLUGIN


def test_a_run_that_asks_for_it_ends_in_the_plan_with_what_to_type(
    deepspeed_without_its_library: None, tiny_model: Path, tiny_rows: Path
) -> None:
    words = ["train", "--model", str(tiny_model), "--dataset", str(tiny_rows), "--max-steps", "1"]
    result = ft(*words, "--backend", "deepspeed", "--dry-run")
    assert result.exit_code == ExitCode.PLUGIN
    assert result.stderr == (
        "error: backend deepspeed (fleettune-backend-deepspeed 0.1.0): no-such-library is not installed\n"
        "hint: pip install 'no-such-library<0.20,>=0.19.8'\n"
    )
    assert ft(*words, "--dry-run").exit_code == 0


@pytest.fixture
def only_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation of fleettune-core and fleettune-cli alone."""
    points = [
        point
        for group in ("fleettune.launchers", "fleettune.backends")
        for point in entry_points(group=group)
        if point.dist is not None and point.dist.name == "fleettune-core"
    ]
    catalog = load_catalog(points)
    monkeypatch.setattr("fleettune_core.plugins.catalog.load_catalog", lambda: catalog)


def test_the_list_tells_which_of_ours_are_not_installed_and_that_is_no_fault(only_core: None) -> None:
    result = ft("plugins", "list")
    assert result.exit_code == 0
    assert result.stdout == (
        "name       kind      from                  state\n"
        "local      launcher  fleettune-core 0.1.0  installed (built in)\n"
        "ddp        backend   fleettune-core 0.1.0  installed (built in)\n"
        "torchrun   launcher  -                     not installed\n"
        "slurm      launcher  -                     not installed\n"
        "fsdp       backend   -                     not installed\n"
        "deepspeed  backend   -                     not installed\n"
    )
    assert result.stderr.splitlines()[-1] == "hint: backend deepspeed: pip install fleettune-backend-deepspeed"
    assert ft("plugins", "list", "--check").exit_code == 0
    rows = json.loads(ft("plugins", "list", "--json").stdout)["plugins"]
    assert rows[-1] == {
        "name": "deepspeed",
        "kind": "backend",
        "distribution": "fleettune-backend-deepspeed",
        "version": None,
        "builtin": False,
        "state": "not installed",
        "hint": "pip install fleettune-backend-deepspeed",
    }


def test_show_of_one_of_ours_that_is_not_installed_says_what_installs_it(only_core: None) -> None:
    result = ft("plugins", "show", "fsdp")
    assert result.exit_code == ExitCode.PLUGIN
    assert result.stderr == "error: the backend fsdp is not installed\nhint: pip install fleettune-backend-fsdp\n"


def write_launcher(folder: Path, source: str) -> None:
    """Install a launcher `odd` of the distribution `odd-launcher` into `folder`."""
    entry_points = {"fleettune.launchers": {"odd": "odd_launcher:Launcher"}}
    write_distribution(folder, "odd-launcher", entry_points, {"odd_launcher": source})


@pytest.fixture
def odd_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`odd_launcher(body)`: a launcher `odd` on `sys.path`, of whose class this is the body."""

    def install(body: str) -> None:
        header = "import time\nfrom dataclasses import dataclass\nfrom pathlib import Path\n"
        header += "from fleettune_core.config.fields import setting\nfrom fleettune_core.hookspecs import hookimpl\n"
        write_launcher(tmp_path, f"{header}class Launcher:\n{textwrap.indent(textwrap.dedent(body), '    ')}")
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("odd_launcher", None)


RAISES = """
    @hookimpl
    def detect_environment(self, env):
        raise ValueError("no cluster")
"""
SLOW = """
    @hookimpl
    def detect_environment(self, env):
        time.sleep(0.02)
"""


@pytest.mark.parametrize(("body", "kind"), [(RAISES, "detection-raises"), (SLOW, "detection-slow")])
def test_the_check_asks_launchers_what_they_detect(odd_launcher: Callable[[str], None], body: str, kind: str) -> None:
    odd_launcher(body)
    result = ft("plugins", "list", "--check", "--json")
    assert result.exit_code == ExitCode.PLUGIN
    states = {row["name"]: row["state"] for row in json.loads(result.stdout)["plugins"]}
    assert states["odd"].startswith(f"{kind}: ")
    assert states["torchrun"] == "ok"


def test_an_environment_that_contradicts_itself_is_no_trouble_with_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ft("plugins", "list", "--check").exit_code == 0
    findings = json.loads(ft("doctor", "--json").stdout)
    (bad,) = [finding for finding in findings if finding["state"] == "bad"]
    assert bad["topic"] == "launcher"
    assert bad["text"].startswith("torchrun [")


def test_the_doctor_marks_each_plugin_that_is_in_trouble(broken_plugin: None) -> None:
    found = [finding for finding in checks.plugins({}) if "broken" in finding.text]
    assert [(finding.topic, finding.state) for finding in found] == [("launcher", "note")]
    assert "the cluster library is too old" in found[0].text
    assert {finding.state for finding in checks.plugins({}) if "broken" not in finding.text} == {"ok"}


def test_the_doctor_marks_plugins_whose_name_clashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        write_distribution(tmp_path, name, {"fleettune.backends": {"same": f"{name}:Backend"}})
    monkeypatch.syspath_prepend(tmp_path)
    found = [finding for finding in checks.plugins({}) if finding.text.startswith("same [")]
    assert [(finding.topic, finding.state) for finding in found] == [("backend", "note")] * 2
    assert all("duplicate-name" in finding.text for finding in found)


def test_show_tells_options_of_every_type_also_in_json(odd_launcher: Callable[[str], None]) -> None:
    odd_launcher(
        """
        @dataclass(frozen=True)
        class Options:
            scratch: Path = setting(Path("/scratch"), "Where files go.")
            ports: tuple[int, ...] = setting((1, 2), "Ports.")
            queue: str | None = setting(None, "Queue.")

        @hookimpl
        def plan_launch(self, request): ...
        """
    )
    result = ft("plugins", "show", "odd", "--json")
    assert result.exit_code == 0, result.output
    options = {option["name"]: (option["type"], option["default"]) for option in json.loads(result.stdout)["options"]}
    assert options == {"scratch": ("Path", "/scratch"), "ports": ("tuple[int, ...]", [1, 2]), "queue": ("str", None)}


def test_a_plugin_that_prints_does_not_spoil_json(odd_launcher: Callable[[str], None]) -> None:
    odd_launcher('print("hello")\n@hookimpl\ndef plan_launch(self, request): ...\n')
    result = ft("plugins", "list", "--check", "--json")
    assert json.loads(result.stdout)["plugins"]
    assert "hello" in result.stderr


def test_a_cache_folder_may_be_named_from_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert cache_folder({"FT_CACHE_DIR": "~/x"}) == Path("/home/ada/x")


def test_a_check_of_good_plugins_is_a_success() -> None:
    result = ft("plugins", "list", "--check")
    assert result.exit_code == 0, result.output


def test_trouble_that_belongs_to_no_line_is_told_beside_the_list() -> None:
    points = [EntryPoint(name="x", value="x:X", group="fleettune.launcher")]
    rows, others = listed(load_catalog(points), check=False)
    assert rows == []
    assert [trouble.kind.value for trouble in others] == ["wrong-group"]


def test_show_tells_docs_hooks_and_how_each_option_is_typed() -> None:
    text = ft("plugins", "show", "ddp").stdout
    for part in (
        "backend ddp  fleettune-core",
        "reduce_grads(context, model, sync)",
        "--grad-compression none|bf16|powersgd  (default none)",
        "--set backend.bucket_mb=float  (default 25.0)",
    ):
        assert part in text
    page = json.loads(ft("plugins", "show", "ddp", "--json").stdout)
    assert page["kind"] == "backend"
    assert page["options"][0]["say"] == "--grad-compression"


def test_show_of_an_unknown_plugin_names_the_nearest_one() -> None:
    result = ft("plugins", "show", "tochrun")
    assert result.exit_code == ExitCode.PLUGIN
    assert result.stderr.splitlines()[0] == "error: no plugin is named 'tochrun' (did you mean torchrun?)"


def test_show_of_a_broken_plugin_says_why(broken_plugin: None) -> None:
    result = ft("plugins", "show", "broken")
    assert result.exit_code == ExitCode.PLUGIN
    assert "the cluster library is too old" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_table_of_plugin_flags_is_what_first_party_plugins_declare() -> None:
    catalog = load_catalog()
    sections = {PluginKind.LAUNCHER: "launch", PluginKind.BACKEND: "backend"}
    declared = {
        option.flags[0]: (f"{section}.{option.name}", entry.name, option.choices, option.default)
        for kind, section in sections.items()
        for entry in catalog.entries(kind)
        if entry.distribution.startswith(FIRST_PARTY)
        for option in describe_options(catalog.load(entry))
        if option.flags
    }
    assert {entry.flag for entry in PLUGIN_FLAGS} == set(declared)
    for entry in PLUGIN_FLAGS:
        path, plugin, choices, default = declared[entry.flag]
        assert (entry.path, entry.plugin, entry.choices) == (path, plugin, choices)
        assert default is None or f"Default: {default}." in entry.help


def test_the_doctor_finds_this_installation_fit() -> None:
    result = ft("doctor", "--json")
    findings = json.loads(result.stdout)
    bad = [finding for finding in findings if finding["state"] == "bad"]
    assert bad == []
    assert result.exit_code == 0
    topics = {finding["topic"] for finding in findings}
    assert topics >= {"python", "fleettune", "training", "devices", "precision", "cores", "runs", "cache", "launcher"}


def test_the_doctor_fails_when_training_is_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_env: Mapping[str, str]) -> Iterator[Finding]:
        yield Finding(topic="training", state="bad", text="not installed: torch", hint="pip install 'fleettune[train]'")

    monkeypatch.setattr(checks, "CHECKS", (checks.python, missing))
    result = ft("doctor")
    assert result.exit_code == ExitCode.TRAINING
    assert "✗ training    not installed: torch" in result.stdout
    assert "→ pip install 'fleettune[train]'" in result.stdout


def test_a_missing_library_is_found_by_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version_of", lambda name: None if name == "torch" else "1.0")
    states = {finding.state: finding for finding in checks.training_libraries({})}
    assert states["bad"].text == "not installed: torch"
    assert "peft 1.0" in states["ok"].text


def test_versions_that_are_not_in_lockstep_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version_of", lambda name: "9.9" if name == "fleettune-core" else "0.1.0")
    (finding,) = checks.own_distributions({})
    assert finding.state == "bad"
    assert "fleettune-core 9.9" in finding.text


def test_a_cache_below_a_file_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    states = {finding.topic: finding for finding in checks.folders({"FT_CACHE_DIR": str(tmp_path / "file" / "cache")})}
    assert states["cache"].state == "bad"
    assert "FT_CACHE_DIR" in (states["cache"].hint or "")


def test_offline_is_a_note() -> None:
    states = {finding.topic: finding.state for finding in checks.hub({"HF_HUB_OFFLINE": "1"})}
    assert states["hub"] == "note"
    assert {finding.topic: finding.state for finding in checks.hub({})}["hub"] == "ok"


def test_the_doctors_lines_fit_the_terminal() -> None:
    finding = Finding(topic="training", state="note", text="word " * 60, hint="type " * 40)
    assert max(map(len, map(unstyled, lines(finding, 80)))) <= 80


def unstyled(line: str) -> str:
    import click

    return click.unstyle(line)
