"""What a run ran on, for `env.json`: versions, machine, the relevant environment variables. Secrets are masked.

A secret is told by the name of its variable or by its own shape, and either is enough.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleettune_core.masking import mask_value
from fleettune_core.types import Devices

DISTRIBUTIONS: tuple[str, ...] = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "datasets",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "deepspeed",
    "bitsandbytes",
    "triton",
    "flash-attn",
    "numpy",
    "pyarrow",
    "pluggy",
    "pydantic",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
"""Distributions whose version can explain a difference between two runs. Fleettune's own come on top."""

PREFIXES: tuple[str, ...] = (
    "ACCELERATE_",
    "CUDA_",
    "DS_",
    "FI_",
    "FT_",
    "FLEETTUNE_",
    "GLOO_",
    "HF_",
    "HIP_",
    "KMP_",
    "MASTER_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "PET_",
    "PYTORCH_",
    "ROCR_",
    "SLURM_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "TRL_",
    "UCX_",
)
"""Variables that change how a run behaves begin with one of these; no other variable is recorded."""

NAMES: tuple[str, ...] = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LD_PRELOAD", "PYTHONPATH")
"""Further variables, by their whole name."""


def describe_environment(
    env: Mapping[str, str],
    *,
    devices: Devices | None = None,
    distributions: Iterable[str] = (),
    cwd: Path | None = None,
) -> dict[str, Any]:
    """The content of `env.json`. Imports nothing that it describes.

    `distributions`: further ones to name, such as those of the chosen plugins. `cwd`: the folder whose git commit is
    wanted; this process's by default.
    """
    folder = cwd or Path.cwd()
    return {
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cwd": str(folder),
        "git_commit": _git_commit(folder),
        "devices": None if devices is None else {**asdict(devices), "kind": devices.kind.value},
        "versions": _versions((*DISTRIBUTIONS, *distributions)),
        "environment": {
            name: mask_value(name, env[name]) for name in sorted(env) if name in NAMES or name.startswith(PREFIXES)
        },
    }


def _versions(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    own = ("fleettune", "fleettune-core", "fleettune-cli", "fleettune-launcher-torchrun", "fleettune-launcher-slurm")
    for name in dict.fromkeys((*own, *names)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_commit(folder: Path) -> str | None:
    """The commit that is checked out in `folder`, or None outside of a repository, or without git."""
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(folder), "rev-parse", "--verify", "HEAD"],  # noqa: S607 - the user's own git
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
