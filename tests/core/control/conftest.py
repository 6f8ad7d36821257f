"""A plan that starts a small script in place of the worker, so that the control story runs without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleettune_core.config.schema import Launch, RunConfig
from fleettune_core.plan.model import Choice, Plan
from fleettune_core.types import BatchPlan, DeviceKind, Devices, LaunchPlan, Layout, PlannedFile, ProcessInfo

PREAMBLE = """
import json, os, sys, time
from pathlib import Path
from fleettune_core.errors import FtError, ExitCode
from fleettune_core.rankrecord import RankRecord
from fleettune_core.rundir import RunDir
from fleettune_core.types import ProcessInfo, WrapFacts

run = RunDir(Path(sys.argv[1]))

def rank(k, size=1):
    return RankRecord(run, ProcessInfo(rank=k, local_rank=k, world_size=size, local_world_size=size))

def done(k, size=1):
    record = rank(k, size)
    record.facts(WrapFacts(wrapper="Net", world_size=size))
    record.first_step(3)
    record.finish(1000 + k)
"""

MakePlan = Callable[..., Plan]


@pytest.fixture
def make_plan(tmp_path: Path) -> MakePlan:
    """`make_plan(code, ...)`: a plan of `ranks` on this machine whose one process runs `code` with the run folder."""

    def make(
        code: str = "",
        *,
        ranks: int = 1,
        layout: Layout | None = None,
        launch: Launch | None = None,
        run_dir: Path | None = None,
        files: tuple[PlannedFile, ...] = (),
        process: ProcessInfo | None = None,
        launcher: str = "local",
    ) -> Plan:
        folder = run_dir or tmp_path / "runs" / "demo"
        script = tmp_path / "worker.py"
        script.write_text(PREAMBLE + code)
        layout = layout or Layout(procs_per_node=ranks)
        command = LaunchPlan(
            launcher=launcher,
            argv=(sys.executable, str(script), str(folder)),
            environment={},
            files=files,
            run_dir=folder,
        )
        return Plan(
            run_id="demo",
            run_dir=folder,
            config=RunConfig(launch=launch or Launch()),
            sources={},
            launcher=Choice(name=launcher, reason="test", distribution="fleettune-core 0.1.0"),
            backend=Choice(name="ddp", reason="default", distribution="fleettune-core 0.1.0"),
            precision=Choice(name="fp32", reason="test"),
            layout=layout,
            devices=Devices(kind=DeviceKind.CPU, count=1, name="CPU", memory_bytes=1 << 30, bf16=False, cpu_cores=2),
            batch=BatchPlan(global_batch=layout.ranks, micro_batch=1, accumulation=1, ranks=layout.ranks),
            threads_per_rank=1,
            process=process,
            launch=None if process is not None else command,
            memory=None,
        )

    return make
