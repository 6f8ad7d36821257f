"""What a model family fixes and its config.json does not say: names of the linear layers, biases, norms.

Each line was compared with the parameters of the class of that name in transformers (a test does it again).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Facts about one `model_type`. Defaults are those of Llama and its many relatives.

    A bias is True, False, or the name of the config key that decides it.
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Names of the projections into the attention; a single one is all three in one matrix."""
    attention_out: str = "o_proj"
    mlp_in: tuple[str, ...] = ("gate_proj", "up_proj")
    """Two names, or one that holds both (`gated`), or one plain layer."""
    mlp_out: str = "down_proj"
    gated: bool = True
    qkv_bias: bool | str = "attention_bias"
    attention_out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    head_bias: bool = False
    norm: Literal["rms", "layer"] = "rms"
    """Root-mean-square norm (a scale) or layer norm (a scale and a shift)."""
    norms_per_layer: int = 2
    qk_norm: Literal["none", "head", "full"] = "none"
    """Norm of queries and keys: over one head, or over all heads at once."""
    learned_positions: bool = False
    extra_positions: int = 0
    """Rows that the position table has beyond `max_positions`."""
    tied_by_default: bool = False
    head_dim: int | None = None
    """Where it is not hidden / heads and the config leaves it out."""
    experts: bool = False
    eager_activation: bool = False
    """Whether the activation is GPT-2's `gelu_new`, which is written out in PyTorch and keeps its steps."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(),
        "mistral": Family(qkv_bias=False, attention_out_bias=False, mlp_bias=False),
        "mixtral": Family(qkv_bias=False, attention_out_bias=False, mlp_bias=False, experts=True),
        "smollm3": Family(tied_by_default=True),
        "granite": Family(),
        "qwen2": Family(qkv_bias=True, attention_out_bias=False, mlp_bias=False),
        "qwen3": Family(qk_norm="head", mlp_bias=False, head_dim=128),
        "qwen3_moe": Family(qk_norm="head", mlp_bias=False, experts=True),
        "olmo2": Family(qk_norm="full", mlp_bias=False),
        "gemma": Family(mlp_bias=False, tied_by_default=True, head_dim=256),
        "gemma2": Family(mlp_bias=False, tied_by_default=True, head_dim=256, norms_per_layer=4),
        "gemma3_text": Family(mlp_bias=False, tied_by_default=True, head_dim=256, norms_per_layer=4, qk_norm="head"),
        "phi3": Family(
            qkv=("qkv_proj",), mlp_in=("gate_up_proj",), qkv_bias=False, attention_out_bias=False, mlp_bias=False
        ),
        "phi": Family(
            eager_activation=True,
            attention_out="dense",
            mlp_in=("fc1",),
            mlp_out="fc2",
            gated=False,
            qkv_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
            head_bias=True,
            norm="layer",
            norms_per_layer=1,
        ),
        "starcoder2": Family(
            mlp_in=("c_fc",),
            mlp_out="c_proj",
            gated=False,
            qkv_bias="use_bias",
            attention_out_bias="use_bias",
            mlp_bias="use_bias",
            norm="layer",
            tied_by_default=True,
        ),
        "gpt2": Family(
            eager_activation=True,
            qkv=("c_attn",),
            attention_out="c_proj",
            mlp_in=("c_fc",),
            mlp_out="c_proj",
            gated=False,
            qkv_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
            norm="layer",
            learned_positions=True,
            tied_by_default=True,
        ),
        "opt": Family(
            attention_out="out_proj",
            mlp_in=("fc1",),
            mlp_out="fc2",
            gated=False,
            qkv_bias="enable_bias",
            attention_out_bias="enable_bias",
            mlp_bias="enable_bias",
            norm="layer",
            learned_positions=True,
            extra_positions=2,
            tied_by_default=True,
        ),
        "gpt_neox": Family(
            qkv=("query_key_value",),
            attention_out="dense",
            mlp_in=("dense_h_to_4h",),
            mlp_out="dense_4h_to_h",
            gated=False,
            qkv_bias="attention_bias",
            attention_out_bias="attention_bias",
            mlp_bias=True,
            norm="layer",
        ),
    }
)
"""By `model_type` of config.json."""

BIAS_DEFAULTS: Mapping[str, bool] = MappingProxyType({"use_bias": True, "enable_bias": True})
"""Config keys that decide a bias and are True when left out; every other one is False."""

ATTENTION_BIAS_BY_DEFAULT = frozenset({"gpt_neox"})
"""Families whose `attention_bias` is True when left out."""

GGUF_FAMILIES: Mapping[str, str] = MappingProxyType(
    {"gemma3": "gemma3_text", "phi2": "phi", "gptneox": "gpt_neox", "qwen3moe": "qwen3_moe"}
)
"""GGUF architecture names that differ from `model_type`."""
