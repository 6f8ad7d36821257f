"""The words of a command line, as they were typed."""

from __future__ import annotations

import click

TYPED = "fleettune_cli.typed"
"""Where a context keeps its words (`click.Context.meta`)."""


def fold(token: str) -> str:
    """`_` is `-` in the name of an option or a command (never in a value: Click splits at `=` first)."""
    return token.replace("_", "-")


def words_typed(ctx: click.Context) -> tuple[str, ...]:
    """The words that this context's command was given, as they were typed."""
    return tuple(ctx.meta.get(TYPED, ()))
