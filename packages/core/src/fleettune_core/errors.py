"""The one exception that reaches users, and the exit codes of every `ft` command."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum

from fleettune_core.masking import mask_tokens


class ExitCode(IntEnum):
    """What a finished command tells its caller. The numbers are a contract: schedulers and scripts read them."""

    OK = 0
    """Done, or submitted with `--detach`."""
    TRAINING = 1
    """The training itself failed."""
    USAGE = 2
    """The command line is wrong: an unknown flag, a value that is no number, more processes than devices."""
    PLUGIN = 3
    """A plugin is missing, broken or named twice."""
    LAUNCH = 4
    """The launcher refused the run."""
    CONFIG = 5
    """The run file, the model or the data is wrong."""
    STOPPED = 75
    """Stopped by a signal after a complete checkpoint: requeue me (EX_TEMPFAIL of sysexits.h)."""
    INTERRUPTED = 130
    """Interrupted (128 + SIGINT)."""


class FtError(Exception):
    """Something that the user can mend: what was given, what is wrong with it, what to type.

    `problems` holds one line per mistake, so that all mistakes of a run file are told at once; `message` is then
    their headline. `hint` says what to type. Tokens, and the user part of URLs, are masked in all of them.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        exit_code: ExitCode = ExitCode.CONFIG,
        problems: Iterable[str] = (),
    ) -> None:
        self.message = mask_tokens(message)
        super().__init__(self.message)
        self.hint = mask_tokens(hint) if hint is not None else None
        self.exit_code = ExitCode(exit_code)
        self.problems = tuple(mask_tokens(problem) for problem in problems)

    def __str__(self) -> str:
        lines = [self.message, *(f"  {problem}" for problem in self.problems)]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def nearest(name: str, valid: Iterable[str], *, limit: int = 1) -> list[str]:
    """The valid names closest to what was typed, best first; empty when nothing is close.

    `-` and `_` count as the same letter, as they do in option names.
    """
    folded = {candidate.replace("-", "_").lower(): candidate for candidate in valid}
    close = difflib.get_close_matches(name.replace("-", "_").lower(), folded, n=limit, cutoff=0.6)
    return [folded[match] for match in close]


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """` (did you mean X?)`, or the empty string when no valid name is close."""
    close = nearest(name, valid)
    return f" (did you mean {close[0]}?)" if close else ""
