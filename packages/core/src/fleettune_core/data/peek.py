"""A fast look at the data before a run: in control, without pyarrow, datasets or a tokenizer."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from fleettune_core.config.schema import Data
from fleettune_core.data.files import Row, check_parquet, file_ending, find_files, iter_rows
from fleettune_core.data.formats import FormatDetector, convert
from fleettune_core.errors import FtError
from fleettune_core.plan.model import DataSummary

_GZIP_RATIO = 8
"""How much larger a compressed file is taken to be; text packs about so well."""


def peek(data: Data, *, limit_bytes: int = 8 * 2**20) -> DataSummary:
    """Say how the training rows will be read, from all rows when they are at most `limit_bytes`, else from the first.

    `FtError` for anything that is already wrong: no such file, no rows, broken JSON, columns of no known shape, a bad
    row; for the rows to evaluate on as well. Parquet files and hub ids are only read when the run prepares.
    """
    if data.dataset is None:
        raise FtError("no data given", hint="--dataset FILE, a folder, a glob or a hub id")
    check_evaluation(data)
    summary = _look(data.dataset, data, limit_bytes)
    if data.eval_dataset is not None:
        _look(data.eval_dataset, data, limit_bytes)
    return summary


def check_evaluation(data: Data) -> None:
    """`FtError` when it is said twice which rows to evaluate on."""
    if data.eval_dataset is not None and data.eval_split:
        raise FtError(
            f"--eval-dataset {data.eval_dataset} and --eval-split {data.eval_split:g} both say what to evaluate on",
            hint="leave one of them out",
        )


def check_kept_back(data: Data, rows: int | None) -> None:
    """`FtError` when `eval_split` is neither a share nor a count, or leaves none of the `rows` to train on (None: not
    known yet, and told when the run prepares)."""
    split = data.eval_split
    if split > 1 and split != int(split):
        raise FtError(
            f"eval_split is {split:g}, which is neither a share of the rows nor a number of them",
            hint="write a share below 1, such as --eval-split 0.05, or a whole number of rows",
        )
    kept = max(1, round(split * (rows or 0))) if split < 1 else int(split)
    if split and rows is not None and kept >= rows:
        raise FtError(
            f"eval_split {split:g} keeps {kept} of {rows} rows: none is left to train on",
            hint="keep fewer: --eval-split 0.05, or a count",
        )


def _look(spec: str, data: Data, limit_bytes: int) -> DataSummary:
    files = find_files(spec)
    if files is None:
        return _unread(data, f"hub id {spec}: loaded when the run prepares", ())
    parquet = [path for path in files if file_ending(path) == ".parquet"]
    for path in parquet:
        check_parquet(path)
    if parquet:
        return _unread(data, "parquet: read when the run prepares", tuple(map(str, files)))
    detector = FormatDetector()
    rows, complete = _first_rows(files, data.max_rows, limit_bytes)
    if not rows and not complete:
        return _unread(data, f"the first row is longer than {limit_bytes / 2**20:g} MiB", tuple(map(str, files)))
    for row in rows:
        detector.add(row)
    detected = detector.result(data.format)
    for row in rows:
        convert(row, detected.format)
    return DataSummary(
        format=detected.format,
        reason=detected.reason if complete else f"{detected.reason} (of the first {limit_bytes / 2**20:g} MiB)",
        rows=len(rows) if complete else None,
        complete=complete,
        files=tuple(map(str, files)),
    )


def _first_rows(files: list[Path], max_rows: int | None, limit_bytes: int) -> tuple[list[Row], bool]:
    """The rows of the first `limit_bytes`, and whether these are all that the run will use."""
    rows: list[Row] = []
    left_bytes = limit_bytes
    for path in files:
        size = path.stat().st_size * (_GZIP_RATIO if path.suffix == ".gz" else 1)
        whole = size <= left_bytes
        wanted = None if max_rows is None else max_rows - len(rows)
        rows.extend(islice(iter_rows(path, limit_bytes=None if whole else left_bytes), wanted))
        if len(rows) == max_rows:
            return rows, True
        if not whole:
            return rows, False
        left_bytes -= size
    return rows, True


def _unread(data: Data, reason: str, files: tuple[str, ...]) -> DataSummary:
    return DataSummary(
        format=data.format or "unknown until loaded", reason=reason, rows=None, complete=False, files=files
    )
