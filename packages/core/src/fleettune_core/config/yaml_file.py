"""A YAML 1.2 (or JSON) text as a tree that remembers the line of every key and value.

The nodes are read by ruamel.yaml and turned into plain Python here, so that nothing but mappings, sequences and plain
scalars can come out of a run file: no tag makes an object, and a date stays the text that was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleettune_core.errors import ExitCode, FtError

_TAG = "tag:yaml.org,2002:"
_TABS = re.compile(r"^\t+", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value of the text. `value` is plain Python; `text` is how a scalar was written, None for the others."""

    value: Any
    text: str | None
    line: int
    """From 1."""
    items: tuple[tuple[str, int, Entry], ...] | None = None
    """(key, the key's line, value) of a mapping, in order; None for anything else."""


class YamlFileError(Exception):
    """What is wrong with a text, and where (from 1; 0 where nobody knows)."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.column = column


def read_file(path: Path) -> Entry | None:
    """The tree of a run file, or None when it is empty. Raises `FtError` with `file:line:column` when it is broken."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FtError(
            f"{path}: there is no such run file", hint="check the path; without a run file, give --model and --dataset"
        ) from None
    except IsADirectoryError:
        raise FtError(f"{path} is a folder, not a run file", hint="name the YAML file itself") from None
    except UnicodeDecodeError as error:
        raise FtError(f"{path}: not a text file: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise FtError(f"{path}: cannot be read: {error.strerror}") from None
    if path.suffix.lower() == ".json":  # JSON may be indented with tabs; YAML may not
        text = _TABS.sub(lambda tabs: " " * len(tabs.group()), text)
    try:
        return parse(text.removeprefix("\ufeff"))
    except YamlFileError as mistake:
        place = f":{mistake.line}:{mistake.column}" if mistake.line else ""
        raise FtError(f"{path}{place}: {mistake.message}", exit_code=ExitCode.CONFIG) from None


def parse(text: str) -> Entry | None:
    """The tree of a text, or None when it holds nothing. Raises `YamlFileError`."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    reader: Any = YAML(typ="safe", pure=True)
    try:
        node = reader.compose(text)
    except YAMLError as error:
        raise _broken(text, error) from None
    except RecursionError:
        raise YamlFileError("nested too deeply") from None
    return None if node is None else _Builder().build(node)


def _broken(text: str, error: Any) -> YamlFileError:
    """What ruamel.yaml found, and where: most of its errors carry a mark, a character that may not stand in YAML has
    a position alone."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        said = [part for part in (error.context, error.problem) if isinstance(part, str)]
        return YamlFileError(", ".join(said) or "broken YAML", int(mark.line) + 1, int(mark.column) + 1)
    before = text[: int(getattr(error, "position", 0))]
    reason = str(getattr(error, "reason", "broken YAML"))
    return YamlFileError(reason, before.count("\n") + 1, len(before) - before.rfind("\n"))


class _Builder:
    """Turns nodes into entries. A node that aliases share is built once; one that holds itself is refused."""

    def __init__(self) -> None:
        self._built: dict[int, Entry | None] = {}

    def build(self, node: Any) -> Entry:
        if id(node) in self._built:
            known = self._built[id(node)]
            if known is None:
                raise _mistake(node, "this value contains itself")
            return known
        self._built[id(node)] = None
        entry = self._make(node)
        self._built[id(node)] = entry
        return entry

    def _make(self, node: Any) -> Entry:
        line = int(node.start_mark.line) + 1
        tag = str(node.tag or "")
        if tag == f"{_TAG}map":
            items = tuple(self._items(node))
            return Entry(value={key: entry.value for key, _, entry in items}, text=None, line=line, items=items)
        if tag == f"{_TAG}seq":
            return Entry(value=[self.build(item).value for item in node.value], text=None, line=line)
        if tag.startswith(_TAG) and isinstance(node.value, str):
            return Entry(value=_scalar(node, tag.removeprefix(_TAG)), text=_text(node), line=line)
        raise _mistake(node, f"the tag {tag.replace(_TAG, '!!')} is not allowed: a run file holds plain values only")

    def _items(self, node: Any) -> Iterator[tuple[str, int, Entry]]:
        seen: dict[str, int] = {}
        merged: list[tuple[str, int, Entry]] = []
        own: list[tuple[str, int, Entry]] = []
        for key_node, value_node in node.value:
            if str(key_node.tag) == f"{_TAG}merge":
                merged += self._merged(value_node)
                continue
            if not isinstance(key_node.value, str):
                raise _mistake(key_node, "a key must be a plain name")
            key, line = _text(key_node), int(key_node.start_mark.line) + 1
            if key in seen:
                raise _mistake(key_node, f"{key} is given twice; the first time on line {seen[key]}")
            seen[key] = line
            own.append((key, line, self.build(value_node)))
        given_before: set[str] = set(seen)
        for key, line, entry in merged:
            if key not in given_before:  # a key beside `<<` wins, and so does an earlier merge
                given_before.add(key)
                own.append((key, line, entry))
        yield from own

    def _merged(self, node: Any) -> Iterator[tuple[str, int, Entry]]:
        for source in node.value if str(node.tag) == f"{_TAG}seq" else [node]:
            entry = self.build(source)
            if entry.items is None:
                raise _mistake(node, "<< takes a mapping, or a list of them")
            yield from entry.items


def _scalar(node: Any, tag: str) -> Any:
    text = _text(node)
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    if tag in ("int", "float"):
        try:
            return _number(text, tag)
        except ValueError:
            raise _mistake(node, f"{text!r} is not a number") from None
    if tag in ("str", "timestamp", "value"):
        return text
    raise _mistake(node, f"the tag !!{tag} is not allowed: a run file holds plain values only")


def _number(text: str, tag: str) -> int | float:
    plain = text.replace("_", "").lower()
    if tag == "int":
        unsigned = plain.lstrip("+-")
        return int(plain, 0) if unsigned.startswith(("0x", "0o", "0b")) else int(plain)
    return float(plain.replace(".inf", "inf").replace(".nan", "nan"))


def _text(node: Any) -> str:
    """A scalar's text; halves of a JSON surrogate pair (an emoji that was written as two escapes) are joined."""
    text = str(node.value)
    if text.isascii():
        return text
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise _mistake(node, "half of a surrogate pair is no character") from None


def _mistake(node: Any, message: str) -> YamlFileError:
    return YamlFileError(message, int(node.start_mark.line) + 1, int(node.start_mark.column) + 1)
