"""How large a model is: its shape from config.json or a GGUF header, and what follows from it.

Standard library only; nothing is downloaded. A hub model is looked up in the local cache of the hub client.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fleettune_core.errors import FtError
from fleettune_core.models.families import ATTENTION_BIAS_BY_DEFAULT, BIAS_DEFAULTS, FAMILIES, GGUF_FAMILIES, Family
from fleettune_core.models.gguf_header import GgufHeader, read_gguf_header
from fleettune_core.models.resolve import ModelRef
from fleettune_core.types import Environment, current_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer, in numbers of elements."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP; of one expert where there are experts."""
    vocab: int
    max_positions: int
    tied_embeddings: bool
    gated_mlp: bool = True
    num_experts: int = 0
    """0 for a dense MLP."""
    experts_per_token: int = 0
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    known: bool = True
    """Whether the family is in `FAMILIES`; for any other one the layers of Llama are assumed."""
    counted_parameters: int | None = None
    """Weights counted in the file itself, where that was possible."""

    @property
    def family(self) -> Family:
        return FAMILIES.get(self.model_type, Family())


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModule:
    """One kind of linear layer, as it stands in each of the model's layers."""

    name: str
    """Last part of its module name, which is what `--lora-target` takes."""
    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundShape:
    """A shape, or the reason why there is none."""

    shape: ModelShape | None
    reason: str


def read_shape(ref: ModelRef, *, env: Environment | None = None, revision: str | None = None) -> ModelShape | None:
    """The model's shape as far as files here tell it, else None; `find_shape` says why."""
    return find_shape(ref, env=env, revision=revision).shape


def find_shape(ref: ModelRef, *, env: Environment | None = None, revision: str | None = None) -> FoundShape:
    """The model's shape and where it was read, or None and why it is unknown.

    `env` tells where the hub client keeps its files; `revision` is a branch, tag or commit of a hub model.
    """
    if ref.gguf_path is not None:
        try:
            return _from_gguf(read_gguf_header(ref.gguf_path))
        except FtError as error:
            return FoundShape(shape=None, reason=error.message)
    folder = ref.path or cached_hub_folder(ref.spec, current_environment() if env is None else env, revision)
    if folder is None:
        return FoundShape(shape=None, reason=f"{ref.label} is not on this machine yet")
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return FoundShape(shape=None, reason=f"{folder} holds no readable config.json")
    except ValueError as error:
        return FoundShape(shape=None, reason=f"{folder / 'config.json'} is not JSON: {error}")
    if not isinstance(config, dict):
        return FoundShape(shape=None, reason=f"{folder / 'config.json'} is not a JSON object")
    fields = cast("dict[str, Any]", config)
    found = shape_from_config(fields)
    if found.shape is None or found.shape.known or "quantization_config" in fields:
        return found
    counted = _count_safetensors(folder)
    return _with_count(found, counted) if counted else found


def cached_hub_folder(repo: str, env: Environment, revision: str | None = None) -> Path | None:
    """Where the hub client already has `repo`, or None.

    The layout is `models--OWNER--NAME/{refs/BRANCH, snapshots/COMMIT}` under `HF_HUB_CACHE`, `HF_HOME/hub` or
    `~/.cache/huggingface/hub`. Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
    """
    home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface").expanduser()
    cache = Path(env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()
    base = cache / ("models--" + repo.replace("/", "--"))
    commit = revision or "main"
    with contextlib.suppress(OSError):  # no such branch or tag here: then it is a commit, or unknown
        commit = (base / "refs" / commit).read_text(encoding="utf-8").strip() or commit
    folder = base / "snapshots" / commit
    return folder if (folder / "config.json").is_file() else None


def shape_from_config(config: Mapping[str, Any]) -> FoundShape:
    """The shape that a parsed config.json describes."""
    text = config.get("text_config")
    if isinstance(text, Mapping) and not _first(config, "hidden_size", "n_embd", "d_model"):
        return shape_from_config({"tie_word_embeddings": config.get("tie_word_embeddings"), **text})
    model_type = str(config.get("model_type", ""))
    known = FAMILIES.get(model_type)
    family = known or Family()
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = _first(config, "num_attention_heads", "n_head", "num_heads", "n_heads")
    vocab = _first(config, "vocab_size")
    missing = [
        name
        for name, value in (("hidden_size", hidden), ("num_hidden_layers", layers), ("num_attention_heads", heads))
        if not value
    ]
    if not hidden or not layers or not heads or not vocab:
        missing += [] if vocab else ["vocab_size"]
        what = f"config.json of a {model_type or 'nameless'} model has no {', '.join(missing)}"
        return FoundShape(shape=None, reason=what)
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts") or 0
    inner = _first(config, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "encoder_ffn_dim")
    if experts:
        inner = _first(config, "moe_intermediate_size") or inner
    tied = config.get("tie_word_embeddings")
    # Embeddings are narrower than the model in a few OPT sizes, with projections around them.
    odd = _first(config, "word_embed_proj_dim") not in (None, hidden)
    shape = ModelShape(
        model_type=model_type,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_first(config, "num_key_value_heads", "num_kv_heads") or heads,
        head_dim=_first(config, "head_dim") or family.head_dim or hidden // heads,
        intermediate=inner or 4 * hidden,
        vocab=vocab,
        max_positions=_first(config, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length") or 0,
        tied_embeddings=bool(tied) if tied is not None else family.tied_by_default,
        gated_mlp=family.gated,
        num_experts=experts,
        experts_per_token=_first(config, "num_experts_per_tok", "num_experts_per_token") or 0,
        qkv_bias=_bias(family.qkv_bias, config, model_type),
        attention_out_bias=_bias(family.attention_out_bias, config, model_type),
        mlp_bias=_bias(family.mlp_bias, config, model_type),
        known=known is not None and not odd and (family.experts or not experts),
    )
    about = "config.json" if shape.known else f"config.json; {model_type or 'its model type'} is counted like Llama"
    return FoundShape(shape=shape, reason=about)


def linear_modules(shape: ModelShape) -> tuple[LinearModule, ...]:
    """Linear layers that stand in every layer, in order: what `--lora-target all-linear` adapts.

    Experts are not among them: transformers keeps all experts of a layer in one tensor, which is no linear layer.
    """
    family = shape.family
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = (queries, keys, keys) if len(family.qkv) == 3 else (queries + 2 * keys,)
    modules = [
        LinearModule(name=name, inputs=shape.hidden, outputs=width, bias=shape.qkv_bias)
        for name, width in zip(family.qkv, widths, strict=True)
    ]
    out = LinearModule(name=family.attention_out, inputs=queries, outputs=shape.hidden, bias=shape.attention_out_bias)
    modules.append(out)
    if not shape.num_experts:
        modules += _mlp(shape)
    return tuple(modules)


def num_parameters(shape: ModelShape) -> int:
    """Number of weights of the model; an output layer that is tied to the embedding counts once."""
    if shape.counted_parameters is not None:
        return shape.counted_parameters
    family = shape.family
    norm = shape.hidden if family.norm == "rms" else 2 * shape.hidden
    layer = sum(_size(module) for module in linear_modules(shape)) + family.norms_per_layer * norm
    if family.qk_norm == "head":
        layer += 2 * shape.head_dim
    elif family.qk_norm == "full":
        layer += (shape.heads + shape.kv_heads) * shape.head_dim
    if shape.num_experts:
        layer += shape.num_experts * (shape.hidden + sum(_size(module) for module in _mlp(shape)))
    return root_parameters(shape) + shape.layers * layer


def root_parameters(shape: ModelShape) -> int:
    """Number of weights outside the layers: embeddings, positions, the last norm and the head."""
    family = shape.family
    embedding = shape.vocab * shape.hidden
    positions = (shape.max_positions + family.extra_positions) * shape.hidden if family.learned_positions else 0
    norm = shape.hidden if family.norm == "rms" else 2 * shape.hidden
    head = (0 if shape.tied_embeddings else embedding) + (shape.vocab if family.head_bias else 0)
    return embedding + positions + norm + head


def _mlp(shape: ModelShape) -> list[LinearModule]:
    family = shape.family
    into = shape.intermediate * (2 if shape.gated_mlp and len(family.mlp_in) == 1 else 1)
    modules = [
        LinearModule(name=name, inputs=shape.hidden, outputs=into, bias=shape.mlp_bias) for name in family.mlp_in
    ]
    down = LinearModule(name=family.mlp_out, inputs=shape.intermediate, outputs=shape.hidden, bias=shape.mlp_bias)
    return [*modules, down]


def _size(module: LinearModule) -> int:
    return module.inputs * module.outputs + (module.outputs if module.bias else 0)


def _bias(rule: bool | str, config: Mapping[str, Any], model_type: str) -> bool:
    if isinstance(rule, bool):
        return rule
    default = BIAS_DEFAULTS.get(rule, rule == "attention_bias" and model_type in ATTENTION_BIAS_BY_DEFAULT)
    return bool(config.get(rule, default))


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _with_count(found: FoundShape, count: int) -> FoundShape:
    assert found.shape is not None
    shape = dataclasses.replace(found.shape, counted_parameters=count)
    return FoundShape(shape=shape, reason=f"{found.reason}; weights counted in the files")


def _count_safetensors(folder: Path) -> int | None:
    """Weights in a folder's safetensors files, from their headers; None when there are none or one is unreadable.

    A file begins with its header's length (u64, little-endian) and the header as JSON. Source:
    https://github.com/huggingface/safetensors#format.
    """
    files = sorted(folder.glob("model*.safetensors"))
    total = 0
    try:
        for file in files:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(length))
            total += sum(math.prod(item["shape"]) for name, item in header.items() if name != "__metadata__")
    except (OSError, ValueError, struct.error, KeyError, TypeError, MemoryError, OverflowError):
        return None
    return total or None


def _from_gguf(header: GgufHeader) -> FoundShape:
    """The shape from GGUF metadata; keys are those of the specification's section on language models."""
    architecture = str(header.metadata.get("general.architecture", ""))

    def number(key: str) -> int | None:
        value = header.metadata.get(f"{architecture}.{key}")
        if value is None:  # one number per layer: the largest stands for all
            value = max(header.arrays.get(f"{architecture}.{key}", ()), default=None)  # type: ignore[type-var]
        return int(value) if isinstance(value, (int, float)) else None

    hidden, layers = number("embedding_length"), number("block_count")
    heads, inner = number("attention.head_count"), number("feed_forward_length")
    embedding = header.tensors.get("token_embd.weight")
    vocab = embedding[1] if embedding and len(embedding) == 2 else header.num_tokens
    if not hidden or not layers or not heads or not vocab or not inner:
        return FoundShape(shape=None, reason=f"the GGUF header of a {architecture or 'nameless'} model lacks its sizes")
    model_type = GGUF_FAMILIES.get(architecture, architecture)
    experts = number("expert_count") or 0
    if experts and model_type == "llama":
        model_type = "mixtral"
    tensors = header.tensors
    shape = ModelShape(
        model_type=model_type,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=number("attention.head_count_kv") or heads,
        head_dim=number("attention.key_length") or hidden // heads,
        intermediate=(number("expert_feed_forward_length") if experts else None) or inner,
        vocab=vocab,
        max_positions=number("context_length") or 0,
        tied_embeddings="output.weight" not in tensors,
        gated_mlp=any(f"blk.0.ffn_gate{suffix}.weight" in tensors for suffix in ("", "_exps", ".0"))
        or FAMILIES.get(model_type, Family()).gated,
        num_experts=experts,
        experts_per_token=number("expert_used_count") or 0,
        qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        known=model_type in FAMILIES,
        counted_parameters=header.num_parameters if tensors else None,
    )
    return FoundShape(shape=shape, reason="GGUF header")
