"""Groups that do not come out even, and settings that have no meaning here, are told before a model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleettune_backend_fsdp import FsdpBackend
from fleettune_backend_fsdp.backend import FsdpOptions
from fleettune_core.config.schema import RunConfig
from fleettune_core.errors import ExitCode, FtError
from fleettune_core.types import BatchPlan, DeviceKind, MemoryRequest, ProcessInfo, TrainingRun


def request(ranks: int = 4, kind: DeviceKind = DeviceKind.CPU, **options: Any) -> MemoryRequest:
    return MemoryRequest(options=FsdpOptions(**options), ranks=ranks, device_kind=kind, lora=False)


@pytest.mark.parametrize(("options", "group"), [({}, 4), ({"shard_group": 2}, 2), ({"shard_group": 1}, 1)])
def test_memory_is_divided_over_a_group(options, group):
    division = FsdpBackend().divide_memory(request(**options))
    assert (division.weights, division.gradients, division.optimizer) == (group, group, group)


def test_offloading_takes_the_state_off_a_gpu_only():
    assert FsdpBackend().divide_memory(request(kind=DeviceKind.CUDA, cpu_offload=True)).weights_offloaded
    assert not FsdpBackend().divide_memory(request(cpu_offload=True)).weights_offloaded


def test_groups_that_do_not_come_out_even_are_refused_with_those_that_do():
    with pytest.raises(FtError, match="--shard-group 3: 4 ranks do not make groups of 3") as caught:
        FsdpBackend().divide_memory(request(shard_group=3))
    assert caught.value.hint == "4 ranks make groups of 1, 2, 4"
    assert caught.value.exit_code == ExitCode.CONFIG


@pytest.mark.parametrize(
    ("precision", "options", "words"),
    [("fp16", {}, "does not train in fp16"), ("fp32", {"cpu_offload": True}, "there is no GPU here")],
)
def test_what_has_no_meaning_here_is_refused(precision, options, words):
    run = TrainingRun(
        config=RunConfig(),
        options=FsdpOptions(**options),
        process=ProcessInfo(rank=0, local_rank=0, world_size=2, local_world_size=2),
        batch=BatchPlan(global_batch=8, micro_batch=2, accumulation=2, ranks=2),
        precision=precision,
        device_kind=DeviceKind.CPU,
        run_dir=Path("run"),
    )
    with pytest.raises(FtError, match=words) as caught:
        FsdpBackend().configure_training(run)
    assert caught.value.exit_code == ExitCode.CONFIG
