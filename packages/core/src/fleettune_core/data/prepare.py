"""From what the user named to tokenised rows, once per run: found, told, converted, tokenised, cached by content.

Called on every rank before any process group exists, so that nothing here waits in a collective: one process
tokenises, the others find its result and map it into memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fleettune_core.config.schema import Data
from fleettune_core.data.formats import DetectedFormat, convert, detect_format
from fleettune_core.data.peek import check_evaluation
from fleettune_core.data.source import RowSource, open_source
from fleettune_core.data.store import ROWS_FILE, build_once, load_rows, write_rows
from fleettune_core.data.tokens import TokenizedRow, tokenize
from fleettune_core.errors import FtError

CODE_VERSION = 1
"""Raise it when the same content would now be tokenised in another way: older caches are then passed by."""

_REPORT_FILE = "report.json"

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareReport:
    """What became of the rows of one source."""

    format: str
    reason: str
    rows: int
    """Rows read."""
    kept: int
    truncated: int
    """Rows, among the kept ones, whose end was cut off at `max_length`."""
    dropped: int
    """Rows in which nothing could be learnt, mostly because the cut left no supervised token."""
    tokens: int
    """Of the kept rows."""
    supervised_tokens: int
    digest: str
    """Name of the content, the tokenizer and the settings together: the cache's key."""
    from_cache: bool = False

    @property
    def detected(self) -> DetectedFormat:
        return DetectedFormat(format=self.format, reason=self.reason)

    def __str__(self) -> str:
        shares = [f"{self.kept} rows"]
        shares += [f"{self.truncated} of them cut"] if self.truncated else []
        shares += [f"{self.dropped} more dropped (nothing to learn in them)"] if self.dropped else []
        percent = 100 * self.supervised_tokens / max(1, self.tokens)
        return f"{', '.join(shares)}, {self.tokens} tokens, {percent:.0f} % supervised"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedData:
    """Rows ready for training. `train` and `eval` are memory-mapped `datasets.Dataset`s with the columns `input_ids`
    and `labels` (list of int32, -100 where not supervised), `length` (int32) and `row` (int64, the source row)."""

    train: Any
    eval: Any
    """None without rows to evaluate on."""
    report: PrepareReport
    """Of all rows of `dataset`, before a part was kept for evaluation."""
    eval_report: PrepareReport | None = None
    """Of `eval_dataset`, where one was given."""


def prepare(
    data: Data,
    *,
    seed: int,
    tokenizer: Any,
    cache_dir: Path,
    tokenizer_digest: str | None = None,
    log: Log | None = None,
) -> PreparedData:
    """Tokenise the rows of `data`, or load them from the cache in `cache_dir`.

    `tokenizer`: a fast transformers tokenizer; `tokenizer_digest`: a name for its content, if the caller has one.
    `seed` chooses which rows `eval_split` keeps, and nothing else. `log` gets one line per stage; without it this
    module's logger does. `FtError` (exit code 5) for anything in the data that the user can mend.
    """
    if data.dataset is None:
        raise FtError("no data given", hint="--dataset FILE, a folder, a glob or a hub id")
    check_evaluation(data)
    say = log or logging.getLogger(__name__).info
    digest = tokenizer_digest or digest_of(tokenizer)
    source = open_source(data.dataset, data)
    report, rows = _prepare_source(source, data, tokenizer, digest, cache_dir, say)
    if data.eval_dataset is not None:
        eval_source = open_source(data.eval_dataset, data, evaluation=True)
        eval_report, eval_rows = _prepare_source(eval_source, data, tokenizer, digest, cache_dir, say)
        return PreparedData(train=rows, eval=eval_rows, report=report, eval_report=eval_report)
    if not data.eval_split:
        return PreparedData(train=rows, eval=None, report=report)
    kept_back = rows_for_evaluation(_column(rows, "row"), data.eval_split, seed)
    say(f"data: {int(kept_back.sum())} of {len(rows)} rows are kept for evaluation (--eval-split {data.eval_split:g})")
    return PreparedData(
        train=rows.select(np.flatnonzero(~kept_back)), eval=rows.select(np.flatnonzero(kept_back)), report=report
    )


def lengths_of(dataset: Any) -> npt.NDArray[np.int32]:
    """Tokens of each row of a prepared data set."""
    return _column(dataset, "length").astype(np.int32, copy=False)


def rows_for_evaluation(rows: npt.NDArray[np.int64], share_or_count: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which of the source rows `rows` are kept for evaluation: a mask with as many set as `share_or_count` says.

    Below 1 it is a share (at least one row is kept), from 1 on a count. Each row's fate hangs on (seed, row) alone,
    as far as the count allows: those with the smallest hash are kept, so a longer data set moves few rows over.
    """
    count = max(1, round(share_or_count * len(rows))) if share_or_count < 1 else int(share_or_count)
    if count >= len(rows):
        raise FtError(
            f"--eval-split {share_or_count:g} keeps {count} of {len(rows)} rows: none is left to train on",
            hint="keep fewer: --eval-split 0.05, or a count",
        )
    key = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    mixed = (rows.astype(np.uint64) + key) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mask = np.zeros(len(rows), dtype=np.bool_)
    mask[np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")[:count]] = True
    return mask


def digest_of(tokenizer: Any) -> str:
    """A name for everything in a fast tokenizer that decides how text becomes tokens, its chat template included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = str(tokenizer.name_or_path) if backend is None else str(backend.to_str())
    # Before its tokens it writes truncation and padding, which are left over from whoever called it last.
    content = content[max(0, content.find('"added_tokens"')) :]
    rest = json.dumps([tokenizer.chat_template, tokenizer.eos_token_id, tokenizer.bos_token_id])
    return hashlib.sha256(f"{rest}\n{content}".encode()).hexdigest()


def _prepare_source(
    source: RowSource, data: Data, tokenizer: Any, tokenizer_digest: str, cache_dir: Path, log: Log
) -> tuple[PrepareReport, Any]:
    key = {
        "version": CODE_VERSION,
        "content": source.digest(),
        "format": data.format,
        "tokenizer": tokenizer_digest,
        "max_length": data.max_length,
        "max_rows": data.max_rows,
        "train_on": data.train_on,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    folder = cache_dir / f"tokens-{digest[:32]}"

    def build(beside: Path) -> None:
        detected = detect_format(source.rows(), data.format)
        log(f"data: {source.label}: {detected.format} ({detected.reason}); tokenising")
        counts = _Counts()
        write_rows(beside / ROWS_FILE, counts.kept_rows(_tokenized(source, detected, data, tokenizer)))
        report = counts.report(detected, digest)
        if not report.kept:
            raise _nothing_left(source, data, report)
        (beside / _REPORT_FILE).write_text(json.dumps(dataclasses.asdict(report)), encoding="utf-8")

    from_cache = build_once(folder, build, log=log)
    stored: dict[str, Any] = json.loads((folder / _REPORT_FILE).read_text(encoding="utf-8"))
    report = dataclasses.replace(PrepareReport(**stored), from_cache=from_cache)
    log(f"data: {source.label}: {report.format}, {report}{' (from the cache)' if from_cache else ''}")
    return report, load_rows(folder / ROWS_FILE)


def _tokenized(source: RowSource, detected: DetectedFormat, data: Data, tokenizer: Any) -> Iterator[TokenizedRow]:
    examples = (convert(row, detected.format) for row in source.rows())
    return tokenize(examples, tokenizer, max_length=data.max_length, train_on=data.train_on)


class _Counts:
    """Counts rows on their way to the disk."""

    def __init__(self) -> None:
        self.rows = self.kept = self.truncated = self.tokens = self.supervised_tokens = 0

    def kept_rows(self, rows: Iterator[TokenizedRow]) -> Iterator[tuple[int, TokenizedRow]]:
        """(source row, tokens) of the rows in which something can be learnt."""
        for number, row in enumerate(rows):
            self.rows += 1
            if row.dropped:
                continue
            self.kept += 1
            self.truncated += row.truncated
            self.tokens += len(row.input_ids)
            self.supervised_tokens += row.supervised_tokens
            yield number, row

    def report(self, detected: DetectedFormat, digest: str) -> PrepareReport:
        return PrepareReport(
            format=detected.format,
            reason=detected.reason,
            rows=self.rows,
            kept=self.kept,
            truncated=self.truncated,
            dropped=self.rows - self.kept,
            tokens=self.tokens,
            supervised_tokens=self.supervised_tokens,
            digest=digest,
        )


def _nothing_left(source: RowSource, data: Data, report: PrepareReport) -> FtError:
    return FtError(
        f"{source.label}: none of {report.rows} rows keeps a supervised token within {data.max_length} tokens",
        hint="raise --max-length, or shorten the prompts; `ft data preview` shows what is supervised",
    )


def _column(dataset: Any, name: str) -> npt.NDArray[Any]:
    return np.asarray(dataset.with_format("numpy", columns=[name])[:][name])
