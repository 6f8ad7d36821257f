"""`ft plugins`: what is installed, from metadata alone; plugins are imported only with `--check` and by `show`."""

from __future__ import annotations

import inspect
import json
import sys
import types
import typing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import rich_click
from click.shell_completion import CompletionItem

from fleettune_cli import terminal
from fleettune_cli.lazy import CONTEXT_SETTINGS, FtGroup
from fleettune_cli.plugin_rows import all_entries, listed, not_installed
from fleettune_cli.tables import print_table
from fleettune_core.errors import ExitCode, FtError, did_you_mean

if TYPE_CHECKING:
    from fleettune_core.plugins.catalog import Catalog
    from fleettune_core.plugins.entries import PluginEntry

JSON = rich_click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(cls=FtGroup, context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
def plugins() -> None:
    """Launchers, backends and extensions that are installed."""


@plugins.command("list", context_settings=CONTEXT_SETTINGS)
@rich_click.option(
    "--check",
    is_flag=True,
    help="Import each plugin, check it against the contract, and ask launchers what they detect.",
)
@JSON
def list_plugins(check: bool, as_json: bool) -> int:
    """List the plugins. Without --check nothing of them is imported."""
    from fleettune_core.plugins.catalog import load_catalog

    catalog = load_catalog()
    rows, others = listed(catalog, check=check)
    rows += not_installed(rows)
    if as_json:
        value = {"plugins": [asdict(row) for row in rows], "troubles": [str(trouble) for trouble in others]}
        click.echo(json.dumps(value, indent=2))
    else:
        print_table(
            ("name", "kind", "from", "state"),
            [(row.name, row.kind, row.source, row.state + (" (built in)" if row.builtin else "")) for row in rows],
            sys.stdout,
        )
        for row in rows:
            if row.hint:
                terminal.say(f"hint: {row.kind} {row.name}: {row.hint}")
        for trouble in others:
            terminal.warn(str(trouble))
    return ExitCode.PLUGIN if check and any(row.at_fault for row in rows) else ExitCode.OK


def _names_of_plugins(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from fleettune_core.plugins.catalog import load_catalog

    names = sorted({entry.name for entry in all_entries(load_catalog())})
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@plugins.command(context_settings=CONTEXT_SETTINGS)
@click.argument("name", shell_complete=_names_of_plugins)
@JSON
def show(name: str, as_json: bool) -> int:
    """Show one plugin: what it is, the hooks it implements, its options."""
    from fleettune_core.plugins.catalog import load_catalog

    catalog = load_catalog()
    entries = all_entries(catalog)
    found = [entry for entry in entries if entry.name == name]
    if not found:
        names = sorted({entry.name for entry in entries})
        absent = next((row for row in not_installed([]) if row.name == name), None)
        if absent is not None:
            raise FtError(f"the {absent.kind} {name} is not installed", hint=absent.hint, exit_code=ExitCode.PLUGIN)
        raise FtError(
            f"no plugin is named {name!r}{did_you_mean(name, names)}",
            hint=f"installed: {', '.join(names)}",
            exit_code=ExitCode.PLUGIN,
        )
    described = [describe(catalog, entry) for entry in found]
    if as_json:
        click.echo(json.dumps(described if len(described) > 1 else described[0], indent=2, default=str))
    else:
        for number, page in enumerate(described):
            if number:
                click.echo()
            _print_plugin(page)
    return ExitCode.OK


def describe(catalog: Catalog, entry: PluginEntry) -> dict[str, Any]:
    """Everything that `show` tells about one plugin, ready for JSON. Raises `FtError` when it cannot be loaded."""
    from fleettune_core.plugins.loading import hook_arguments, new_manager
    from fleettune_core.plugins.options import describe_options

    plugin = catalog.load(entry)
    manager = new_manager()
    manager.register(plugin)
    implemented = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    section = {"launcher": "launch", "backend": "backend"}.get(entry.kind.label)
    return {
        "name": entry.name,
        "kind": entry.kind.label,
        "distribution": entry.distribution,
        "version": entry.version,
        "builtin": entry.builtin,
        "object": entry.value,
        "docs": inspect.getdoc(plugin) or "",
        "hooks": {name: list(arguments) for name, arguments in hook_arguments().items() if name in implemented},
        "options": [
            {
                "name": option.name,
                "say": _how_to_say(section, option.name),
                "type": _type_of(option.annotation),
                "default": option.default,
                "help": option.help,
            }
            for option in describe_options(plugin)
        ],
    }


def _print_plugin(page: dict[str, Any]) -> None:
    head = f"{page['kind']} {page['name']}"
    click.echo(f"{terminal.styled(head, sys.stdout, bold=True)}  {page['distribution']} {page['version']}")
    click.echo(f"  {page['object']}")
    if page["docs"]:
        click.echo()
        for line in page["docs"].splitlines():
            click.echo(f"  {line}".rstrip())
    click.echo("\nhooks")
    for hook, arguments in page["hooks"].items():
        click.echo(f"  {hook}({', '.join(arguments)})")
    if not page["options"]:
        click.echo("\nno options")
        return
    click.echo("\noptions")
    for option in page["options"]:
        gap = "" if option["say"].endswith("=") else " "
        say = terminal.styled(option["say"], sys.stdout, fg="cyan")
        click.echo(f"  {say}{gap}{option['type']}  (default {option['default']})")
        for line in _wrapped(option["help"]):
            click.echo(f"      {line}")


def _type_of(annotation: Any) -> str:
    """An option's type as it is read: `none|bf16`, `float`, `tuple[int, ...]`; None is left out."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return "|".join(str(choice) for choice in typing.get_args(annotation) if choice is not None)
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        return "|".join(filter(None, map(_type_of, parts)))
    return annotation.__name__ if origin is None and inspect.isclass(annotation) else str(annotation)


def _how_to_say(section: str | None, name: str) -> str:
    """How the option is typed: its own flag where first-party options have one, else `--set`."""
    from fleettune_cli.plugin_flags import PLUGIN_FLAGS

    path = f"{section}.{name}" if section else name
    flag = next((entry.flag for entry in PLUGIN_FLAGS if entry.path == path), None)
    return flag or f"--set {path}="


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width=max(40, terminal.columns() - 6))
