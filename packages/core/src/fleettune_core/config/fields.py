"""How a setting is declared: a dataclass field that carries its own help, flags and limits.

The run file's schema and every plugin's `Options` use it, so `--help`, `ft plugins show`, the docs and the checks all
read one declaration. Standard library only: building the command line must not import a validation library.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

_KEY = "fleettune.setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a number: `at_least` and `at_most` are inclusive, `above` and `below` are not."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def problem(self, value: Any) -> str | None:
        """Why `value` is out of bounds, or None."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {_number(self.at_least)}"
        if self.above is not None and value <= self.above:
            return f"must be above {_number(self.above)}"
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {_number(self.at_most)}"
        if self.below is not None and value >= self.below:
            return f"must be below {_number(self.below)}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One declared setting, as the command line, the docs and the checks see it."""

    name: str
    annotation: Any
    """The resolved type: `int`, `str | None`, `Literal[...]`, …"""
    default: Any
    help: str
    flags: tuple[str, ...]
    """Spellings on the command line, the main one first; empty for a setting of the run file alone."""
    limits: Limits
    metavar: str | None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a `Literal`, without None; empty for any other type."""
        return tuple(value for value in _literals(self.annotation) if value is not None)

    @property
    def base_type(self) -> type:
        """`bool`, `int`, `float` or `str`: the type of one value, without None and Literal."""
        for candidate in (bool, int, float):
            if self.annotation is candidate or candidate in typing.get_args(self.annotation):
                return candidate
        return str


def setting(
    default: Any,
    help: str,
    *,
    flag: bool | str = True,
    aliases: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    metavar: str | None = None,
) -> Any:
    """Declare a setting as a dataclass field.

    `flag`: True for `--its-name`, a string for another spelling, False for none; `aliases` are further spellings.
    `help` is one or two sentences with the unit and the special values.
    """
    return dataclasses.field(
        default=default,
        metadata={_KEY: (help, flag, aliases, Limits(at_least=at_least, above=above, at_most=at_most), metavar)},
    )


@cache
def _hints(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def settings_of(owner: type) -> Iterator[Setting]:
    """The settings of a dataclass, in order.

    Nested sections and open mappings (fields with a `default_factory`) are passed over; any other field that was not
    made with `setting` raises TypeError, because nobody could read what it means.
    """
    hints = _hints(owner)
    for item in dataclasses.fields(owner):
        if item.default_factory is not dataclasses.MISSING:
            continue
        if _KEY not in item.metadata:
            raise TypeError(f"{owner.__qualname__}.{item.name} is not declared with setting(default, help)")
        text, flag, aliases, limits, metavar = item.metadata[_KEY]
        main = () if flag is False else (flag if isinstance(flag, str) else "--" + item.name.replace("_", "-"),)
        yield Setting(
            name=item.name,
            annotation=hints[item.name],
            default=item.default,
            help=text,
            flags=(*main, *aliases),
            limits=limits,
            metavar=metavar,
        )


def _number(bound: float) -> str:
    """A whole bound with all its digits."""
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"


def _literals(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    found: tuple[Any, ...] = ()
    for part in typing.get_args(annotation):
        found += _literals(part)
    return found
