"""Optimizer state that another backend has written is loaded before the first step, at every stage and onto a disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from system_packages import need_libaio
from tiny_model import make_tiny_model

PLACES = {
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3},
    "memory": {"zero_stage": 3, "offload_optimizer": "cpu"},
    "disk": {"zero_stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": "."},
}

# DeepSpeed changes the environment when it is imported: each case is a process of its own.
SCRIPT = """
import sys
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from transformers import AutoModelForCausalLM

from fleettune_backend_deepspeed import DeepSpeedBackend
from fleettune_backend_deepspeed.options import DeepSpeedOptions
from fleettune_core.backend_kit.optimizer_state import save_optimizer
from fleettune_core.config.schema import RunConfig
from fleettune_core.types import BatchPlan, DeviceKind, ProcessInfo, TrainingContext, TrainingRun

folder, options = Path(sys.argv[1]), eval(sys.argv[2])


def loaded():
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


model, optimizer = loaded()
ids = torch.arange(16)[None]
for _ in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
Path("theirs").mkdir()
save_optimizer(model, optimizer, Path("theirs"))

endings = []
run = TrainingRun(
    config=RunConfig(),
    options=DeepSpeedOptions(**options),
    process=ProcessInfo(rank=0, local_rank=0, world_size=1, local_world_size=1),
    batch=BatchPlan(global_batch=1, micro_batch=1, accumulation=1, ranks=1),
    precision="fp32",
    device_kind=DeviceKind.CPU,
    run_dir=Path("run"),
    model_folder=folder,
    at_end=endings.append,
)
backend = DeepSpeedBackend()
backend.configure_training(run)
context = TrainingContext(run=run, device=torch.device("cpu"), lora=False, gradient_checkpointing=False)
wrapped = backend.wrap_model(context, *loaded())
backend.load_state(context, wrapped, Path("theirs"))
Path("ours").mkdir()
backend.save_state(context, wrapped, Path("ours"))
for end in endings:
    end()

theirs, ours = (_load_state_dict_from_keys(checkpoint_id=name)["optimizer"] for name in ("theirs", "ours"))
assert ours.keys() == theirs.keys()
moments = [name for name in theirs if name.endswith((".exp_avg", ".exp_avg_sq", ".step"))]
assert len(moments) == 3 * len(list(model.parameters()))
assert all(theirs[name].any() for name in moments)
assert [name for name in moments if not torch.equal(ours[name], theirs[name])] == []
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that DeepSpeed puts its moments on a disk."""
    return make_tiny_model(tmp_path_factory.mktemp("wide"), hidden_size=256, intermediate_size=1024)


@pytest.mark.slow
@pytest.mark.parametrize("place", list(PLACES))
def test_what_another_backend_has_written_is_loaded_exactly(model: Path, tmp_path: Path, place: str) -> None:
    if place == "disk":
        need_libaio()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), repr(PLACES[place])],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
