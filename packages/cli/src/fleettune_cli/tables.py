"""Rows in columns: a Rich table on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from fleettune_cli import terminal


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], stream: IO[str]) -> None:
    """Print `rows` under `headings`. Nothing is cut off: a cell that is too wide goes on in the next line."""
    if terminal.is_plain(stream):
        stream.write("\n".join(plain_table(headings, rows)) + "\n")
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold cyan")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    terminal.rich_console(stream).print(table)


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, two spaces apart; the last one is as wide as it likes, so that lines can be searched."""
    widths = [max(len(row[index]) for row in (headings, *rows)) for index in range(len(headings))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (headings, *rows)
    ]
