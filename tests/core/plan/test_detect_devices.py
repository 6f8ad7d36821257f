"""Counting devices from recorded texts and a stand-in for NVML."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fleettune_core.plan.devices import (
    Gpu,
    cgroup_folders,
    cpu_bf16,
    cpu_quota,
    detect_devices,
    memory_limit,
    read_cpuinfo,
    usable_cores,
    visible_gpus,
)
from fleettune_core.types import DeviceKind

GIB = 1 << 30
X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu sse2 avx512f avx512_bf16
bogomips\t: 4800.00

processor\t: 1
model name\t: another
flags\t\t: fpu amx_bf16
"""
ARM = """processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd sve i8mm bf16
CPU implementer\t: 0x41
"""
MEMINFO = "MemTotal:       16777216 kB\nMemFree:        1 kB\n"
CGROUP_2 = "0::/user/job\n"
MOUNTS_2 = "30 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
CGROUP_1 = "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n"
MOUNTS_1 = (
    "31 24 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 24 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 24 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


def machine(root: Path, **files: str) -> Path:
    """A root folder with the given files; `__` in a name stands for `/`."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


# CPU


def test_the_cpu_is_the_one_device_where_there_is_no_driver(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__cpuinfo=X86, proc__meminfo=MEMINFO)
    devices = detect_devices({}, root=root)
    assert (devices.kind, devices.count) == (DeviceKind.CPU, 1)
    assert devices.name == "AMD EPYC 9654 96-Core Processor"
    assert devices.memory_bytes == 16 * GIB
    assert (devices.bf16, devices.bf16_by) == (True, "AVX512_BF16")
    assert devices.cpu_cores >= 1


def test_only_the_first_processor_is_read() -> None:
    name, flags = read_cpuinfo(X86.splitlines())
    assert name == "AMD EPYC 9654 96-Core Processor"
    assert "amx_bf16" not in flags


@pytest.mark.parametrize(
    ("text", "by"),
    [(X86, "AVX512_BF16"), (ARM, "BF16"), ("flags : avx2 amx_bf16 avx512_bf16", "AMX_BF16"), ("flags : avx2", "")],
)
def test_bf16_is_read_from_the_flags(text: str, by: str) -> None:
    assert cpu_bf16(read_cpuinfo(text.splitlines())[1]) == by


def test_a_machine_without_proc_still_answers(tmp_path: Path) -> None:
    devices = detect_devices({}, root=tmp_path)
    assert devices.memory_bytes > 0
    assert devices.name
    assert not devices.bf16


def test_the_strictest_cgroup_on_the_way_up_holds(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__cgroup=CGROUP_2, proc__self__mountinfo=MOUNTS_2, proc__meminfo=MEMINFO)
    write(root, "sys/fs/cgroup/user/memory.max", f"{4 * GIB}\n")
    write(root, "sys/fs/cgroup/user/job/memory.max", "max\n")
    write(root, "sys/fs/cgroup/user/job/cpu.max", "150000 100000\n")
    write(root, "sys/fs/cgroup/user/cpu.max", "max 100000\n")
    assert memory_limit(root) == 4 * GIB
    assert cpu_quota(root) == 1.5
    assert detect_devices({}, root=root).memory_bytes == 4 * GIB
    assert detect_devices({}, root=root).cpu_cores == 1


def test_limits_of_cgroup_version_1_are_read(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__cgroup=CGROUP_1, proc__self__mountinfo=MOUNTS_1, proc__meminfo=MEMINFO)
    write(root, "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us", "400000\n")
    write(root, "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us", "100000\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert memory_limit(root) == 2 * GIB
    assert cpu_quota(root) == 4.0


def test_inside_a_container_the_mount_is_the_nearest_cgroup() -> None:
    mounts = "31 24 0:28 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    inside = cgroup_folders("4:memory:/docker/abc\n", mounts, "memory")
    assert inside == [(1, Path("sys/fs/cgroup/memory"))]
    assert cgroup_folders("4:memory:/\n", mounts, "memory") == inside


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__self__cgroup=CGROUP_1, proc__self__mountinfo=MOUNTS_1, proc__meminfo=MEMINFO)
    assert memory_limit(root) is None
    assert cpu_quota(root) is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (0.5, 1), (2.9, 2), (64.0, 8)])
def test_cores_are_whole_and_at_least_one(quota: float | None, cores: int) -> None:
    assert usable_cores(8, quota) == cores


def test_a_machine_without_gpus_answers_at_once(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__cpuinfo=X86, proc__meminfo=MEMINFO)
    times: list[float] = []
    for _ in range(5):
        started = time.process_time()
        detect_devices({}, root=root)
        times.append(time.process_time() - started)
    assert min(times) < 0.02, times


# GPUs


class NVMLError(Exception):
    """As pynvml's."""


def fake_nvml(gpus: Sequence[Gpu], fails: str | None = None) -> types.ModuleType:
    module = types.ModuleType("pynvml")

    def call(name: str, function: Any) -> None:
        def wrapped(*arguments: Any) -> Any:
            if name == fails:
                raise NVMLError(name)
            return function(*arguments)

        setattr(module, name, wrapped)

    def mig_mode(gpu: Gpu) -> list[int]:
        if gpu.capability < (8, 0):
            raise NVMLError("not supported")
        return [int(gpu.mig is not None)] * 2

    def mig_handle(gpu: Gpu, index: int) -> Gpu:
        if index >= len(gpu.mig or ()):
            raise NVMLError("not found")
        uuid, memory_bytes = (gpu.mig or ())[index]
        return Gpu(index=0, uuid=uuid, name="part", memory_bytes=memory_bytes, capability=gpu.capability)

    module.NVMLError = NVMLError  # type: ignore[attr-defined]
    call("nvmlInit", lambda: None)
    call("nvmlShutdown", lambda: None)
    call("nvmlDeviceGetCount", lambda: len(gpus))
    call("nvmlDeviceGetHandleByIndex", lambda index: gpus[index])
    call("nvmlDeviceGetUUID", lambda gpu: gpu.uuid)
    call("nvmlDeviceGetName", lambda gpu: gpu.name.encode())
    call("nvmlDeviceGetMemoryInfo", lambda gpu: types.SimpleNamespace(total=gpu.memory_bytes))
    call("nvmlDeviceGetCudaComputeCapability", lambda gpu: gpu.capability)
    call("nvmlDeviceGetMigMode", mig_mode)
    call("nvmlDeviceGetMaxMigDeviceCount", lambda _: 7)
    call("nvmlDeviceGetMigDeviceHandleByIndex", mig_handle)
    return module


def gpu(index: int, **changes: Any) -> Gpu:
    fields = {
        "index": index,
        "uuid": f"GPU-{index}abc0000-1111-2222-3333-444444444444",
        "name": "NVIDIA A100-SXM4-80GB",
        "memory_bytes": 80 * GIB,
        "capability": (8, 0),
        "mig": None,
    }
    return Gpu(**(fields | changes))


T4 = {"name": "Tesla T4", "memory_bytes": 16 * GIB, "capability": (7, 5)}
PARTS = (("MIG-aaaa", 10 * GIB), ("MIG-aabb", 20 * GIB))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A root with a loaded driver."""
    return machine(tmp_path, proc__cpuinfo=X86, proc__meminfo=MEMINFO, dev__nvidiactl="")


def test_all_gpus_count_and_the_smallest_memory_holds(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([gpu(0), gpu(1, memory_bytes=40 * GIB)]))
    devices = detect_devices({}, root=host)
    assert (devices.kind, devices.count, devices.memory_bytes) == (DeviceKind.CUDA, 2, 40 * GIB)
    assert (devices.bf16, devices.bf16_by) == (True, "compute capability 8.0")
    assert devices.name == "NVIDIA A100-SXM4-80GB"


def test_one_old_gpu_takes_bf16_from_all(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([gpu(0), gpu(1, **T4)]))
    devices = detect_devices({}, root=host)
    assert (devices.bf16, devices.bf16_by) == (False, "compute capability 7.5")
    assert devices.name == "NVIDIA A100-SXM4-80GB + Tesla T4"
    assert detect_devices({"CUDA_VISIBLE_DEVICES": "0"}, root=host).bf16


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_leave_the_cpu(host: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([gpu(0)]))
    assert detect_devices({"CUDA_VISIBLE_DEVICES": value}, root=host).kind is DeviceKind.CPU


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_a_driver_that_does_not_answer_leaves_the_cpu(host: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([gpu(0)], fails=call))
    assert detect_devices({}, root=host).kind is DeviceKind.CPU


def test_without_the_bindings_the_cpu_is_left(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect_devices({}, root=host).kind is DeviceKind.CPU


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, [0, 1, 2, 3]),
        ("0,1", [0, 1]),
        ("3,1", [3, 1]),
        (" 2 , 0 ", [2, 0]),
        ("0,9,1", [0]),
        ("0,-1,1", [0]),
        ("9,0", []),
        ("0,,1", [0]),
        ("1,1", []),
        ("1gpu2,2ampere", [1, 2]),
        ("GPU-1abc", [1]),
        ("GPU-1ABC0000,GPU-3", [1, 3]),
        ("GPU-", []),
        ("GPU-zz,GPU-1", []),
        ("none", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(value: str | None, shown: list[int]) -> None:
    assert [found.index for found in visible_gpus(value, [gpu(index) for index in range(4)])] == shown


def test_a_process_sees_one_mig_instance(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([gpu(0, mig=PARTS)]))
    for value, memory_bytes in ((None, 10), ("MIG-aabb", 20), ("MIG-aaaa,MIG-aabb", 10), ("0", 10)):
        env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        devices = detect_devices(env, root=host)
        assert (devices.count, devices.memory_bytes) == (1, memory_bytes * GIB), value
    assert visible_gpus("MIG-aa", [gpu(0, mig=PARTS)]) == []


def test_a_divided_gpu_does_not_count_beside_whole_ones() -> None:
    assert [found.index for found in visible_gpus(None, [gpu(0, mig=PARTS), gpu(1), gpu(2)])] == [1, 2]
