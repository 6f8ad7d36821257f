"""The control story: a plan becomes a folder, a job and a report, and the exit code tells the truth."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleettune_core.config.schema import Launch
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plan.model import Plan
from fleettune_core.plan.record import read_run_record
from fleettune_core.run import Outcome, _wait_for_folder, become_worker, start
from fleettune_core.rundir import RunDir
from fleettune_core.types import JobState, Layout, PlannedFile, ProcessInfo

MakePlan = Callable[..., Plan]

TWO_STEPS = """
record = rank(0)
record.stage("training")
record.facts(WrapFacts(wrapper="Net", world_size=1))
with run.metrics_jsonl.open("a") as out:
    for step in (1, 2):
        line = {"step": step, "epoch": 0.1, "loss": 3.0 - step, "tokens": 100, "samples": 8, "step_seconds": 0.5,
                "tokens_per_second": 200.0, "peak_memory_bytes": 5000 * step}
        out.write(json.dumps(line) + "\\n")
    out.write(json.dumps({"step": 2, "epoch": 0.1, "eval_loss": 0.5}) + "\\n")
record.first_step(3)
record.finish(12_345)
"""


def ran(plan: Plan) -> Outcome:
    return start(plan, env={}).finish()


def test_a_run_that_works_leaves_a_whole_folder_and_exit_code_0(make_plan: MakePlan) -> None:
    run = start(make_plan(TWO_STEPS), env={"HF_TOKEN": "hf_abcdefghijklmnop", "OMP_NUM_THREADS": "2"})
    outcome = run.finish()
    folder = run.run_dir

    assert outcome.exit_code == 0
    assert outcome.report.status == "done"
    assert outcome.report.first_failure is None
    assert json.loads(folder.report_json.read_text()) == outcome.report.to_dict()
    assert read_run_record(folder.read_json(folder.run_json)).run_id == "demo"
    assert folder.read_json(folder.plan_json)["launch"]["argv"][0] == sys.executable
    environment = folder.read_json(folder.env_json)["environment"]
    assert environment == {"HF_TOKEN": "***", "OMP_NUM_THREADS": "2"}
    assert folder.launcher_log.is_file()


def test_the_report_adds_up_steps_and_leaves_evaluations_out(make_plan: MakePlan) -> None:
    report = ran(make_plan(TWO_STEPS)).report.to_dict()
    assert report["totals"] == {
        "steps": 2,
        "rows": 16,
        "tokens": 200,
        "seconds": 1.0,
        "tokens_per_second": 200.0,
        "peak_memory_bytes": 12_345,
        "last_loss": 1.0,
    }
    [member] = report["world"]
    assert (member["rank"], member["wrapper"], member["sharding"], member["world_size"]) == (0, "Net", "none", 1)
    assert member["stage"] == "done"
    assert 0 < report["seconds_to_first_step"] < 60
    assert report["launcher"] == {"state": "done", "exit_code": 0, "reason": None}


def test_a_run_is_followed_while_it_goes_on(make_plan: MakePlan) -> None:
    waits = "rank(0).stage('loading')\nwhile not (run.path / 'go').exists():\n    time.sleep(0.02)\n"
    run = start(make_plan(waits + TWO_STEPS))
    try:
        deadline = time.monotonic() + 30
        while [state.stage for state in run.ranks()] != ["loading"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert run.status().state is JobState.RUNNING
        assert run.wait(0.05).state is JobState.RUNNING
        assert list(run.metrics()) == []
    finally:
        (run.run_dir.path / "go").touch()
    assert run.finish().exit_code == 0
    assert [line["step"] for line in run.metrics()] == [1, 2, 2]


def test_a_launchers_files_are_written_before_it_starts(make_plan: MakePlan) -> None:
    files = (PlannedFile(path="launch/job.sh", text="echo hi\n", executable=True),)
    checks = "assert os.access(run.path / 'launch/job.sh', os.X_OK)\ndone(0)"
    assert ran(make_plan(checks, files=files)).exit_code == 0


def test_a_launcher_writes_nothing_outside_of_the_run_folder(make_plan: MakePlan, tmp_path: Path) -> None:
    with pytest.raises(FtError, match="outside of the run folder") as caught:
        start(make_plan("", files=(PlannedFile(path="../../escaped", text=""),)))
    assert caught.value.exit_code is ExitCode.PLUGIN
    assert not (tmp_path / "escaped").exists()


def test_a_folder_that_holds_something_is_refused_and_left_alone(make_plan: MakePlan) -> None:
    plan = make_plan("done(0)")
    assert ran(plan).exit_code == 0
    before = plan.run_dir.joinpath("report.json").read_text()
    with pytest.raises(FtError, match="exists and is not empty") as caught:
        start(plan)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert plan.run_dir.joinpath("report.json").read_text() == before


@pytest.mark.parametrize("by_hand_as", [None, 0, 1])
def test_a_launch_that_was_refused_can_be_typed_again(make_plan: MakePlan, by_hand_as: int | None) -> None:
    def plan(code: str) -> Plan:
        return make_plan(code) if by_hand_as is None else by_hand(make_plan, code, by_hand_as)

    refused = plan("")
    assert refused.launch is not None
    nowhere = dataclasses.replace(refused.launch, argv=("/no/such/python",))
    with pytest.raises(FtError, match="could not start /no/such/python") as caught:
        start(dataclasses.replace(refused, launch=nowhere))
    assert caught.value.exit_code is ExitCode.LAUNCH
    assert ran(plan("done(0)" if by_hand_as is None else f"done({by_hand_as}, 2)")).exit_code == 0


def test_a_refused_launch_leaves_other_machines_folder_alone(make_plan: MakePlan) -> None:
    assert ran(by_hand(make_plan, "done(0, 2)", 0)).exit_code == 0
    refused = by_hand(make_plan, "", 1)
    assert refused.launch is not None
    with pytest.raises(FtError, match="could not start"):
        start(dataclasses.replace(refused, launch=dataclasses.replace(refused.launch, argv=("/no/such/python",))))
    folder = RunDir(refused.run_dir)
    assert folder.report_json.is_file()
    assert [path.name for path in folder.nodes.iterdir()] == ["node0.json"]


FAILURES = {
    "a mistake that the user can mend keeps its own exit code": (
        "rank(0).failure(FtError('no rows', exit_code=ExitCode.CONFIG, problems=['a.jsonl:1'])); sys.exit(5)",
        1,
        ExitCode.CONFIG,
        "no rows",
    ),
    "any other exception is a failed training": (
        "rank(0).failure(ValueError('loss is nan')); sys.exit(1)",
        1,
        ExitCode.TRAINING,
        "ValueError: loss is nan",
    ),
    "a rank that claims success in its exit code only is not done": (
        "rank(0).stage('training')",
        1,
        ExitCode.TRAINING,
        "ended without a word in the stage training",
    ),
    "a rank that never came up is not done": ("done(0, 2)", 2, ExitCode.TRAINING, "before it said anything"),
    "a launcher that fails after all is done is not exit code 0": (
        "done(0); sys.exit(3)",
        1,
        ExitCode.TRAINING,
        "every rank finished its work, but the launcher did not end well: exit code 3",
    ),
    "a process that is killed is told by its signal": (
        "rank(0).stage('loading'); os.kill(os.getpid(), 9)",
        1,
        ExitCode.TRAINING,
        "ended without a word in the stage loading: killed by SIGKILL",
    ),
    "a launcher that ends before any rank refused the launch": (
        "print('no module named torch', file=sys.stderr); sys.exit(1)",
        1,
        ExitCode.LAUNCH,
        "the launcher ended before any rank began: exit code 1",
    ),
    "even when it ends with 0": ("", 1, ExitCode.LAUNCH, "the launcher ended before any rank began: exit code 0"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_is_not_done_never_ends_with_0(make_plan: MakePlan, name: str) -> None:
    code, ranks, exit_code, cause = FAILURES[name]
    outcome = ran(make_plan(code, ranks=ranks))
    assert outcome.exit_code == exit_code
    assert outcome.report.status == "failed"
    assert outcome.report.first_failure is not None
    assert cause in outcome.report.first_failure.cause


def test_a_refused_launch_shows_the_end_of_the_launchers_log(make_plan: MakePlan) -> None:
    plan = make_plan("print('\\n'.join(f'line {k}' for k in range(50))); sys.exit(1)")
    report = ran(plan).report
    assert report.last_lines == tuple(f"line {k}" for k in range(30, 50))
    assert report.log == RunDir(plan.run_dir).launcher_log


def test_a_failed_rank_shows_the_end_of_its_own_log_with_secrets_masked(make_plan: MakePlan) -> None:
    code = """
import socket
run.rank_log(socket.gethostname(), 0).write_text("Traceback\\nGET https://me:pw@hub/x hf_abcdefghijklmnop\\n")
rank(0).failure(RuntimeError("gone"))
sys.exit(1)
"""
    report = ran(make_plan(code)).report.to_dict()
    assert report["first_failure"]["last_lines"] == ["Traceback", "GET https://***@hub/x ***"]
    assert report["first_failure"]["log"].endswith(".rank0.log")


def test_a_cancelled_run_is_interrupted_and_says_so(make_plan: MakePlan) -> None:
    run = start(make_plan("rank(0).stage('training'); time.sleep(60)"))
    deadline = time.monotonic() + 30
    while not run.ranks():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.cancel(grace_seconds=5)
    run.cancel()
    outcome = run.finish()
    assert outcome.exit_code == ExitCode.INTERRUPTED
    assert (outcome.report.status, outcome.report.first_failure) == ("interrupted", None)


def test_a_run_that_stopped_after_a_checkpoint_asks_to_be_requeued(make_plan: MakePlan) -> None:
    code = "rank(0).failure(FtError('stopped', exit_code=ExitCode.STOPPED)); sys.exit(75)"
    outcome = ran(make_plan(code))
    assert (outcome.exit_code, outcome.report.status) == (75, "interrupted")


def test_an_elastic_world_that_shrank_is_done_with_the_ranks_it_ended_with(make_plan: MakePlan) -> None:
    code = "rank(3, 4).stage('training'); time.sleep(0.05); done(0, 2); done(1, 2)"
    layout = Layout(min_nodes=1, max_nodes=2, procs_per_node=2)
    assert ran(make_plan(code, layout=layout)).exit_code == 0


def test_a_fixed_world_that_shrank_is_not_done(make_plan: MakePlan) -> None:
    code = "rank(3, 4).stage('training'); time.sleep(0.05); done(0, 2); done(1, 2)"
    assert ran(make_plan(code, ranks=4)).exit_code == ExitCode.TRAINING


TWO_NODES = Layout(min_nodes=2, max_nodes=2, procs_per_node=1)


def by_hand(make_plan: MakePlan, code: str, node_rank: int, **more: Any) -> Plan:
    launch = Launch(nodes="2", rdzv_endpoint="host:1", node_rank=node_rank)
    return make_plan(code, layout=TWO_NODES, launch=launch, **more)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_machines_that_share_a_disk_share_the_folder_whoever_comes_first(
    make_plan: MakePlan, order: tuple[int, int]
) -> None:
    for node_rank in order:
        outcome = ran(by_hand(make_plan, f"done({node_rank}, 2)", node_rank))
        assert outcome.exit_code == 0, outcome.report
    folder = RunDir(make_plan().run_dir)
    assert folder.read_json(folder.run_json)["config"]["launch"]["node_rank"] == 0, "node 0 has the last word"
    assert sorted(path.name for path in folder.nodes.iterdir()) == ["node0.json", "node1.json"]


def test_a_machine_without_a_shared_disk_answers_for_its_own_ranks(make_plan: MakePlan, tmp_path: Path) -> None:
    here = ran(by_hand(make_plan, "done(0, 2)", 0, run_dir=tmp_path / "disk0" / "run"))
    there = ran(by_hand(make_plan, "rank(1, 2).stage('training')", 1, run_dir=tmp_path / "disk1" / "run"))
    assert here.exit_code == 0
    assert there.exit_code == ExitCode.TRAINING
    assert RunDir(tmp_path / "disk1" / "run").report_json.is_file()


def test_two_machines_with_one_node_rank_are_refused_where_they_share_a_disk(make_plan: MakePlan) -> None:
    assert ran(by_hand(make_plan, "done(1, 2)", 1)).exit_code == 0
    with pytest.raises(FtError, match="already has a node 1") as caught:
        start(by_hand(make_plan, "done(1, 2)", 1))
    assert "--node-rank" in str(caught.value.hint)


def test_a_machine_does_not_join_a_folder_of_something_else(make_plan: MakePlan, tmp_path: Path) -> None:
    plan = by_hand(make_plan, "done(1, 2)", 1)
    plan.run_dir.mkdir(parents=True)
    plan.run_dir.joinpath("thesis.txt").write_text("precious")
    with pytest.raises(FtError, match="exists and is not empty"):
        start(plan)
    assert [path.name for path in plan.run_dir.iterdir()] == ["thesis.txt"]


def rank_of_two(rank: int, restart_count: int = 0) -> ProcessInfo:
    return ProcessInfo(rank=rank, local_rank=rank, world_size=2, local_world_size=2, restart_count=restart_count)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What this process was replaced by, instead of being replaced."""
    calls: list[list[str]] = []

    class Replaced(BaseException):
        pass

    def execve(_path: str, argv: list[str], _env: dict[str, str]) -> None:
        calls.append(argv)
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    return calls


def become(plan: Plan) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - execve never returns, nor does its double
        become_worker(plan)
    if isinstance(caught.value, FtError):
        raise caught.value


def test_rank_0_writes_the_folder_and_becomes_the_worker(make_plan: MakePlan, replaced: list[list[str]]) -> None:
    plan = make_plan(process=rank_of_two(0))
    become(plan)
    assert replaced == [[sys.executable, "-m", "fleettune_core.worker", str(plan.run_dir), "--console"]]
    assert RunDir(plan.run_dir).run_json.is_file()


def test_another_rank_waits_for_the_folder_and_writes_nothing(make_plan: MakePlan, replaced: list[list[str]]) -> None:
    plan = make_plan(process=rank_of_two(1))
    waiting = threading.Thread(target=become, args=(plan,))
    waiting.start()
    time.sleep(0.3)
    assert replaced == []
    assert not plan.run_dir.exists()
    RunDir(plan.run_dir).create()
    RunDir(plan.run_dir).write_json(RunDir(plan.run_dir).run_json, {})
    waiting.join(30)
    assert len(replaced) == 1


def test_a_rank_that_waits_in_vain_says_what_to_type(make_plan: MakePlan) -> None:
    plan = make_plan(process=rank_of_two(1))
    with pytest.raises(FtError, match=r"rank 1 on .* waited 0 s for rank 0") as caught:
        _wait_for_folder(RunDir(plan.run_dir), rank_of_two(1), timeout_seconds=0.2)
    assert "--run-dir DIR on a disk that all machines share" in str(caught.value.hint)


def test_ranks_do_not_mix_into_a_folder_of_an_earlier_run(make_plan: MakePlan, replaced: list[list[str]]) -> None:
    assert ran(make_plan("done(0, 2); done(1, 2)", ranks=2)).exit_code == 0
    for rank in range(2):
        with pytest.raises(FtError, match="not empty" if rank == 0 else "another run's"):
            become(make_plan(process=rank_of_two(rank)))
    assert replaced == []


def test_ranks_that_were_restarted_go_on_in_their_folder(make_plan: MakePlan, replaced: list[list[str]]) -> None:
    become(make_plan(process=rank_of_two(0)))
    rank_record = RunDir(make_plan().run_dir).rank_record(1)
    rank_record.write_text("{}")
    for rank in range(2):
        become(make_plan(process=rank_of_two(rank, restart_count=1)))
    assert len(replaced) == 3


def test_the_control_story_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "deepspeed", "numpy")
    code = f"import sys, fleettune_core.run; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
