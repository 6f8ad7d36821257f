"""Write the table of TRL's config fields that Fleettune ships, so that the control process need not import TRL.

    python tools/generate_trl_fields.py            writes packages/core/src/fleettune_core/config/trl_fields.json
    python tools/generate_trl_fields.py --stdout   prints it instead

A test runs the second form and compares: after an upgrade of TRL or transformers, run the first.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import sys
import types
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[1] / "packages/core/src/fleettune_core/config/trl_fields.json"
LIBRARIES = ("trl", "transformers")
HELP_CHARACTERS = 160
PLAIN_TYPES = {bool: "bool", int: "int", float: "float", str: "str", dict: "dict", list: "list", type(None): "None"}


def main() -> int:
    """Write or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stdout", action="store_true", help="print the table and write nothing")
    arguments = parser.parse_args()
    text = json.dumps(table(), indent=1, ensure_ascii=False) + "\n"
    if arguments.stdout:
        sys.stdout.write(text)
    else:
        TABLE.write_text(text, encoding="utf-8")
        print(f"wrote {TABLE}", file=sys.stderr)
    return 0


def table() -> dict[str, Any]:
    """The whole file: what it was made from, and the fields of each method's config class in their order."""
    from trl import SFTConfig

    return {
        "made_from": {library: version(library) for library in LIBRARIES},
        "methods": {"sft": {field.name: describe(field) for field in dataclasses.fields(SFTConfig) if field.init}},
    }


def describe(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """One field: its type as our small type language, its default as `repr`, and the first sentence of its help."""
    names, choices = type_names(field.type)
    if field.default is not dataclasses.MISSING:
        default = field.default
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        default = None
    if isinstance(default, enum.Enum):
        default = default.value
    entry: dict[str, Any] = {"type": " | ".join(names), "default": repr(default)}
    if choices:
        entry["choices"] = choices
    entry["help"] = first_sentence(str(field.metadata.get("help", "")))
    return entry


def type_names(annotation: Any) -> tuple[list[str], list[str]]:
    """The parts of a type (`["int", "None"]`, None last), and the values of its enum, if it has one.

    Containers keep no more than their outer type, but for `list[str]`; a class that YAML cannot write is left out.
    """
    found: dict[str, None] = {}
    choices: list[str] = []
    for part in parts_of(annotation):
        origin = typing.get_origin(part)
        if origin is typing.Literal:
            found.update(dict.fromkeys(PLAIN_TYPES[type(value)] for value in typing.get_args(part)))
        elif origin is list and typing.get_args(part) == (str,):
            found["list[str]"] = None
        elif origin in PLAIN_TYPES or part in PLAIN_TYPES:
            found[PLAIN_TYPES[origin or part]] = None
        elif isinstance(part, type) and issubclass(part, enum.Enum):
            found["str"] = None
            choices = [str(member.value) for member in part]
    return sorted(found, key=lambda name: name == "None"), choices


def parts_of(annotation: Any) -> list[Any]:
    """The members of a union, nested ones too; any other type alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [part for member in typing.get_args(annotation) for part in parts_of(member)]
    return [annotation]


def first_sentence(text: str) -> str:
    """The first sentence of a help text on one line, cut at a word where it is long."""
    flat = " ".join(text.split())
    sentence = flat.split(". ")[0].rstrip(".")
    if len(sentence) > HELP_CHARACTERS:
        sentence = sentence[:HELP_CHARACTERS].rsplit(" ", 1)[0] + " …"
    return sentence


if __name__ == "__main__":
    raise SystemExit(main())
