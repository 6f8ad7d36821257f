"""The supervised fine-tuning loss, computed at supervised positions only.

Most positions of a row (the prompt, the padding) carry no label. Projecting only the others through the LM head saves
the largest matrix multiplication of a small model, and the memory of its logits.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
import torch.nn.functional as F

IGNORED = -100
"""Label of a position without a loss, as transformers and TRL have it."""

_SCALED_LOGITS = (
    "final_logit_softcapping",
    "logit_scale",
    "output_multiplier",
    "lm_head_multiplier",
    "logits_scaling",
)


def plain_head(model: torch.nn.Module) -> bool:
    """Whether the model's logits are just `lm_head(hidden)`, so that the loss may be computed from the hidden states.

    Models that scale or cap their logits, or add a router loss, keep the head that TRL gives them.
    """
    config = model.config.get_text_config()  # pyright: ignore[reportCallIssue,reportAttributeAccessIssue]
    scaled = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _SCALED_LOGITS)
    routed = hasattr(config, "output_router_logits")
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    return not scaled and not routed and isinstance(head, torch.nn.Linear) and hasattr(model, "base_model")


def agrees_with_logits(model: Any) -> bool:
    """Whether the loss from the hidden states is the loss from the model's own logits, tried on one short row.

    A head may do more than its last layer shows (a transform before it, a scale by another name): then the two differ.
    Run once, before anything is wrapped.
    """
    head = model.get_output_embeddings()
    if hasattr(head.weight, "ds_numel"):
        return True  # Created in shards by ZeRO-3: nothing can be tried before the engine gathers them.
    vocabulary = head.weight.shape[0]
    ids = (torch.arange(16, device=model.device) * 7919 % vocabulary)[None]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
            expected = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            ours = supervised_nll(hidden, ids, head.weight, head.bias)
    finally:
        model.train(training)
    relative = 1e-3 if model.dtype == torch.float32 else 3e-2
    return bool((ours - expected).abs() <= relative * expected.abs())


def add_summed_loss(model: Any) -> None:
    """Let `model(..., labels=labels, summed_loss=True)` return the summed loss (a scalar tensor) instead of logits.

    `model`: a transformers causal LM, before or after PEFT put adapters into it. `labels`: [batch, sequence] int64,
    unshifted. Without the flag the forward is the model's own. The forward is patched (not called beside the wrapper)
    because DDP, FSDP and DeepSpeed act in the forward of what they wrap; and it returns a bare tensor, because DDP
    looks for tensors in the output and sees none inside a class that it does not know.
    """
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, summed_loss: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not summed_loss:
            if labels is not None:
                kwargs["labels"] = labels
            return original(*args, **kwargs)
        kwargs["use_cache"] = False
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        head = self.get_output_embeddings()
        return supervised_nll(hidden, labels, head.weight, head.bias)

    model.forward = types.MethodType(forward, model)


def supervised_nll(
    hidden: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Sum over supervised positions of -log p(next token).

    `hidden`: [batch, sequence, hidden]; `labels`: [batch, sequence] int64, IGNORED where nothing is learnt; `weight`:
    [vocabulary, hidden]. Returns a scalar, fp32.
    """
    targets = labels[:, 1:]
    mask = targets != IGNORED
    rows, wanted = hidden[:, :-1][mask], targets[mask]
    if wanted.numel() == 0:
        # A micro-batch of fillers. A loss of zero must still reach every parameter, or DDP waits for their gradients.
        return _summed(hidden[:1, 0], weight, bias, labels.new_zeros(1)) * 0.0
    return _summed(rows, weight, bias, wanted)


def _summed(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    fused = getattr(F, "linear_cross_entropy", None)  # torch 2.13
    if fused is not None and rows.dtype == torch.float32 and not torch.is_autocast_enabled(rows.device.type):
        return fused(rows, weight, targets, linear_bias=bias, reduction="sum")
    # bf16 logits lose the digits that tell a likely token from a certain one: the softmax is taken in fp32.
    return F.cross_entropy(F.linear(rows, weight, bias).float(), targets, reduction="sum")
