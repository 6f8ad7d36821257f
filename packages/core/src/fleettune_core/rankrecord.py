"""What one rank says of itself in the run folder: its stage, what it found, and how it failed.

Each rank writes its own file and no other, so nothing is shared and nothing is lost when one dies. The report is
assembled from these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from typing import Any

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.masking import mask_tokens
from fleettune_core.rundir import RunDir
from fleettune_core.types import ProcessInfo, WrapFacts

STAGES = ("starting", "preparing", "loading", "wrapping", "training", "saving", "done", "failed")


class RankRecord:
    """Writer of `ranks/rank<k>.json`; every change is written at once, atomically."""

    def __init__(self, run_dir: RunDir, process: ProcessInfo) -> None:
        self._run_dir = run_dir
        self._path = run_dir.rank_record(process.rank)
        now = time.time()
        self._record: dict[str, Any] = {
            "rank": process.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "local_rank": process.local_rank,
            "world_size": process.world_size,
            "restart_count": process.restart_count,
            "stage": "starting",
            "started_at": now,
            "updated_at": now,
            "first_step_at": None,
            "total_steps": None,
            "facts": None,
            "held": None,
            "reduction": None,
            "data": None,
            "announcements": [],
            "peak_memory_bytes": None,
            "failure": None,
        }
        self._write()

    def stage(self, name: str) -> None:
        assert name in STAGES, name
        self._update(stage=name)

    def facts(self, facts: WrapFacts, **more: Any) -> None:
        """What `wrap_model` really did here, as core found it."""
        self._update(facts={**dataclasses.asdict(facts), **more})

    def data(self, summary: dict[str, Any]) -> None:
        """What the data turned out to be: counts, and the first example with its supervised part."""
        self._update(data=summary)

    def announce(self, line: str) -> None:
        """One line for whoever follows the run."""
        self._update(announcements=[*self._record["announcements"], {"at": time.time(), "text": line}])

    def first_step(self, total_steps: int) -> None:
        """The first of `total_steps` optimizer steps is done."""
        self._update(first_step_at=time.time(), total_steps=total_steps)

    def held(self, *, weight_bytes: int, optimizer_bytes: int) -> None:
        """What this rank holds of weights and optimizer state between two steps."""
        self._update(held={"weight_bytes": weight_bytes, "optimizer_bytes": optimizer_bytes})

    def reduction(self, *, weight: str, distance: float) -> None:
        """How near to the ranks' mean the gradients are that the optimizer reads, at `weight`, relative to its norm."""
        self._update(reduction={"weight": weight, "distance": distance})

    def finish(self, peak_memory_bytes: int) -> None:
        self._update(stage="done", peak_memory_bytes=peak_memory_bytes)

    def failure(self, error: BaseException) -> ExitCode:
        """Record why this rank ends; returns the exit code that it should end with."""
        code = error.exit_code if isinstance(error, FtError) else ExitCode.TRAINING
        failure = {
            "at": time.time(),
            "kind": type(error).__name__,
            "mendable": isinstance(error, FtError),
            "message": error.message if isinstance(error, FtError) else mask_tokens(str(error)),
            "problems": list(error.problems) if isinstance(error, FtError) else [],
            "hint": error.hint if isinstance(error, FtError) else None,
            "exit_code": int(code),
        }
        # A full disk must not keep a rank from ending: the others wait for it.
        with contextlib.suppress(OSError):
            self._update(stage="failed", failure=failure)
        return code

    def _update(self, **changes: Any) -> None:
        self._record.update(changes, updated_at=time.time())
        self._write()

    def _write(self) -> None:
        self._run_dir.write_json(self._path, self._record)
