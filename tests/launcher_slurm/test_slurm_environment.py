"""What SLURM made of this process, from environments in the form that SLURM's manual pages give."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import DeviceKind, Devices, LaunchRequest, Layout, ProcessInfo, Score
from fleettune_launcher_slurm import SlurmLauncher
from fleettune_launcher_slurm.environment import detect

JOB = {
    "SLURM_JOB_ID": "123",
    "SLURM_JOBID": "123",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
BATCH_SCRIPT = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
TASK = {
    **JOB,
    "SLURM_STEP_ID": "1",
    "SLURM_STEPID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
}
ODD = st.sampled_from(["", " 1 ", "x", "1.5", "²", "1e9", "4294967291"])


def process_of(env: dict[str, str]) -> ProcessInfo:
    found = detect(env)
    assert found is not None
    assert found.process is not None
    return found.process


def test_a_task_of_an_srun_is_a_rank_with_everything_filled_in() -> None:
    found = detect(TASK)
    assert found is not None
    assert found.score is Score.STARTED_BY
    assert found.reason == "srun started this as rank 6 of 8 in SLURM job 123"
    assert found.process == ProcessInfo(
        rank=6,
        local_rank=2,
        world_size=8,
        local_world_size=4,
        node_rank=1,
        master_addr="gpu07",
        master_port=20000 + (123 * 101 + 1) % 10000,
        group="slurm-123.1",
    )


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290", "-5", "batch"])
def test_a_batch_script_is_no_rank(step: str | None) -> None:
    assert detect(BATCH_SCRIPT if step is None else {**BATCH_SCRIPT, "SLURM_STEP_ID": step}) is None


def test_a_step_of_fewer_tasks_than_the_job_counts_the_steps_own() -> None:
    env = {
        **TASK,
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "gpu08",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
    }
    process = process_of(env)
    assert (process.rank, process.world_size, process.local_world_size, process.num_nodes) == (1, 2, 2, 1)


def test_on_one_node_no_host_name_needs_to_resolve() -> None:
    process = process_of({**TASK, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"})
    assert process.master_addr == "127.0.0.1"


def test_uneven_nodes_keep_their_own_numbers() -> None:
    env = {**TASK, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x2),3", "SLURM_NODEID": "2"}
    assert process_of(env).local_world_size == 3


def test_a_single_task_is_a_world_of_one() -> None:
    env = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    process = process_of(env)
    assert (process.world_size, process.local_world_size, process.master_addr) == (1, 1, "127.0.0.1")


def test_every_rank_of_a_step_computes_the_same_port_and_other_steps_another() -> None:
    ports = {
        process_of({**TASK, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 4)}).master_port for rank in range(8)
    }
    assert len(ports) == 1
    others = {process_of({**TASK, "SLURM_STEP_ID": str(step)}).master_port for step in range(20)}
    assert len(others) == 20
    assert all(20000 <= port < 30000 for port in others | ports if port is not None)


@pytest.mark.parametrize("damage", [{"SLURM_PROCID": "8"}, {"SLURM_PROCID": "x"}, {"SLURM_LOCALID": "4"}])
def test_numbers_that_contradict_each_other_are_no_rank(damage: dict[str, str]) -> None:
    assert detect({**TASK, **damage}) is None


def test_a_machine_that_could_submit_is_not_offered_what_this_version_refuses(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert detect({"PATH": str(tmp_path)}) is None
    assert detect({}) is None


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(TASK)), ODD | st.integers(-2, 9).map(str)))
def test_whatever_the_variables_hold_a_rank_that_is_found_can_exist(env: dict[str, str]) -> None:
    found = detect(env)
    if found is not None and found.process is not None:
        process = found.process
        assert 0 <= process.rank < process.world_size
        assert 0 <= process.local_rank < process.local_world_size <= process.world_size


def test_asked_to_submit_it_says_what_works_in_this_version() -> None:
    devices = Devices(kind=DeviceKind.CPU, count=1, name="CPU", memory_bytes=1, bf16=False, cpu_cores=1)
    request = LaunchRequest(
        run_id="r",
        run_dir=Path("/r"),
        command=("-m", "x"),
        python="/python",
        layout=Layout(),
        devices=devices,
        options=SlurmLauncher.Options(),
    )
    with pytest.raises(FtError, match="does not submit jobs") as caught:
        SlurmLauncher().plan_launch(request)
    assert caught.value.exit_code is ExitCode.LAUNCH
    assert "srun ft train" in str(caught.value.hint)
