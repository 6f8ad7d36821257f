"""Ask the launchers what they see in the environment, each by itself: a bad one is a record and hides no other."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import pluggy

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plugins.catalog import Catalog
from fleettune_core.plugins.entries import PluginEntry, PluginKind
from fleettune_core.plugins.loading import new_manager, stdout_to_stderr
from fleettune_core.plugins.trouble import PluginTroubleError, Trouble, TroubleKind, describe_exception
from fleettune_core.types import Detection, Environment, ProcessInfo

BUDGET_SECONDS = 0.005
"""What the contract allows `detect_environment`."""


def detect(
    entries: Iterable[PluginEntry],
    env: Environment,
    loader: Callable[[PluginEntry], Any],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, Detection], tuple[Trouble, ...]]:
    """What each launcher detects, by name, and the trouble on the way.

    `loader` is `Catalog.load`; `clock` tells seconds. A launcher that cannot be loaded, raises, or answers something
    that is no Detection detects nothing. A slow one keeps its answer; it is called a second time before it is called
    slow, so that a busy machine accuses nobody. A name that two distributions share is passed over: it cannot be
    chosen.

    An FtError of `detect_environment` passes: the environment itself is wrong, and only the user can mend it.
    """
    entries = tuple(entries)
    claims = Counter(entry.name for entry in entries)
    frozen_env = MappingProxyType(dict(env))
    manager = new_manager()
    detections: dict[str, Detection] = {}
    troubles: list[Trouble] = []
    for entry in entries:
        if claims[entry.name] > 1:
            continue
        try:
            plugin = loader(entry)
            answer, seconds = _ask(manager, entry, plugin, frozen_env, clock)
        except PluginTroubleError as error:
            troubles.append(error.trouble)
            continue
        if seconds > BUDGET_SECONDS:
            message = f"detect_environment took {seconds * 1000:.1f} ms; {BUDGET_SECONDS * 1000:.0f} ms are allowed"
            hint = "let it look at the mapping alone: no commands, no files, no imports"
            troubles.append(entry.trouble(TroubleKind.DETECTION_SLOW, message, hint))
        if answer is not None:
            detections[entry.name] = answer
    return detections, tuple(troubles)


def strongest_process(catalog: Catalog, env: Environment) -> ProcessInfo | None:
    """Which rank this process is, as the launcher that speaks strongest for it says; None where it is none.

    Raises FtError (exit code 3) when two launchers speak equally strongly and do not agree, and what a launcher says of
    an environment that contradicts itself.
    """
    detections, _ = detect(catalog.entries(PluginKind.LAUNCHER), env, catalog.load)
    ranks = {name: found for name, found in detections.items() if found.process is not None}
    best = max((found.score for found in ranks.values()), default=None)
    strongest = {name: found for name, found in ranks.items() if found.score == best}
    places = {found.process for found in strongest.values()}
    if len(places) > 1:
        raise FtError(
            f"{len(strongest)} launchers disagree about which rank this process is",
            problems=[f"{name}: {found.reason}: {found.process}" for name, found in strongest.items()],
            hint="uninstall one of them, or unset the variables of the one that did not start this process",
            exit_code=ExitCode.PLUGIN,
        )
    return places.pop() if places else None


def _ask(
    manager: pluggy.PluginManager,
    entry: PluginEntry,
    plugin: Any,
    env: Mapping[str, str],
    clock: Callable[[], float],
) -> tuple[Detection | None, float]:
    """The answer of one plugin and the seconds of its faster call."""
    manager.register(plugin)
    try:
        best = float("inf")
        answers: list[Any] = []
        for _ in range(2):
            start = clock()
            with stdout_to_stderr():
                answers = manager.hook.detect_environment(env=env)
            best = min(best, clock() - start)
            if best <= BUDGET_SECONDS:
                break
    except (FtError, KeyboardInterrupt):
        raise
    except BaseException as error:
        message = f"detect_environment raised {describe_exception(error)}"
        raise PluginTroubleError(entry.trouble(TroubleKind.DETECTION_RAISES, message)) from error
    finally:
        manager.unregister(plugin)
    answer = answers[0] if answers else None
    if answer is not None and not _is_detection(answer):
        message = f"detect_environment answered {answer!r:.80}, which is neither a Detection nor None"
        raise PluginTroubleError(entry.trouble(TroubleKind.DETECTION_RAISES, message))
    return answer, best


def _is_detection(answer: Any) -> bool:
    return (
        isinstance(answer, Detection)
        and isinstance(answer.score, int)  # pyright: ignore[reportUnnecessaryIsInstance]
        and isinstance(answer.reason, str)  # pyright: ignore[reportUnnecessaryIsInstance]
        and (answer.process is None or isinstance(answer.process, ProcessInfo))  # pyright: ignore[reportUnnecessaryIsInstance]
    )
