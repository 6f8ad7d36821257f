"""The progress of one run among several: a spinner with its stage on a terminal, nothing elsewhere."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from fleettune_cli import terminal
from fleettune_cli.progress import STAGE_WORDS, QuietDisplay, Snapshot

if TYPE_CHECKING:
    from types import TracebackType

    from rich.status import Status
    from typing_extensions import Self


class VerifyDisplay(QuietDisplay):
    """Leaves no line behind: the caller says how the run ended."""

    def __init__(self, title: str, stream: IO[str], *, quiet: bool) -> None:
        self._title = title
        self._stream = None if quiet or terminal.is_plain(stream) else stream
        self._status: Status | None = None

    def __enter__(self) -> Self:
        if self._stream is not None:
            self._status = terminal.rich_console(self._stream).status(self._title)
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, snapshot: Snapshot) -> None:
        if self._status is None:
            return
        step = f", step {snapshot.step}/{snapshot.total_steps}" if snapshot.step else ""
        self._status.update(f"{self._title}: {STAGE_WORDS[snapshot.stage]}{step} …")
