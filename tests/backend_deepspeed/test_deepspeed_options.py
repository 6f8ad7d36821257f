"""Bad options of the backend deepspeed are one line each, before a model loads; the JSON follows from the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleettune_backend_deepspeed import DeepSpeedBackend
from fleettune_backend_deepspeed.ds_config import ZERO_KEYS, derive, ds_config, merge, read_user_config
from fleettune_backend_deepspeed.options import SHARED_MEMORY_OP, DeepSpeedOptions, check_options
from fleettune_core.config.schema import RunConfig
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import BatchPlan, DeviceKind, MemoryRequest, ProcessInfo, TrainingRun


def run(**options: Any) -> TrainingRun:
    return TrainingRun(
        config=RunConfig(),
        options=DeepSpeedOptions(**options),
        process=ProcessInfo(rank=0, local_rank=0, world_size=4, local_world_size=4),
        batch=BatchPlan(global_batch=16, micro_batch=2, accumulation=2, ranks=4),
        precision="fp32",
        device_kind=DeviceKind.CPU,
        run_dir=Path("run"),
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero_stage": 2, "offload_params": "cpu"}, "--offload-params cpu needs --zero-stage 3, and it is 2"),
        ({"zero_stage": 0, "offload_optimizer": "cpu"}, "--offload-optimizer cpu needs --zero-stage 1, 2 or 3"),
        ({"zero_stage": 2, "offload_optimizer": "nvme", "nvme_path": "/"}, "nvme needs --zero-stage 3, and it is 2"),
        ({"zero_stage": 3, "offload_optimizer": "nvme"}, "--offload-optimizer nvme needs --nvme-path DIR"),
        ({"zero_stage": 3, "offload_params": "nvme", "nvme_path": "/no/such"}, "--nvme-path /no/such: no such folder"),
        ({"zero_stage": 3, "nvme_path": "/"}, "--nvme-path /: nothing is offloaded to nvme"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(options, words):
    with pytest.raises(FtError) as caught:
        check_options(DeepSpeedOptions(**options))
    assert words in caught.value.message
    assert caught.value.problems == ()
    assert caught.value.exit_code == ExitCode.CONFIG


def test_several_mistakes_are_told_together():
    with pytest.raises(FtError) as caught:
        check_options(DeepSpeedOptions(zero_stage=0, offload_params="cpu", offload_optimizer="cpu"))
    assert len(caught.value.problems) == 2


def test_a_disk_that_is_full_is_told(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100 << 30, 100 << 30, 5 << 20))
    with pytest.raises(FtError, match="5 MiB are free, and offloading needs at least 1 GiB"):
        check_options(DeepSpeedOptions(zero_stage=3, offload_params="nvme", nvme_path=str(tmp_path)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_divided_as_the_stage_says(stage):
    request = MemoryRequest(options=DeepSpeedOptions(zero_stage=stage), ranks=4, device_kind=DeviceKind.CPU, lora=False)
    division = DeepSpeedBackend().divide_memory(request)
    assert (division.optimizer, division.gradients, division.weights) == (
        4 if stage >= 1 else 1,
        4 if stage >= 2 else 1,
        4 if stage >= 3 else 1,
    )


def test_the_json_follows_from_the_plan():
    config = derive(run(zero_stage=3, offload_optimizer="cpu"))
    assert config["train_batch_size"] == 16
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 2
    assert config["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}}


def write(tmp_path: Path, content: Any) -> str:
    file = tmp_path / "ds.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def test_a_users_json_is_merged_over_it(tmp_path):
    content = {
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1000},
        "wall_clock_breakdown": True,
    }
    config = ds_config(run(zero_stage=3, deepspeed_config=write(tmp_path, content)))
    assert config["zero_optimization"] == {"stage": 3, "stage3_prefetch_bucket_size": 1000}
    assert config["wall_clock_breakdown"] is True
    assert config["train_batch_size"] == 16


def test_what_contradicts_the_plan_names_both_sides():
    with pytest.raises(FtError) as caught:
        merge(derive(run(zero_stage=2)), {"zero_optimization": {"stage": 3}, "train_batch_size": 32}, "ds.json")
    assert list(caught.value.problems) == [
        "ds.json: zero_optimization.stage is 3, and the plan says 2 (--zero-stage)",
        "ds.json: train_batch_size is 32, and the plan says 16 (--global-batch)",
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"zero_optimisation": {}}, "unknown key zero_optimisation (did you mean zero_optimization?)"),
        ({"zero_optimization": {"stag": 2}}, "unknown key zero_optimization.stag (did you mean stage?)"),
        ({"zero_optimization": 2}, "zero_optimization is an object, not 2"),
        ({"optimizer": {"type": "Adam"}}, "optimizer: the optimizer is the run's"),
        ("{\n  broken", "ds.json:2: broken JSON"),
        ("[1]", "a DeepSpeed config is a JSON object"),
    ],
)
def test_a_bad_json_is_one_line(tmp_path, content, words):
    with pytest.raises(FtError) as caught:
        read_user_config(write(tmp_path, content))
    assert words in caught.value.message
    assert caught.value.exit_code == ExitCode.CONFIG


def test_a_missing_json_is_one_line():
    with pytest.raises(FtError, match=r"--deepspeed-config no\.json: No such file or directory"):
        read_user_config("no.json")


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    """What the installed DeepSpeed shows, from a process of its own: importing it changes the environment."""
    code = """
import importlib, inspect, json, deepspeed
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
source = inspect.getsource(importlib.import_module("deepspeed.comm.torch"))
print("FACTS", json.dumps({
    "zero_keys": [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()],
    "operations": list(deepspeed.ops.__compatible_ops__),
    "uses": source.count("torch.ops.deepspeed."),
    "inference_uses": source.count("torch.ops.deepspeed.inference_all_reduce"),
}))
"""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FACTS"))[6:])


def test_the_known_keys_are_those_of_the_installed_deepspeed(installed):
    left_out = {"cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "zenflow", "leaf_module"}
    internal = {"compute_grad_norm", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory"}
    spelt = set(installed["zero_keys"])
    assert not ZERO_KEYS - spelt, f"DeepSpeed no longer has zero_optimization.{ZERO_KEYS - spelt}"
    new = spelt - ZERO_KEYS - left_out - internal
    assert not new, f"DeepSpeed has new keys {new}: ds_config.ZERO_KEYS must follow"


def test_only_inference_uses_the_operation_that_is_left_out_on_a_cpu(installed):
    assert SHARED_MEMORY_OP in installed["operations"], "DeepSpeed has renamed its shared-memory operation"
    assert installed["uses"] == installed["inference_uses"] > 0, (
        "more than inference_all_reduce uses DeepSpeed's compiled operations: engine.prepare_libraries must build them"
    )
