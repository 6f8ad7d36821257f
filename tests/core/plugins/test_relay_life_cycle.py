"""The relay: who is registered, in which order, who owns a hook, and whose fault a failure is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.hookspecs import hookimpl
from fleettune_core.plugins.catalog import load_catalog
from fleettune_core.plugins.entries import PluginKind
from fleettune_core.plugins.relay import LoadedPlugin, Relay, open_relay
from fleettune_core.plugins.trouble import PluginTroubleError, TroubleKind
from fleettune_core.types import LaunchPlan

LAUNCHER, BACKEND, EXTENSION = PluginKind.LAUNCHER, PluginKind.BACKEND, PluginKind.EXTENSION


def planned(text: str) -> LaunchPlan:
    return LaunchPlan(launcher="here", argv=(text,), environment={}, run_dir=Path("run"))


class Launcher:
    @hookimpl
    def plan_launch(self, request: Any) -> LaunchPlan:
        return planned(f"planned {request}")


class Backend:
    @hookimpl
    def configure_training(self, run: Any) -> dict[str, str]:
        return {"by": "backend"}

    @hookimpl
    @contextlib.contextmanager
    def reduce_grads(self, sync: bool) -> Iterator[None]:
        yield


class Extension:
    @hookimpl
    def configure_training(self, run: Any) -> dict[str, str]:
        return {"by": "extension"}


class Usurper:
    @hookimpl
    def plan_launch(self, request: Any) -> LaunchPlan:
        return planned("stolen")


class Wrapper:
    @hookimpl(wrapper=True)
    def plan_launch(self, request: Any) -> Any:
        answer = yield
        return planned(f"<{answer.argv[0]}>")


class Fails:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    @hookimpl
    def configure_training(self, run: Any) -> None:
        raise self.error


@pytest.fixture
def loaded(make_entry: Any) -> Any:
    def make(name: str, kind: PluginKind, plugin: Any) -> LoadedPlugin:
        return LoadedPlugin(entry=make_entry(name, kind, f"{name}-plugin"), plugin=plugin)

    return make


def test_launcher_backend_extensions_are_registered_once_in_this_order(loaded: Any) -> None:
    relay = Relay(
        [
            loaded("here", LAUNCHER, Launcher()),
            loaded("back", BACKEND, Backend()),
            loaded("more", EXTENSION, Extension()),
        ]
    )
    assert [entry.name for entry in relay.plugins] == ["here", "back", "more"]
    assert relay.call("plan_launch", request=1) == planned("planned 1")
    assert relay.call("configure_training", run=None) == [{"by": "extension"}, {"by": "backend"}]


def test_relays_do_not_know_each_other(loaded: Any) -> None:
    plugin = Launcher()
    first, second = Relay([loaded("here", LAUNCHER, plugin)]), Relay([])
    assert first.has("plan_launch")
    assert not second.has("plan_launch")
    assert Relay([loaded("here", LAUNCHER, plugin)]).call("plan_launch", request=2) == planned("planned 2")


def test_has_and_owner_tell_who_answers(loaded: Any) -> None:
    relay = Relay([loaded("here", LAUNCHER, Launcher()), loaded("wrap", EXTENSION, Wrapper())])
    assert relay.has("plan_launch")
    assert relay.owner("plan_launch").name == "here"  # type: ignore[union-attr]
    assert not relay.has("launch")
    assert relay.owner("launch") is None
    assert not Relay([loaded("wrap", EXTENSION, Wrapper())]).has("plan_launch"), "a wrapper answers nothing itself"


def test_a_hook_with_one_result_has_one_owner(loaded: Any) -> None:
    relay = Relay([loaded("here", LAUNCHER, Launcher()), loaded("thief", EXTENSION, Usurper())])
    assert relay.call("plan_launch", request=3) == planned("planned 3")
    assert [entry.name for entry in relay.plugins] == ["here"]
    (trouble,) = relay.troubles
    assert trouble.kind is TroubleKind.DUPLICATE_NAME
    assert trouble.plugin == "extension thief"
    assert "launcher here (here-plugin 1.0)" in trouble.message


def test_a_backend_that_owns_a_hook_of_the_launcher_ends_the_run(loaded: Any) -> None:
    class Both(Backend, Usurper):
        pass

    with pytest.raises(PluginTroubleError) as caught:
        Relay([loaded("here", LAUNCHER, Launcher()), loaded("thief", BACKEND, Both())])
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert "launcher here" in str(caught.value)


def test_an_extension_may_wrap_an_owned_hook(loaded: Any) -> None:
    relay = Relay([loaded("here", LAUNCHER, Launcher()), loaded("wrap", EXTENSION, Wrapper())])
    assert relay.call("plan_launch", request=4) == planned("<planned 4>")
    assert relay.troubles == ()


def test_a_misspelt_hook_does_not_survive_registration(loaded: Any) -> None:
    class Misspelt(Launcher):
        @hookimpl
        def lunch(self) -> None: ...

    with pytest.raises(PluginTroubleError) as caught:
        Relay([loaded("here", LAUNCHER, Misspelt())])
    assert caught.value.trouble.kind is TroubleKind.MISSPELT_HOOK


def test_an_extension_that_does_not_fit_is_left_out_whole(loaded: Any) -> None:
    class Unfit:
        @hookimpl
        def configure_training(self, run: Any) -> dict[str, str]:
            return {"by": "unfit"}

        @hookimpl
        def plan_launch(self, reqest: Any) -> None: ...

    relay = Relay([loaded("here", LAUNCHER, Launcher()), loaded("unfit", EXTENSION, Unfit())])
    assert relay.call("configure_training", run=None) == []
    assert relay.call("plan_launch", request=5) == planned("planned 5")
    assert [trouble.kind for trouble in relay.troubles] == [TroubleKind.WRONG_SIGNATURE]


def test_an_error_for_the_user_passes_unchanged(loaded: Any) -> None:
    error = FtError("no such partition", exit_code=ExitCode.LAUNCH)
    relay = Relay([loaded("here", EXTENSION, Fails(error))])
    with pytest.raises(FtError) as caught:
        relay.call("configure_training", run=None)
    assert caught.value is error


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(0)])
def test_the_plugin_that_raised_is_named_among_several(loaded: Any, error: BaseException) -> None:
    relay = Relay(
        [
            loaded("back", BACKEND, Backend()),
            loaded("guilty", EXTENSION, Fails(error)),
            loaded("more", EXTENSION, Extension()),
        ]
    )
    with pytest.raises(PluginTroubleError) as caught:
        relay.call("configure_training", run=None)
    assert caught.value.trouble.plugin == "extension guilty"
    assert caught.value.trouble.distribution == "guilty-plugin 1.0"
    assert caught.value.__cause__ is error


def test_an_interrupt_is_nobodys_fault(loaded: Any) -> None:
    relay = Relay([loaded("here", EXTENSION, Fails(KeyboardInterrupt()))])
    with pytest.raises(KeyboardInterrupt):
        relay.call("configure_training", run=None)


def test_a_hook_that_must_answer_and_does_not_is_an_error(loaded: Any) -> None:
    class Silent:
        @hookimpl
        def plan_launch(self, request: Any) -> None: ...

    relay = Relay([loaded("here", LAUNCHER, Silent())])
    with pytest.raises(PluginTroubleError, match=r"launcher here .*plan_launch answered None"):
        relay.call("plan_launch", request=None)
    with pytest.raises(PluginTroubleError, match=r"launcher here .*launch is not implemented"):
        relay.call("launch", plan=None)
    assert relay.call("shard_data", context=None, dataset=None, shard=None) is None


@pytest.mark.parametrize(
    ("kind", "hook", "arguments", "wanted"),
    [
        (LAUNCHER, "plan_launch", {"request": None}, "LaunchPlan"),
        (LAUNCHER, "launch", {"plan": None}, "Job"),
        (BACKEND, "expect_wrapped", {"run": None}, "WrapFacts"),
        (BACKEND, "wrap_model", {"context": None, "model": None, "optimizer": None}, "WrappedModel"),
    ],
)
def test_an_answer_of_another_type_is_the_plugins_fault(
    loaded: Any, kind: PluginKind, hook: str, arguments: dict[str, Any], wanted: str
) -> None:
    class Odd:
        @hookimpl
        def plan_launch(self) -> str:
            return "python train.py"

        @hookimpl
        def launch(self) -> str:
            return "1234"

    class OddBackend:
        @hookimpl
        def expect_wrapped(self) -> str:
            return "DistributedDataParallel"

        @hookimpl
        def wrap_model(self) -> str:
            return "wrapped"

    relay = Relay([loaded("odd", kind, Odd() if kind is LAUNCHER else OddBackend())])
    with pytest.raises(PluginTroubleError) as caught:
        relay.call(hook, **arguments)
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert caught.value.trouble.kind is TroubleKind.HOOK_RAISES
    assert caught.value.message == (
        f"{kind.label} odd (odd-plugin 1.0): its hook {hook} answered a str, which is no {wanted}"
    )


def test_the_hot_path_calls_pluggy_directly(loaded: Any) -> None:
    relay = Relay([loaded("back", BACKEND, Backend())])
    with relay.hook.reduce_grads(context=None, model=None, sync=True) as entered:
        assert entered is None


EXTENSION_SOURCE = """
    from fleettune_core.hookspecs import hookimpl

    class Extension:
        @hookimpl
        def configure_training(self, run):
            return {"from": "good"}
"""


def test_a_broken_extension_that_nobody_named_does_not_hide_a_good_one(install: Any) -> None:
    install("bad-plugin", {EXTENSION.value: {"bad": "bad_module:Extension"}}, {"bad_module": "raise OSError('no')\n"})
    names = {EXTENSION.value: {"good": "good_module:Extension"}}
    install("good-plugin", names, {"good_module": EXTENSION_SOURCE})
    catalog = load_catalog()
    relay = open_relay(catalog, launcher=catalog.find(LAUNCHER, "local"))
    assert relay.call("configure_training", run=None) == [{"from": "good"}]
    (trouble,) = relay.troubles
    assert trouble.kind is TroubleKind.IMPORT_ERROR
    assert trouble.distribution == "bad-plugin 1.0"


def test_extensions_that_share_a_name_are_left_out_and_told_by_the_catalog(install: Any) -> None:
    for name in ("first", "second"):
        names = {EXTENSION.value: {"same": f"{name}_module:Extension"}}
        install(f"{name}-plugin", names, {f"{name}_module": EXTENSION_SOURCE})
    catalog = load_catalog()
    relay = open_relay(catalog)
    assert relay.plugins == ()
    assert [trouble.plugin for trouble in catalog.troubles if "first-plugin" in trouble.distribution] == [
        "extension same"
    ]


def test_a_broken_plugin_that_was_chosen_ends_the_run(install: Any) -> None:
    install("bad-plugin", {BACKEND.value: {"bad": "bad_module:Backend"}}, {"bad_module": "raise OSError('no')\n"})
    catalog = load_catalog()
    with pytest.raises(PluginTroubleError) as caught:
        open_relay(catalog, backend=catalog.find(BACKEND, "bad"))
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert open_relay(catalog, backend=catalog.find(BACKEND, "ddp")).has("wrap_model")


def test_one_object_under_two_groups_answers_once(loaded: Any) -> None:
    plugin = Extension()
    relay = Relay([loaded("one", BACKEND, plugin), loaded("two", EXTENSION, plugin)])
    assert relay.call("configure_training", run=None) == [{"by": "extension"}]


def test_the_worker_gets_the_planned_backend_and_its_options(install: Any) -> None:
    source = """
        from dataclasses import dataclass
        from fleettune_core.config.fields import setting
        from fleettune_core.hookspecs import hookimpl
        from fleettune_core.types import WrapFacts, WrappedModel

        class Backend:
            @dataclass(frozen=True)
            class Options:
                stage: int = setting(1, "What is divided.", at_most=3)

            @hookimpl
            def wrap_model(self, context, model, optimizer):
                return WrappedModel(model=model, optimizer=optimizer, facts=WrapFacts(wrapper="plain", world_size=1))
    """
    install("acme-plugin", {BACKEND.value: {"acme": "acme_module:Backend"}}, {"acme_module": source})
    relay = Relay.for_worker("acme")
    assert [entry.name for entry in relay.plugins if entry.kind is BACKEND] == ["acme"]
    assert relay.call("wrap_model", context=None, model=None, optimizer=None).facts.wrapper == "plain"
    assert relay.options_of("acme", {"stage": 2}).stage == 2
    with pytest.raises(FtError, match=r"run\.json: stage is 4, but must be at most 3"):
        relay.options_of("acme", {"stage": 4})
    with pytest.raises(FtError) as caught:
        Relay.for_worker("acmee")
    assert caught.value.exit_code is ExitCode.PLUGIN
