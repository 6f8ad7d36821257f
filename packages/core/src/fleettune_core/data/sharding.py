"""Which rows an optimizer step sees, and which rank gets which of them.

Step *t* sees the same rows on every layout: rows are permuted by (seed, epoch), cut into global batches, and only then
is a global batch dealt out to ranks and micro-batches. Nothing here holds a list of all rows: the permutation is
computed where it is needed, so any step of any epoch is reached in constant time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fleettune_core.data.tokens import IGNORE
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import BatchPlan, DataShard, ShardedData

FILLER = -1
"""The row that is none: it pads a last, short global batch and weighs nothing."""

_ROUNDS = 8

Rows = npt.NDArray[np.int64]


def permute(indices: Rows, n: int, seed: int, epoch: int) -> Rows:
    """Where a bijection of [0, n), chosen by (seed, epoch), sends each of `indices`.

    `indices`: any shape, int64, each in [0, n); the result has the same shape. Stateless: no array of n is made, so
    n may be 10^12. ValueError for an index outside.

    A number is split into two digits of bases a and b with n <= a·b, and an alternating Feistel network adds to one
    digit a keyed hash of the other; a result beyond n is sent through again until it falls below ("cycle walking").
    Both from J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. The hash is the finalizer
    of splitmix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
    """
    values = np.asarray(indices, dtype=np.int64)
    if values.size and (int(values.min()) < 0 or int(values.max()) >= n):
        raise ValueError(f"indices must be in [0, {n})")
    base_low = math.isqrt(n - 1) + 1 if n > 1 else 1
    base_high = -(-n // base_low)
    keys = np.random.SeedSequence((seed, epoch, n)).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
    result = _feistel(values.ravel(), base_low, base_high, keys)
    # a·b - n < a, so that few numbers walk, and each comes back below n because the network is a bijection.
    while (beyond := result >= n).any():
        result[beyond] = _feistel(result[beyond], base_low, base_high, keys)
    return np.reshape(result, values.shape)


def _feistel(values: Rows, base_low: int, base_high: int, keys: npt.NDArray[np.uint64]) -> Rows:
    high, low = np.divmod(values, base_low)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            low = (low + _hash(high, key, base_low)) % base_low
        else:
            high = (high + _hash(low, key, base_high)) % base_high
    return high * base_low + low


def _hash(values: Rows, key: np.uint64, base: int) -> Rows:
    """A number below `base` (at most 2^32) for each of `values`."""
    mixed = (values.astype(np.uint64) + key) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return (((mixed >> np.uint64(32)) * np.uint64(base)) >> np.uint64(32)).astype(np.int64)


def steps_per_epoch(data: ShardedData) -> int:
    """Optimizer steps of one pass over the rows; the last one may be short of rows."""
    return -(-data.num_rows // data.batch.global_batch)


def rows_of_step(data: ShardedData, epoch: int, step: int) -> Rows:
    """The rows that optimizer step `step` of an epoch sees, on any layout: at most `global_batch`, int64."""
    if not 0 <= step < steps_per_epoch(data):
        raise ValueError(f"an epoch has {steps_per_epoch(data)} steps, and step {step} is none of them")
    start = step * data.batch.global_batch
    positions = np.arange(start, min(start + data.batch.global_batch, data.num_rows), dtype=np.int64)
    return permute(positions, data.num_rows, data.seed, epoch)


def deal(rows: Rows, lengths: npt.NDArray[Any], batch: BatchPlan, shard: DataShard) -> list[list[int]]:
    """This rank's micro-batches of one global batch: `accumulation` lists of `micro_batch` rows.

    `rows`: at most `global_batch`; `lengths`: tokens of each. Rows are sorted by length, longest first (a batch that
    does not fit in memory shows at once), and cut into micro-batches of neighbours, which need little padding. One
    accumulation slot after the other, the ranks take a neighbour each, in an order that turns around at every slot,
    so that no rank gets the longer one each time. A short batch is spread evenly: micro-batches differ by one row at
    most, and fillers make up the rest.
    """
    ordered = rows[np.lexsort((rows, -np.asarray(lengths, dtype=np.int64)))]
    num_micro_batches = batch.accumulation * batch.ranks
    smaller, num_larger = divmod(len(ordered), num_micro_batches)
    dealt: list[list[int]] = []
    for slot in range(batch.accumulation):
        place = shard.index if slot % 2 == 0 else batch.ranks - 1 - shard.index
        number = slot * batch.ranks + place
        start = number * smaller + min(number, num_larger)
        micro_batch = cast("list[int]", ordered[start : start + smaller + (number < num_larger)].tolist())
        dealt.append(micro_batch + [FILLER] * (batch.micro_batch - len(micro_batch)))
    return dealt


class GlobalBatchSampler:
    """This rank's micro-batches, in order, from any step (a `fleettune_core.types.BatchSampler`).

    Every rank yields equally many micro-batches of exactly `micro_batch` rows, `FILLER` among them where the last
    global batch is short. All ranks together see `rows_of_step`, each row once.
    """

    def __init__(self, data: ShardedData, shard: DataShard) -> None:
        if data.num_rows < 1:
            raise ValueError("there are no rows to sample from")
        if shard.count != data.batch.ranks or not 0 <= shard.index < shard.count:
            raise ValueError(f"shard {shard.index} of {shard.count} does not belong to {data.batch.ranks} ranks")
        self.data = data
        self.shard = shard
        self._epoch = 0
        self._next_step = 0

    def __len__(self) -> int:
        return steps_per_epoch(self.data) * self.data.batch.accumulation

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of rows for the iterations that start from now on."""
        self._epoch = epoch

    def seek(self, step: int) -> None:
        """Start the next iteration (that one alone) at optimizer step `step` of the epoch."""
        if not 0 <= step <= steps_per_epoch(self.data):
            raise ValueError(f"an epoch has {steps_per_epoch(self.data)} steps: cannot start at step {step}")
        self._next_step = step

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator itself: what was set must count from the call on, not from the first micro-batch on.
        epoch, start = self._epoch, self._next_step
        self._next_step = 0
        return self._micro_batches(epoch, start)

    def _micro_batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        for step in range(start, steps_per_epoch(self.data)):
            yield from self.micro_batches_of_step(epoch, step)

    def micro_batches_of_step(self, epoch: int, step: int) -> list[list[int]]:
        """This rank's micro-batches of one optimizer step."""
        rows = rows_of_step(self.data, epoch, step)
        return deal(rows, np.asarray(self.data.lengths[rows]), self.data.batch, self.shard)


def check_coverage(data: ShardedData, *, epoch: int, step: int, rows_by_rank: Sequence[Sequence[int]]) -> None:
    """Hold what all ranks were given in one step against what the step must see.

    `rows_by_rank`: each rank's rows of this step, fillers included or not. `FtError` (exit code 3) names how many
    rows are missing, are given twice or do not belong, and the first of them: each row must be given exactly once.
    """
    expected = rows_of_step(data, epoch, step)
    everything = np.concatenate([np.asarray(rows, dtype=np.int64).ravel() for rows in rows_by_rank])
    given, counts = np.unique(everything[everything != FILLER], return_counts=True)
    faults = {
        "missing": np.setdiff1d(expected, given),
        "given more than once": given[counts > 1],
        "of another step": np.setdiff1d(given, expected),
    }
    problems = [f"{len(rows)} rows {fault}, the first is row {rows[0]}" for fault, rows in faults.items() if len(rows)]
    if problems:
        raise FtError(
            f"the ranks do not share out step {step} of epoch {epoch}: of its {len(expected)} rows"
            f" {int((counts == 1).sum())} were given once",
            problems=problems,
            hint="the sampler of the backend (shard_data) or another layer shards a second time",
            exit_code=ExitCode.PLUGIN,
        )


class FillerDataset:
    """Rows as the trainer takes them, and a filler for row -1: one padding token, nothing supervised.

    `dataset`: anything with `__len__` and `__getitem__` that gives `input_ids` and `labels` (a `datasets.Dataset`);
    other columns are left out. Each item: `{"input_ids": list[int], "labels": list[int]}`.
    """

    def __init__(self, dataset: Any, pad_token_id: int) -> None:
        self._dataset = dataset
        self._pad_token_id = pad_token_id

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self._filler() if index == FILLER else self._item(self._dataset[self._checked(index)])

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, list[int]]]:
        """Several rows at once, in order; torch's DataLoader asks in this way where it can."""
        real = [self._checked(index) for index in indices if index != FILLER]
        together = getattr(self._dataset, "__getitems__", None)
        fetched = together(real) if together is not None and real else [self._dataset[index] for index in real]
        items = iter(fetched)
        return [self._filler() if index == FILLER else self._item(next(items)) for index in indices]

    def _filler(self) -> dict[str, list[int]]:
        return {"input_ids": [self._pad_token_id], "labels": [IGNORE]}

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self._dataset):
            raise IndexError(f"row {index} of {len(self._dataset)}")
        return int(index)

    @staticmethod
    def _item(row: Mapping[str, Any]) -> dict[str, list[int]]:
        return {"input_ids": row["input_ids"], "labels": row["labels"]}
