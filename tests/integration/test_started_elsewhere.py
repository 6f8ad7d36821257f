"""Ranks that something else has started: `ft train` in each of them becomes the worker, and launches nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from train_runs import Training


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def by_torch(rank: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {name: str(n) for name, n in names.items()}


def by_slurm(rank: int, port: int) -> dict[str, str]:
    # The port follows from the job's number, so a free one cannot be handed over.
    numbers = {"PROCID": rank, "LOCALID": rank, "NTASKS": 2, "NNODES": 1, "NODEID": 0, "JOB_ID": port, "STEP_ID": 0}
    words = {"STEP_NODELIST": "localhost", "STEP_TASKS_PER_NODE": "2", "STEP_NUM_TASKS": "2", "TASKS_PER_NODE": "2"}
    return {f"SLURM_{name}": str(value) for name, value in {**numbers, **words}.items()}


def start(folder: Path, model: Path, rows: Path, ranks: list[dict[str, str]], *more: str) -> list[Training]:
    """`ft train` once per environment in `ranks`, at the same time; waited for."""
    command = [sys.executable, "-m", "fleettune_cli", "train", "--run-dir", str(folder), "--model", str(model)]
    command += ["--dataset", str(rows), "--global-batch", "8", "--max-steps", "2", "--precision", "fp32", *more]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    base = {**clean, "NO_COLOR": "1", "FT_CACHE_DIR": str(folder.parent / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
    processes = [subprocess.Popen(command, env={**base, **rank}, **pipes) for rank in ranks]
    finished = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=200)
        finished.append(Training(folder=folder, exit_code=process.returncode, stdout=stdout, stderr=stderr))
    return finished


@pytest.mark.parametrize(("environment", "launcher"), [(by_torch, "torchrun"), (by_slurm, "slurm")])
def test_two_ranks_train_together_and_leave_a_report(tmp_path, tiny_model, tiny_rows, environment, launcher):
    port = free_port()
    first, second = start(tmp_path / "run", tiny_model, tiny_rows, [environment(rank, port) for rank in range(2)])
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert first.stdout == f"{tmp_path / 'run' / 'model'}\n"
    assert second.stdout == ""
    report = first.report
    assert report["status"] == "done"
    assert [(rank["rank"], rank["wrapper"]) for rank in report["world"]] == [
        (0, "DistributedDataParallel"),
        (1, "DistributedDataParallel"),
    ]
    assert report["totals"]["steps"] == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["launcher"]["name"] == launcher


def test_a_failure_there_is_reported_too_and_in_json(tmp_path, tiny_model, tiny_rows):
    port = free_port()
    bad = ["--set", "train.optim_args=nonsense", "--json"]
    ranks = [by_torch(rank, port) for rank in range(2)]
    first, second = start(tmp_path / "run", tiny_model, tiny_rows, ranks, *bad)
    assert first.exit_code != 0
    assert second.exit_code != 0
    told = json.loads(first.stdout)
    assert told["status"] == "failed"
    assert told["first_failure"]["cause"]
    assert told["model"] is None
    assert first.report["first_failure"] == told["first_failure"]
