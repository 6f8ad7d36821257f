"""A run as a child process: its state, its log, its end, and that nothing outlives it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.launchers.subprocess_job import SubprocessJob, describe_exit, read_tail
from fleettune_core.rundir import RunDir
from fleettune_core.types import Job, JobState, LaunchPlan

IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
)
WITH_A_WORKER_IN_ITS_OWN_SESSION = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
"""


def plan(tmp_path: Path, code: str, **changes: object) -> LaunchPlan:
    values: dict[str, object] = {
        "launcher": "local",
        "argv": (sys.executable, "-c", code),
        "environment": {},
        "run_dir": tmp_path,
        **changes,
    }
    return LaunchPlan(**values)  # type: ignore[arg-type]


def until(done: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_it_is_a_job_of_the_contract(tmp_path: Path) -> None:
    job = SubprocessJob.start(plan(tmp_path, ""))
    assert isinstance(job, Job)
    job.wait()


def test_output_of_both_kinds_goes_to_the_launchers_log(tmp_path: Path) -> None:
    job = SubprocessJob.start(plan(tmp_path, "import sys; print('out', flush=True); print('err', file=sys.stderr)"))
    status = job.wait(30)
    assert (status.state, status.exit_code) == (JobState.DONE, 0)
    assert job.log_files() == (RunDir(tmp_path).launcher_log,)
    assert RunDir(tmp_path).launcher_log.read_text() == "out\nerr\n"


def test_standard_input_is_empty_and_the_group_is_its_own(tmp_path: Path) -> None:
    job = SubprocessJob.start(
        plan(tmp_path, "import os, sys; print(repr(sys.stdin.read()), os.getpgid(0) == os.getpid())")
    )
    job.wait(30)
    assert read_tail(job.log_files()[0], 1000) == "'' True\n"
    assert job.id.isdecimal()


def test_the_environment_is_the_inherited_one_minus_unset_plus_the_plans(tmp_path: Path) -> None:
    code = "import os; print(*(os.environ.get(n, '-') for n in ('KEPT', 'GONE', 'ADDED')))"
    wanted = plan(tmp_path, code, environment={"ADDED": "3"}, unset=("GONE",))
    job = SubprocessJob.start(wanted, inherited={**os.environ, "KEPT": "1", "GONE": "2"})
    job.wait(30)
    assert read_tail(job.log_files()[0], 1000) == "1 - 3\n"


def test_waiting_with_a_time_out_returns_the_state_as_it_is(tmp_path: Path) -> None:
    job = SubprocessJob.start(plan(tmp_path, "import time; time.sleep(60)"))
    try:
        assert job.wait(0.1).state is JobState.RUNNING
        assert job.status().state is JobState.RUNNING
    finally:
        job.cancel(5)


def test_a_failure_keeps_its_exit_code_and_a_signal_its_name(tmp_path: Path) -> None:
    failed = SubprocessJob.start(plan(tmp_path, "raise SystemExit(7)")).wait(30)
    assert (failed.state, failed.exit_code, failed.reason) == (JobState.FAILED, 7, "exit code 7")
    killed = SubprocessJob.start(plan(tmp_path, "import os; os.kill(os.getpid(), 9)")).wait(30)
    assert (killed.state, killed.exit_code, killed.reason) == (JobState.FAILED, -9, "killed by SIGKILL")


def test_a_launcher_can_explain_its_own_log(tmp_path: Path) -> None:
    job = SubprocessJob.start(
        plan(tmp_path, "raise SystemExit('no such queue')"),
        explain=lambda log: "there is no such queue" if "no such queue" in log else None,
    )
    assert job.wait(30).reason == "there is no such queue"


def test_cancel_ends_a_process_that_ignores_term_and_can_be_called_again(tmp_path: Path) -> None:
    job = SubprocessJob.start(plan(tmp_path, IGNORES_TERM))
    until(lambda: "up" in read_tail(job.log_files()[0], 100))
    began = time.monotonic()
    job.cancel(grace_seconds=0.3)
    assert time.monotonic() - began < 10
    status = job.status()
    assert (status.state, status.exit_code) == (JobState.CANCELLED, -signal.SIGKILL)
    job.cancel()
    assert job.status() == status


def test_cancel_after_the_end_changes_nothing(tmp_path: Path) -> None:
    job = SubprocessJob.start(plan(tmp_path, ""))
    job.wait(30)
    job.cancel()
    assert job.status().state is JobState.DONE


def test_a_worker_in_a_session_of_its_own_does_not_outlive_its_leader(tmp_path: Path) -> None:
    job = SubprocessJob.start(plan(tmp_path, WITH_A_WORKER_IN_ITS_OWN_SESSION))
    assert job.wait(30).state is JobState.DONE
    orphan = int(read_tail(job.log_files()[0], 100))
    assert not alive(orphan)


def test_a_worker_of_a_leader_that_is_killed_at_once_is_ended_too(tmp_path: Path) -> None:
    job = SubprocessJob.start(plan(tmp_path, WITH_A_WORKER_IN_ITS_OWN_SESSION + "time.sleep(60)"))
    until(lambda: read_tail(job.log_files()[0], 100).endswith("\n"))
    orphan = int(read_tail(job.log_files()[0], 100))
    assert alive(orphan)
    os.kill(int(job.id), signal.SIGUSR1)
    until(lambda: job.status().state is JobState.FAILED)
    assert not alive(orphan)


def test_another_jobs_processes_are_left_alone(tmp_path: Path) -> None:
    other = SubprocessJob.start(plan(tmp_path, "import time; time.sleep(60)"), log=tmp_path / "other.log")
    try:
        SubprocessJob.start(plan(tmp_path, WITH_A_WORKER_IN_ITS_OWN_SESSION)).wait(30)
        assert other.status().state is JobState.RUNNING
    finally:
        other.cancel(5)


def test_a_program_that_cannot_be_started_is_refused_with_the_whole_command(tmp_path: Path) -> None:
    with pytest.raises(FtError, match="could not start /no/such/python: No such file") as caught:
        SubprocessJob.start(plan(tmp_path, "", argv=("/no/such/python", "-m", "x y")))
    assert caught.value.exit_code is ExitCode.LAUNCH
    assert '"x y"' in str(caught.value.hint)


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a" * 100 + "end")
    assert read_tail(tmp_path / "log", 5) == "aaend"
    assert read_tail(tmp_path / "missing", 5) == ""


def test_an_exit_is_told_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-15) == "killed by SIGTERM"
    assert describe_exit(-250) == "killed by signal 250"
