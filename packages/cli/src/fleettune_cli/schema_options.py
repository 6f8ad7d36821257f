"""Options of a command, made from the run file's schema: one declaration for the file, the flags and the help.

Values stay the strings that were typed. `config.load` converts and checks them together with those of the run file,
so that all mistakes are told at once and in the same words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from rich_click.rich_parameter import RichOption

from fleettune_cli.lazy import option_as_typed
from fleettune_cli.plugin_flags import PLUGIN_FLAGS
from fleettune_core.config.fields import Setting, settings_of
from fleettune_core.config.schema import SECTIONS, TOP_LEVEL, RunConfig

PANELS = {
    "model": "Model",
    "data": "Data",
    "train": "Training",
    "batch": "Batch",
    "launch": "Where it runs",
    "backend": "Backend",
    "checkpoint": "Checkpoints",
    "": "Run",
}
MAX_METAVAR_COLUMNS = 20
PLUGIN_GROUPS = {"launch.launcher": "fleettune.launchers", "backend.backend": "fleettune.backends"}


class SettingOption(RichOption):
    """An option that says one value of the run file: `path` is the value's place there (`model.lora_r`)."""

    def __init__(self, *args: Any, path: str, values: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path = path
        self.values = values

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        values = self.values
        if self.path in PLUGIN_GROUPS:
            values = tuple(plugin_names(PLUGIN_GROUPS[self.path]))
        elif self.path == "train.lr_scheduler_type":
            from fleettune_core.config.trl_fields import fields_for

            values = fields_for("sft")["lr_scheduler_type"].choices
        if values:
            return [CompletionItem(value) for value in values if value.startswith(incomplete)]
        if self.path in ("model.model", "data.dataset", "data.eval_dataset"):
            return [CompletionItem(incomplete, type="file")]
        if self.path == "run_dir":
            return [CompletionItem(incomplete, type="dir")]
        return super().shell_complete(ctx, incomplete)

    def get_rich_table_row(self, ctx: Any, formatter: Any, panel: Any = None) -> Any:
        """The row of this option in `--help`: its main spelling; the others stand behind the help text."""
        shown = RichOption([self.opts[0], str(self.name)], help=self.help, metavar=self.metavar, is_flag=self.is_flag)
        if self.secondary_opts:
            # Both spellings in one word, which Click itself would refuse to declare.
            shown.opts = [f"--[no-]{self.opts[0][2:]}"]
        return shown.get_rich_table_row(ctx, formatter, panel)


def complete_set(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What `--set` may name: sections, then the settings and TRL's fields of a section, then a field's values."""
    from fleettune_core.config.trl_fields import OWNED, fields_for

    path, equals, begun = incomplete.partition("=")
    section, dot, _ = path.partition(".")
    fields = fields_for("sft")
    if equals:
        field = fields.get(path.partition(".")[2]) if section == "train" else None
        return [
            CompletionItem(f"{path}={value}") for value in (field.choices if field else ()) if value.startswith(begun)
        ]
    if not dot:
        return [CompletionItem(f"{name}.") for name in SECTIONS if name.startswith(path)]
    if section not in SECTIONS:
        return []
    names = [setting.name for setting in settings_of(SECTIONS[section])]
    if section == "train":
        names += [name for name in fields if name not in OWNED and name not in names]
    wanted = path.replace("-", "_")
    return [CompletionItem(f"{section}.{name}=") for name in names if f"{section}.{name}".startswith(wanted)]


def set_option(says: str) -> Callable[[Any], Any]:
    """The option `--set KEY.PATH=VALUE`; `says`: what it may name."""
    import rich_click

    return rich_click.option(
        "--set",
        "sets",
        shell_complete=complete_set,
        multiple=True,
        panel=PANELS[""],
        metavar="KEY.PATH=VALUE",
        help=f"{says} May be repeated.",
    )


def plugin_names(group: str) -> list[str]:
    """Names of the installed plugins of an entry-point group, from metadata alone."""
    from importlib import metadata

    return sorted({entry.name for entry in metadata.entry_points(group=group)})


def options_of(section: str) -> Iterator[SettingOption]:
    """The options of a section of the run file (`""` for the values outside of any)."""
    owner = SECTIONS[section] if section else RunConfig
    for setting in settings_of(owner):
        if setting.flags and (section or setting.name in TOP_LEVEL):
            yield make_option(setting, f"{section}.{setting.name}" if section else setting.name, PANELS[section])


def plugin_options() -> Iterator[SettingOption]:
    """Options for those settings of first-party plugins that have a flag."""
    for entry in PLUGIN_FLAGS:
        yield SettingOption(
            [entry.flag, entry.path.replace(".", "__")],
            path=entry.path,
            values=entry.choices,
            help=entry.help,
            metavar=entry.metavar or _metavar_of(entry.choices),
            default=None,
            panel=PANELS[entry.path.partition(".")[0]],
        )


def make_option(setting: Setting, path: str, panel: str) -> SettingOption:
    """One setting as an option. Its default is not given to Click: what nobody typed is left to the plan."""
    is_flag = setting.base_type is bool
    flags = [f"{flag}/--no-{flag[2:]}" for flag in setting.flags] if is_flag else list(setting.flags)
    return SettingOption(
        [*flags, path.replace(".", "__")],
        path=path,
        values=setting.choices,
        help=_help(setting),
        metavar=None if is_flag else _metavar(setting),
        is_flag=is_flag,
        default=None,
        panel=panel,
    )


def said(ctx: click.Context) -> dict[str, tuple[str, Any]]:
    """What the user typed, by path of the run file: (the flag as typed, its value)."""
    flags: dict[str, tuple[str, Any]] = {}
    for parameter in ctx.command.params:
        name = parameter.name or ""
        typed = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if typed and isinstance(parameter, SettingOption):
            flags[parameter.path] = (option_as_typed(ctx, parameter), ctx.params[name])
    return flags


def with_options(options: Iterable[click.Option]) -> Callable[[click.Command], click.Command]:
    """Add options to a command, in front of those that it has; their values come through `said`."""

    def decorate(command: click.Command) -> click.Command:
        mine = list(options)
        for option in mine:
            option.expose_value = True
        command.params[:0] = mine
        assert command.callback is not None
        command.callback = _without({option.name for option in mine}, command.callback)
        return command

    return decorate


def _without(names: set[str | None], callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def call(**values: Any) -> Any:
        return callback(**{name: value for name, value in values.items() if name not in names})

    return call


def _help(setting: Setting) -> str:
    text = setting.help
    if setting.choices and not _metavar_shows(setting.choices):
        text += f" One of {', '.join(setting.choices)}."
    if setting.base_type is not bool and setting.default not in (None, "") and "efault" not in text:
        text += f" Default: {setting.default}."
    if len(setting.flags) > 1:
        text += f" Also {', '.join(setting.flags[1:])}."
    return text


def _metavar(setting: Setting) -> str:
    return setting.metavar or {int: "N", float: "X"}.get(setting.base_type) or _metavar_of(setting.choices)


def _metavar_of(choices: tuple[str, ...]) -> str:
    if not choices:
        return "TEXT"
    return "|".join(choices) if _metavar_shows(choices) else "NAME"


def _metavar_shows(choices: tuple[str, ...]) -> bool:
    """Whether the choices are short enough to stand beside the option in 80 columns of help."""
    return len("|".join(choices)) <= MAX_METAVAR_COLUMNS


def setting_options(ctx: click.Context) -> Iterator[SettingOption]:
    """The options of this context's command that say a value of the run file."""
    return (parameter for parameter in ctx.command.params if isinstance(parameter, SettingOption))
