"""Data files: finding them, and reading their rows with file and line.

Standard library only; parquet imports pyarrow when a parquet file is read, never before.
"""

from __future__ import annotations

import csv
import glob
import gzip
import importlib
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from fleettune_core.errors import FtError, did_you_mean, nearest

ENDINGS = (".json", ".jsonl", ".ndjson", ".csv", ".parquet", ".json.gz", ".jsonl.gz", ".ndjson.gz", ".csv.gz")
"""Endings of data files, lower case."""

_FOREIGN_ENDINGS = (".txt", ".tsv", ".arrow", ".yaml", ".yml", ".xlsx", ".xml", ".zip", ".zst", ".gz", ".md", ".py")
"""Endings that say "this is a path" although rows are not read from such files."""

_ABOUT_THE_DATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
"""Files that tools lay beside data files. In a folder they are passed over: they hold no rows."""

_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?")
_NAMES_SHOWN = 5
_CHARACTERS_SHOWN = 40
_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"[ \t\r\n]*")
_PARQUET_MAGIC = (b"PAR1", b"PARE")
_LEAST_PARQUET_BYTES = 12
_KINDS = "json, jsonl, csv or parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row as it stands in the file."""

    values: dict[str, Any]
    file: Path
    line: int
    """From 1: the line on which it starts; for parquet and hub data, which have no lines, the row's number."""
    numbered_by: str = "line"
    """`line` or `row`."""

    @property
    def where(self) -> str:
        """`chat.jsonl:12`, or `chat.parquet row 12`."""
        return f"{self.file}:{self.line}" if self.numbered_by == "line" else f"{self.file} row {self.line}"


def find_files(spec: str) -> list[Path] | None:
    """The data files that `spec` names, sorted; None when it can only be a hub id (`org/name`, or a bare name).

    `spec` is a file, a folder (searched to the bottom; hidden files are passed over) or a glob. `FtError` when it
    looks like a path but nothing is there, and when a folder or a glob holds no data file.
    """
    if not spec.strip():
        # An empty path would mean the current folder.
        raise FtError("the name of the data is empty", hint=f"give a file, folder or glob of {_KINDS}, or a hub id")
    path = Path(spec).expanduser()
    if path.is_file():
        if file_ending(path) is None:
            raise FtError(f"{spec}: not a data file: rows are read from {', '.join(ENDINGS)}")
        return [path]
    if path.is_dir():
        found = sorted(item for item in path.rglob("*") if _is_data(item, below=path))
        if not found:
            raise FtError(f"the folder {spec} holds no data file ({_KINDS})", hint=_what_is_there(path))
        return found
    if any(character in spec for character in "*?["):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207 (a Path's glob takes no absolute pattern)
        found = sorted(match for match in matches if match.is_file() and file_ending(match) is not None)
        if not found:
            others = f"; it matches {len(matches)} of other kinds" if matches else ""
            raise FtError(f"no {_KINDS} file matches {spec}{others}", hint=f"the current folder is {Path.cwd()}")
        return found
    if _looks_like_a_path(spec):
        raise _missing(spec, path)
    return None


def file_ending(path: Path) -> str | None:
    """The known ending of a data file (`.jsonl`, `.csv.gz`), or None."""
    name = path.name.lower()
    return max((ending for ending in ENDINGS if name.endswith(ending)), key=len, default=None)


def check_parquet(path: Path) -> None:
    """`FtError` for a parquet file that is cut off or is none: it begins and ends with `PAR1` (`PARE`: encrypted).

    Source: https://parquet.apache.org/docs/file-format/.
    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
            size = file.seek(0, 2)
            file.seek(max(0, size - 4))
            end = file.read(4)
    except OSError as error:
        raise FtError(f"{path}: cannot be read: {error.strerror or error}") from error
    if start not in _PARQUET_MAGIC:
        raise FtError(f"{path}: broken parquet file: it does not begin with PAR1")
    if size < _LEAST_PARQUET_BYTES or end not in _PARQUET_MAGIC:
        raise FtError(f"{path}: broken parquet file: it does not end with PAR1", hint="copy or download it again")


def iter_all_rows(files: Iterable[Path], *, max_rows: int | None = None) -> Iterator[Row]:
    """The rows of all files, one after the other; the first `max_rows` of them when it is given."""
    return islice((row for path in files for row in iter_rows(path)), max_rows)


def iter_rows(path: Path, *, limit_bytes: int | None = None) -> Iterator[Row]:
    """The rows of one file, in order.

    `limit_bytes`: only the rows that lie wholly in this much of the file's beginning (parquet: no effect). `FtError`
    names file and line of broken JSON, of a row that is no object, and of bytes that are not UTF-8; an empty file
    is an error as well, unless its beginning alone was asked for. A byte order mark is passed over.
    """
    ending = file_ending(path) or ""
    kind = ending.removesuffix(".gz")
    empty = True
    try:
        if kind == ".parquet":
            rows = _parquet_rows(path)
        elif kind == ".csv":
            rows = _csv_rows(path, limit_bytes)
        elif kind == ".json":
            rows = _json_rows(path, limit_bytes)
        else:
            rows = _json_lines(path, _lines(path, limit_bytes))
        for row in rows:
            empty = False
            yield row
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FtError(f"{path}: broken gzip file: {error}") from None
    except OSError as error:
        raise FtError(f"{path}: cannot be read: {error.strerror or error}") from error
    if empty and limit_bytes is None:
        raise FtError(f"{path}: no rows: the file is empty")


def _is_data(path: Path, *, below: Path) -> bool:
    parts = path.relative_to(below).parts
    return (
        file_ending(path) is not None
        and path.name not in _ABOUT_THE_DATA
        and not any(part.startswith(".") for part in parts)
        and path.is_file()
    )


def _what_is_there(folder: Path) -> str:
    names = sorted(item.name for item in folder.iterdir())
    if not names:
        return "it is empty"
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"it holds {shown}" + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


def _looks_like_a_path(spec: str) -> bool:
    if spec.startswith((".", "/", "~")) or spec.endswith("/") or not _HUB_ID.fullmatch(spec):
        return True
    ending = Path(spec).suffix.lower()
    # A mistyped ending still is one, but `org/data-v1.5` and `org/wiki.en` are hub ids.
    return bool(ending) and (ending in (*ENDINGS, *_FOREIGN_ENDINGS) or bool(nearest(ending, ENDINGS)))


def _missing(spec: str, path: Path) -> FtError:
    folder = path.parent
    if not folder.is_dir():
        missing = folder
        while not missing.parent.is_dir():
            missing = missing.parent
        folder = missing.parent
        siblings = [item.name for item in folder.iterdir() if item.is_dir()]
        close = did_you_mean(missing.name, siblings)
        return FtError(f"no such data file: {spec}: there is no folder {missing}{close}", hint=_path_hint(path))
    siblings = [item.name for item in folder.iterdir() if item.is_dir() or file_ending(item) is not None]
    close = [str(folder / name) for name in nearest(path.name, siblings)]
    return FtError(
        f"no such data file: {spec}" + (f" (did you mean {close[0]}?)" if close else ""), hint=_path_hint(path)
    )


def _path_hint(path: Path) -> str:
    current = "" if path.is_absolute() else f"; the current folder is {Path.cwd()}"
    return f"give a file, folder or glob of {_KINDS}, or a hub id (org/name){current}"


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else path.open("rb")


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> FtError:
    byte = error.object[error.start]
    return FtError(
        f"{path}:{line}: not UTF-8: byte 0x{byte:02x}",
        hint=f"convert the file, for instance: iconv -f LATIN1 -t UTF-8 {path} > converted{path.suffix}",
    )


def _lines(path: Path, limit_bytes: int | None) -> Iterator[tuple[int, str]]:
    """(line number, text with its line end). Lines end at LF alone: U+2028 and its like are part of a value."""
    consumed = 0
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            consumed += len(raw)
            if limit_bytes is not None and consumed > limit_bytes:
                return
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, error) from None


def _json_lines(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    for number, text in lines:
        if text.isspace():
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise _broken_json(path, number, error.msg, column=error.colno) from None
        except (ValueError, RecursionError) as error:
            raise _broken_json(path, number, str(error)) from None
        if number == 1 and isinstance(value, list):
            raise FtError(
                f"{path}:1: a JSON array, where {path.suffix} needs one object a line",
                hint=f"name the file {path.stem}.json",
            )
        yield _row(path, number, value)


def _json_rows(path: Path, limit_bytes: int | None) -> Iterator[Row]:
    """The elements of a JSON array; or objects one after the other, which many tools also write as `.json`.

    Elements are decoded one at a time, because that is what knows each one's line.
    """
    with _open(path) as file:
        raw = file.read() if limit_bytes is None else file.read(limit_bytes + 1)
    cut = limit_bytes is not None and len(raw) > limit_bytes
    try:
        text = raw.decode("utf-8-sig", errors="ignore" if cut else "strict")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, raw.count(b"\n", 0, error.start) + 1, error) from None
    position = _after_blanks(text, 0)
    if text.startswith("[", position):
        yield from _array_elements(path, text, position + 1, cut=cut)
    elif text.startswith("{", position):
        yield from _objects(path, text, position, cut=cut)
    elif position < len(text):
        raise _broken_json(path, text.count("\n", 0, position) + 1, "expected an array of objects: [{…}, {…}]")


def _array_elements(path: Path, text: str, position: int, *, cut: bool) -> Iterator[Row]:
    line = text.count("\n", 0, position) + 1
    counted = position
    first = True
    while True:
        position = _after_blanks(text, position)
        if first and text.startswith("]", position):
            break
        line += text.count("\n", counted, position)
        counted = position
        try:
            value, position = _decode(path, text, position)
        except FtError:
            if cut:
                return
            raise
        yield _row(path, line, value)
        first = False
        position = _after_blanks(text, position)
        if text.startswith(",", position):
            position += 1
        elif text.startswith("]", position):
            break
        elif cut and position == len(text):
            return
        else:
            line = text.count("\n", 0, position) + 1
            end = position == len(text)
            raise _broken_json(path, line, "the array is not closed by ]" if end else "expected , or ]")
    position = _after_blanks(text, position + 1)
    if position < len(text):
        raise _broken_json(path, text.count("\n", 0, position) + 1, "more text after the end of the array")


def _objects(path: Path, text: str, position: int, *, cut: bool) -> Iterator[Row]:
    line, counted = 1, 0
    num_objects = 0
    only: Row | None = None
    while position < len(text):
        line += text.count("\n", counted, position)
        counted = position
        try:
            value, position = _decode(path, text, position)
        except FtError:
            if cut:
                return
            raise
        row = _row(path, line, value)
        num_objects += 1
        # The first one is held back: an object alone in a .json file is not a table of one row but another shape.
        if only is not None:
            yield only
            only = None
        if num_objects == 1:
            only = row
        else:
            yield row
        position = _after_blanks(text, position)
    if only is not None and not cut:
        inside = [name for name, value in only.values.items() if isinstance(value, list)]
        raise FtError(
            f"{path}: one JSON object, expected an array of objects: [{{…}}, {{…}}]",
            hint=(f"keep the list under {inside[0]!r} alone" if len(inside) == 1 else "put it into [ ]")
            + ", or write one object a line into a .jsonl file",
        )


def _decode(path: Path, text: str, position: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise _broken_json(path, error.lineno, error.msg, column=error.colno) from None
    except (ValueError, RecursionError) as error:
        raise _broken_json(path, text.count("\n", 0, position) + 1, str(error)) from None


def _after_blanks(text: str, position: int) -> int:
    match = _BLANKS.match(text, position)
    assert match is not None
    return match.end()


def _broken_json(path: Path, line: int, problem: str, *, column: int | None = None) -> FtError:
    where = f" (column {column})" if column else ""
    return FtError(f"{path}:{line}: broken JSON: {problem}{where}")


def _row(path: Path, line: int, value: Any) -> Row:
    if not isinstance(value, dict):
        text = json.dumps(value, ensure_ascii=False)
        shown = text if len(text) <= _CHARACTERS_SHOWN else text[: _CHARACTERS_SHOWN - 1] + "…"
        raise FtError(f"{path}:{line}: a row must be an object with named columns, not {shown}")
    return Row(values=cast("dict[str, Any]", value), file=path, line=line)


def _csv_rows(path: Path, limit_bytes: int | None) -> Iterator[Row]:
    lines = _lines(path, limit_bytes)
    reader = csv.reader((text for _, text in lines), strict=True)
    # The parser's limit on a field (128 KiB) is the process's, and documents are longer than that.
    previous_limit = csv.field_size_limit(sys.maxsize)
    try:
        header: list[str] | None = None
        while True:
            start = reader.line_num + 1
            try:
                fields = next(reader, None)
            except csv.Error as error:
                if limit_bytes is not None and "end of data" in str(error):
                    break  # the beginning that was asked for ends inside quotes
                raise FtError(f"{path}:{start}: broken CSV: {error}") from None
            if fields is None:
                break
            if not fields:
                continue
            if header is None:
                header = _csv_header(path, start, fields)
                continue
            if len(fields) != len(header):
                raise FtError(
                    f"{path}:{start}: {len(fields)} fields, but the header has {len(header)}: {', '.join(header)}",
                    hint='a field with commas or line ends stands in "double quotes"',
                )
            yield Row(values=dict(zip(header, fields, strict=True)), file=path, line=start)
    finally:
        csv.field_size_limit(previous_limit)


def _csv_header(path: Path, line: int, fields: list[str]) -> list[str]:
    names = [field.strip() for field in fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise FtError(f"{path}:{line}: the header names {', '.join(map(repr, twice))} more than once")
    return names


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        pa: Any = importlib.import_module("pyarrow")  # as Any: it has no types
        pq: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise FtError(
            f"{path}: reading parquet needs pyarrow", hint="pip install 'fleettune-core[train]', or convert it to jsonl"
        ) from None
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values=values, file=path, line=number, numbered_by="row")
    except pa.ArrowInvalid as error:
        raise FtError(f"{path}: broken parquet file: {error}") from None
