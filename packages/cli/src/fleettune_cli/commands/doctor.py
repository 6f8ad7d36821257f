"""`ft doctor`: look at this machine and this installation, and say what to type where something is missing."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click
import rich_click

from fleettune_cli import checks, terminal
from fleettune_cli.lazy import CONTEXT_SETTINGS, FtCommand
from fleettune_core.errors import ExitCode

MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "bad": ("✗", "red")}
TOPIC_COLUMNS = 10


@click.command(cls=FtCommand, context_settings=CONTEXT_SETTINGS)
@rich_click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> int:
    """Check this machine and this installation.

    ✓ is fine, ! is worth a look, ✗ keeps a run from training: then the exit code is 1.
    """
    from fleettune_core.types import current_environment

    env = current_environment()
    findings = [finding for check in checks.CHECKS for finding in check(env)]
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        for finding in findings:
            for line in lines(finding, terminal.columns()):
                click.echo(line, color=not terminal.is_plain(sys.stdout))
    return ExitCode.TRAINING if any(finding.state == "bad" for finding in findings) else ExitCode.OK


def lines(finding: checks.Finding, width: int) -> list[str]:
    """A finding in lines of at most `width` columns, words longer than that excepted."""
    import textwrap

    mark, colour = MARKS[finding.state]
    indent = " " * (TOPIC_COLUMNS + 4)
    room = max(20, width - len(indent))
    texts = textwrap.wrap(finding.text, room, break_long_words=False, break_on_hyphens=False) or [""]
    if finding.hint:
        texts += textwrap.wrap(f"→ {finding.hint}", room, break_long_words=False, break_on_hyphens=False)
    head = f"{click.style(mark, fg=colour, bold=True)} {finding.topic:<{TOPIC_COLUMNS}}  "
    return [head + texts[0], *(indent + text for text in texts[1:])]
