"""Each rank of each run has a folder of its own on the disk, which goes with it; buffers fit the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleettune_backend_deepspeed import nvme
from fleettune_backend_deepspeed.ds_config import PARAMS_ON_DISK, ds_config
from fleettune_backend_deepspeed.options import DeepSpeedOptions
from fleettune_core.config.schema import RunConfig
from fleettune_core.errors import FtError
from fleettune_core.types import BatchPlan, DeviceKind, ProcessInfo, TrainingRun


class Ending:
    """What was asked for at the end of a rank."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def close(self) -> None:
        for call in self.calls:
            call()
        self.calls.clear()


@pytest.fixture
def ending():
    calls = Ending()
    yield calls
    calls.close()


def run(
    disk: Path,
    ending: Ending,
    *,
    run_dir: str = "runs/a",
    rank: int = 0,
    model_folder: Path | None = None,
    **more: Any,
) -> TrainingRun:
    options = {"zero_stage": 3, "offload_params": "nvme", "offload_optimizer": "nvme", "nvme_path": str(disk), **more}
    return TrainingRun(
        config=RunConfig(),
        options=DeepSpeedOptions(**options),
        process=ProcessInfo(rank=rank, local_rank=rank, world_size=2, local_world_size=2),
        batch=BatchPlan(global_batch=4, micro_batch=2, accumulation=1, ranks=2),
        precision="fp32",
        device_kind=DeviceKind.CPU,
        run_dir=Path(run_dir),
        model_folder=model_folder,
        at_end=ending.calls.append,
    )


def folders(disk: Path) -> set[str]:
    return {path.name for path in disk.iterdir() if path.is_dir()}


def test_ranks_and_runs_do_not_share_a_folder(tmp_path: Path, ending: Ending) -> None:
    claimed = [
        nvme.claim_folder(tmp_path, run(tmp_path, ending, run_dir=place, rank=rank))
        for place in ("runs/a", "elsewhere/a")
        for rank in (0, 1)
    ]
    assert len(set(claimed)) == 4
    assert folders(tmp_path) == {path.name for path in claimed}


def test_a_folder_goes_with_its_rank_whatever_is_in_it(tmp_path: Path, ending: Ending) -> None:
    folder = nvme.claim_folder(tmp_path, run(tmp_path, ending))
    (folder / "zero_stage_3").mkdir()
    (folder / "zero_stage_3" / "0.swp").write_text("weights")
    ending.close()
    assert folders(tmp_path) == set()


def test_what_a_killed_rank_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path: Path, ending: Ending) -> None:
    living = nvme.claim_folder(tmp_path, run(tmp_path, ending, run_dir="runs/living"))
    code = f"""
import os, signal, sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from pathlib import Path
from test_deepspeed_nvme import Ending, nvme, run
disk = Path({str(tmp_path)!r})
nvme.claim_folder(disk, run(disk, Ending(), run_dir="runs/killed"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ}, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert any("killed" in name for name in folders(tmp_path))
    new = nvme.claim_folder(tmp_path, run(tmp_path, ending, run_dir="runs/new"))
    assert folders(tmp_path) == {living.name, new.name}


def test_other_peoples_files_on_the_disk_stay(tmp_path: Path, ending: Ending) -> None:
    (tmp_path / "zero_stage_3").mkdir()
    (tmp_path / "fleettune-elsewhere-a-rank0").mkdir()  # another machine's, on a disk that they share
    nvme.claim_folder(tmp_path, run(tmp_path, ending))
    assert folders(tmp_path) >= {"zero_stage_3", "fleettune-elsewhere-a-rank0"}


def test_buffers_hold_the_largest_weights_share(
    tmp_path: Path, ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme, "weight_sizes", lambda _: (1_000_001, 400_000_000))
    asked = run(tmp_path, ending)
    zero = nvme.prepared(ds_config(asked), asked)["zero_optimization"]
    assert zero["sub_group_size"] == nvme.SUB_GROUP_NUMEL
    assert zero["offload_param"]["buffer_size"] == 500_001 + nvme.SUB_GROUP_NUMEL
    (mine,) = folders(tmp_path)
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == str(tmp_path / mine)


def test_a_small_model_gets_small_buffers(tiny_model: Path, tmp_path: Path, ending: Ending) -> None:
    asked = run(tmp_path, ending, model_folder=tiny_model)
    largest, whole = nvme.weight_sizes(asked)
    assert (largest, whole) == (362 * 64, 97_216)
    zero = nvme.prepared(ds_config(asked), asked)["zero_optimization"]
    assert zero["offload_param"]["buffer_size"] == (362 * 64 + 97_216) // 2


def test_weights_on_a_disk_stay_there(tmp_path: Path, ending: Ending) -> None:
    zero = ds_config(run(tmp_path, ending))["zero_optimization"]
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    assert zero["stage3_prefetch_bucket_size"] == zero["stage3_max_live_parameters"] == 0
    only_optimizer = run(tmp_path, ending, offload_params="none")
    assert "stage3_prefetch_bucket_size" not in ds_config(only_optimizer)["zero_optimization"]


@pytest.mark.parametrize("key", [name.removeprefix("zero_optimization.") for name in PARAMS_ON_DISK])
def test_a_users_json_cannot_ask_for_what_deepspeed_cannot_do(tmp_path: Path, ending: Ending, key: str) -> None:
    parent, _, leaf = key.rpartition(".")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {parent: {leaf: 5}} if parent else {leaf: 5}}))
    with pytest.raises(FtError) as caught:
        ds_config(run(tmp_path, ending, deepspeed_config=str(file)))
    assert caught.value.message == f"{file}: zero_optimization.{key} is 5, and the plan says 0 (--offload-params nvme)"
