"""Click, with three habits: commands are imported when needed, `-` and `_` are one letter, nothing is abbreviated.

Click itself never abbreviates an option. What this module adds: a group that knows its commands by name and one
line of text only, and a memory of how an option was typed, so that the plan can say `--lora_r` to who typed that.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem
from rich_click import RichCommand, RichGroup

from fleettune_cli import errors
from fleettune_cli.words import TYPED, fold, words_typed

PROGRAM = "ft"
COMPLETION_VARIABLE = "_FT_COMPLETE"


CONTEXT_SETTINGS: dict[str, Any] = {
    "token_normalize_func": fold,
    "help_option_names": ["-h", "--help"],
    "rich_help_config": {
        "theme": "default-box",
        "options_table_column_types": ["opt_all_metavar", "help"],
        "append_metavars_help_string": "{}",
        "style_option": "bold cyan",
        "style_command": "bold cyan",
        "max_width": 100,
    },
}


class FtCommand(RichCommand):
    """A command that remembers how its options were typed."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """As Click completes, with `_` for `-` in the name of an option; the shell gets the spelling that was begun.

        The shell drops what does not begin with the typed letters, so each name is given as far as typed in their
        spelling.
        """
        folded = fold(incomplete) if incomplete.startswith("--") else incomplete
        found = super().shell_complete(ctx, folded)
        if folded == incomplete:
            return found
        return [
            CompletionItem(incomplete + item.value[len(incomplete) :], type=item.type, help=item.help) for item in found
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[TYPED] = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            # Click's parser raises some of them without saying where it was.
            error.ctx = error.ctx or ctx
            raise


class FtGroup(RichGroup):
    """A group whose commands are `FtCommand`s, and which names the nearest command when it knows none."""

    command_class = FtCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[TYPED] = tuple(args)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = fold(args[0])
        command = self.load_command(ctx, name)
        if command is None and not ctx.resilient_parsing:
            raise errors.unknown_command(ctx, args[0], self.list_commands(ctx))
        return (command.name if command else None), command, args[1:]

    def load_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command itself, imported if need be; None for an unknown name."""
        return self.get_command(ctx, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    """A command by name: where it lives, and its line in the list of commands."""

    name: str
    target: str
    """`module:attribute`."""
    summary: str


class LazyGroup(FtGroup):
    """A group that lists its commands without importing any of them."""

    def __init__(self, *args: Any, lazy: Sequence[LazyCommand] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = {command.name: command for command in lazy}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The entry for a list of commands: name and summary. `load_command` gives the one that runs."""
        lazy = self._lazy.get(cmd_name)
        if lazy is None:
            return super().get_command(ctx, cmd_name)
        return RichCommand(name=lazy.name, help=lazy.summary)

    def load_command(self, ctx: click.Context, name: str) -> click.Command | None:
        lazy = self._lazy.get(name)
        if lazy is None:
            return super().get_command(ctx, name)
        module, _, attribute = lazy.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), lazy.target
        return command

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line; what it raises becomes one clear message and an exit code (`errors.guard`)."""
        words = list(sys.argv[1:] if args is None else args)
        program = prog_name or PROGRAM
        variable = complete_var or COMPLETION_VARIABLE
        if variable in os.environ:
            from click.shell_completion import shell_complete

            sys.exit(shell_complete(self, extra, program, variable, os.environ[variable]))

        def run() -> Any:
            with self.make_context(program, words, **extra) as context:
                return self.invoke(context)

        if standalone_mode:
            sys.exit(errors.guard(run))
        return run()


def option_as_typed(ctx: click.Context, option: click.Parameter) -> str:
    """How `option` was spelt on the command line: the last spelling, or its own name when it was not typed."""
    spellings = {fold(name) for name in (*option.opts, *option.secondary_opts)}
    typed = option.opts[0]
    for word in words_typed(ctx):
        if word == "--":
            break
        name = word.partition("=")[0]
        if name.startswith("--") and fold(name) in {f"--{fold(s.lstrip('-'))}" for s in spellings}:
            typed = name
    return typed
