"""The batch equation: solved where it can be, and refused with numbers that work where it cannot."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleettune_core.config.source import Source
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plan.batch import resolve_for_world, solve_batch

small = st.integers(1, 64)
maybe = st.none() | small


def numbers(**given: int | None) -> tuple[int, int, int, int]:
    plan = solve_batch(**given)  # type: ignore[arg-type]
    return plan.global_batch, plan.micro_batch, plan.accumulation, plan.ranks


def refusal(**given: object) -> FtError:
    with pytest.raises(FtError) as caught:
        solve_batch(**given)  # type: ignore[arg-type]
    assert caught.value.exit_code is ExitCode.CONFIG
    return caught.value


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        ({"ranks": 1}, (8, 8, 1, 1)),
        ({"ranks": 2}, (8, 4, 1, 2)),
        ({"ranks": 3}, (9, 3, 1, 3)),
        ({"ranks": 16}, (16, 1, 1, 16)),
        ({"ranks": 2, "global_batch": 32}, (32, 8, 2, 2)),
        ({"ranks": 1, "global_batch": 14}, (14, 7, 2, 1)),
        ({"ranks": 1, "global_batch": 11}, (11, 1, 11, 1)),
        ({"ranks": 2, "global_batch": 32, "micro_batch": 4}, (32, 4, 4, 2)),
        ({"ranks": 2, "global_batch": 32, "per_device": 4}, (32, 4, 4, 2)),
        ({"ranks": 2, "global_batch": 32, "accumulation": 4}, (32, 4, 4, 2)),
        ({"ranks": 2, "per_device": 3}, (6, 3, 1, 2)),
        ({"ranks": 2, "per_device": 3, "accumulation": 4}, (24, 3, 4, 2)),
        ({"ranks": 2, "micro_batch": 3, "accumulation": 4}, (24, 3, 4, 2)),
        ({"ranks": 2, "micro_batch": 2}, (8, 2, 2, 2)),
        ({"ranks": 1, "micro_batch": 3}, (9, 3, 3, 1)),
        ({"ranks": 2, "accumulation": 2}, (8, 2, 2, 2)),
        ({"ranks": 1, "global_batch": 32, "max_micro_batch": 16}, (32, 16, 2, 1)),
        ({"ranks": 1, "global_batch": 32, "max_micro_batch": 5}, (32, 4, 8, 1)),
        ({"ranks": 1, "global_batch": 32, "max_micro_batch": 0}, (32, 1, 32, 1)),
    ],
)
def test_what_is_not_said_is_solved(given: dict[str, int], solved: tuple[int, int, int, int]) -> None:
    assert numbers(**given) == solved


@given(ranks=small, global_batch=maybe, micro_batch=maybe, per_device=maybe, accumulation=maybe)
def test_a_solution_keeps_every_number_that_was_given(
    ranks: int, global_batch: int | None, micro_batch: int | None, per_device: int | None, accumulation: int | None
) -> None:
    try:
        plan = solve_batch(
            ranks=ranks,
            global_batch=global_batch,
            micro_batch=micro_batch,
            per_device=per_device,
            accumulation=accumulation,
        )
    except FtError:
        # A lone number is never refused: only two that meet can contradict each other.
        said = [value for value in (global_batch, micro_batch, per_device, accumulation) if value is not None]
        assert len(said) > 1 or (global_batch is not None and global_batch % ranks)
        return
    assert plan.global_batch == plan.micro_batch * plan.accumulation * ranks
    assert global_batch in (None, plan.global_batch)
    assert micro_batch in (None, plan.micro_batch)
    assert per_device in (None, plan.micro_batch)
    assert accumulation in (None, plan.accumulation)
    assert set(plan.reasons) == {"global_batch", "micro_batch", "accumulation", "ranks"}


@given(ranks=small, global_batch=st.integers(1, 500))
def test_the_global_batches_that_a_refusal_offers_can_be_dealt(ranks: int, global_batch: int) -> None:
    try:
        solve_batch(ranks=ranks, global_batch=global_batch)
    except FtError as error:
        offered = re.search(r"--global-batch ([\d or]+);", error.hint or "")
        assert offered is not None
        values = [int(value) for value in re.findall(r"\d+", offered[1])]
        assert all(solve_batch(ranks=ranks, global_batch=value).global_batch == value for value in values)
        assert min(abs(value - global_batch) for value in values) < ranks


def test_reasons_say_where_each_number_came_from() -> None:
    sources = {
        "batch.global_batch": Source(kind="flag", where="--global-batch"),
        "batch.per_device_train_batch_size": Source(kind="file", where="run.yaml:7"),
    }
    plan = solve_batch(ranks=2, global_batch=32, per_device=4, sources=sources, ranks_source="1 node × 2")
    assert plan.reasons == {
        "global_batch": "--global-batch",
        "micro_batch": "run.yaml:7",
        "accumulation": "solved",
        "ranks": "1 node × 2",
    }
    assert str(plan) == "32 rows = 4 per micro-batch × 4 accumulation × 2 ranks"


def test_a_raised_default_says_why() -> None:
    plan = solve_batch(ranks=3)
    assert plan.reasons["global_batch"] == "default 8, raised to a multiple of 3 ranks"
    assert solve_batch(ranks=4).reasons["global_batch"] == "default"
    assert solve_batch(ranks=4, per_device=2).reasons["global_batch"] == "follows"


def test_a_contradiction_shows_the_equation_with_every_source() -> None:
    error = refusal(
        ranks=2,
        global_batch=64,
        per_device=4,
        accumulation=2,
        sources={
            "global_batch": "--global-batch",
            "per_device_train_batch_size": "run.yaml:7",
            "gradient_accumulation_steps": "run.yaml:8",
        },
        ranks_source="1 node × 2",
    )
    assert str(error) == (
        "the batch sizes contradict each other: 64 ≠ 4 × 2 × 2 = 16\n"
        "  global batch                    64  --global-batch\n"
        "  micro-batch (per device)         4  run.yaml:7\n"
        "  accumulation                     2  run.yaml:8\n"
        "  ranks                            2  1 node × 2\n"
        "hint: leave one of them out and it is solved, or say --global-batch 16"
    )


def test_a_global_batch_that_cannot_be_dealt_names_its_neighbours() -> None:
    error = refusal(ranks=3, global_batch=32, sources={"global_batch": "--global-batch"}, ranks_source="1 node × 3")
    assert error.message == (
        "a global batch of 32 rows (--global-batch) cannot be dealt evenly to 3 ranks (1 node × 3)"
    )
    assert error.hint == "the nearest that can: --global-batch 30 or 33; or 2 ranks"


def test_a_global_batch_below_the_ranks_offers_no_empty_one() -> None:
    assert refusal(ranks=4, global_batch=2).hint == "the nearest that can: --global-batch 4; or 2 ranks"


def test_a_micro_batch_that_does_not_divide_names_its_neighbours() -> None:
    error = refusal(ranks=2, global_batch=32, micro_batch=5)
    assert error.hint == "the nearest that work: --micro-batch 4 or 8, or --global-batch 30 or 40"
    error = refusal(ranks=2, global_batch=32, accumulation=5)
    assert error.hint == "the nearest that work: --gradient-accumulation-steps 4 or 8, or --global-batch 30 or 40"


def test_two_sizes_of_one_micro_batch_are_refused_unless_equal() -> None:
    assert "micro-batch" in refusal(ranks=1, micro_batch=2, per_device=4).message
    assert numbers(ranks=1, micro_batch=4, per_device=4) == (4, 4, 1, 1)


@given(ranks=st.sampled_from([1, 2, 4, 8]), world=st.sampled_from([1, 2, 3, 4, 6, 8]))
def test_another_world_keeps_the_global_batch_and_never_needs_more_memory(ranks: int, world: int) -> None:
    planned = solve_batch(ranks=ranks, global_batch=24 * 8)
    formed = resolve_for_world(planned, world)
    assert (formed.global_batch, formed.ranks) == (planned.global_batch, world)
    assert formed.micro_batch <= planned.micro_batch


def test_the_planned_world_changes_nothing() -> None:
    planned = solve_batch(ranks=4, global_batch=32)
    assert resolve_for_world(planned, 4) is planned


def test_a_world_that_cannot_share_the_global_batch_is_refused() -> None:
    with pytest.raises(FtError, match=r"32 rows .* cannot be dealt evenly to 3 ranks"):
        resolve_for_world(solve_batch(ranks=4, global_batch=32), 3)
