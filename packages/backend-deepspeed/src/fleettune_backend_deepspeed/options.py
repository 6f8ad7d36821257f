"""Options of the backend, and what they may not say together. Standard library only: control checks them too."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fleettune_core.config import setting
from fleettune_core.errors import ExitCode, FtError

SHARED_MEMORY_OP = "deepspeed_shm_comm"
"""DeepSpeed's name for the operation that it compiles for communication on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions:
    """Options of the backend deepspeed."""

    zero_stage: int = setting(
        2,
        "What is divided over the ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.",
        at_least=0,
        at_most=3,
        metavar="0|1|2|3",
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = setting(
        "none", "Keep optimizer state in the machine's memory or on a disk, from stage 1 on (nvme: stage 3)."
    )
    offload_params: Literal["none", "cpu", "nvme"] = setting(
        "none", "Keep weights in the machine's memory or on a disk; stage 3 alone."
    )
    nvme_path: str | None = setting(None, "Folder on the disk that nvme offloads to.", metavar="DIR")
    deepspeed_config: str | None = setting(
        None,
        "A DeepSpeed JSON that is merged over what follows from the plan; what contradicts the plan is refused.",
        metavar="FILE",
    )


def uses_nvme(options: DeepSpeedOptions) -> bool:
    """Whether anything is offloaded to a disk."""
    return "nvme" in (options.offload_optimizer, options.offload_params)


def check_options(options: DeepSpeedOptions) -> None:
    """Raise FtError (exit code 5), one line per mistake, for options that do not go together."""
    stage = options.zero_stage
    problems: list[str] = []
    if options.offload_params != "none" and stage != 3:
        problems.append(f"--offload-params {options.offload_params} needs --zero-stage 3, and it is {stage}")
    if options.offload_optimizer != "none" and stage == 0:
        problems.append(f"--offload-optimizer {options.offload_optimizer} needs --zero-stage 1, 2 or 3, and it is 0")
    if options.offload_optimizer == "nvme" and stage in (1, 2):
        problems.append(f"--offload-optimizer nvme needs --zero-stage 3, and it is {stage}; cpu works with {stage}")
    wanted = [name for name in ("offload_optimizer", "offload_params") if getattr(options, name) == "nvme"]
    if wanted:
        problems += _disk_problems(options.nvme_path, "--" + wanted[0].replace("_", "-"))
    elif options.nvme_path is not None:
        problems.append(f"--nvme-path {options.nvme_path}: nothing is offloaded to nvme")
    if problems:
        raise FtError(
            problems[0] if len(problems) == 1 else "options of the backend deepspeed do not go together",
            problems=problems if len(problems) > 1 else (),
            hint="`ft plugins show deepspeed` lists the options",
            exit_code=ExitCode.CONFIG,
        )


_LEAST_FREE_BYTES = 1 << 30


def _disk_problems(path: str | None, flag: str) -> list[str]:
    if path is None:
        return [f"{flag} nvme needs --nvme-path DIR"]
    folder = Path(path)
    if not folder.is_dir():
        return [f"--nvme-path {path}: no such folder"]
    if not os.access(folder, os.W_OK | os.X_OK):
        return [f"--nvme-path {path}: you may not write there"]
    free = shutil.disk_usage(folder).free
    if free < _LEAST_FREE_BYTES:
        return [f"--nvme-path {path}: {free / (1 << 20):.0f} MiB are free, and offloading needs at least 1 GiB"]
    return []
