"""One given value, checked and converted to the type of its setting.

Pydantic does the parsing (a flag's `"16"` is an int, `yes` a bool); what it would let pass and a reader would not, a
bool for a number or a number that is not finite, is refused here. Messages are ours: the value, and what is wrong.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from fleettune_core.config.fields import Limits, Setting
from fleettune_core.config.source import Source
from fleettune_core.config.trl_fields import LIMITS, TrlField
from fleettune_core.errors import did_you_mean
from fleettune_core.masking import shown

_MOST_CHOICES_LISTED = 12
_NO_LIMITS = Limits()

ATTENTION_NAMES = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
"""Attention kernels that transformers brings; any other one is a hub id (`kernels-community/flash-attn2`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value as somebody wrote it. `text` is how a scalar was written, None for a mapping, a list or a flag's bool."""

    value: Any
    text: str | None
    source: Source
    line: int | None = None
    """Line of the run file; None for a value from anywhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a value is checked against. `annotation` is None for a plugin's option, which its plugin checks later."""

    path: str
    annotation: Any
    limits: Limits = _NO_LIMITS
    choices: tuple[str, ...] = ()
    may_be_empty: bool = True
    """Whether text may be empty: of a setting it would say nothing, and is most often an unset variable."""
    names: tuple[str, ...] = ()
    """Known names of a text that may also be a hub id (`owner/name`); empty for any text."""
    joined: bool = False
    """Whether a list of texts is taken as well, for the same names with commas."""

    @staticmethod
    def of_setting(path: str, setting: Setting, choices: tuple[str, ...] = ()) -> Target:
        return Target(
            path=path,
            annotation=setting.annotation,
            limits=setting.limits,
            choices=setting.choices or choices,
            may_be_empty=False,
            names=ATTENTION_NAMES if path == "model.attn_implementation" else (),
            joined=path == "model.lora_target",
        )

    @staticmethod
    def of_trl_field(path: str, field: TrlField) -> Target:
        limits = LIMITS.get(field.name, _NO_LIMITS)
        return Target(path=path, annotation=field.annotation, limits=limits, choices=field.choices)


class BadValueError(Exception):
    """A value that does not fit; the text says so after `place: `."""


def convert(given: Given, target: Target) -> Any:
    """The typed value. Raises `BadValueError`."""
    value = given.value
    if target.annotation is None:
        return value
    members = members_of(target.annotation)
    if value is None:
        if type(None) in members:
            return None
        raise BadValueError("has no value")
    if isinstance(value, bool) and bool not in members:
        raise BadValueError(f"{_show(given, target)} is not {_wanted(target, members)}")
    if target.choices and not isinstance(value, (dict, list)):
        return _choice(given, target)
    if target.joined and isinstance(value, list):
        return _joined(given, target)
    if str in members and not members & {bool, int, float, dict} and not isinstance(value, (dict, list)):
        return _text(given, target)
    if str in members and isinstance(value, str):
        return value
    typed = _parse(given, target, members)
    if isinstance(typed, float) and not math.isfinite(typed):
        raise BadValueError(f"{_show(given, target)} is not a finite number")
    problem = target.limits.problem(typed)
    if problem:
        raise BadValueError(f"{_show(given, target)} {problem}")
    return typed


def _text(given: Given, target: Target) -> str:
    written = given.text if given.text is not None else str(given.value)  # a number is the text that was written
    if not written.strip() and not target.may_be_empty:
        raise BadValueError("is empty; leave it out, or set the variable that it was to come from")
    if target.names and "/" not in written and written not in target.names:
        close = did_you_mean(written, target.names)
        raise BadValueError(f"{_show(given, target)} is not one of {', '.join(target.names)}, nor a hub id{close}")
    return written


def _joined(given: Given, target: Target) -> str:
    """The names of a list, with commas between them."""
    items = cast("list[Any]", given.value)
    if not items or not all(isinstance(item, str) and item.strip() for item in items):
        raise BadValueError(f"{_show(given, target)} is not a list of names, such as [q_proj, v_proj]")
    return ",".join(items)


def _choice(given: Given, target: Target) -> str:
    written = given.text if given.text is not None else str(given.value)
    if written in target.choices:
        return written
    close = did_you_mean(written, target.choices)
    listed = f" one of {', '.join(target.choices)}" if len(target.choices) <= _MOST_CHOICES_LISTED else " a known name"
    raise BadValueError(f"{_show(given, target)} is not{listed}{close}")


def _parse(given: Given, target: Target, members: frozenset[Any]) -> Any:
    from pydantic import ValidationError

    value = given.value.strip() if isinstance(given.value, str) else given.value
    try:
        return _adapter(target.annotation).validate_python(value)
    except ValidationError:
        raise BadValueError(f"{_show(given, target)} is not {_wanted(target, members)}") from None


@cache
def _adapter(annotation: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(annotation)


def _show(given: Given, target: Target) -> str:
    return shown(target.path, given.text if given.text is not None else given.value)


def members_of(annotation: Any) -> frozenset[Any]:
    """The plain types of an annotation: `int | None` is {int, NoneType}, a Literal of texts is {str}."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return frozenset(member for part in typing.get_args(annotation) for member in members_of(part))
    if origin is typing.Literal:
        return frozenset({type(value) for value in typing.get_args(annotation)})
    return frozenset({origin or annotation})


_IN_WORDS: Mapping[type, str] = types.MappingProxyType(
    {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text (put it in quotes)",
        dict: "a mapping, such as {key: value}",
        list: "a list, such as [a, b]",
    }
)


def _wanted(target: Target, members: frozenset[Any]) -> str:
    if target.choices:
        return f"one of {', '.join(target.choices[:_MOST_CHOICES_LISTED])}"
    return " or ".join(words for kind, words in _IN_WORDS.items() if kind in members)
