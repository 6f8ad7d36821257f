"""A plugin's own settings: its `Options` dataclass, filled strictly from the run file and the flags.

`Options` is a frozen dataclass whose fields are made with `fleettune_core.config.setting`; a plugin without settings
has none.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from fleettune_core.config.fields import Setting, settings_of
from fleettune_core.config.schema import SECTIONS, RunConfig
from fleettune_core.config.source import Source
from fleettune_core.errors import ExitCode, FtError, did_you_mean
from fleettune_core.plugins.entries import PluginKind

_SECTION_OF = {PluginKind.LAUNCHER: "launch", PluginKind.BACKEND: "backend"}
_TYPE_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def describe_options(plugin: Any) -> tuple[Setting, ...]:
    """The plugin's settings, in the order of its `Options`; empty where it has none."""
    owner = getattr(plugin, "Options", None)
    return () if owner is None else tuple(settings_of(owner))


def check_options(plugin: Any, kind: PluginKind) -> str | None:
    """What is wrong with the plugin's `Options`, or None.

    Also refused is a setting that nobody could reach, because its name in the run file or its flag belongs to core.
    """
    owner = getattr(plugin, "Options", None)
    if owner is None:
        return None
    if not inspect.isclass(owner) or not dataclasses.is_dataclass(owner):
        return "its Options is not a dataclass"
    if not owner.__dataclass_params__.frozen:  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
        return "its Options is not frozen"
    try:
        settings = describe_options(plugin)
    except Exception as error:  # noqa: BLE001 - resolving a plugin's annotations runs its code
        return f"its Options cannot be read: {error}"
    named = {item.name for item in settings}
    undocumented = [item.name for item in dataclasses.fields(owner) if item.name not in named]
    if undocumented:
        return f"its Options.{undocumented[0]} is not declared with setting(default, help)"
    silent = [item.name for item in settings if not item.help.strip()]
    if silent:
        return f"its Options.{silent[0]} has no help text"

    taken_flags = {
        flag for part in (RunConfig, *SECTIONS.values()) for item in settings_of(part) for flag in item.flags
    }
    for item in settings:
        if item.name in _core_names(kind):
            return f"its Options.{item.name} is already a setting of core, under {_SECTION_OF[kind]}: in the run file"
        for flag in item.flags:
            if flag in taken_flags:
                return f"its Options.{item.name} wants the flag {flag}, which belongs to core"
    return None


def build_options(
    plugin: Any,
    values: Mapping[str, Any],
    where: Callable[[str], Source],
    *,
    title: str | None = None,
    kind: PluginKind | None = None,
) -> Any:
    """An instance of the plugin's `Options` with `values` in it; None where it has no `Options`.

    `where` gives the source of a value by the option's name as it stands in `values`; `title` names the plugin
    (`backend ddp`); with `kind`, core's settings in the same section of the run file count as near names too, because
    a misspelt one of them ends up here. `-` and `_` in a name are the same; text is read as the option's type, as
    flags bring it. Raises FtError (exit code 5) with every problem: names that do not exist, values of another type,
    beyond their limits or refused by `Options` itself; exit code 3 where `Options` breaks.
    """
    owner = getattr(plugin, "Options", None)
    title = title or type(plugin).__name__
    settings = {item.name: item for item in describe_options(plugin)}
    near = (*settings, *_core_names(kind))
    problems: list[str] = []
    accepted: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        place = where(key).where
        if name not in settings:
            problems.append(f"{place}: {title} has no option {key}{did_you_mean(key, near)}")
            continue
        if name in places:
            problems.append(f"{place}: {name} is given twice, with - and with _")
            continue
        places[name] = place
        try:
            accepted[name] = _read(settings[name], value)
        except ValueError as error:
            problems.append(f"{place}: {name} is {value!r}, but {error}")
    if problems:
        _refuse(title, problems, settings)
    if owner is None:
        return None
    try:
        return owner(**accepted)
    except FtError:
        raise
    except ValueError as error:
        given = ", ".join(f"{name} ({place})" for name, place in places.items()) or "its defaults"
        _refuse(title, [f"{error}; given: {given}"], settings)
    except Exception as error:
        raise FtError(
            f"{title}: options-rejected: its Options raised {type(error).__name__}: {error}", exit_code=ExitCode.PLUGIN
        ) from error


def _core_names(kind: PluginKind | None) -> tuple[str, ...]:
    """Core's own settings in the section of the run file where this kind's options stand."""
    section = _SECTION_OF.get(kind) if kind else None
    return tuple(item.name for item in dataclasses.fields(SECTIONS[section])) if section else ()


def _refuse(title: str, problems: list[str], settings: Mapping[str, Setting]) -> typing.NoReturn:
    raise FtError(
        f"{len(problems)} option{'s' if len(problems) > 1 else ''} of {title} cannot be used",
        problems=problems,
        hint=f"options of {title}: {', '.join(settings)}" if settings else f"{title} has no options",
        exit_code=ExitCode.CONFIG,
    )


def _read(item: Setting, value: Any) -> Any:
    """`value` as the setting's type; ValueError with what it must be."""
    branches = _branches(item.annotation)
    for choice in item.choices:
        if (value == choice and type(value) is type(choice)) or (isinstance(value, str) and value == str(choice)):
            return choice
    if value is None and type(None) in branches:
        return None
    must = _must_be(item, branches)
    plain = [branch for branch in branches if branch is not type(None) and typing.get_origin(branch) is not Literal]
    # pydantic would read true as 1, and say of 010 where text is wanted only that it is no string.
    if not plain or (isinstance(value, bool) and bool not in plain and plain != [Any]):
        raise ValueError(must)
    if isinstance(value, (int, float)) and str in plain and len(plain) == 1:
        raise ValueError(f"{must}; put it in quotes")

    from pydantic import TypeAdapter, ValidationError

    try:
        result = TypeAdapter[Any](item.annotation).validate_python(value)
    except ValidationError:
        raise ValueError(must) from None
    if problem := item.limits.problem(result):
        raise ValueError(problem)
    return result


def _branches(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _must_be(item: Setting, branches: tuple[Any, ...]) -> str:
    words = [_TYPE_WORDS.get(branch, _type_name(branch)) for branch in branches if _is_plain(branch)]
    if item.choices:
        words.insert(0, f"one of {', '.join(str(choice) for choice in item.choices)}")
    return f"must be {' or '.join(words)}"


def _is_plain(branch: Any) -> bool:
    return branch is not type(None) and typing.get_origin(branch) is not Literal


def _type_name(branch: Any) -> str:
    return str(getattr(branch, "__name__", branch)) if typing.get_origin(branch) is None else str(branch)
