"""What this machine has, counted without torch: GPUs through NVML, the CPU through /proc and its cgroup.

A machine without the NVIDIA driver answers in a few milliseconds: NVML is imported only where a driver is loaded.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleettune_core.types import DeviceKind, Devices, Environment

_DRIVER_SIGNS = ("proc/driver/nvidia", "dev/nvidiactl", "dev/nvidia0", "dev/dxg")
"""Any of them stands for a loaded driver; the last one is the Windows subsystem for Linux."""
_BF16_CPU_FLAGS = (("amx_bf16", "AMX_BF16"), ("avx512_bf16", "AVX512_BF16"), ("bf16", "BF16"))
"""Flags of /proc/cpuinfo, the strongest first; the last one is Arm's."""
_NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML lists it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """CUDA compute capability (major, minor)."""
    mig: tuple[tuple[str, int], ...] | None = None
    """(UUID, bytes) of its MIG instances; None when it is not divided."""


def detect_devices(env: Environment, *, root: Path = Path("/")) -> Devices:
    """The devices that a process started with `env` would own.

    `CUDA_VISIBLE_DEVICES` is honoured as CUDA reads it. `root` is where /proc, /sys and /dev are looked up.
    """
    cores = usable_cores(_affinity(), cpu_quota(root))
    gpus = visible_gpus(env.get("CUDA_VISIBLE_DEVICES"), list_gpus(root))
    if gpus:
        names = list(dict.fromkeys(gpu.name for gpu in gpus))
        weakest = min(gpus, key=lambda gpu: gpu.capability)
        major, minor = weakest.capability
        return Devices(
            kind=DeviceKind.CUDA,
            count=len(gpus),
            name=" + ".join(names),
            memory_bytes=min(gpu.memory_bytes for gpu in gpus),
            bf16=major >= 8,
            bf16_by=f"compute capability {major}.{minor}",
            cpu_cores=cores,
        )
    name, flags = read_cpuinfo(_lines(root / "proc/cpuinfo"))
    bf16_by = cpu_bf16(flags)
    return Devices(
        kind=DeviceKind.CPU,
        count=1,
        name=name or platform.processor() or platform.machine() or "CPU",
        memory_bytes=usable_memory(memory_total(_text(root / "proc/meminfo")), memory_limit(root)),
        bf16=bool(bf16_by),
        bf16_by=bf16_by,
        cpu_cores=cores,
    )


# GPUs


def list_gpus(root: Path = Path("/")) -> list[Gpu]:
    """The machine's NVIDIA GPUs in PCI order; empty without a driver, or with one that does not answer."""
    if not any((root / sign).exists() for sign in _DRIVER_SIGNS):
        return []
    try:
        # Late: the bindings alone take 20 ms.
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return [_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index=index,
        uuid=_string(nvml.nvmlDeviceGetUUID(handle)),
        name=_string(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        mig=_read_mig(nvml, handle),
    )


def _read_mig(nvml: Any, handle: Any) -> tuple[tuple[str, int], ...] | None:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
        if not current:
            return None
        found: list[tuple[str, int]] = []
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            except nvml.NVMLError:
                continue  # a free slot
            uuid = _string(nvml.nvmlDeviceGetUUID(instance))
            found.append((uuid, int(nvml.nvmlDeviceGetMemoryInfo(instance).total)))
        return tuple(found)
    except nvml.NVMLError:
        return None  # a GPU that cannot be divided


def visible_gpus(value: str | None, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that CUDA shows under `CUDA_VISIBLE_DEVICES=value` (None: unset), in its order.

    Entries are indices or prefixes of a UUID that fit one GPU alone. The list is cut at the first entry that fits
    none (-1 is the customary one), and naming a GPU twice shows none at all. A process sees one MIG instance at the
    most, and none of a divided GPU's undivided rest. Indices are taken in PCI order, which is CUDA's own order where
    the GPUs are of one kind. Source: CUDA programming guide, "CUDA Environment Variables"; NVIDIA MIG user guide,
    "CUDA visible devices"; the same reading is in `torch/cuda/__init__.py`, `_parse_visible_devices`.
    """
    if value is None:
        return _at_most_one_instance(list(gpus))
    entries = [entry.strip() for entry in value.split(",")]
    if entries[0].startswith("MIG-"):
        fits = [part for gpu in gpus for part in _mig_parts(gpu) if part.uuid.startswith(entries[0])]
        return fits if len(fits) == 1 else []
    shown: list[Gpu] = []
    for entry in entries:
        gpu = _find_gpu(entry, gpus)
        if gpu is None:
            break
        if gpu in shown:
            return []
        shown.append(gpu)
    return _at_most_one_instance(shown)


def _find_gpu(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.startswith("GPU-"):
        fits = [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())]
    else:
        # As strtoul reads it: digits up to the first other character.
        digits = entry[: len(entry) - len(entry.lstrip("0123456789"))]
        fits = [gpu for gpu in gpus if digits and gpu.index == int(digits)]
    return fits[0] if len(fits) == 1 else None


def _at_most_one_instance(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Undivided GPUs; where there are none, the first MIG instance."""
    whole = [gpu for gpu in gpus if gpu.mig is None]
    return whole or [part for gpu in gpus for part in _mig_parts(gpu)][:1]


def _mig_parts(gpu: Gpu) -> list[Gpu]:
    return [
        Gpu(index=gpu.index, uuid=uuid, name=f"{gpu.name} MIG", memory_bytes=memory_bytes, capability=gpu.capability)
        for uuid, memory_bytes in gpu.mig or ()
    ]


def _string(value: str | bytes) -> str:
    """Bindings before version 11.515 return bytes."""
    return value.decode() if isinstance(value, bytes) else value


# CPU


def read_cpuinfo(lines: Sequence[str]) -> tuple[str, frozenset[str]]:
    """The model's name and the flags of the first processor in the lines of /proc/cpuinfo."""
    name, flags = "", frozenset[str]()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and not name:
            name = value.strip()
        elif key.strip() in {"flags", "Features"}:
            return name, frozenset(value.split())
    return name, flags


def cpu_bf16(flags: frozenset[str]) -> str:
    """The extension that multiplies bf16, by name; empty without one."""
    return next((name for flag, name in _BF16_CPU_FLAGS if flag in flags), "")


def memory_total(meminfo: str) -> int | None:
    """Bytes of `MemTotal` in the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def usable_memory(total: int | None, limit: int | None) -> int:
    """The smaller of the machine's memory and its cgroup's limit, in bytes."""
    if total is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total if limit is None else min(total, limit)


def usable_cores(affinity: int, quota: float | None) -> int:
    """Cores that this process may use: its affinity, and at most the quota, rounded down but never to 0."""
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# cgroup: a limit of any folder from the process's own up to the root holds.


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time per wall-clock time that the cgroup allows; None without a limit."""

    def version_1(folder: Path) -> float | None:
        quota, period = _integer(folder / "cpu.cfs_quota_us"), _integer(folder / "cpu.cfs_period_us")
        return quota / period if quota and quota > 0 and period else None

    def version_2(folder: Path) -> float | None:
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        return int(quota) / int(period) if quota.isdigit() and period.strip().isdigit() else None

    return _smallest_limit(root, "cpu", version_1, version_2)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the cgroup allows; None without a limit."""

    def version_1(folder: Path) -> float | None:
        limit = _integer(folder / "memory.limit_in_bytes")
        return limit if limit is not None and limit < _NO_LIMIT_BYTES else None

    def version_2(folder: Path) -> float | None:
        return _integer(folder / "memory.max")  # "max" is no number, so no limit

    limit = _smallest_limit(root, "memory", version_1, version_2)
    return None if limit is None else int(limit)


def cgroup_folders(cgroup: str, mountinfo: str, controller: str) -> list[tuple[int, Path]]:
    """(version, folder) of every cgroup whose limit for `controller` holds, relative to the root of the file system.

    `cgroup` is the text of /proc/self/cgroup and `mountinfo` of /proc/self/mountinfo (both in proc(5)). Inside a
    container the path in `cgroup` may lie above what is mounted: then the mount itself is the nearest folder.
    """
    version_1: dict[str, str] = {}
    version_2 = None
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version_2 = path
        for name in controllers.split(","):
            version_1[name] = path
    folders: list[tuple[int, Path]] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, details = before.split(), after.split()
        if len(fields) < 5 or len(details) < 3:
            continue
        mounted, mount_point = fields[3], Path(fields[4].lstrip("/"))
        if details[0] == "cgroup2" and version_2 is not None:
            folders += [(2, folder) for folder in _up(mount_point, mounted, version_2)]
        elif details[0] == "cgroup" and controller in details[2].split(",") and controller in version_1:
            folders += [(1, folder) for folder in _up(mount_point, mounted, version_1[controller])]
    return folders


def _up(mount_point: Path, mounted: str, path: str) -> list[Path]:
    """The folder of cgroup `path` below a mount of cgroup `mounted`, and its parents up to the mount."""
    try:
        inside = Path(path).relative_to(mounted)
    except ValueError:
        return [mount_point]
    folder = mount_point / inside
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount_point))]


def _smallest_limit(
    root: Path, controller: str, version_1: Callable[[Path], float | None], version_2: Callable[[Path], float | None]
) -> float | None:
    folders = cgroup_folders(_text(root / "proc/self/cgroup"), _text(root / "proc/self/mountinfo"), controller)
    limits = [(version_1 if version == 1 else version_2)(root / folder) for version, folder in folders]
    return min((limit for limit in limits if limit is not None), default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _lines(path: Path, limit: int = 64) -> list[str]:
    """The first lines of a file: one processor's part of /proc/cpuinfo, which is long on large machines."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line for line, _ in zip(file, range(limit), strict=False)]
    except OSError:
        return []


def _integer(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None
