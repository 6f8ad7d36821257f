"""Where rows come from: files, or a data set of the hub. Worker side; `datasets` is imported for hub data alone."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from fleettune_core.config.schema import Data
from fleettune_core.data.files import Row, file_ending, find_files, iter_all_rows
from fleettune_core.errors import FtError

_EVAL_SPLITS = ("validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Rows that can be read as often as needed."""

    label: str
    """For messages: what the user named, and the split of a hub data set."""
    files: tuple[Path, ...] = ()
    hub: Any = None
    """A `datasets.Dataset`; None for files."""
    max_rows: int | None = None

    def rows(self) -> Iterator[Row]:
        """The rows, from the first one on."""
        if self.hub is None:
            return iter_all_rows(self.files, max_rows=self.max_rows)
        return self._hub_rows()

    def digest(self) -> str:
        """A name for the content: the same bytes give the same one, whatever the files are called."""
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(f"{file_ending(path)} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
        if self.hub is not None:
            # `datasets` names a loaded table by its builder, configuration, revision and transformations.
            fingerprint = self.hub._fingerprint  # noqa: SLF001 (there is no public name for it)
            digest.update(f"{self.label} {fingerprint} {len(self.hub)}".encode())
        return digest.hexdigest()

    def _hub_rows(self) -> Iterator[Row]:
        rows = cast("Iterator[dict[str, Any]]", iter(self.hub))
        for number, values in enumerate(islice(rows, self.max_rows), start=1):
            yield Row(values=values, file=Path(self.label), line=number, numbered_by="row")


def open_source(spec: str, data: Data, *, evaluation: bool = False) -> RowSource:
    """Find what `spec` names. A hub data set is downloaded here, or taken from its cache.

    `evaluation`: of a hub data set take the split `validation`, else `test`, and not the one that is trained on.
    `FtError` when there is no such file, or the hub does not give the data set.
    """
    files = find_files(spec)
    if files is not None:
        return RowSource(label=spec, files=tuple(files), max_rows=data.max_rows)
    split = _evaluation_split(spec, data) if evaluation else data.dataset_split
    try:
        datasets: Any = importlib.import_module("datasets")  # as Any: it has no types
        table = datasets.load_dataset(spec, data.dataset_config, split=split)
    except Exception as error:  # dozens of kinds, from the network to a data set's own code
        raise _not_loaded(spec, error) from error
    return RowSource(label=f"{spec}[{split}]", hub=table, max_rows=data.max_rows)


def _evaluation_split(spec: str, data: Data) -> str:
    try:
        datasets: Any = importlib.import_module("datasets")
        names: list[str] = datasets.get_dataset_split_names(spec, data.dataset_config)
    except Exception as error:
        raise _not_loaded(spec, error) from error
    for name in _EVAL_SPLITS:
        if name in names:
            return name
    if spec == data.dataset:
        raise FtError(
            f"{spec} has no split to evaluate on, only {', '.join(names)}",
            hint="keep a part of the training rows for it: --eval-split 0.05",
        )
    return data.dataset_split


def _not_loaded(spec: str, error: Exception) -> FtError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return FtError(
        f"{spec}: no such file, and the hub does not give it: {reason}",
        hint="give a file, folder or glob of json, jsonl, csv or parquet, or a hub id (org/name)",
    )
