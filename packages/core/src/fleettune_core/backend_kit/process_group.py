"""A process group for engines that want one, also where one process trains alone."""

from __future__ import annotations

import torch.distributed as dist

from fleettune_core.types import DeviceKind


def ensure_process_group(device_kind: DeviceKind) -> None:
    """Make a group of this process alone unless there is one already; no port is opened for it."""
    if not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if device_kind is DeviceKind.CUDA else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
