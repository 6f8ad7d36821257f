"""Is this process one of torchrun's? Asked of recorded and of damaged environments."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import ProcessInfo, Score
from fleettune_launcher_torchrun.environment import detect

# What torchrun 2.13 sets for the second worker of the second of two machines.
TORCHRUN = {
    "LOCAL_RANK": "1",
    "RANK": "3",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "41371",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "demo-1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
ODD = st.sampled_from(["", " 1 ", "x", "1.5", "²", "1e9", "4294967291"])


def test_torchruns_worker_is_a_rank_of_it() -> None:
    found = detect(TORCHRUN)
    assert found is not None
    assert found.score is Score.STARTED_BY_INNER
    assert found.reason == "torchrun started this as rank 3 of 4"
    assert found.process == ProcessInfo(
        rank=3,
        local_rank=1,
        world_size=4,
        local_world_size=2,
        node_rank=1,
        master_addr="10.0.0.1",
        master_port=41371,
        restart_count=2,
        group="demo-1",
    )


@pytest.mark.parametrize("shared", ["none", "fleettune", ""])
def test_a_rendezvous_id_that_many_runs_have_names_no_run(shared: str) -> None:
    found = detect({**TORCHRUN, "TORCHELASTIC_RUN_ID": shared})
    assert found is not None
    assert found.process is not None
    assert found.process.group is None


def test_a_rank_set_by_hand_counts_as_started_and_says_so() -> None:
    found = detect({**BY_HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert found is not None
    assert found.score is Score.STARTED_BY
    assert "by hand or by another launcher" in found.reason
    assert found.process is not None
    assert (found.process.rank, found.process.local_rank, found.process.node_rank) == (3, 1, 1)


def test_a_rank_set_by_hand_without_local_numbers_is_on_one_machine() -> None:
    found = detect(BY_HAND)
    assert found is not None
    assert found.process is not None
    assert (found.process.local_rank, found.process.local_world_size, found.process.num_nodes) == (3, 4, 1)


def test_a_rank_set_by_hand_inside_a_slurm_task_outranks_slurm() -> None:
    found = detect({**BY_HAND, "SLURM_PROCID": "3"})
    assert found is not None
    assert found.score is Score.STARTED_BY_INNER


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_of_a_rank_is_an_error_that_names_the_other_half(missing: str) -> None:
    with pytest.raises(FtError) as caught:
        detect({name: value for name, value in BY_HAND.items() if name != missing})
    assert caught.value.message.endswith(f"there is no {missing}")
    assert caught.value.exit_code is ExitCode.LAUNCH
    assert "unset RANK and WORLD_SIZE" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 and WORLD_SIZE=2 contradict each other"),
        ({"RANK": "x"}, "RANK=x is no number"),
        ({"RANK": "0"}, "beside RANK=0 there is no WORLD_SIZE and no MASTER_ADDR and no MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "beside RANK=0 WORLD_SIZE=2 there is no MASTER_ADDR"),
        ({"WORLD_SIZE": "2"}, "beside WORLD_SIZE=2 there is no RANK"),
        ({"RANK": "5", "WORLD_SIZE": "1"}, "RANK=5 and WORLD_SIZE=1 contradict each other"),
    ],
)
def test_ranks_that_would_each_train_alone_are_stopped(env: dict[str, str], words: str) -> None:
    with pytest.raises(FtError) as caught:
        detect(env)
    assert words in caught.value.message
    assert caught.value.exit_code is ExitCode.LAUNCH


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "MASTER_ADDR": "a"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "3", "MASTER_PORT": "http"},
        {"WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1", "SLURM_PROCID": "3"},
    ],
)
def test_leftovers_of_a_group_of_one_are_no_rank(env: dict[str, str]) -> None:
    assert detect(env) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"RANK": "4"},
        {"RANK": "-1"},
        {"RANK": "one"},
        {"RANK": ""},
        {"WORLD_SIZE": ""},
        {"RANK": "²"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "4.0"},
        {"LOCAL_RANK": "2"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": "8"},
        {"MASTER_PORT": "http"},
        {"TORCHELASTIC_RESTART_COUNT": "none"},
    ],
)
def test_numbers_that_cannot_be_are_an_error_that_names_them(damage: dict[str, str]) -> None:
    with pytest.raises(FtError) as caught:
        detect({**TORCHRUN, **damage})
    assert next(iter(damage)) in caught.value.message
    assert caught.value.exit_code is ExitCode.LAUNCH


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(TORCHRUN)), ODD | st.integers(-2, 9).map(str)))
def test_whatever_the_variables_hold_a_rank_that_is_found_can_exist(env: dict[str, str]) -> None:
    try:
        found = detect(env)
    except FtError:
        return
    if found is not None:
        process = found.process
        assert process is not None
        assert 0 <= process.rank < process.world_size
        assert 0 <= process.local_rank < process.local_world_size <= process.world_size
