"""The verdict of a verification: what counts as the same, and what is said where it is not."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fleettune_core.verify.comparison import TOLERANCES, RunFigures, WeightDistance, compare, largest_distance

FIGURES = RunFigures(
    title="ddp 1x1",
    exit_code=0,
    cause=None,
    problems=(),
    losses=(2.0, 1.5, 1.0),
    grad_norms=(4.0, 3.0, 2.0),
    wrapper="LlamaForCausalLM",
    sharding="none",
    ranks=1,
    initial_weights="00ff",
    weight_bytes=100,
    optimizer_bytes=200,
    peak_memory_bytes=300,
    seconds=7.0,
)
NEAR = WeightDistance(rms=1e-9, largest=1e-3)


def judged(other: RunFigures, distance: WeightDistance | None = NEAR, precision: str = "fp32", reference=FIGURES):
    return compare(reference, other, distance, tolerance=TOLERANCES[precision], learning_rate=1e-3)


def changed(**changes) -> RunFigures:
    return dataclasses.replace(FIGURES, title="mine 2x1", **changes)


def test_the_first_run_is_the_reference():
    assert judged(FIGURES).verdict == "reference"


def test_rounding_is_the_same_even_where_one_weight_went_the_other_way():
    found = judged(changed(losses=(2.0, 1.5 * (1 + 9e-6), 1.0), grad_norms=(4.0, 3.0, 2.0 * (1 + 9e-5))))
    assert found.verdict == "same"
    assert found.loss_step == 2
    assert found.agrees


@pytest.mark.parametrize(
    ("changes", "distance", "words"),
    [
        ({"losses": (2.0, 1.5, 1.0 * (1 + 2e-5))}, NEAR, "the loss of step 3 is 2.0e-05 away (allowed: 1e-05)"),
        ({"grad_norms": (4.0, 6.0, 2.0)}, NEAR, "the gradient norm of step 2 is 1.0e+00 away (allowed: 1e-04)"),
        ({}, WeightDistance(rms=1e-4, largest=1e-3), "the weights are 1.0e-04 away (allowed: 2e-05, 0.02 × the"),
        ({"initial_weights": "0100"}, NEAR, "it began with other weights: checksum 0100, not 00ff"),
        ({"losses": (2.0, 1.5)}, NEAR, "2 steps, not 3"),
        ({"losses": (2.0, None, 1.0)}, NEAR, "the loss of step 2 is inf away"),
    ],
)
def test_what_differs_is_told_with_its_step_and_what_is_allowed(changes, distance, words):
    found = judged(changed(**changes), distance)
    assert found.verdict == "differs"
    assert not found.agrees
    assert found.reasons[0].startswith(words)


def test_a_checksum_that_nobody_can_tell_is_no_difference():
    assert judged(changed(initial_weights=None)).verdict == "same"


def test_in_16_bits_more_is_allowed_and_weights_are_not_judged():
    other = changed(losses=(2.0, 1.5, 1.01))
    far = WeightDistance(rms=1.0, largest=1.0)
    assert judged(other, far, "bf16").verdict == "same"
    assert judged(other, NEAR, "fp32").verdict == "differs"


def test_a_run_that_failed_says_why_and_has_no_distances():
    found = judged(changed(exit_code=3, cause="RuntimeError: lost", problems=("rank 1: gone",)))
    assert found.verdict == "failed"
    assert found.reasons == ("RuntimeError: lost (exit code 3)", "rank 1: gone")
    assert found.loss_distance is None


def test_nothing_agrees_with_a_first_run_that_failed():
    broken = dataclasses.replace(FIGURES, exit_code=1, cause="lost")
    found = judged(changed(), reference=broken)
    assert (found.verdict, found.agrees) == ("failed", False)
    assert found.reasons == ("there is nothing to compare with: ddp 1x1 failed",)


def test_losses_that_are_both_not_finite_are_equal():
    assert largest_distance((None, 1.0), (None, 1.0)) == (0.0, 1)
    assert largest_distance((1.0, 1.0), (1.0, None)) == (math.inf, 2)
