"""Which rows a step sees, and who gets them: the same rows for every layout, each once, dealt by length."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleettune_core.data.sharding import (
    FILLER,
    FillerDataset,
    GlobalBatchSampler,
    check_coverage,
    deal,
    permute,
    rows_of_step,
    steps_per_epoch,
)
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import BatchPlan, DataShard, ShardedData

Layout = tuple[int, int, int]
"""ranks × micro_batch × accumulation."""


def batch_plan(layout: Layout) -> BatchPlan:
    ranks, micro_batch, accumulation = layout
    return BatchPlan(
        global_batch=ranks * micro_batch * accumulation, micro_batch=micro_batch, accumulation=accumulation, ranks=ranks
    )


def sharded(num_rows: int, layout: Layout, *, seed: int = 3) -> ShardedData:
    lengths = np.random.default_rng(0).integers(1, 500, num_rows)
    return ShardedData(num_rows=num_rows, lengths=lengths, seed=seed, batch=batch_plan(layout))


def samplers(data: ShardedData) -> list[GlobalBatchSampler]:
    return [GlobalBatchSampler(data, DataShard(index=rank, count=data.batch.ranks)) for rank in range(data.batch.ranks)]


layouts = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_permute_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@given(n=st.integers(1, 10**12), seed=st.integers(0, 100), data=st.data())
def test_permute_of_a_few_is_what_permute_of_all_says(n: int, seed: int, data: st.DataObject) -> None:
    indices = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    together = permute(indices, n, seed, 0)
    assert together.tolist() == [int(permute(np.array([index]), n, seed, 0)[0]) for index in indices]
    assert ((together >= 0) & (together < n)).all()


def test_permute_looks_shuffled() -> None:
    n = 20_000
    order = permute(np.arange(n), n, 42, 0)
    correlations = [
        np.corrcoef(np.arange(n), order)[0, 1],
        np.corrcoef(order[:-1], order[1:])[0, 1],
        np.corrcoef(order, permute(np.arange(n), n, 42, 1))[0, 1],
        np.corrcoef(order, permute(np.arange(n), n, 43, 0))[0, 1],
    ]
    # Of n independent pairs the correlation has the standard deviation 1/sqrt(n): five of them.
    assert np.abs(correlations).max() < 5 / np.sqrt(n)
    # Every batch of 100 draws from all over: its mean is that of a sample.
    means = order.reshape(-1, 100).mean(axis=1)
    assert abs(means.std() / (n / np.sqrt(12) / np.sqrt(100)) - 1) < 0.2


@pytest.mark.parametrize("n", [3, 4])
def test_every_order_of_a_few_rows_occurs_about_equally_often(n: int) -> None:
    seen: dict[tuple[int, ...], int] = {}
    for seed in range(2400):
        order = tuple(permute(np.arange(n), n, seed, 0).tolist())
        seen[order] = seen.get(order, 0) + 1
    expected = 2400 / {3: 6, 4: 24}[n]
    assert len(seen) == {3: 6, 4: 24}[n]
    assert all(abs(count - expected) < 5 * np.sqrt(expected) for count in seen.values())


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 5\)"):
        permute(np.array([5]), 5, 0, 0)
    with pytest.raises(ValueError, match=r"must be in \[0, 5\)"):
        permute(np.array([-1]), 5, 0, 0)


@settings(deadline=None)
@given(num_rows=st.integers(1, 200), layout=layouts, epoch=st.integers(0, 3))
def test_all_ranks_together_see_each_row_of_each_step_once(num_rows: int, layout: Layout, epoch: int) -> None:
    data = sharded(num_rows, layout)
    ranks = samplers(data)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    streams = [list(sampler) for sampler in ranks]
    accumulation = data.batch.accumulation
    seen: list[int] = []
    for step in range(steps_per_epoch(data)):
        parts = [stream[step * accumulation : (step + 1) * accumulation] for stream in streams]
        given = [row for part in parts for micro_batch in part for row in micro_batch if row != FILLER]
        assert sorted(given) == sorted(rows_of_step(data, epoch, step).tolist())
        seen += given
    assert sorted(seen) == list(range(num_rows))


@settings(deadline=None)
@given(num_rows=st.integers(1, 200), layout=layouts)
def test_every_rank_does_the_same_number_of_whole_micro_batches(num_rows: int, layout: Layout) -> None:
    data = sharded(num_rows, layout)
    for sampler in samplers(data):
        micro_batches = list(sampler)
        assert len(micro_batches) == len(sampler) == steps_per_epoch(data) * data.batch.accumulation
        assert {len(micro_batch) for micro_batch in micro_batches} == {data.batch.micro_batch}


@settings(deadline=None)
@given(num_rows=st.integers(1, 200), layout=layouts)
def test_fillers_are_spread_evenly(num_rows: int, layout: Layout) -> None:
    data = sharded(num_rows, layout)
    last = steps_per_epoch(data) - 1
    real = [
        sum(row != FILLER for row in micro_batch)
        for sampler in samplers(data)
        for micro_batch in sampler.micro_batches_of_step(0, last)
    ]
    assert max(real) - min(real) <= 1


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_step_sees_the_same_rows_on_every_layout(epoch: int) -> None:
    def rows_by_step(layout: Layout) -> list[list[int]]:
        data = sharded(1000, layout)
        ranks = samplers(data)
        return [
            sorted(
                row
                for sampler in ranks
                for micro_batch in sampler.micro_batches_of_step(epoch, step)
                for row in micro_batch
                if row != FILLER
            )
            for step in range(steps_per_epoch(data))
        ]

    one = rows_by_step((1, 32, 1))
    assert (
        one == rows_by_step((1, 4, 8)) == rows_by_step((8, 4, 1)) == rows_by_step((2, 16, 1)) == rows_by_step((4, 1, 8))
    )
    assert len({tuple(rows) for rows in one}) == len(one)


def test_another_epoch_and_another_seed_give_another_order() -> None:
    first = rows_of_step(sharded(1000, (1, 32, 1)), 0, 0).tolist()
    assert first != rows_of_step(sharded(1000, (1, 32, 1)), 1, 0).tolist()
    assert first != rows_of_step(sharded(1000, (1, 32, 1), seed=4), 0, 0).tolist()


def test_rows_of_like_length_share_a_micro_batch_and_ranks_take_turns_with_the_longer_one() -> None:
    batch = batch_plan((2, 2, 2))
    rows = np.array([5, 6, 7, 8, 9, 10, 11, 12])
    lengths = np.array([10, 80, 20, 70, 30, 60, 40, 50])
    assert deal(rows, lengths, batch, DataShard(index=0, count=2)) == [[6, 8], [7, 5]]
    assert deal(rows, lengths, batch, DataShard(index=1, count=2)) == [[10, 12], [11, 9]]


def test_rows_of_equal_length_are_dealt_by_number() -> None:
    rows = np.array([9, 2, 7, 4])
    dealt = [deal(rows, np.ones(4), batch_plan((2, 2, 1)), DataShard(index=rank, count=2)) for rank in range(2)]
    assert dealt == [[[2, 4]], [[7, 9]]]


def test_ranks_get_equal_work() -> None:
    data = sharded(4096, (4, 2, 8))
    work = [sum(int(data.lengths[row]) for micro_batch in sampler for row in micro_batch) for sampler in samplers(data)]
    assert max(work) / min(work) < 1.02


def test_seek_goes_on_where_an_earlier_run_stopped() -> None:
    data = sharded(150, (2, 4, 2))
    for sampler in samplers(data):
        sampler.set_epoch(2)
        whole = list(sampler)
        sampler.seek(4)
        assert list(sampler) == whole[4 * data.batch.accumulation :]
        assert list(sampler) == whole, "seek counts for one iteration"
        sampler.seek(steps_per_epoch(data))
        assert list(sampler) == []


def test_what_is_set_counts_from_the_start_of_an_iteration() -> None:
    [sampler] = samplers(sharded(64, (1, 8, 1)))
    first = list(sampler)
    sampler.seek(3)
    stream = iter(sampler)
    sampler.set_epoch(1)
    sampler.seek(5)
    assert list(stream) == first[3:]


def test_a_step_beyond_the_epoch_is_refused() -> None:
    data = sharded(64, (1, 8, 1))
    [sampler] = samplers(data)
    with pytest.raises(ValueError, match="8 steps"):
        sampler.seek(9)
    with pytest.raises(ValueError, match="8 steps"):
        rows_of_step(data, 0, 8)


def test_a_shard_of_another_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="does not belong to 2 ranks"):
        GlobalBatchSampler(sharded(64, (2, 4, 1)), DataShard(index=0, count=4))


class LazyLengths:
    """Lengths of a billion rows that nobody has."""

    def __getitem__(self, rows: Any) -> Any:
        return rows % 1000 + 1


def test_a_billion_rows_cost_neither_time_nor_memory() -> None:
    data = ShardedData(num_rows=10**9, lengths=LazyLengths(), seed=1, batch=batch_plan((8, 4, 4)))

    def first_step() -> list[list[int]]:
        sampler = GlobalBatchSampler(data, DataShard(index=3, count=8))
        sampler.seek(7_000_000)
        stream = iter(sampler)
        return [next(stream) for _ in range(4)]

    first_step()
    seconds: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        first_step()
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    try:
        first_step()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert min(seconds) < 0.010
    assert peak_bytes < 1_000_000


# The check that some layer shards twice


def rows_by_rank(data: ShardedData, epoch: int, step: int) -> list[list[int]]:
    return [
        [row for micro_batch in sampler.micro_batches_of_step(epoch, step) for row in micro_batch]
        for sampler in samplers(data)
    ]


def test_the_coverage_check_passes_what_the_sampler_deals() -> None:
    data = sharded(50, (4, 2, 2))
    for step in range(steps_per_epoch(data)):
        check_coverage(data, epoch=1, step=step, rows_by_rank=rows_by_rank(data, 1, step))


def test_a_sampler_that_shards_twice_is_caught() -> None:
    data = sharded(64, (2, 4, 2))
    twice = [rows[rank::2] for rank, rows in enumerate(rows_by_rank(data, 0, 0))]
    with pytest.raises(FtError, match="of its 16 rows 8 were given once") as caught:
        check_coverage(data, epoch=0, step=0, rows_by_rank=twice)
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert [problem.split(",")[0] for problem in caught.value.problems] == ["8 rows missing"]


def test_ranks_that_all_get_the_same_rows_are_caught() -> None:
    data = sharded(64, (2, 4, 2))
    first = rows_by_rank(data, 0, 0)[0]
    with pytest.raises(FtError) as caught:
        check_coverage(data, epoch=0, step=0, rows_by_rank=[first, first])
    assert [problem.split(",")[0] for problem in caught.value.problems] == [
        "8 rows missing",
        "8 rows given more than once",
    ]


def test_rows_of_another_step_are_caught() -> None:
    data = sharded(64, (2, 4, 2))
    with pytest.raises(FtError) as caught:
        check_coverage(data, epoch=0, step=0, rows_by_rank=rows_by_rank(data, 0, 1))
    assert [problem.split(",")[0] for problem in caught.value.problems] == [
        "16 rows missing",
        "16 rows of another step",
    ]


# Fillers


class Plain:
    """A data set that gives one row at a time."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index, 9], "labels": [-100, index], "length": 2, "row": index}


class Batched(Plain):
    """A data set that gives several at once, as `datasets.Dataset` does."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("inner", [Plain(), Batched()])
def test_row_minus_one_is_a_filler_that_weighs_nothing(inner: Plain) -> None:
    dataset = FillerDataset(inner, pad_token_id=7)
    filler = {"input_ids": [7], "labels": [-100]}
    assert len(dataset) == 3
    assert dataset[FILLER] == filler
    assert dataset[2] == {"input_ids": [2, 9], "labels": [-100, 2]}
    assert dataset.__getitems__([2, FILLER, 0, FILLER]) == [dataset[2], filler, dataset[0], filler]
    assert dataset.__getitems__([FILLER]) == [filler]


@pytest.mark.parametrize("index", [3, -2])
def test_other_rows_outside_are_an_error_and_not_a_row_from_the_end(index: int) -> None:
    dataset = FillerDataset(Plain(), pad_token_id=7)
    with pytest.raises(IndexError):
        dataset[index]
    with pytest.raises(IndexError):
        dataset.__getitems__([0, index])
