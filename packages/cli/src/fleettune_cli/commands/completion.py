"""`ft completion`: the script that makes a shell complete `ft`."""

from __future__ import annotations

import click

from fleettune_cli.lazy import COMPLETION_VARIABLE, CONTEXT_SETTINGS, PROGRAM, FtCommand


@click.command(cls=FtCommand, context_settings=CONTEXT_SETTINGS)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of your shell.

    bash: eval "$(ft completion bash)" in ~/.bashrc

    zsh: eval "$(ft completion zsh)" in ~/.zshrc

    fish: ft completion fish | source in config.fish
    """
    from click.shell_completion import get_completion_class

    from fleettune_cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None, shell
    click.echo(kind(cli, {}, PROGRAM, COMPLETION_VARIABLE).source())
