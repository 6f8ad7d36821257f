"""Each of the eleven kinds of plugin trouble, with a real distribution: a record, and never a crash."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plugins.catalog import Catalog, load_catalog
from fleettune_core.plugins.completeness import incomplete
from fleettune_core.plugins.detection import detect
from fleettune_core.plugins.entries import PluginKind
from fleettune_core.plugins.relay import open_relay
from fleettune_core.plugins.trouble import PluginTroubleError, Trouble, TroubleKind
from fleettune_core.types import Score

LAUNCHERS = PluginKind.LAUNCHER.value

GOOD = """
    from fleettune_core.hookspecs import hookimpl
    from fleettune_core.types import Detection, Score

    class Launcher:
        @hookimpl
        def detect_environment(self, env):
            return Detection(score=Score.INSIDE, reason="inside good")

        @hookimpl
        def plan_launch(self, request):
            return "a plan"
"""


def launcher(body: str, header: str = "") -> str:
    """Source of a module with a class `Launcher` of this body."""
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    return f"from fleettune_core.hookspecs import hookimpl\n{header}\nclass Launcher:\n{lines}\n"


def load_trouble(install: Any, source: str, *, group: str = LAUNCHERS, **options: Any) -> Trouble:
    """The record for a plugin `acme` of a distribution `acme-plugin`, which must not load."""
    install("acme-plugin", {group: {"acme": "acme_module:Launcher"}}, {"acme_module": source}, **options)
    catalog = load_catalog()
    with pytest.raises(PluginTroubleError) as caught:
        catalog.load(catalog.find(group, "acme"))
    assert caught.value.exit_code is ExitCode.PLUGIN
    trouble = caught.value.trouble
    assert trouble.distribution == "acme-plugin 1.0"
    assert "acme" in trouble.plugin
    assert len(str(trouble).splitlines()) == 1
    assert trouble.kind.value in str(trouble)
    return trouble


def test_there_are_exactly_eleven_kinds() -> None:
    assert {kind.value for kind in TroubleKind} == {
        "import-error",
        "wrong-signature",
        "misspelt-hook",
        "duplicate-name",
        "wrong-group",
        "options-rejected",
        "detection-raises",
        "detection-slow",
        "hook-raises",
        "missing-extra",
        "incomplete",
    }


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_module_anywhere\n", ["no_such_module_anywhere"]),
        ("raise RuntimeError('broken at\\nimport')\n", ["RuntimeError: broken at import", "acme_module.py:1"]),
        ("def broken(:\n", ["SyntaxError", "acme_module.py:1"]),
        ("import sys\nsys.exit(0)\n", ["SystemExit"]),
        ("class Launchr: pass\n", ["acme_module", "Launcher"]),
        (launcher("def __init__(self, port): ..."), ["cannot be called without arguments", "port"]),
    ],
    ids=["module-missing", "raises", "syntax", "exits", "no-such-object", "needs-arguments"],
)
def test_import_error_says_what_was_found_and_what_is_wrong(install: Any, source: str, words: list[str]) -> None:
    trouble = load_trouble(install, source)
    assert trouble.kind is TroubleKind.IMPORT_ERROR
    for word in words:
        assert word in str(trouble)


def test_an_unreadable_entry_point_file_is_an_import_error_of_that_distribution_alone(install: Any) -> None:
    folder = install("acme-plugin", {LAUNCHERS: {"acme": "acme_module:Launcher"}})
    install("good-plugin", {LAUNCHERS: {"good": "good_module:Launcher"}}, {"good_module": GOOD})
    (folder / "acme_plugin-1.0.dist-info" / "entry_points.txt").write_text("[fleettune.launchers]\nno equals sign\n")
    catalog = load_catalog()
    names = [entry.name for entry in catalog.entries(LAUNCHERS)]
    assert "good" in names
    assert "acme" not in names
    if sys.version_info < (3, 12):  # Later versions pass such a line over.
        (trouble,) = [trouble for trouble in catalog.troubles if "acme-plugin" in trouble.distribution]
        assert trouble.kind is TroubleKind.IMPORT_ERROR


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("@hookimpl\ndef plan_launch(self, reqest): ...", ["'reqest'", "plan_launch(request)", "did you mean request"]),
        ("@hookimpl\ndef plan_launch(self, request, extra): ...", ["'extra'", "plan_launch(request)"]),
        ("@hookimpl\ndef plan_launch(self, request=None): ...", ["default", "plan_launch(request)"]),
        ("@hookimpl\ndef plan_launch(self, *, request): ...", ["keyword only", "plan_launch(request)"]),
        ("@hookimpl\ndef plan_launch(request): ...", ["lacks self", "plan_launch(request)"]),
        ("@hookimpl(wrapper=True)\ndef plan_launch(self, request): return 1", ["plan_launch"]),
    ],
    ids=["renamed", "surplus", "default", "keyword-only", "no-self", "wrapper-without-yield"],
)
def test_wrong_signature_names_the_hook_and_the_contract(install: Any, body: str, words: list[str]) -> None:
    trouble = load_trouble(install, launcher(body))
    assert trouble.kind is TroubleKind.WRONG_SIGNATURE
    for word in words:
        assert word in str(trouble)


@pytest.mark.parametrize("decoration", ["@property", "@Explodes"])
def test_an_attribute_that_raises_does_not_hide_what_else_is_wrong(install: Any, decoration: str) -> None:
    header = "class Explodes:\n    def __init__(self, f): ...\n    def __get__(self, *_): raise OSError('no disk')\n"
    body = f"{decoration}\ndef aaa(self):\n    raise OSError('no disk')\n@hookimpl\ndef plan_launch(self, reqest): ..."
    trouble = load_trouble(install, launcher(body, header))
    # Older versions of pluggy read every attribute, and then that is the trouble.
    assert trouble.kind in {TroubleKind.WRONG_SIGNATURE, TroubleKind.IMPORT_ERROR}
    assert "reqest" in trouble.message or "no disk" in trouble.message


def test_a_hook_may_take_fewer_arguments_than_the_contract(install: Any) -> None:
    body = "@hookimpl\ndef plan_launch(self):"
    body += "\n    return LaunchPlan(launcher='acme', argv=(), environment={}, run_dir=None)"
    source = launcher(body, "from fleettune_core.types import LaunchPlan")
    install("acme-plugin", {LAUNCHERS: {"acme": "acme_module:Launcher"}}, {"acme_module": source})
    catalog = load_catalog()
    relay = open_relay(catalog, launcher=catalog.find(LAUNCHERS, "acme"))
    assert relay.call("plan_launch", request=None).launcher == "acme"


def test_a_plugin_that_prints_while_it_is_imported_or_made_does_not_reach_stdout(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "def __init__(self): print('made')\n@hookimpl\ndef plan_launch(self, request): ..."
    source = launcher(body, "print('imported')")
    install("acme-plugin", {LAUNCHERS: {"acme": "acme_module:Launcher"}}, {"acme_module": source})
    catalog = load_catalog()
    catalog.load(catalog.find(LAUNCHERS, "acme"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "imported\nmade\n"


def test_misspelt_hook_names_the_nearest_hook(install: Any) -> None:
    trouble = load_trouble(install, launcher("@hookimpl\ndef plan_lunch(self, request): ..."))
    assert trouble.kind is TroubleKind.MISSPELT_HOOK
    assert "plan_lunch" in trouble.message
    assert trouble.hint == "call it plan_launch"


def test_an_optional_hook_of_another_version_is_no_trouble(install: Any) -> None:
    body = "@hookimpl(optionalhook=True)\ndef later(self): ...\n@hookimpl\ndef plan_launch(self, request): ..."
    install("acme-plugin", {LAUNCHERS: {"acme": "acme_module:Launcher"}}, {"acme_module": launcher(body)})
    catalog = load_catalog()
    plugin = catalog.load(catalog.find(LAUNCHERS, "acme"))
    assert type(plugin).__name__ == "Launcher"


def test_duplicate_name_is_an_error_only_for_who_asks_and_names_both_distributions(install: Any) -> None:
    for name in ("first", "second"):
        install(f"{name}-plugin", {LAUNCHERS: {"acme": f"{name}_module:Launcher"}}, {f"{name}_module": GOOD})
    catalog = load_catalog()
    (trouble,) = [trouble for trouble in catalog.troubles if trouble.kind is TroubleKind.DUPLICATE_NAME]
    assert trouble.distribution == "first-plugin 1.0 and second-plugin 1.0"
    assert catalog.find(LAUNCHERS, "local").distribution == "fleettune-core"
    with pytest.raises(FtError) as caught:
        catalog.find(LAUNCHERS, "acme")
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert "first-plugin 1.0" in str(caught.value)
    assert "second-plugin 1.0" in str(caught.value)


@pytest.mark.parametrize(("group", "name"), [(LAUNCHERS, "local"), (PluginKind.BACKEND.value, "ddp")])
def test_an_installed_plugin_never_hides_a_built_in(install: Any, group: str, name: str) -> None:
    install("acme-plugin", {group: {name: "acme_module:Launcher"}}, {"acme_module": GOOD})
    catalog = load_catalog()
    entry = catalog.find(group, name)
    assert entry.builtin
    assert entry.distribution == "fleettune-core"
    (trouble,) = [trouble for trouble in catalog.troubles if trouble.distribution == "acme-plugin 1.0"]
    assert trouble.kind is TroubleKind.DUPLICATE_NAME
    assert "fleettune-core" in trouble.message


@pytest.mark.parametrize("group", ["fleettune.launcher", "fleettune_launchers", "fleetune.launchers"])
def test_a_misspelt_group_is_reported_with_the_nearest_one(install: Any, group: str) -> None:
    install("acme-plugin", {group: {"acme": "acme_module:Launcher"}}, {"acme_module": GOOD})
    (trouble,) = [trouble for trouble in load_catalog().troubles if trouble.distribution == "acme-plugin 1.0"]
    assert trouble.kind is TroubleKind.WRONG_GROUP
    assert group in trouble.message
    assert trouble.hint == "declare it in the group fleettune.launchers"


def test_a_group_of_a_plugins_own_is_no_trouble(install: Any) -> None:
    install("acme-plugin", {"fleettune_acme.queues": {"acme": "acme_module:Launcher"}}, {"acme_module": GOOD})
    assert not [trouble for trouble in load_catalog().troubles if trouble.distribution == "acme-plugin 1.0"]


@pytest.mark.parametrize(
    ("group", "body", "right_group"),
    [
        (LAUNCHERS, "def wrap_model(self, context, model, optimizer): ...", "fleettune.backends"),
        (PluginKind.BACKEND.value, "def plan_launch(self, request): ...", "fleettune.launchers"),
    ],
)
def test_a_plugin_with_the_hooks_of_another_group_is_in_the_wrong_group(
    install: Any, group: str, body: str, right_group: str
) -> None:
    trouble = load_trouble(install, launcher(f"@hookimpl\n{body}"), group=group)
    assert trouble.kind is TroubleKind.WRONG_GROUP
    assert trouble.hint == f"declare it in the group {right_group}"


def test_a_plugin_that_forgot_to_mark_its_hooks_is_told_so(install: Any) -> None:
    trouble = load_trouble(install, launcher("def plan_launch(self, request): ..."))
    assert trouble.kind is TroubleKind.WRONG_GROUP
    assert "mark plan_launch with" in str(trouble)


SETTING = "import dataclasses\nfrom dataclasses import dataclass\nfrom fleettune_core.config.fields import setting\n"
PLAN = "@hookimpl\ndef plan_launch(self, request): ...\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("Options = {'queue': 'a'}", "not a dataclass"),
        ("class Options:\n    queue: str = 'a'", "not a dataclass"),
        ("@dataclass\nclass Options:\n    queue: str = setting('a', 'Queue.')", "not frozen"),
        ("@dataclass(frozen=True)\nclass Options:\n    queue: str = 'a'", "queue"),
        ("@dataclass(frozen=True)\nclass Options:\n    more: dict = dataclasses.field(default_factory=dict)", "more"),
        ("@dataclass(frozen=True)\nclass Options:\n    queue: str = setting('a', ' ')", "no help text"),
        ("@dataclass(frozen=True)\nclass Options:\n    queue: 'NoSuchType' = setting('a', 'Queue.')", "NoSuchType"),
        ("@dataclass(frozen=True)\nclass Options:\n    nodes: int = setting(1, 'Nodes.')", "already a setting of core"),
        ("@dataclass(frozen=True)\nclass Options:\n    q: int = setting(1, 'Q.', flag='--seed')", "--seed"),
    ],
)
def test_options_rejected_when_nobody_could_use_or_read_them(install: Any, options: str, words: str) -> None:
    trouble = load_trouble(install, launcher(f"{options}\n{PLAN}", SETTING))
    assert trouble.kind is TroubleKind.OPTIONS_REJECTED
    assert words in trouble.message


def test_detection_that_raises_is_a_record_and_does_not_hide_a_good_one(install: Any) -> None:
    bad = launcher("@hookimpl\ndef detect_environment(self, env): return env['NO_SUCH_VARIABLE']")
    install("acme-plugin", {LAUNCHERS: {"acme": "acme_module:Launcher"}}, {"acme_module": bad})
    install("good-plugin", {LAUNCHERS: {"good": "good_module:Launcher"}}, {"good_module": GOOD})
    catalog = load_catalog()
    detections, troubles = detect(catalog.entries(LAUNCHERS), {}, catalog.load)
    assert detections["good"].score is Score.INSIDE
    (trouble,) = troubles
    assert trouble.kind is TroubleKind.DETECTION_RAISES
    assert trouble.distribution == "acme-plugin 1.0"
    assert "KeyError" in trouble.message


def test_detection_that_is_slow_is_a_record_and_keeps_its_answer(install: Any) -> None:
    slow = GOOD.replace("return Detection", "import time; time.sleep(0.006); return Detection")
    install("acme-plugin", {LAUNCHERS: {"acme": "acme_module:Launcher"}}, {"acme_module": slow})
    catalog = load_catalog()
    detections, troubles = detect([catalog.find(LAUNCHERS, "acme")], {}, catalog.load)
    assert detections["acme"].reason == "inside good"
    (trouble,) = troubles
    assert trouble.kind is TroubleKind.DETECTION_SLOW
    assert "5 ms are allowed" in trouble.message


def test_hook_that_raises_names_plugin_distribution_hook_and_cause(install: Any) -> None:
    source = launcher("@hookimpl\ndef plan_launch(self, request): return 1 / 0")
    install("acme-plugin", {LAUNCHERS: {"acme": "acme_module:Launcher"}}, {"acme_module": source})
    catalog = load_catalog()
    relay = open_relay(catalog, launcher=catalog.find(LAUNCHERS, "acme"))
    with pytest.raises(PluginTroubleError) as caught:
        relay.call("plan_launch", request=None)
    assert caught.value.trouble.kind is TroubleKind.HOOK_RAISES
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for word in ("launcher acme", "acme-plugin 1.0", "plan_launch", "ZeroDivisionError", "acme_module.py"):
        assert word in str(caught.value)


EXTRAS = [
    "acme-engine>=2; extra == 'engine'",
    "acme-engine>=2 ; extra == 'all'",
    "other; extra == 'all'",
    "plain-one",
    "xml-acme; extra == 'xml'",
]


@pytest.mark.parametrize(
    ("module", "extra"), [("acme_engine", "engine"), ("acme_engine.runtime", "engine"), ("xml.acme", "xml")]
)
def test_missing_extra_gives_the_exact_command(install: Any, module: str, extra: str) -> None:
    trouble = load_trouble(install, f"import {module}\n", requires=EXTRAS)
    assert trouble.kind is TroubleKind.MISSING_EXTRA
    assert trouble.hint == f"pip install 'acme-plugin[{extra}]'"


def test_a_missing_module_of_no_extra_stays_an_import_error(install: Any) -> None:
    assert load_trouble(install, "import plain_one\n", requires=EXTRAS).kind is TroubleKind.IMPORT_ERROR


@pytest.mark.parametrize("place", ["construction", "hook"])
def test_missing_extra_is_found_where_the_import_is_late(install: Any, place: str) -> None:
    method = "def __init__(self)" if place == "construction" else "@hookimpl\ndef launch(self, plan)"
    source = launcher(f"@hookimpl\ndef plan_launch(self, request): ...\n{method}:\n    import acme_engine")
    install("acme-plugin", {LAUNCHERS: {"acme": "acme_module:Launcher"}}, {"acme_module": source}, requires=EXTRAS)
    catalog = load_catalog()
    with pytest.raises(PluginTroubleError) as caught:
        open_relay(catalog, launcher=catalog.find(LAUNCHERS, "acme")).call("launch", plan=None)
    assert caught.value.trouble.kind is TroubleKind.MISSING_EXTRA
    assert caught.value.hint == "pip install 'acme-plugin[engine]'"


def test_trouble_is_loaded_once_and_told_each_time(install: Any) -> None:
    source = "import builtins\nbuiltins.acme_imports = getattr(builtins, 'acme_imports', 0) + 1\nraise OSError\n"
    install("acme-plugin", {LAUNCHERS: {"acme": "acme_module:Launcher"}}, {"acme_module": source})
    import builtins

    catalog: Catalog = load_catalog()
    try:
        for _ in range(2):
            with pytest.raises(PluginTroubleError):
                catalog.load(catalog.find(LAUNCHERS, "acme"))
        assert vars(builtins)["acme_imports"] == 1
    finally:
        del vars(builtins)["acme_imports"]


@pytest.fixture
def without_its_library(install: Any) -> None:
    """The distribution of our backend deepspeed, which requires one that is not there."""
    entry_points = {PluginKind.BACKEND.value: {"deepspeed": "acme_backend:Backend"}}
    source = "from fleettune_core.hookspecs import hookimpl\nclass Backend:\n    @hookimpl\n"
    source += "    def wrap_model(self, context, model, optimizer): ...\n"
    requires = ["no-such-library<0.20,>=0.19.8", "pluggy", "other-library; extra == 'more'"]
    install("fleettune-backend-deepspeed", entry_points, {"acme_backend": source}, requires=requires)


def test_a_plugin_of_ours_without_its_library_is_refused_before_a_rank_imports_it(without_its_library: None) -> None:
    catalog = load_catalog()
    entry = catalog.find(PluginKind.BACKEND, "deepspeed")
    with pytest.raises(PluginTroubleError) as caught:
        catalog.load(entry)
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert caught.value.trouble.kind is TroubleKind.INCOMPLETE
    assert caught.value.message == (
        "backend deepspeed (fleettune-backend-deepspeed 1.0): no-such-library is not installed"
    )
    assert caught.value.hint == "pip install 'no-such-library<0.20,>=0.19.8'"
    assert "acme_backend" not in sys.modules
    assert catalog.troubles == ()  # whoever does not ask for it hears nothing of it


def test_somebody_elses_plugin_may_know_better_than_its_metadata(install: Any) -> None:
    install("acme-plugin", {LAUNCHERS: {"acme": "acme_module:Launcher"}}, {"acme_module": GOOD}, requires=["no-such"])
    catalog = load_catalog()
    entry = catalog.find(LAUNCHERS, "acme")
    assert catalog.load(entry)
    assert incomplete(entry).message == "no-such is not installed"
