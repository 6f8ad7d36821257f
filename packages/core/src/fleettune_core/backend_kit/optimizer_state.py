"""Optimizer state on disk, by parameter name, through torch.distributed.checkpoint.

The names do not depend on the wrapper, and the files can be read under any world size, so another layout or backend
can go on from them. Each rank writes a part; none reads more than it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write `optimizer`'s state and hyperparameters into `folder` (collective)."""
    state = get_optimizer_state_dict(model, plain_optimizer(optimizer), options=_OPTIONS)
    state_dict_saver.save({"optimizer": state}, checkpoint_id=folder, no_dist=not dist.is_initialized())


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read what `save_optimizer` wrote into `optimizer`, in place (collective)."""
    inner = plain_optimizer(optimizer)
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, inner, options=_OPTIONS)}
    state_dict_loader.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, inner, state["optimizer"], options=_OPTIONS)


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside Accelerate's wrapper, or itself."""
    inner: Any = optimizer
    while isinstance(inner, AcceleratedOptimizer):
        inner = inner.optimizer
    return inner
