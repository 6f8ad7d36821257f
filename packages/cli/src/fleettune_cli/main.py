"""`ft`: the group of all commands. Nothing here imports a command."""

from __future__ import annotations

import gc
import sys

import click
import rich_click

from fleettune_cli.lazy import CONTEXT_SETTINGS, LazyCommand, LazyGroup

COMMANDS = (
    LazyCommand(
        name="train",
        target="fleettune_cli.commands.train:train",
        summary="Fine-tune a language model.",
    ),
    LazyCommand(
        name="verify",
        target="fleettune_cli.commands.verify:verify",
        summary="Check on your own run that every layout and backend gives the same numbers.",
    ),
    LazyCommand(
        name="data",
        target="fleettune_cli.commands.data:data",
        summary="Look at data as a run would read it.",
    ),
    LazyCommand(
        name="plugins",
        target="fleettune_cli.commands.plugins:plugins",
        summary="Launchers, backends and extensions that are installed.",
    ),
    LazyCommand(
        name="doctor",
        target="fleettune_cli.commands.doctor:doctor",
        summary="Check this machine and this installation.",
    ),
    LazyCommand(
        name="completion",
        target="fleettune_cli.commands.completion:completion",
        summary="Print the completion script of your shell.",
    ),
)


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from fleettune_cli import __version__
    from fleettune_cli.versions import own_versions

    python = ".".join(map(str, sys.version_info[:3]))
    click.echo(f"ft {__version__} (Python {python})")
    for name, version in own_versions().items():
        click.echo(f"{name} {version}" + ("" if version == __version__ else "  ! not the version of ft"))
    ctx.exit()


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings=CONTEXT_SETTINGS,
    no_args_is_help=True,
    epilog="Start with: ft train --model MODEL --dataset DATA --lora --dry-run",
)
@rich_click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the versions and exit.",
)
def cli() -> None:
    """Fine-tune language models with one command, on one CPU or on many GPUs."""


def main() -> None:
    """The entry point of `ft`."""
    from fleettune_cli.terminal import (
        drop_impossible_columns,
        escape_what_cannot_be_shown,
        replace_closed_streams,
    )

    # A help page makes a hundred thousand short-lived objects; looking for cycles among them is an eighth of its time.
    gc.set_threshold(100_000, 50, 50)
    replace_closed_streams()
    escape_what_cannot_be_shown()
    drop_impossible_columns()
    cli.main()


__all__ = ["COMMANDS", "cli", "main"]
