"""A plan on the terminal: a Rich panel, or plain lines where colour and boxes are not wanted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from fleettune_cli import terminal
from fleettune_cli.plan_page import PlanPage, Row, plan_page, shell_lines
from fleettune_core.plan.model import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

LABEL_COLUMNS = 15


def print_plan(plan: Plan, stream: IO[str], *, explain: bool = False, compact: bool = False) -> None:
    """Print a plan. `compact` leaves out the parts of each row, for a run that starts at once."""
    page = plan_page(plan, explain=explain)
    width = terminal.columns()
    if terminal.is_plain(stream):
        stream.write("\n".join(plain_lines(page, width, compact=compact)) + "\n")
        stream.flush()
        return
    console = terminal.rich_console(stream)
    for part in renderables(page, width, compact=compact):
        console.print(part, soft_wrap=isinstance(part, str))


def plain_lines(page: PlanPage, width: int, *, compact: bool = False) -> Iterator[str]:
    """The page in plain lines, none longer than `width` unless it holds a single longer word."""
    yield page.title
    for row in page.rows:
        text = f"{row.text} ({row.reason})" if row.reason and not row.parts else row.text
        yield from _hanging(row.label, text, width)
        if compact and row.label != "overridden":
            continue
        column = max((len(name) for name, _ in row.parts), default=0)
        for name, detail in row.parts:
            yield from _hanging("", f"{name:<{column}}  {detail}" if name else detail, width, extra=2 if name else 0)
        if row.parts and row.reason:
            yield from _hanging("", row.reason, width, extra=2)
    for number, (path, value, where) in enumerate(page.explained):
        yield from _hanging("" if number else "settings", f"{path} = {value} ({where})", width)
    for note in page.notes:
        yield from _hanging("note", note, width)
    for warning in page.warnings:
        yield from _hanging("warning", warning, width)
    if page.command:
        yield "command"
        yield from (f"  {line}" for line in shell_lines(page.command, width - 2))


def renderables(page: PlanPage, width: int, *, compact: bool = False) -> Iterator[RenderableType]:
    """The page for a Rich console. The command stands outside of any box and unstyled, so that it can be copied."""
    from rich import box
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in page.rows:
        grid.add_row(row.label, _rich_row(row, compact=compact))
    for note in page.notes:
        grid.add_row("note", Text(note, style="italic"))
    for warning in page.warnings:
        grid.add_row(Text("warning", style="bold yellow"), Text(warning, style="yellow"))
    yield Panel(grid, title=Text(page.title, style="bold"), title_align="left", border_style="dim", box=box.ROUNDED)
    if page.explained:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("setting", "value", "from"):
            table.add_column(heading, overflow="fold")
        for path, value, where in page.explained:
            table.add_row(path, value, Text(where, style="dim" if where == "default" else ""))
        yield table
    if page.command:
        yield "\n".join(shell_lines(page.command, width))


def _rich_row(row: Row, *, compact: bool) -> Text:
    from rich.text import Text

    text = Text(row.text)
    parts = () if compact and row.label != "overridden" else row.parts
    column = max((len(name) for name, _ in parts), default=0)
    if row.reason and not row.parts:
        text.append(f" ({row.reason})", style="dim")
    for name, detail in parts:
        text.append("\n")
        text.append(f"{name:>{column}}  " if name else "", style="dim")
        text.append(detail)
    if row.reason and parts:
        text.append(f"\n{row.reason}", style="dim")
    return text


def _hanging(label: str, text: str, width: int, *, extra: int = 0) -> list[str]:
    """`label` and `text` in two columns; further lines of the text start in its column."""
    start = " " * (LABEL_COLUMNS + extra)
    return textwrap.wrap(
        text,
        width=width,
        initial_indent=f"  {label}".ljust(LABEL_COLUMNS) + " " * extra,
        subsequent_indent=start,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [f"  {label}"]
