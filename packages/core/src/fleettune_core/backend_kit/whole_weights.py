"""Whole weights by name, one at a time, from a model whose weights are divided over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch


def whole_weights(
    model: torch.nn.Module, gather: Callable[[Any], torch.Tensor], *, trained_only: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer of `model` by its name in the `state_dict`, whole, for `iterate_weights`.

    `gather`: makes one of them whole on the CPU (collective: every rank asks for the same ones in the same order). It
    is asked when its result is taken, and once for weights that are tied; those come as one tensor under each of their
    names, as `save_pretrained` expects. `trained_only`: leave out what has no gradient.
    """
    named: list[tuple[str, Any]] = list(model.named_parameters(remove_duplicate=False))
    persistent = model.state_dict().keys()
    named += [(name, buffer) for name, buffer in model.named_buffers() if name in persistent]
    names_left = Counter(id(value) for _, value in named)
    tied: dict[int, torch.Tensor] = {}
    for name, value in named:
        if trained_only and not value.requires_grad:
            continue
        names_left[id(value)] -= 1
        whole = tied.pop(id(value)) if id(value) in tied else gather(value)
        if names_left[id(value)]:
            tied[id(value)] = whole
        yield name, whole
