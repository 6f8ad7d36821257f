"""Examples as a model sees them, with the supervised part marked: by colour, or by brackets where there is none."""

from __future__ import annotations

from typing import IO

import click

from fleettune_cli import terminal
from fleettune_core.data.preview import Preview, PreviewExample

OPEN, CLOSE = "[[", "]]"
"""Marks around the supervised part where there is no colour."""


def print_preview(shown: Preview, stream: IO[str]) -> None:
    """Print the format, and each example with its supervised part marked."""
    plain = terminal.is_plain(stream)
    mark = f"between {OPEN} and {CLOSE}" if plain else terminal.styled("in green", stream, fg="green", bold=True)
    print(f"format: {shown.format} ({shown.reason})", file=stream)
    print(f"the supervised part is {mark}", file=stream)
    if shown.note:
        print(f"note: {shown.note}", file=stream)
    for example in shown.examples:
        counts = ""
        if example.num_tokens is not None:
            cut = ", the end cut off at --max-length" if example.truncated else ""
            counts = f": {example.num_tokens} tokens, {example.supervised_tokens} supervised{cut}"
        print(terminal.styled(f"\n{example.where}{counts}", stream, bold=True), file=stream)
        print(marked(example, plain=plain).rstrip("\n"), file=stream)


def marked(example: PreviewExample, *, plain: bool) -> str:
    """The text of an example with its supervised segments marked: by brackets, or by colour.

    A line's end is left outside of the mark, so that brackets close on the line that they belong to.
    """
    pieces: list[str] = []
    for segment in example.segments:
        text = segment.text.rstrip("\n")
        if not segment.supervised or not text:
            pieces.append(segment.text)
            continue
        pieces.append(f"{OPEN}{text}{CLOSE}" if plain else click.style(text, fg="green", bold=True))
        pieces.append(segment.text[len(text) :])
    return "".join(pieces)


def first_lines(example: PreviewExample, *, plain: bool, num_lines: int) -> list[str]:
    """The beginning of a marked example, for a run that starts; says so when there is more."""
    lines = marked(example, plain=plain).rstrip("\n").splitlines()
    if len(lines) <= num_lines:
        return lines
    return [*lines[:num_lines], f"… {len(lines) - num_lines} more lines; `ft data preview` shows all"]
