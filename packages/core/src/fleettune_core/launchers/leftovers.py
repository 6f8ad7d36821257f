"""Find and end the processes that a finished job left behind.

A process group is not enough: torchrun puts every worker into a session of its own, so a torchrun that dies at once
(SIGKILL, or SIGUSR1, which it does not handle: pytorch/pytorch#154849) leaves its workers running on the devices. All
processes of a job inherit one environment variable with a value that no other job has, and `/proc` tells who has it.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

JOB_MARK = "FLEETTUNE_JOB_MARK"
"""Environment variable whose value marks the processes of one job. Nothing but the search for leftovers reads it."""

_PROC = Path("/proc")
_POLL_SECONDS = 0.05
_AFTER_KILL_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """The processes of one job, known by their group and their mark."""

    group: int
    mark: str

    def find(self) -> list[int]:
        """What is alive, as `os.kill` takes it: process ids, or without `/proc` the whole group as a negative one."""
        if not (_PROC / "self" / "stat").exists():
            return [-self.group] if _group_exists(self.group) else []
        entry = f"{JOB_MARK}={self.mark}".encode()
        folders = (folder for folder in _PROC.iterdir() if folder.name.isdecimal())
        return [int(folder.name) for folder in folders if self._belongs(folder, entry)]

    def end(self, *, grace_seconds: float) -> list[int]:
        """TERM, then KILL after the grace, and wait until they are gone. Who it was, for a test or a log."""
        first = self.find()
        for number, patience_seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, _AFTER_KILL_SECONDS)):
            alive = self.find()
            for pid in alive:
                _send(pid, number)
            deadline = time.monotonic() + patience_seconds
            while alive and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                alive = self.find()
            if not alive:
                break
        return first

    def _belongs(self, folder: Path, entry: bytes) -> bool:
        try:
            # After the command's closing bracket: state, parent, process group (proc(5)).
            state, _, group = (folder / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[:3]
            if state in "ZX":
                return False
            return int(group) == self.group or entry in (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            return False  # gone meanwhile, or another user's


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return
