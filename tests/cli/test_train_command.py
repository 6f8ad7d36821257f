"""`ft train` from the plan to the exit code, with a run that is played by hand: no process is started."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fleettune_cli.main import cli
from fleettune_cli.render_report import next_line
from fleettune_core.config.source import Source
from fleettune_core.errors import ExitCode
from fleettune_core.failures import FirstFailure
from fleettune_core.plan.model import Plan
from fleettune_core.report import Report, Totals, WorldMember
from fleettune_core.run import Outcome
from fleettune_core.rundir import RunDir
from fleettune_core.types import JobState, JobStatus, ProcessInfo

PREPARED = {
    "format": "messages",
    "reason": "all 40 rows have messages",
    "rows": 40,
    "kept": 38,
    "truncated": 3,
    "dropped": 2,
    "tokens": 4000,
    "supervised_tokens": 1000,
    "preview": {
        "format": "messages",
        "reason": "all 40 rows have messages",
        "examples": [
            {
                "where": "chat.jsonl:1",
                "segments": [{"text": "user: hello\n", "supervised": False}, {"text": "hi\n", "supervised": True}],
                "num_tokens": 5,
                "supervised_tokens": 2,
                "truncated": False,
            }
        ],
        "note": None,
    },
}


class PlayedRun:
    """Stands in for `fleettune_core.run.Run`: ends at once with the report it was given, or when it is cancelled."""

    def __init__(self, plan: Plan, folder: Path, report: Report, *, hangs: bool = False) -> None:
        self.plan = plan
        self.run_dir = RunDir(folder)
        self.report = report
        self.cancelled = False
        self._hangs = hangs

    def wait(self, timeout_seconds: float | None = None) -> JobStatus:
        if self._hangs and not self.cancelled:
            time.sleep(timeout_seconds or 0)
            return JobStatus(state=JobState.RUNNING)
        return JobStatus(state=JobState.CANCELLED if self.cancelled else JobState.DONE, exit_code=0)

    def cancel(self, grace_seconds: float = 10.0) -> None:
        self.cancelled = True

    def finish(self) -> Outcome:
        return Outcome(exit_code=self.report.exit_code, report=self.report)


def report(**changes: Any) -> Report:
    base: dict[str, Any] = {
        "run_id": "chat-20260102-030405",
        "status": "done",
        "exit_code": 0,
        "world": tuple(
            WorldMember(
                rank=rank,
                host="node-a",
                pid=100 + rank,
                wrapper="DistributedDataParallel",
                sharding="none",
                world_size=2,
                stage="done",
            )
            for rank in range(2)
        ),
        "seconds_to_first_step": 7.25,
        "totals": Totals(
            steps=2,
            rows=16,
            tokens=2000,
            seconds=4.0,
            tokens_per_second=500.0,
            peak_memory_bytes=3 * 2**30,
            last_loss=1.5,
        ),
        "first_failure": None,
        "last_lines": (),
        "log": None,
        "launcher": JobStatus(state=JobState.DONE, exit_code=0),
    }
    return Report(**{**base, **changes})


FAILURE = {
    "status": "failed",
    "exit_code": 1,
    "first_failure": FirstFailure(
        rank=1,
        host="node-a",
        cause="OutOfMemoryError: out of memory",
        hint="lower --micro-batch",
        problems=("a detail",),
        exit_code=1,
    ),
    "last_lines": ("loading", "Traceback …"),
    "log": Path("logs/node-a.rank1.log"),
}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    run_dir = RunDir(folder)
    run_dir.create()
    lines = [{"step": 1, "loss": 2.25, "step_seconds": 2.0}, {"step": 2, "loss": 1.5, "step_seconds": 2.0}]
    run_dir.metrics_jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_dir.write_json(run_dir.rank_record(0), {"rank": 0, "stage": "training", "data": PREPARED})
    run_dir.model.mkdir()
    return folder


@pytest.fixture
def play(
    monkeypatch: pytest.MonkeyPatch, make_plan: Callable[..., Plan], run_folder: Path
) -> Callable[..., SimpleNamespace]:
    """Make `ft train` plan the plan made by hand, and start the run played by hand."""

    def prepare(*, hangs: bool = False, process: ProcessInfo | None = None, **changes: Any) -> SimpleNamespace:
        plan = make_plan(process=process, launch=None) if process is not None else make_plan()
        played = SimpleNamespace(
            plan=plan, run=PlayedRun(plan, run_folder, report(**changes), hangs=hangs), worker=None
        )

        def start(plan: Plan, *, env: object = None) -> PlayedRun:
            return played.run

        def become_worker(plan: Plan, *, as_json: bool) -> None:
            played.worker = plan
            raise SystemExit(0)

        monkeypatch.setattr("fleettune_core.config.load.read_config", lambda **_: None)
        monkeypatch.setattr("fleettune_core.plan.solve.make_plan", lambda _, **__: plan)
        monkeypatch.setattr("fleettune_core.run.start", start)
        monkeypatch.setattr("fleettune_core.run.become_worker", become_worker)
        return played

    return prepare


def ft(*words: str) -> Result:
    return CliRunner().invoke(cli, ["train", *words], prog_name="ft")


def test_a_dry_run_prints_the_golden_plan_on_stdout_and_nothing_else(play: Callable[..., Any]) -> None:
    play()
    result = ft("--dry-run")
    assert result.exit_code == 0
    assert result.stdout == (Path(__file__).parent / "golden" / "plan-plain.txt").read_text(encoding="utf-8")
    assert result.stderr == ""


def test_a_dry_run_in_json_is_json_alone(play: Callable[..., Any]) -> None:
    play()
    result = ft("--dry-run", "--json")
    tree = json.loads(result.stdout)
    assert tree["batch"]["equation"] == "64 rows = 2 per micro-batch × 2 accumulation × 16 ranks"
    assert tree["sources"]["model.lora_r"]["beat"] == [["run.yaml:5", 16]]
    assert result.stderr == ""


def test_no_secret_of_a_plugin_is_in_the_plan(play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    played = play()
    backend = {"secret_token": "hunter2", "nested": {"api_key": "hunter2"}, "queue": "long"}
    config = dataclasses.replace(played.plan.config, backend_options=backend)
    source = Source(kind="flag", where="--set", beat=(("run.yaml:3", "hunter2"),))
    sources = {**played.plan.sources, "backend.secret_token": source}
    plan = dataclasses.replace(played.plan, config=config, sources=sources)
    monkeypatch.setattr("fleettune_core.plan.solve.make_plan", lambda _, **__: plan)
    result = ft("--dry-run", "--json")
    assert "hunter2" not in result.stdout
    tree = json.loads(result.stdout)
    assert tree["config"]["backend"]["secret_token"] == tree["config"]["backend"]["nested"]["api_key"] == "***"
    assert tree["config"]["backend"]["queue"] == "long"
    assert tree["sources"]["backend.secret_token"]["beat"] == [["run.yaml:3", "***"]]
    assert "hunter2" not in ft("--dry-run", "--explain").stdout


def test_a_run_that_is_done_leaves_the_models_place_alone_on_stdout(play: Callable[..., Any], run_folder: Path) -> None:
    play()
    result = ft()
    assert result.exit_code == 0
    assert result.stdout == f"{run_folder / 'model'}\n"
    for text in (
        "plan of chat-20260102-030405",
        "data: messages (all 40 rows have messages): 38 rows, 4,000 tokens, 25 % supervised, 3 rows cut at the end",
        "first example (chat.jsonl:1), the supervised part between [[ and ]]:\n  user: hello\n  [[hi]]\n",
        "step 2/50  loss 1.5000",
        "done: chat-20260102-030405",
        "loss         2.2500 → 1.5000",
        "500 tokens/s",
        "after 7.2 s",
        "1 on node-a: DistributedDataParallel",
        next_line(run_folder / "model", lora=True),
    ):
        assert text in result.stderr


def test_quiet_says_nothing_but_the_result(play: Callable[..., Any], run_folder: Path) -> None:
    play()
    result = ft("--quiet")
    assert result.stdout == f"{run_folder / 'model'}\n"
    assert result.stderr == ""


def test_a_machine_without_the_model_does_not_say_that_it_is_there(play: Callable[..., Any], run_folder: Path) -> None:
    play()
    (run_folder / "model").rmdir()
    result = ft()
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "in the run folder of machine 0" in result.stderr
    assert json.loads(ft("--json").stdout)["model"] is None


def test_json_gives_the_report_on_stdout(play: Callable[..., Any], run_folder: Path) -> None:
    play()
    tree = json.loads(ft("--json").stdout)
    assert tree["status"] == "done"
    assert tree["model"] == str(run_folder / "model")
    assert tree["totals"]["steps"] == 2


@pytest.mark.parametrize("words", [(), ("--quiet",)])
def test_a_failure_is_one_block_printed_last(
    play: Callable[..., Any], run_folder: Path, words: tuple[str, ...]
) -> None:
    play(**FAILURE)
    result = ft(*words)
    assert result.exit_code == ExitCode.TRAINING
    assert result.stdout == ""
    assert result.stderr.endswith(
        "error: rank 1 on node-a failed first: OutOfMemoryError: out of memory\n"
        "  a detail\n"
        "last lines of logs/node-a.rank1.log:\n"
        "  | loading\n"
        "  | Traceback …\n"
        f"logs: {run_folder / 'logs'}\n"
        "hint: lower --micro-batch\n"
    )


@pytest.mark.parametrize("code", [ExitCode.TRAINING, ExitCode.LAUNCH, ExitCode.CONFIG, ExitCode.STOPPED])
def test_the_exit_code_is_the_runs_own(play: Callable[..., Any], code: ExitCode) -> None:
    play(**{**FAILURE, "exit_code": int(code)})
    assert ft().exit_code == code


@pytest.fixture
def heard() -> Iterator[None]:
    """SIGINT is heard: a shell that starts the tests in its background has it ignored, and `ft` leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_the_command_without_a_traceback(
    play: Callable[..., Any], heard: None, number: signal.Signals
) -> None:
    played = play(hangs=True, **{**FAILURE, "status": "interrupted", "exit_code": int(ExitCode.INTERRUPTED)})
    before = signal.getsignal(number)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
    timer.start()
    result = ft()
    timer.join()
    assert played.run.cancelled
    assert result.exit_code == ExitCode.INTERRUPTED
    assert f"{number.name}: ending the run" in result.stderr
    assert 'File "' not in result.stderr
    assert signal.getsignal(number) is before


def test_a_process_that_is_a_rank_becomes_the_worker_and_only_rank_0_shows_the_plan(play: Callable[..., Any]) -> None:
    for rank in (0, 3):
        process = ProcessInfo(rank=rank, local_rank=rank, world_size=16, local_world_size=8)
        played = play(process=process)
        result = ft()
        assert played.worker is played.plan
        assert ("plan of" in result.stderr) is (rank == 0)


@pytest.fixture(autouse=True)
def no_signal_handler_is_left() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
