"""Every launcher detects by itself: nothing that one does reaches another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.hookspecs import hookimpl
from fleettune_core.plugins.catalog import Catalog
from fleettune_core.plugins.detection import detect, strongest_process
from fleettune_core.plugins.trouble import PluginTroubleError, TroubleKind
from fleettune_core.types import Detection, ProcessInfo, Score

INSIDE = Detection(score=Score.INSIDE, reason="inside")


class Good:
    @hookimpl
    def detect_environment(self, env: Any) -> Detection | None:
        return INSIDE if env.get("ACME_JOB") else None


class Answers:
    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls = 0

    @hookimpl
    def detect_environment(self) -> Any:
        self.calls += 1
        return self.answer


class Writes:
    @hookimpl
    def detect_environment(self, env: Any) -> None:
        env["ACME_JOB"] = "stolen"


class NoDetection:
    @hookimpl
    def plan_launch(self, request: Any) -> None: ...


def test_only_who_sees_something_is_in_the_answer(make_entry: Any) -> None:
    plugins = {"good": Good(), "quiet": Answers(None), "none": NoDetection()}
    entries = [make_entry(name) for name in plugins]
    detections, troubles = detect(entries, {"ACME_JOB": "7"}, lambda entry: plugins[entry.name])
    assert detections == {"good": INSIDE}
    assert troubles == ()


@pytest.mark.parametrize(
    "answer", ["inside", 30, Detection(score="high", reason="x"), Detection(score=30, reason=None)]
)  # type: ignore[arg-type]
def test_an_answer_that_is_no_detection_is_a_record(make_entry: Any, answer: Any) -> None:
    plugins = {"bad": Answers(answer), "good": Good()}
    entries = [make_entry(name) for name in plugins]
    detections, troubles = detect(entries, {"ACME_JOB": "7"}, lambda entry: plugins[entry.name])
    assert detections == {"good": INSIDE}
    assert [trouble.kind for trouble in troubles] == [TroubleKind.DETECTION_RAISES]


def test_a_plugin_cannot_change_what_the_next_one_sees(make_entry: Any) -> None:
    plugins = {"bad": Writes(), "good": Good()}
    env: dict[str, str] = {}
    detections, troubles = detect([make_entry(name) for name in plugins], env, lambda entry: plugins[entry.name])
    assert (detections, env) == ({}, {})
    assert [trouble.kind for trouble in troubles] == [TroubleKind.DETECTION_RAISES]


def test_a_plugin_that_cannot_be_loaded_is_a_record(make_entry: Any) -> None:
    entries = [make_entry("broken"), make_entry("good")]

    def load(entry: Any) -> Any:
        if entry.name == "broken":
            raise PluginTroubleError(entry.trouble(TroubleKind.IMPORT_ERROR, "no"))
        return Good()

    detections, troubles = detect(entries, {"ACME_JOB": "7"}, load)
    assert detections == {"good": INSIDE}
    assert [trouble.kind for trouble in troubles] == [TroubleKind.IMPORT_ERROR]


class Raises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    @hookimpl
    def detect_environment(self) -> None:
        raise self.error


class Panic(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(0), Panic("no cluster")])
def test_whatever_a_plugin_raises_is_a_record(make_entry: Any, error: BaseException) -> None:
    plugins = {"bad": Raises(error), "good": Good()}
    detections, troubles = detect(
        [make_entry(name) for name in plugins], {"ACME_JOB": "7"}, lambda entry: plugins[entry.name]
    )
    assert detections == {"good": INSIDE}
    assert [trouble.kind for trouble in troubles] == [TroubleKind.DETECTION_RAISES]
    assert type(error).__name__ in troubles[0].message


@pytest.mark.parametrize("error", [KeyboardInterrupt(), FtError("RANK=5 of 2", exit_code=ExitCode.LAUNCH)])
def test_an_interrupt_and_a_word_for_the_user_pass(make_entry: Any, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        detect([make_entry("acme")], {}, lambda _: Raises(error))
    assert caught.value is error


def test_a_plugin_that_prints_while_it_detects_does_not_reach_stdout(
    make_entry: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    class Chatty:
        @hookimpl
        def detect_environment(self) -> None:
            print("hello")

    detect([make_entry("acme")], {}, lambda _: Chatty())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "hello\n"


def times(*seconds: float) -> Any:
    """A clock: every call of the hook takes the next of these."""

    def ticks() -> Iterator[float]:
        now = 0.0
        for duration in seconds:
            yield now
            now += duration
            yield now

    return ticks().__next__


@pytest.mark.parametrize(
    ("seconds", "calls", "kinds"),
    [
        ((0.004,), 1, []),
        ((0.2, 0.004), 2, []),
        ((0.2, 0.02), 2, [TroubleKind.DETECTION_SLOW]),
    ],
    ids=["fast", "slow-once", "slow-twice"],
)
def test_noise_does_not_accuse_a_good_plugin(
    make_entry: Any, seconds: tuple[float, ...], calls: int, kinds: list[TroubleKind]
) -> None:
    plugin = Answers(INSIDE)
    detections, troubles = detect([make_entry("acme")], {}, lambda _: plugin, clock=times(*seconds))
    assert detections == {"acme": INSIDE}
    assert plugin.calls == calls
    assert [trouble.kind for trouble in troubles] == kinds


def test_a_name_that_two_distributions_share_detects_nothing(make_entry: Any) -> None:
    entries = [make_entry("acme", distribution="first"), make_entry("acme", distribution="second")]
    assert detect(entries, {}, lambda _: Answers(INSIDE)) == ({}, ())


def started(score: Score, rank: int) -> Answers:
    process = ProcessInfo(rank=rank, local_rank=rank, world_size=4, local_world_size=4)
    return Answers(Detection(score=score, reason="started", process=process))


@pytest.mark.parametrize(
    ("plugins", "rank"),
    [
        ({"quiet": Answers(None), "inside": Answers(INSIDE)}, None),
        ({"outer": started(Score.STARTED_BY, 0), "inner": started(Score.STARTED_BY_INNER, 3)}, 3),
        ({"one": started(Score.STARTED_BY, 2), "two": started(Score.STARTED_BY, 2)}, 2),
    ],
    ids=["none", "inner-wins", "agreed"],
)
def test_the_strongest_launcher_says_which_rank_this_is(
    make_entry: Any, monkeypatch: pytest.MonkeyPatch, plugins: dict[str, Any], rank: int | None
) -> None:
    catalog = Catalog(make_entry(name) for name in plugins)
    monkeypatch.setattr(catalog, "load", lambda entry: plugins[entry.name])
    found = strongest_process(catalog, {})
    assert (found.rank if found else None) == rank


def test_launchers_that_disagree_about_the_rank_are_an_error(make_entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = {"one": started(Score.STARTED_BY, 0), "two": started(Score.STARTED_BY, 1)}
    catalog = Catalog(make_entry(name) for name in plugins)
    monkeypatch.setattr(catalog, "load", lambda entry: plugins[entry.name])
    with pytest.raises(FtError, match="disagree about which rank") as caught:
        strongest_process(catalog, {})
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert len(caught.value.problems) == 2
