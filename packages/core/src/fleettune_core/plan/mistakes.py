"""Collects independent mistakes, so that all of them are told at once."""

from __future__ import annotations

from types import TracebackType

from fleettune_core.errors import ExitCode, FtError


class SeveralMistakesError(FtError):
    """Independent mistakes, a line for each in `problems`; the headline only counts them."""


class Mistakes:
    """`with mistakes: step()` keeps an `FtError` of the step for later; `raise_all` raises what was kept.

    One mistake is raised as it is. Several become one error with a line for each: exit code 5, or their own where
    they share one.
    """

    def __init__(self) -> None:
        self._errors: list[FtError] = []

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, FtError):
            self._errors.append(error)
            return True
        return False

    def __bool__(self) -> bool:
        return bool(self._errors)

    def raise_all(self) -> None:
        """Raise what was kept; do nothing when there is nothing."""
        if not self._errors:
            return
        if len(self._errors) == 1:
            raise self._errors[0]
        codes = {error.exit_code for error in self._errors}
        problems = [line for error in self._errors for line in _lines(error)]
        raise SeveralMistakesError(
            f"{len(problems)} mistakes",
            problems=problems,
            exit_code=codes.pop() if len(codes) == 1 else ExitCode.CONFIG,
        )


def _lines(error: FtError) -> list[str]:
    """One line per mistake; the hint stands behind the last one."""
    if isinstance(error, SeveralMistakesError):
        return list(error.problems)
    lines = [f"{error.message}: {problem}" for problem in error.problems] or [error.message]
    if error.hint:
        lines[-1] += f" (hint: {error.hint})"
    return lines
