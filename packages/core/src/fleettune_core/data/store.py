"""Tokenised rows on disk: a folder that is complete or absent, built by one process while others wait."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fleettune_core.data.tokens import TokenizedRow

ROWS_FILE = "rows.arrow"

_ROWS_PER_BATCH = 1000


def build_once(folder: Path, build: Callable[[Path], None], *, log: Callable[[str], None]) -> bool:
    """See to it that `folder` exists; true when it did already.

    `build` fills a folder beside it, which is then synced and renamed; whatever it raises leaves nothing behind. Any
    number of processes may call this at once: one builds, the others wait for it. A builder that died is replaced
    by the next in line.
    """
    if folder.is_dir():
        return True
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock: Any = FileLock(folder.parent / f"{folder.name}.lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        log(f"data: waiting for another process that prepares it ({lock.lock_file})")
        lock.acquire()
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        if folder.is_dir():
            return True
        prefix = f".{folder.name}."
        for left_behind in folder.parent.glob(f"{prefix}*"):  # by a builder that died: we hold its lock
            shutil.rmtree(left_behind, ignore_errors=True)
        beside = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        stack.callback(shutil.rmtree, beside, ignore_errors=True)
        build(beside)
        for path in (*beside.iterdir(), beside):
            _sync(path)
        beside.chmod(0o755)
        beside.rename(folder)
        return False


def write_rows(path: Path, rows: Iterator[tuple[int, TokenizedRow]]) -> None:
    """Write (source row, tokens) pairs as an Arrow stream, with the columns that `load_rows` gives."""
    pa: Any = importlib.import_module("pyarrow")  # as Any: it has no types

    ids = pa.list_(pa.int32())
    schema = pa.schema([("input_ids", ids), ("labels", ids), ("length", pa.int32()), ("row", pa.int64())])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while batch := list(islice(rows, _ROWS_PER_BATCH)):
            columns = [
                [row.input_ids for _, row in batch],
                [row.labels for _, row in batch],
                [len(row.input_ids) for _, row in batch],
                [number for number, _ in batch],
            ]
            arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def load_rows(path: Path) -> Any:
    """A memory-mapped `datasets.Dataset` with `input_ids` and `labels` (list of int32), `length` (int32: tokens) and
    `row` (int64: the source row, from 0)."""
    datasets: Any = importlib.import_module("datasets")
    return datasets.Dataset.from_file(str(path))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
