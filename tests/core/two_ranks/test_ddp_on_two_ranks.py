"""The backend ddp and the run-time checks, on two real ranks: one run writes a record, the tests read it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-ranks")
    script = Path(__file__).with_name("record_facts.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    done = subprocess.run(
        [*launcher, "--rdzv-endpoint=localhost:0", str(script), str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-9000:]
    return json.loads((folder / "record.json").read_text())


@pytest.mark.parametrize("case", ["plain", "accumulated"])
def test_two_ranks_end_with_the_weights_of_one_process(record, case):
    assert record[case]["distance_to_one_process"] < 1e-6


@pytest.mark.parametrize(("case", "tolerance"), [("bf16", 0.05), ("powersgd", 0.2)])
def test_compressed_gradients_stay_near_and_the_ranks_agree(record, case, tolerance):
    assert 0 < record[case]["distance_to_one_process"] < tolerance
    assert len(set(record[case]["checksums"])) == 1


def test_a_static_graph_is_used_exactly_where_it_holds(record):
    assert record["plain"]["static_graph"] is True
    assert record["accumulated"]["static_graph"] is False


def test_the_facts_name_the_wrapper_and_the_ranks(record):
    assert record["plain"]["wrapper"] == "DistributedDataParallel"
    assert record["plain"]["world_size"] == 2


def test_wrapping_a_wrapped_model_returns_it_unchanged(record):
    assert record["plain"]["again_is_the_same"] is True


def test_optimizer_state_comes_back_by_name(record):
    assert record["optimizer_restored"] == [True] * 4
    assert record["learning_rate_restored"] == pytest.approx(1e-2)


def test_right_shards_pass_the_coverage_check(record):
    assert record["shards_right"] is None


def test_data_that_is_sharded_twice_is_caught(record):
    assert "rows missing" in record["sharded_twice"]


def test_data_that_is_not_sharded_at_all_is_caught(record):
    assert "given more than once" in record["not_sharded"]


def test_equal_replicas_pass_and_drifted_ones_are_caught(record):
    assert record["replicas_right"] is None
    assert "weights differ" in record["replicas_drifted"]


def test_a_weight_that_is_divided_has_the_checksum_of_the_whole_one(record):
    assert record["divided_checksum"] == record["whole_checksum"]


def test_a_backend_that_does_something_else_than_asked_is_caught(record):
    assert record["wrapped_right"] is None
    assert "sharding is none, not zero-3" in record["not_sharded_as_asked"]


def test_a_backend_that_lies_about_its_wrapper_is_caught(record):
    assert "the backend says wrapper DeepSpeedEngine, and it is DistributedDataParallel" in record["posing"]
