"""What can be wrong with a plugin. Trouble is a record: it is shown, and it stops only a run that needs the plugin."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fleettune_core.errors import ExitCode, FtError


class TroubleKind(str, Enum):
    """The eleven kinds of plugin trouble.

    `ft plugins list` prints those that metadata show (duplicate-name, wrong-group, incomplete, import-error), with
    `--check` all but hook-raises, which only a run meets.
    """

    IMPORT_ERROR = "import-error"
    """Its module or object cannot be imported or made."""
    WRONG_SIGNATURE = "wrong-signature"
    """A hook takes other arguments than the contract's."""
    MISSPELT_HOOK = "misspelt-hook"
    """It implements a hook that does not exist."""
    DUPLICATE_NAME = "duplicate-name"
    """Two plugins want one name, or to answer one hook that has a single owner."""
    WRONG_GROUP = "wrong-group"
    """Its entry-point group does not exist, or is not the one that its hooks belong to."""
    OPTIONS_REJECTED = "options-rejected"
    """Its `Options` is no frozen dataclass of documented settings, or refuses to be made."""
    DETECTION_RAISES = "detection-raises"
    """`detect_environment` raised something else than FtError, or answered something that is no Detection."""
    DETECTION_SLOW = "detection-slow"
    """`detect_environment` took more than 5 ms, twice."""
    HOOK_RAISES = "hook-raises"
    """A hook raised something else than FtError, or gave no answer, or one of another type, where one is needed."""
    MISSING_EXTRA = "missing-extra"
    """It needs a package that one of its distribution's extras installs."""
    INCOMPLETE = "incomplete"
    """Its distribution requires another one, which is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One thing that is wrong with one plugin, in one line."""

    kind: TroubleKind
    plugin: str
    """As people name it: `launcher slurm`."""
    distribution: str
    """Where it comes from: `fleettune-launcher-slurm 0.1.0`."""
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        hint = f"; {self.hint}" if self.hint else ""
        return " ".join(f"{self.kind.value}: {self.plugin} ({self.distribution}): {self.message}{hint}".split())


class PluginTroubleError(FtError):
    """Trouble with a plugin that this run needs; exit code 3."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(
            f"{trouble.plugin} ({trouble.distribution}): {' '.join(trouble.message.split())}",
            hint=trouble.hint,
            exit_code=ExitCode.PLUGIN,
        )
        self.trouble = trouble


def describe_exception(error: BaseException) -> str:
    """`ValueError: what it said (file.py:12)`, with the innermost place that is known."""
    kind = type(error).__name__
    if isinstance(error, SyntaxError):
        return f"{kind}: {error.msg} ({error.filename}:{error.lineno})"
    text = f"{kind}: {error}" if str(error) else kind
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return text if place is None else f"{text} ({place.tb_frame.f_code.co_filename}:{place.tb_lineno})"
