"""The planned command lines, started: torch's own launcher with a worker that only tells who it is."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from fleettune_core.errors import FtError
from fleettune_core.failures import read_summary
from fleettune_core.types import DeviceKind, Devices, Job, JobState, LaunchRequest, Layout
from fleettune_launcher_torchrun import TorchrunLauncher
from fleettune_launcher_torchrun.argv import Options
from fleettune_launcher_torchrun.environment import detect

CPU = Devices(kind=DeviceKind.CPU, count=1, name="CPU", memory_bytes=8 << 30, bf16=False, cpu_cores=2)
TELLS = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[1])
(folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps([sys.argv[1:], dict(os.environ)]))
"""
MEETS = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("total", int(total), flush=True)
dist.destroy_process_group()
os._exit(0)  # gloo's threads can abort an interpreter that is shutting down (pytorch/pytorch#179291)
"""


def free_port() -> int:
    """A port below those that the system hands out itself: one of these may be taken again before it is used."""
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("no free port among a hundred")


def start(run_dir: Path, code: str, layout: Layout, *arguments: str, **changes: object) -> Job:
    run_dir.mkdir(exist_ok=True)
    script = run_dir / "worker.py"
    script.write_text(code)
    values: dict[str, object] = {
        "run_id": run_dir.name,
        "run_dir": run_dir,
        "command": (str(script), str(run_dir), *arguments),
        "python": sys.executable,
        "layout": layout,
        "devices": CPU,
        "options": Options(join_timeout_seconds=60),
        "environment": {"OMP_NUM_THREADS": "1"},
        **changes,
    }
    launcher = TorchrunLauncher()
    return launcher.launch(launcher.plan_launch(LaunchRequest(**values)))  # type: ignore[arg-type]


def log(job: Job) -> str:
    return "\n".join(path.read_text() for path in job.log_files())


def test_two_runs_side_by_side_do_not_clash_and_their_arguments_arrive_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Variables through which torchrun would run something else than what was planned.
    monkeypatch.setenv("PET_RUN_PATH", "1")
    monkeypatch.setenv("PYTHON_EXEC", "/bin/false")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    arguments = ("--r=16", "--nnodes=9", "--", "-m")
    jobs = [start(tmp_path / name, TELLS, Layout(procs_per_node=2), *arguments) for name in ("a", "b")]
    ports = set()
    for job, name in zip(jobs, ("a", "b"), strict=True):
        assert job.wait(120).state is JobState.DONE, log(job)
        for rank in range(2):
            argv, env = json.loads((tmp_path / name / f"rank{rank}.json").read_text())
            assert argv == [str(tmp_path / name), *arguments]
            found = detect(env)
            assert found is not None
            assert found.process is not None
            assert (found.process.rank, found.process.local_rank, found.process.world_size) == (rank, rank, 2)
            assert (found.process.group, found.process.master_addr) == (name, "127.0.0.1")
            ports.add(found.process.master_port)
    assert len(ports) == 2
    assert not list(temporary.glob("torchelastic_*")), "torchrun's own files belong into the run folder"


def test_two_machines_started_by_hand_meet_and_keep_their_node_ranks(tmp_path: Path) -> None:
    layout = Layout(min_nodes=2, max_nodes=2, procs_per_node=1)
    endpoint = f"127.0.0.1:{free_port()}"
    # Node 1 comes first, as it may.
    jobs = {
        node: start(tmp_path / "run", TELLS + MEETS, layout, str(node), node_rank=node, rdzv_endpoint=endpoint)
        for node in (1, 0)
    }
    for node, job in jobs.items():
        assert job.wait(120).state is JobState.DONE, log(job)
        assert "total 2" in log(job)
        argv, env = json.loads((tmp_path / "run" / f"rank{node}.json").read_text())
        assert argv[1] == str(node), "node rank k has rank k"
        found = detect(env)
        assert found is not None
        assert found.process is not None
        assert found.process.group is None
    assert jobs[0].log_files() != jobs[1].log_files(), "machines may share the folder, never a log"


def test_two_machines_that_both_claim_node_0_fail_in_seconds(tmp_path: Path) -> None:
    layout = Layout(min_nodes=2, max_nodes=2, procs_per_node=1)
    endpoint = f"127.0.0.1:{free_port()}"
    first = start(tmp_path / "a", TELLS, layout, node_rank=0, rdzv_endpoint=endpoint)
    try:
        port = int(endpoint.rpartition(":")[2])
        deadline = time.monotonic() + 60
        while not any(
            c.laddr.port == port and c.status == "LISTEN" for c in psutil.Process(int(first.id)).net_connections()
        ):
            assert time.monotonic() < deadline, log(first)
            time.sleep(0.1)
        began = time.monotonic()
        with pytest.raises(FtError, match="node 0 cannot listen on port"):
            start(tmp_path / "b", TELLS, layout, node_rank=0, rdzv_endpoint=endpoint)
        assert time.monotonic() - began < 5
    finally:
        first.cancel(10)
    assert first.status().state is JobState.CANCELLED


@pytest.mark.parametrize(("node_rank", "told"), [(0, "not all of 2 machines came"), (1, "nothing answered at")])
def test_a_machine_that_is_left_alone_gives_up_and_says_whom_it_waited_for(
    tmp_path: Path, node_rank: int, told: str
) -> None:
    job = start(
        tmp_path / "run",
        TELLS,
        Layout(min_nodes=2, max_nodes=2, procs_per_node=1),
        node_rank=node_rank,
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
        options=Options(join_timeout_seconds=2),
    )
    status = job.wait(60)
    assert status.state is JobState.FAILED
    assert told in str(status.reason), (status, log(job))


def test_an_elastic_run_starts_with_the_machines_that_are_there(tmp_path: Path) -> None:
    job = start(
        tmp_path / "run",
        MEETS,
        Layout(min_nodes=1, max_nodes=2, procs_per_node=1),
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
        max_restarts=1,
        options=Options(local_addr="127.0.0.1", last_call_seconds=1),
    )
    assert job.wait(120).state is JobState.DONE, log(job)
    assert "total 1" in log(job)


def test_workers_of_a_torchrun_that_dies_at_once_do_not_outlive_it(tmp_path: Path) -> None:
    sleeps = "import sys, os, time; open(f'{sys.argv[1]}/up' + os.environ['RANK'], 'w').close(); time.sleep(120)"
    job = start(tmp_path / "run", sleeps, Layout(procs_per_node=2))
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "run").glob("up*"))) < 2:
        assert time.monotonic() < deadline, log(job)
        time.sleep(0.1)
    workers = psutil.Process(int(job.id)).children(recursive=True)
    assert len(workers) >= 2
    os.kill(int(job.id), signal.SIGKILL)
    assert job.wait(30).reason == "killed by SIGKILL"
    assert [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE] == []


def test_the_summary_that_torchrun_prints_tells_who_was_killed(tmp_path: Path) -> None:
    dies = "import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(60)"
    job = start(tmp_path / "run", dies, Layout(procs_per_node=2))
    began = time.time()
    status = job.wait(60)
    assert (status.state, status.exit_code) == (JobState.FAILED, 1)
    ends = read_summary(log(job))
    first = next(end for end in ends if end.first)
    assert (first.rank, first.code) == (1, -9)
    assert abs(first.at - began) < 60
