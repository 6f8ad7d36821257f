"""Which arithmetic a run uses, with the reason in words."""

from __future__ import annotations

import pytest

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.plan.precision import choose_precision
from fleettune_core.types import DeviceKind, Devices


def devices(kind: DeviceKind, name: str, bf16_by: str, *, bf16: bool) -> Devices:
    return Devices(kind=kind, count=1, name=name, memory_bytes=1 << 34, bf16=bf16, bf16_by=bf16_by, cpu_cores=2)


NEW_CPU = devices(DeviceKind.CPU, "AMD EPYC", "AVX512_BF16", bf16=True)
OLD_CPU = devices(DeviceKind.CPU, "Xeon", "", bf16=False)
A100 = devices(DeviceKind.CUDA, "NVIDIA A100", "compute capability 8.0", bf16=True)
T4 = devices(DeviceKind.CUDA, "NVIDIA T4", "compute capability 7.5", bf16=False)


@pytest.mark.parametrize(
    ("where", "name", "reason"),
    [
        (NEW_CPU, "bf16", "auto: this CPU multiplies bf16 (AVX512_BF16)"),
        (OLD_CPU, "fp32", "auto: this CPU has no bf16 arithmetic"),
        (A100, "bf16", "auto: NVIDIA A100 multiplies bf16 (compute capability 8.0)"),
        (T4, "fp32", "auto: NVIDIA T4 has no bf16 arithmetic (compute capability 7.5)"),
    ],
)
def test_auto_is_bf16_where_the_device_multiplies_it(where: Devices, name: str, reason: str) -> None:
    choice = choose_precision("auto", where)
    assert (choice.name, choice.reason) == (name, reason)


@pytest.mark.parametrize("where", [OLD_CPU, T4])
def test_bf16_that_is_emulated_is_allowed_and_called_slow(where: Devices) -> None:
    choice = choose_precision("bf16", where)
    assert choice.name == "bf16"
    assert "slow" in choice.reason
    assert "emulated" in choice.reason


@pytest.mark.parametrize(("requested", "where"), [("fp32", T4), ("bf16", A100), ("fp16", T4), ("fp32", NEW_CPU)])
def test_what_is_asked_and_there_is_given(requested: str, where: Devices) -> None:
    choice = choose_precision(requested, where)
    assert choice.name == requested
    assert choice.reason.startswith("as asked")
    assert "slow" not in choice.reason


@pytest.mark.parametrize(("where", "instead"), [(NEW_CPU, "--precision bf16"), (OLD_CPU, "--precision fp32")])
def test_fp16_on_a_cpu_is_refused_with_what_to_type(where: Devices, instead: str) -> None:
    with pytest.raises(FtError) as caught:
        choose_precision("fp16", where)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert instead in (caught.value.hint or "")


def test_an_unknown_precision_names_the_nearest() -> None:
    with pytest.raises(FtError, match="did you mean bf16"):
        choose_precision("b16", A100)
