"""A plan made by hand, so that rendering is tested without planning anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleettune_core.config.schema import Backend, Batch, Data, Model, RunConfig, Train
from fleettune_core.config.source import Source
from fleettune_core.plan.model import Choice, DataSummary, MemoryEstimate, Plan
from fleettune_core.types import BatchPlan, DeviceKind, Devices, LaunchPlan, Layout

MIB = 2**20


@pytest.fixture(autouse=True)
def no_terminal_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine that runs the tests says about terminals does not reach them."""
    for name in ("NO_COLOR", "CI", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    """A plan for 2 machines with 8 GPUs; fields may be replaced by name."""

    def make(**changes: Any) -> Plan:
        run_dir = Path("runs/chat-20260102-030405")
        plan = Plan(
            run_id="chat-20260102-030405",
            run_dir=run_dir,
            config=RunConfig(
                name="chat",
                model=Model(model="org/tiny-135M", lora=True, lora_r=8, lora_alpha=16.0, lora_target="all-linear"),
                data=Data(dataset="chat.jsonl"),
                train=Train(max_steps=50, learning_rate=2e-4),
                batch=Batch(global_batch=64),
                backend=Backend(backend="ddp"),
            ),
            sources={
                "name": Source(kind="file", where="run.yaml:1"),
                "model.model": Source(kind="file", where="run.yaml:3"),
                "model.lora": Source(kind="file", where="run.yaml:4"),
                "model.lora_r": Source(kind="flag", where="--lora-r", beat=(("run.yaml:5", 16),)),
                "data.dataset": Source(kind="file", where="run.yaml:7"),
                "train.max_steps": Source(kind="flag", where="--max_steps", beat=(("run.yaml:9", 500),)),
                "batch.global_batch": Source(kind="flag", where="--global-batch"),
            },
            launcher=Choice(
                name="torchrun",
                reason="default: 8 devices on this machine, one process each",
                distribution="fleettune-launcher-torchrun 0.1.0",
            ),
            backend=Choice(name="ddp", reason="default", distribution="fleettune-core 0.1.0"),
            precision=Choice(name="bf16", reason="auto: this device multiplies bf16 natively"),
            layout=Layout(min_nodes=2, max_nodes=2, procs_per_node=8),
            devices=Devices(
                kind=DeviceKind.CUDA,
                count=8,
                name="NVIDIA H200",
                memory_bytes=139 * 1024 * MIB,
                bf16=True,
                cpu_cores=64,
            ),
            batch=BatchPlan(
                global_batch=64,
                micro_batch=2,
                accumulation=2,
                ranks=16,
                reasons={
                    "global_batch": "--global-batch",
                    "micro_batch": "solved: the largest that fits",
                    "accumulation": "solved",
                    "ranks": "2 nodes × 8",
                },
            ),
            threads_per_rank=8,
            process=None,
            launch=LaunchPlan(
                launcher="torchrun",
                argv=(
                    "/opt/venv/bin/python",
                    "-m",
                    "torch.distributed.run",
                    "--nnodes=2",
                    "--nproc-per-node=8",
                    "--node-rank=0",
                    "--rdzv-backend=c10d",
                    "--rdzv-endpoint=node a:29500",
                    "-m",
                    "fleettune_core.worker",
                    "runs/chat-20260102-030405",
                ),
                environment={"HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "8"},
                run_dir=run_dir,
                notes=("the store listens on node a, port 29500",),
            ),
            memory=MemoryEstimate(
                weights=257 * MIB,
                gradients=9 * MIB,
                optimizer=19 * MIB,
                activations=512 * MIB,
                logits=384 * MIB,
                parameters=134_515_008,
                trainable=2_442_240,
                assumptions=("2 rows of 1024 tokens", "no checkpointing"),
            ),
            data=DataSummary(format="messages", reason="every row has the column messages", rows=5200, complete=True),
            notes=("sbatch found; add --launcher slurm to submit",),
            warnings=("--max-restarts is 0: a lost rank ends the run",),
        )
        return dataclasses.replace(plan, **changes)

    return make
