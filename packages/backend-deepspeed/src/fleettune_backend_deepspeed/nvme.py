"""Offloading to a disk: a folder of this rank's own there, and buffers that fit the model. Worker side."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from filelock import FileLock

from fleettune_backend_deepspeed.options import DeepSpeedOptions
from fleettune_core.types import TrainingRun

SUB_GROUP_NUMEL = 25_000_000
"""Elements that the optimizer steps at once (100 MB of fp32): enough for a disk to be fast, and four buffers of it and
of each moment stay small beside the model."""

_LOCK = ".lock"


def prepared(config: dict[str, Any], run: TrainingRun) -> dict[str, Any]:
    """`config` with what offloading to a disk needs; the disk is swept, and this rank's folder there is made.

    What a user's own JSON says about buffers stays.
    """
    options: DeepSpeedOptions = run.options
    assert options.nvme_path is not None, "check_options has seen it"
    largest, whole = weight_sizes(run)
    config = copy.deepcopy(config)
    zero = config["zero_optimization"]
    share = -(-largest // run.process.world_size)
    together = min(SUB_GROUP_NUMEL, -(-whole // run.process.world_size))
    zero.setdefault("sub_group_size", together)
    if options.offload_params == "nvme":
        # A buffer holds a weight's share, and at the start a whole sub group, which ends with the weight that fills it.
        zero["offload_param"].setdefault("buffer_size", share + zero["sub_group_size"])
    folder = str(claim_folder(Path(options.nvme_path), run))
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device") == "nvme":
            zero[name]["nvme_path"] = folder
    return config


def weight_sizes(run: TrainingRun) -> tuple[int, int]:
    """Elements of the model's largest weight, and of all of them. Nothing is loaded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    assert run.model_folder is not None, "core names it in every run"
    trust = {"trust_remote_code": run.config.model.trust_remote_code}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run.model_folder, **trust), **trust)
    sizes = [weight.numel() for weight in model.parameters()]
    return max(sizes), sum(sizes)


def claim_folder(disk: Path, run: TrainingRun) -> Path:
    """A new folder of this rank's own on `disk`, held by a lock while the process lives and removed at its end.

    Folders that a killed rank left here are removed first: nobody holds their locks.
    """
    host = f"fleettune-{socket.gethostname()}-"
    # Two runs may have folders of the same name; DeepSpeed's own names tell ranks apart, but no runs.
    digest = hashlib.sha256(str(run.run_dir.resolve()).encode()).hexdigest()[:8]
    mine = disk / f"{host}{run.run_dir.resolve().name}-{digest}-rank{run.process.rank}"
    # Between two ranks, one must not take the other's new folder for an abandoned one.
    with FileLock(disk / f".fleettune-{os.getuid()}.lock"):
        for folder in disk.glob(f"{host}*"):
            if not _is_held(folder):
                shutil.rmtree(folder, ignore_errors=True)
        mine.mkdir(exist_ok=True)
        lock = os.open(mine / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)

    def remove() -> None:
        shutil.rmtree(mine, ignore_errors=True)
        os.close(lock)

    run.at_end(remove)
    return mine


def _is_held(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
