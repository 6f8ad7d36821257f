"""A plugin's options are filled strictly: the right type, the right names, and all problems at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from fleettune_core.config.fields import setting
from fleettune_core.config.source import Source
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plugins.entries import PluginKind
from fleettune_core.plugins.options import build_options, describe_options


class Plugin:
    @dataclass(frozen=True, kw_only=True)
    class Options:
        compression: Literal["none", "bf16"] = setting("none", "How gradients travel.")
        stage: Literal[0, 1, 2, 3] = setting(0, "What is divided.")
        bucket_mb: float = setting(25.0, "Size of a bucket, in MiB.", above=0)
        workers: int | None = setting(None, "Processes; none for as many as cores.", at_least=1, at_most=64)
        queue: str | None = setting(None, "Queue to wait in.")
        static_graph: bool = setting(True, "Whether the graph never changes.")
        ports: Literal["any"] | int = setting("any", "A port, or any.")
        names: list[str] | None = setting(None, "Hosts.")  # noqa: RUF009 - setting() makes a field

        def __post_init__(self) -> None:
            if self.queue == "closed":
                raise ValueError("the queue closed takes no jobs")
            if self.queue == "crash":
                raise ZeroDivisionError("a fault of the plugin")
            if self.queue == "told":
                raise FtError("said by the plugin", exit_code=ExitCode.LAUNCH)


class Bare:
    pass


def from_file(name: str) -> Source:
    return Source(kind="file", where=f"run.yaml:{len(name)}")


def build(**values: Any) -> Any:
    return build_options(Plugin(), values, from_file, title="backend acme", kind=PluginKind.BACKEND)


def refused(**values: Any) -> FtError:
    with pytest.raises(FtError) as caught:
        build(**values)
    return caught.value


def test_without_values_the_defaults_stand() -> None:
    assert build() == Plugin.Options()


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("compression", "bf16", "bf16"),
        ("stage", "3", 3),
        ("stage", 3, 3),
        ("bucket_mb", "12.5", 12.5),
        ("bucket_mb", 12, 12.0),
        ("workers", "4", 4),
        ("workers", None, None),
        ("queue", "long", "long"),
        ("static_graph", "false", False),
        ("static_graph", True, True),
        ("ports", "any", "any"),
        ("ports", "8080", 8080),
        ("names", ["a", "b"], ["a", "b"]),
    ],
)
def test_a_value_is_read_as_its_type(name: str, given: Any, expected: Any) -> None:
    value = getattr(build(**{name: given}), name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("compression", "bf17", "must be one of none, bf16"),
        ("compression", None, "must be one of none, bf16"),
        ("stage", 4, "must be one of 0, 1, 2, 3"),
        ("stage", True, "must be one of 0, 1, 2, 3"),
        ("bucket_mb", 0, "must be above 0"),
        ("bucket_mb", "big", "must be a number"),
        ("bucket_mb", True, "must be a number"),
        ("workers", "2.5", "must be a whole number"),
        ("workers", 65, "must be at most 64"),
        ("workers", 0, "must be at least 1"),
        ("queue", 10, "must be text; put it in quotes"),
        ("static_graph", "perhaps", "must be true or false"),
        ("ports", "none", "must be one of any or a whole number"),
        ("names", "a", "must be list[str]"),
    ],
)
def test_a_wrong_value_is_told_with_its_place_and_what_it_must_be(name: str, given: Any, words: str) -> None:
    error = refused(**{name: given})
    assert error.exit_code is ExitCode.CONFIG
    assert error.problems == (f"run.yaml:{len(name)}: {name} is {given!r}, but {words}",)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    error = refused(compresion="bf16")
    assert error.problems == ("run.yaml:10: backend acme has no option compresion (did you mean compression?)",)
    assert error.hint is not None
    assert "compression, stage" in error.hint


def test_a_misspelt_setting_of_core_in_the_same_section_gets_its_nearest_one() -> None:
    with pytest.raises(FtError, match=r"did you mean nproc_per_node\?"):
        build_options(Bare(), {"nproc_per_nod": 2}, from_file, title="launcher acme", kind=PluginKind.LAUNCHER)


def test_all_problems_are_told_at_once() -> None:
    error = refused(compresion="bf16", workers=0, stage=7)
    assert len(error.problems) == 3
    assert error.message == "3 options of backend acme cannot be used"


def test_dashes_and_underscores_are_the_same_but_not_twice() -> None:
    assert build(**{"bucket-mb": 3}).bucket_mb == 3.0
    assert "given twice" in refused(**{"bucket-mb": 3, "bucket_mb": 4}).problems[0]


def test_what_options_refuses_itself_is_shown_with_what_was_given() -> None:
    error = refused(queue="closed")
    assert error.exit_code is ExitCode.CONFIG
    assert error.problems == ("the queue closed takes no jobs; given: queue (run.yaml:5)",)


def test_an_error_of_the_plugin_for_its_user_passes_unchanged() -> None:
    assert (refused(queue="told").message, refused(queue="told").exit_code) == ("said by the plugin", ExitCode.LAUNCH)


def test_options_that_break_are_the_plugins_fault() -> None:
    error = refused(queue="crash")
    assert error.exit_code is ExitCode.PLUGIN
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_plugin_without_options_takes_none() -> None:
    assert build_options(Bare(), {}, from_file) is None
    assert describe_options(Bare()) == ()
    with pytest.raises(FtError) as caught:
        build_options(Bare(), {"queue": "a"}, from_file, title="launcher bare")
    assert caught.value.hint == "launcher bare has no options"


def test_options_are_described_in_their_order() -> None:
    described = describe_options(Plugin())
    assert [item.name for item in described][:3] == ["compression", "stage", "bucket_mb"]
    assert described[0].choices == ("none", "bf16")
