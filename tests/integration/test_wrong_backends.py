"""Backends that quietly do something else are stopped by the run itself, with an error that says what they did."""

from __future__ import annotations

import pytest

from train_runs import Training, disagreements, train
from wrong_backend_sources import NAMES, SOURCE, UNCHECKED, install

EXPECTED = {
    "forgetful": "rank 0: it is this rank's own gradient: nothing was reduced",
    "summing": "rank 0: it is the sum over 2 ranks",
    "losing": "rank 0: it is the last micro-batch alone: what was accumulated before it is lost",
    "altering": "its wrap_model has changed the model",
    "twice": "do not share out step 0",
    "posing": "sharding is none, not zero-3",
    "unwrapped": "the backend says wrapper DistributedDataParallel, and it is LlamaForCausalLM",
    "boasting": "the backend says sharding zero-3, and it is none",
    "broken": "its hook wrap_model raised ZeroDivisionError: by accident",
}


COMMON = [
    *("--global-batch", "8", "--micro-batch", "2", "--precision", "fp32", "--nproc-per-node", "2"),
    # The warm-up's first step has a learning rate of 0: nothing moves, and no weight can be seen to differ.
    *("--max-steps", "4", "--warmup-steps", "2", "--learning-rate", "1e-3"),
]


def trainings(folder, names, source, *data: str) -> dict[str, Training]:
    """One training with each of these backends."""
    install(folder / "site", source)
    environment = {"PYTHONPATH": str(folder / "site"), "FT_CACHE_DIR": str(folder / "cache")}
    return {name: train(folder / name, *data, *COMMON, "--backend", name, environment=environment) for name in names}


@pytest.fixture(scope="module")
def runs(tiny_model, tiny_rows, tmp_path_factory) -> dict[str, Training]:
    data = ("--model", str(tiny_model), "--dataset", str(tiny_rows))
    return trainings(tmp_path_factory.mktemp("wrong-backends"), EXPECTED, SOURCE, *data)


def test_every_wrong_backend_is_tried():
    assert set(EXPECTED) == set(NAMES)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_a_wrong_backend_ends_the_run_and_is_named(runs, name):
    run = runs[name]
    assert run.exit_code == 3, run.stderr
    assert EXPECTED[name] in " ".join(run.stderr.split())
    assert not (run.folder / "model").exists()
    assert run.report["status"] == "failed"


def test_it_trains_no_step_before_it_is_found(runs):
    for name in EXPECTED:
        assert not (runs[name].folder / "metrics.jsonl").exists() or not runs[name].steps, name


SHOWS_IN = {"forgetful": "losses", "summing": "gradient norms", "losing": "losses", "posing": "what ran"}
"""Where the same-numbers class sees each of them."""


@pytest.fixture(scope="module")
def unchecked(tiny_model, tiny_rows, tmp_path_factory) -> dict[str, Training]:
    data = ("--model", str(tiny_model), "--dataset", str(tiny_rows))
    folder = tmp_path_factory.mktemp("unchecked")
    return trainings(folder, [*SHOWS_IN, "ddp"], SOURCE + UNCHECKED, *data)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SHOWS_IN))
def test_where_the_run_does_not_check_the_numbers_show_it(unchecked, name):
    sharding = "zero-3" if name == "posing" else "none"
    assert unchecked[name].exit_code == 0, unchecked[name].stderr
    right = disagreements(
        unchecked["ddp"], unchecked["ddp"], wrapper="DistributedDataParallel", sharding="none", ranks=2
    )
    wrong = disagreements(
        unchecked["ddp"], unchecked[name], wrapper="DistributedDataParallel", sharding=sharding, ranks=2
    )
    assert right == set()
    assert SHOWS_IN[name] in wrong
