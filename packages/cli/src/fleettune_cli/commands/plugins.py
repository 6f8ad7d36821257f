"""`ft plugins`: what is installed, from metadata alone; plugins are imported only with `--check` and by `show`."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click
import rich_click
from click.shell_completion import CompletionItem

from fleettune_cli import terminal
from fleettune_cli.lazy import CONTEXT_SETTINGS, FtGroup
from fleettune_cli.tables import print_table
from fleettune_core.errors import ExitCode, FtError, did_you_mean

if TYPE_CHECKING:
    from fleettune_core.plugins.catalog import Catalog, PluginEntry
    from fleettune_core.plugins.trouble import Trouble

JSON = rich_click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(cls=FtGroup, context_settings=CONTEXT_SETTINGS, no_args_is_help=True)
def plugins() -> None:
    """Launchers, backends and extensions that are installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One line of the list."""

    name: str
    kind: str
    distribution: str
    version: str
    builtin: bool
    state: str
    """`installed` (not looked at), `ok` (imported and checked), or what is wrong."""
    hint: str | None = None

    @property
    def source(self) -> str:
        """`fleettune-core 0.1.0`."""
        return f"{self.distribution} {self.version}"

    def concerns(self, trouble: Trouble) -> bool:
        """Whether a record is about this plugin."""
        return trouble.plugin == f"{self.kind} {self.name}" and self.source in trouble.distribution


@plugins.command("list", context_settings=CONTEXT_SETTINGS)
@rich_click.option("--check", is_flag=True, help="Import each plugin and check it against the contract.")
@JSON
def list_plugins(check: bool, as_json: bool) -> int:
    """List the installed plugins. Without --check nothing of them is imported."""
    from fleettune_core.plugins.catalog import load_catalog

    catalog = load_catalog()
    rows, others = listed(catalog, check=check)
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
    return ExitCode.PLUGIN if check and any(row.state != "ok" for row in rows) else ExitCode.OK


def listed(catalog: Catalog, *, check: bool) -> tuple[list[Listed], list[Trouble]]:
    """The lines of the list, and the troubles that belong to none of them."""
    troubles = list(catalog.troubles)
    rows: list[Listed] = []
    for entry in _all_entries(catalog):
        row = Listed(
            name=entry.name,
            kind=entry.kind.label,
            distribution=entry.distribution,
            version=entry.version,
            builtin=entry.builtin,
            state="ok" if check else "installed",
        )
        mine = next((trouble for trouble in troubles if row.concerns(trouble)), None)
        if mine is None and check:
            mine = _checked(catalog, entry)
        if mine is not None:
            row = replace(row, state=" ".join(f"{mine.kind.value}: {mine.message}".split()), hint=mine.hint)
        rows.append(row)
    return rows, [trouble for trouble in troubles if not any(row.concerns(trouble) for row in rows)]


def _names_of_plugins(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from fleettune_core.plugins.catalog import load_catalog

    names = sorted({entry.name for entry in _all_entries(load_catalog())})
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@plugins.command(context_settings=CONTEXT_SETTINGS)
@click.argument("name", shell_complete=_names_of_plugins)
@JSON
def show(name: str, as_json: bool) -> int:
    """Show one plugin: what it is, the hooks it implements, its options."""
    from fleettune_core.plugins.catalog import load_catalog

    catalog = load_catalog()
    entries = _all_entries(catalog)
    found = [entry for entry in entries if entry.name == name]
    if not found:
        names = sorted({entry.name for entry in entries})
        raise FtError(
            f"no plugin is named {name!r}{did_you_mean(name, names)}",
            hint=f"installed: {', '.join(names)}",
            exit_code=ExitCode.PLUGIN,
        )
    described = [describe(catalog, entry) for entry in found]
    if as_json:
        click.echo(json.dumps(described if len(described) > 1 else described[0], indent=2))
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
                "type": "|".join(map(str, option.choices)) or option.base_type.__name__,
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


def _how_to_say(section: str | None, name: str) -> str:
    """How the option is typed: its own flag where first-party options have one, else `--set`."""
    from fleettune_cli.plugin_flags import PLUGIN_FLAGS

    path = f"{section}.{name}" if section else name
    flag = next((entry.flag for entry in PLUGIN_FLAGS if entry.path == path), None)
    return flag or f"--set {path}="


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width=max(40, terminal.columns() - 6))


def _checked(catalog: Catalog, entry: PluginEntry) -> Trouble | None:
    from fleettune_core.plugins.trouble import PluginTroubleError

    try:
        catalog.load(entry)
    except PluginTroubleError as error:
        return error.trouble
    return None


def _all_entries(catalog: Catalog) -> list[PluginEntry]:
    from fleettune_core.plugins.catalog import PluginKind

    def entries() -> Iterator[PluginEntry]:
        for kind in PluginKind:
            yield from catalog.entries(kind)

    return list(entries())
