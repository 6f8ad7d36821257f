"""A run as a child process of this one, in a process group of its own. Shared by the launchers of one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.launchers.leftovers import JOB_MARK, Leftovers
from fleettune_core.rundir import RunDir
from fleettune_core.types import JobState, JobStatus, LaunchPlan

Explain = Callable[[str], str | None]
"""From the end of a failed launcher's log to one sentence for the user, or None."""

_LOG_TAIL_BYTES = 64_000
_LEFTOVER_GRACE_SECONDS = 5.0


class SubprocessJob:
    """Implements `fleettune_core.types.Job` with one child process, the leader of its own session and group.

    Standard output and error go to the launcher's log, standard input is empty, so a run neither fights for the
    terminal nor dies with it. When the leader ends, by itself or by `cancel`, whatever it left behind is ended too
    (`leftovers`): no process outlives its job.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], *, log: Path, leftovers: Leftovers, explain: Explain | None = None
    ) -> None:
        self._process = process
        self._log = log
        self._leftovers = leftovers
        self._explain = explain
        self._cancelled = False
        self._swept = False

    @classmethod
    def start(
        cls,
        plan: LaunchPlan,
        *,
        log: Path | None = None,
        explain: Explain | None = None,
        inherited: Mapping[str, str] | None = None,
    ) -> SubprocessJob:
        """Start `plan.argv` in the current folder.

        Its environment is the inherited one (`inherited`, or this process's) without `plan.unset`, with
        `plan.environment` on top. `log`: another file than the run folder's `launcher.log`. Raises `FtError` (exit
        code 4) when the program cannot be started.
        """
        log = log or RunDir(plan.run_dir).launcher_log
        environment = {
            name: value
            for name, value in (os.environ if inherited is None else inherited).items()
            if name not in plan.unset
        }
        mark = uuid.uuid4().hex
        environment.update(plan.environment)
        environment[JOB_MARK] = mark
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                process = subprocess.Popen(
                    plan.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise FtError(
                f"the launcher {plan.launcher} could not start {plan.argv[0]}: {error.strerror}",
                hint=f"the whole command: {subprocess.list2cmdline(plan.argv)}",
                exit_code=ExitCode.LAUNCH,
            ) from error
        return cls(process, log=log, leftovers=Leftovers(group=process.pid, mark=mark), explain=explain)

    @property
    def id(self) -> str:
        """The leader's process id, which is also its group's."""
        return str(self._process.pid)

    def status(self) -> JobStatus:
        """The state now."""
        return self._status(self._process.poll())

    def wait(self, timeout_seconds: float | None = None) -> JobStatus:
        """Wait until the leader ends, at most `timeout_seconds`; then the state as it is."""
        try:
            return self._status(self._process.wait(timeout_seconds))
        except subprocess.TimeoutExpired:
            return self._status(None)

    def log_files(self) -> Sequence[Path]:
        """The launcher's own log."""
        return (self._log,)

    def cancel(self, grace_seconds: float = 10.0) -> None:
        """TERM to the group, KILL to everything of this job that is left after `grace_seconds`.

        A second call, or one after the end, does nothing.
        """
        if self._process.poll() is None:
            self._cancelled = True
            self._signal_group(signal.SIGTERM)
            try:
                self._process.wait(grace_seconds)
            except subprocess.TimeoutExpired:
                self._signal_group(signal.SIGKILL)
                self._process.wait()
        self._sweep()

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _status(self, code: int | None) -> JobStatus:
        if code is None:
            return JobStatus(state=JobState.RUNNING)
        self._sweep()
        if code == 0:
            return JobStatus(state=JobState.DONE, exit_code=0)
        if self._cancelled:
            return JobStatus(state=JobState.CANCELLED, exit_code=code, reason="cancelled")
        explained = self._explain(self.log_tail()) if self._explain else None
        return JobStatus(state=JobState.FAILED, exit_code=code, reason=explained or describe_exit(code))

    def _sweep(self) -> None:
        """End what the leader left behind; once, because afterwards its group's number may be another's."""
        if not self._swept:
            self._swept = True
            self._leftovers.end(grace_seconds=_LEFTOVER_GRACE_SECONDS)

    def log_tail(self) -> str:
        """The last 64 kB of the launcher's log."""
        return read_tail(self._log, _LOG_TAIL_BYTES)


def describe_exit(code: int) -> str:
    """`exit code 3`, or `killed by SIGKILL` for the negative codes that `subprocess` gives."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def read_tail(path: Path, limit_bytes: int) -> str:
    """The end of a log file, at most `limit_bytes`; empty where there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
