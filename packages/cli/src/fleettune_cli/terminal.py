"""What the terminal can show: colour or plain lines, and how wide."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_COLUMNS = 80
MIN_COLUMNS = 20
"""Narrower than this a page of options is no page."""


def is_plain(stream: IO[str], env: Mapping[str, str] | None = None) -> bool:
    """Whether `stream` gets plain lines: it is no terminal, a dumb one, or `NO_COLOR` (no-color.org) or `CI` is set."""
    environment = os.environ if env is None else env
    if environment.get("NO_COLOR") or environment.get("CI") or environment.get("TERM") == "dumb":
        return True
    return not stream.isatty()


def columns() -> int:
    """Width of the terminal, or 80 where there is none; `COLUMNS` wins."""
    return shutil.get_terminal_size((DEFAULT_COLUMNS, 24)).columns


def drop_impossible_columns() -> None:
    """Unset a `COLUMNS` in which no page can be shown (0, or no number): what prints in columns reads it by itself."""
    text = os.environ.get("COLUMNS", "")
    if text and not (text.isdecimal() and int(text) >= MIN_COLUMNS):
        del os.environ["COLUMNS"]


def rich_console(stream: IO[str]) -> Console:
    """A Rich console that colours nothing by itself (numbers and paths stay as they are)."""
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False, width=columns())


def styled(text: str, stream: IO[str], **style: object) -> str:
    """`text` in a style where `stream` shows styles, and bare elsewhere."""
    return text if is_plain(stream) else click.style(text, **style)  # type: ignore[arg-type]


def say(line: str) -> None:
    """One line for the reader, on stderr: stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def warn(line: str) -> None:
    """One warning line on stderr."""
    say(f"{styled('warning:', sys.stderr, fg='yellow', bold=True)} {line}")


def replace_closed_streams() -> None:
    """Who closed stdout or stderr (`ft … >&-`) wants nothing there, and the next file must not take its place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open as long as we live


def escape_what_cannot_be_shown() -> None:
    """Let a terminal without UTF-8 show `?` for a letter it lacks, rather than end the command."""
    import io

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
