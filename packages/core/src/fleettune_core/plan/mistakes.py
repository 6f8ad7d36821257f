"""Collects independent mistakes, so that all of them are told at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from fleettune_core.config.source import LoadedConfig, Source
from fleettune_core.errors import ExitCode, FtError


class SeveralMistakesError(FtError):
    """Independent mistakes, a line for each in `problems`; the headline only counts them."""


class Mistakes:
    """`with mistakes: step()` keeps an `FtError` of the step for later; `raise_all` raises what was kept.

    One mistake is raised as it is. Several become one error with a line for each, the run file's first and in its
    order: exit code 5, or their own where they share one. The mistakes that `loaded` brings are told among them.
    """

    def __init__(self, loaded: LoadedConfig | None = None) -> None:
        self._loaded = loaded
        self._errors: list[FtError] = []

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, FtError):
            return False
        # Several plans of one command may find the same mistake, and it is told once.
        if all(_lines(error) != _lines(other) for other in self._errors):
            self._errors.append(error)
        return True

    def __bool__(self) -> bool:
        return bool(self._errors)

    def raise_all(self) -> None:
        """Raise what was kept; do nothing when there is nothing."""
        before = self._loaded.mistakes if self._loaded is not None else ()
        if self._loaded is not None and not self._errors:
            self._loaded.raise_mistakes()
        if not self._errors:
            return
        if len(self._errors) == 1 and not before:
            raise self._errors[0]
        codes = {error.exit_code for error in self._errors}
        if self._loaded is not None and before:
            codes.add(self._loaded.exit_code)
        file = self._loaded.file if self._loaded is not None else None
        problems = [mistake.text for mistake in before] + [line for error in self._errors for line in _lines(error)]
        raise SeveralMistakesError(
            f"{len(problems)} mistakes{_shared_place(problems, file)}",
            problems=sorted(problems, key=lambda line: _line_number(line, file) or sys.maxsize),
            exit_code=codes.pop() if len(codes) == 1 else ExitCode.CONFIG,
        )


@contextmanager
def said_at(source: Source) -> Generator[None]:
    """Put the place where a value was said before the message of an `FtError` about it."""
    try:
        yield
    except FtError as error:
        if source.kind not in ("flag", "file", "environment"):
            raise
        said = f"{source.where}: {error.message}"
        raise FtError(said, hint=error.hint, exit_code=error.exit_code, problems=error.problems) from error


def _line_number(problem: str, file: Path | None) -> int:
    """Line of the run file that a mistake names first; 0 where it names none."""
    match = re.search(rf"(?<![\w/.-]){re.escape(str(file))}:(\d+)", problem) if file is not None else None
    return int(match[1]) if match else 0


def _shared_place(problems: Sequence[str], file: Path | None) -> str:
    """` in run.yaml`, where every mistake is to be mended there."""
    if file is not None and all(_line_number(problem, file) for problem in problems):
        return f" in {file}"
    return " in the command line" if all(problem.startswith("--") for problem in problems) else ""


def _lines(error: FtError) -> list[str]:
    """One line per mistake; the hint stands behind the last one."""
    if isinstance(error, SeveralMistakesError):
        return list(error.problems)
    lines = [
        # A problem that begins with its place says enough.
        problem if re.match(r"--[a-z]|\S+:\d+: ", problem) else f"{error.message}: {problem}"
        for problem in error.problems
    ] or [error.message]
    if error.hint:
        lines[-1] += f" (hint: {error.hint})"
    return lines
