"""What the engine is said to hold follows from the stage, the device and the user's own JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleettune_backend_deepspeed.ds_config import LARGEST_BUCKET, ds_config, with_bucket
from fleettune_backend_deepspeed.memory import MAX_LIVE_PARAMETERS, divide
from fleettune_backend_deepspeed.options import DeepSpeedOptions
from fleettune_core.config.schema import RunConfig
from fleettune_core.types import BatchPlan, DeviceKind, MemoryDivision, ProcessInfo, TrainingRun


def division(
    stage: int, user: dict[str, Any] | None = None, *, ranks: int = 2, kind: DeviceKind = DeviceKind.CPU, **options: Any
) -> MemoryDivision:
    user = {"zero_optimization": user} if user is not None else {}
    return divide(DeepSpeedOptions(zero_stage=stage, **options), user, ranks=ranks, device_kind=kind)


def config(stage: int, num_trained: int, **options: Any) -> dict[str, Any]:
    run = TrainingRun(
        config=RunConfig(),
        options=DeepSpeedOptions(zero_stage=stage, **options),
        process=ProcessInfo(rank=0, local_rank=0, world_size=2, local_world_size=2),
        batch=BatchPlan(global_batch=8, micro_batch=2, accumulation=2, ranks=2),
        precision="fp32",
        device_kind=DeviceKind.CPU,
        run_dir=Path("run"),
    )
    return with_bucket(ds_config(run), num_trained)["zero_optimization"]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("trained", "bucket"), [(1000, 1000), (10**10, LARGEST_BUCKET), (0, 1)])
def test_the_bucket_is_no_larger_than_what_is_trained(stage, trained, bucket):
    assert config(stage, trained)["reduce_bucket_size"] == bucket


def test_without_a_stage_there_is_no_bucket_to_size():
    assert config(0, 1000) == {"stage": 0}


def test_a_users_bucket_wins_and_is_counted_whole(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"reduce_bucket_size": 7000}}')
    assert config(2, 1000, deepspeed_config=str(file))["reduce_bucket_size"] == 7000
    said = division(2, {"reduce_bucket_size": 7000})
    assert (said.bucket_elements, said.bucket_fixed) == (7000, True)
    assert (division(2).bucket_elements, division(2).bucket_fixed) == (LARGEST_BUCKET, False)


def test_overlapping_takes_a_second_bucket_below_stage_3():
    assert [division(stage, {"overlap_comm": True}).bucket_elements // LARGEST_BUCKET for stage in (1, 2, 3)] == [
        2,
        2,
        1,
    ]


def test_stage_3_gathers_up_to_the_live_parameters_among_many_ranks():
    assert division(3).gathered_elements == MAX_LIVE_PARAMETERS
    assert division(3, {"stage3_max_live_parameters": 5000}).gathered_elements == 5000
    assert (division(3, ranks=1).gathered_elements, division(3, ranks=1).gathered_layers) == (0, 0)
    assert division(2).gathered_elements == 0
    assert division(3, offload_params="nvme", nvme_path="/").gathered_elements == 0


def test_offloaded_state_counts_in_memory_that_the_device_shares():
    on_cpu = division(2, offload_optimizer="cpu")
    on_gpu = division(2, offload_optimizer="cpu", kind=DeviceKind.CUDA)
    assert (on_cpu.optimizer_offloaded, on_cpu.gradients_offloaded, on_cpu.master_copies) == (False, False, 3)
    assert (on_gpu.optimizer_offloaded, on_gpu.gradients_offloaded) == (True, True)
