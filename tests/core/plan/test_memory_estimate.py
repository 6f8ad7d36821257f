"""The memory estimate against models that exist: weights, gradients and moments exactly, activations closely."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

from fleettune_core.backends.ddp import DdpBackend, DdpOptions
from fleettune_core.models.shape import ModelShape, num_parameters, root_parameters, shape_from_config
from fleettune_core.plan.batch import solve_batch
from fleettune_core.plan.memory import estimate, lora_parameters
from fleettune_core.plan.model import MemoryEstimate
from fleettune_core.types import DeviceKind, MemoryDivision, MemoryRequest

ROWS, LENGTH, LAYERS = 2, 64, 3
COMMON = {"vocab_size": 320, "num_hidden_layers": LAYERS, "max_position_embeddings": 256, "eos_token_id": 2}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    # Wide against its heads and its length, as real models are.
    "llama": lambda: LlamaConfig(
        hidden_size=192, intermediate_size=512, num_attention_heads=3, num_key_value_heads=1, **COMMON
    ),
    "qwen2": lambda: Qwen2Config(
        hidden_size=128, intermediate_size=320, num_attention_heads=4, num_key_value_heads=4, **COMMON
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=320,
        n_embd=128,
        n_layer=LAYERS,
        n_head=4,
        n_positions=256,
        attn_pdrop=0,
        resid_pdrop=0,
        embd_pdrop=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


def shape_of(name: str) -> ModelShape:
    shape = shape_from_config(CONFIGS[name]().to_dict()).shape
    assert shape is not None
    return shape


def make(name: str, *, lora: bool, precision: str, attn: str = "sdpa", target: Any = "all-linear") -> Any:
    """The model as a worker makes it: a frozen base in bf16 with LoRA, else fp32 weights."""
    dtype = torch.bfloat16 if lora and precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype, attn_implementation=attn)
    if lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules=target, task_type="CAUSAL_LM"))
    return model.train()


def estimated(name: str, **settings: Any) -> MemoryEstimate:
    batch = solve_batch(ranks=1, global_batch=ROWS, micro_batch=ROWS)
    return estimate(shape_of(name), batch=batch, max_length=LENGTH, lora_r=8, **settings)


def saved_bytes(model: Any, *, autocast: bool) -> int:
    """Bytes that autograd keeps for the backward of the decoder: every storage once, the model's own left out."""
    own = {part.untyped_storage().data_ptr() for part in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    decoder = model.get_base_model().base_model if hasattr(model, "get_base_model") else model.base_model
    ids = torch.randint(0, 320, (ROWS, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        decoder(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_activations_are_those_that_autograd_keeps(name: str, lora: bool, precision: str, attn: str) -> None:
    autocast = precision == "bf16" and not lora
    real = saved_bytes(make(name, lora=lora, precision=precision, attn=attn), autocast=autocast)
    ours = estimated(name, lora=lora, precision=precision, attn=attn).activations
    assert 0.97 < ours / real < 1.2, (ours, real)


@pytest.mark.parametrize("target", ["q_proj,v_proj", "q_proj,down_proj", "o_proj,gate_proj"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_follow_the_adapted_layers(target: str, precision: str) -> None:
    real = saved_bytes(make("llama", lora=True, precision=precision, target=target.split(",")), autocast=False)
    ours = estimated("llama", lora=True, lora_target=target, precision=precision).activations
    # The first layer's attention keeps nothing below its first adapter, which is a third of three layers.
    assert 0.95 < ours / real < 1.25, (ours, real)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("lora", "precision"), [(False, "fp32"), (False, "bf16"), (True, "fp32"), (True, "bf16")])
def test_weights_gradients_and_moments_are_exact(name: str, lora: bool, precision: str) -> None:
    model = make(name, lora=lora, precision=precision)
    trained = [part for part in model.parameters() if part.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for part in trained:
        part.grad = torch.zeros_like(part)
    optimizer.step()
    ours = estimated(name, lora=lora, precision=precision)

    def size(tensors: Any) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    assert ours.weights == size(model.parameters())
    assert ours.gradients == size(part.grad for part in trained)
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert ours.optimizer == size(moments)
    assert ours.trainable == sum(part.numel() for part in trained)
    assert ours.parameters == sum(part.numel() for part in model.parameters())


@pytest.mark.parametrize("target", ["q_proj,v_proj", "down_proj", "lm_head,q_proj"])
def test_named_targets_count_as_peft_counts_them(target: str) -> None:
    model = make("llama", lora=True, precision="fp32", target=target.split(","))
    real = sum(part.numel() for part in model.parameters() if part.requires_grad)
    assert lora_parameters(shape_of("llama"), r=8, target=target) == real


def test_checkpointing_keeps_the_inputs_of_all_layers_and_one_layer_or_the_logits() -> None:
    plain = estimated("llama", precision="fp32")
    light = estimated("llama", precision="fp32", gradient_checkpointing=True)
    model = make("llama", lora=False, precision="fp32")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    width = 192 * 4 * ROWS * LENGTH
    # With what the LM head reads.
    kept = saved_bytes(model, autocast=False) + width
    layer = (plain.activations - 3 * width) // LAYERS
    assert layer > light.logits  # a vocabulary of 320: here the layer is the larger one
    assert light.activations - (layer - light.logits) == pytest.approx(kept, rel=0.02)
    assert light.total < plain.total
    assert light.weights == plain.weights


def test_smollm2_with_lora_needs_what_was_measured() -> None:
    """Weights, gradients and moments of a real run, in bytes; LoRA r=16 on all linear layers."""
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
    figure = estimate(
        shape, batch=solve_batch(ranks=1, global_batch=2), max_length=512, precision="bf16", lora=True, lora_r=16
    )
    assert figure.trainable == 4_884_480
    assert figure.weights == 134_515_008 * 2 + 4_884_480 * 4
    assert figure.gradients == 4_884_480 * 4
    assert figure.optimizer == 4_884_480 * 8


@pytest.mark.parametrize(("optimizer", "bytes_each"), [("adamw_torch", 8), ("sgd", 0), ("adamw_8bit", 2)])
def test_the_optimizer_decides_the_bytes_of_its_state(optimizer: str, bytes_each: int) -> None:
    figure = estimated("llama", precision="fp32", optimizer=optimizer)
    assert figure.optimizer == figure.trainable * bytes_each


def test_an_unknown_optimizer_is_said_to_be_counted_like_adamw() -> None:
    figure = estimated("llama", precision="fp32", optimizer="brandnew")
    assert "optimizer brandnew is counted like AdamW" in figure.assumptions
    assert figure.optimizer == figure.trainable * 8


def test_logits_grow_with_rows_and_length_alone() -> None:
    assert estimated("llama", precision="bf16").logits == ROWS * LENGTH * 320 * 12


# What a backend keeps besides


def divided(*, ranks: int = 2, accumulation: int = 2, length: int = LENGTH, **settings: Any) -> MemoryEstimate:
    """A full fp32 fine-tune of the Llama; `settings` that `MemoryDivision` has are its own, the others `estimate`'s."""
    batch = solve_batch(ranks=ranks, micro_batch=ROWS, accumulation=accumulation)
    fields = {item.name for item in dataclasses.fields(MemoryDivision)}
    division = MemoryDivision(**{name: value for name, value in settings.items() if name in fields})
    rest = {name: value for name, value in settings.items() if name not in fields}
    return estimate(
        shape_of("llama"),
        batch=batch,
        max_length=length,
        precision=rest.pop("precision", "fp32"),
        **rest,
        division=division,
    )


WEIGHTS = num_parameters(shape_of("llama")) * 4


@pytest.mark.parametrize(("ranks", "accumulation", "times"), [(1, 2, 1), (2, 1, 1), (2, 2, 2)])
def test_ddp_holds_gradients_beside_its_buckets_while_it_accumulates(ranks: int, accumulation: int, times: int) -> None:
    batch = solve_batch(ranks=ranks, micro_batch=ROWS, accumulation=accumulation)
    request = MemoryRequest(options=DdpOptions(), ranks=ranks, device_kind=DeviceKind.CPU, lora=False)
    division = DdpBackend().divide_memory(request)
    figure = estimate(shape_of("llama"), batch=batch, max_length=LENGTH, precision="fp32", division=division)
    assert figure.gradients == times * WEIGHTS
    assert ("gradients twice: once in the buckets that are reduced" in figure.assumptions) == (times == 2)


@pytest.mark.parametrize(("accumulation", "share"), [(1, 2), (2, 1)])
def test_gradients_that_are_divided_at_the_end_of_a_step_are_whole_until_then(accumulation: int, share: int) -> None:
    figure = divided(gradients=2, gradients_whole_between=True, accumulation=accumulation)
    assert figure.gradients == WEIGHTS // share


def test_gathered_weights_lie_beside_the_shards() -> None:
    shards = divided(weights=2).weights
    root = root_parameters(shape_of("llama")) * 4
    layer = (WEIGHTS - root) // LAYERS
    assert divided(weights=2, gathered_layers=2).weights - shards == 2 * layer
    assert divided(weights=2, gathered_layers=1, gathered_root=True).weights - shards == pytest.approx(
        layer + root, abs=8
    )
    assert divided(weights=2, gathered_elements=10**9).weights - shards == WEIGHTS
    assert divided(weights=2, gathered_elements=1000).weights - shards == 4000
    assert divided(weights=2, gathered_elements=1000, gathered_layers=1).weights - shards == layer


def test_weights_are_gathered_in_half_under_autocast_alone() -> None:
    settings = {"weights": 2, "gathered_elements": 10**9, "gathered_in_half": True}
    assert divided(**settings, precision="bf16").weights == WEIGHTS // 2 + WEIGHTS // 2
    assert divided(**settings, precision="fp32").weights == WEIGHTS // 2 + WEIGHTS


@pytest.mark.parametrize("name", CONFIGS)
def test_what_weights_gathered_in_half_compute_is_kept_in_half(name: str) -> None:
    real = saved_bytes(make(name, lora=False, precision="bf16").to(torch.bfloat16), autocast=False)
    ours = estimated(name, precision="bf16", division=MemoryDivision(gathered_in_half=True)).activations
    assert 0.97 < ours / real < 1.2, (ours, real)


def test_a_large_table_outweighs_few_tokens() -> None:
    """Its gradient as the head's lies beside the logits'; a tied one's is there three times at the end."""
    untied, tied = (
        estimate(
            dataclasses.replace(shape_of("llama"), vocab=10**6, tied_embeddings=is_tied),
            batch=solve_batch(ranks=1, micro_batch=1, accumulation=2),
            max_length=4,
            precision="fp32",
        )
        for is_tied in (False, True)
    )
    table = 10**6 * 192 * 4
    assert untied.logits == tied.logits == table + 4 * 10**6 * 4
    assert tied.activations + tied.logits == 3 * table
    assert untied.activations < table


def test_a_bucket_is_no_larger_than_what_is_trained_unless_it_is_fixed() -> None:
    plain = divided().gradients
    assert divided(bucket_elements=1000, bucket_lives="run").gradients - plain == 4000
    assert divided(bucket_elements=10**9, bucket_lives="run").gradients - plain == WEIGHTS
    assert divided(bucket_elements=10**9, bucket_lives="run", bucket_fixed=True).gradients - plain == 4 * 10**9


def test_a_bucket_of_the_backward_counts_beyond_the_logits_that_are_gone() -> None:
    plain = divided()
    assert plain.logits < WEIGHTS
    assert divided(bucket_elements=10**9).gradients - plain.gradients == WEIGHTS - plain.logits
    assert divided(bucket_elements=1000).gradients == plain.gradients
    several, one = (
        divided(bucket_elements=1000, bucket_lives="step", accumulation=count).gradients for count in (2, 1)
    )
    assert (several - plain.gradients, one - plain.gradients) == (4000, 0)


def test_copies_on_which_the_optimizer_works_are_divided_as_its_state_is() -> None:
    assert divided(optimizer=2).optimizer == WEIGHTS
    assert divided(optimizer=2, master_copies=1).optimizer == WEIGHTS + WEIGHTS // 2
    assert divided(optimizer=2, master_copies=1, optimizer_offloaded=True).optimizer == 0


def test_gradients_that_leave_the_device_leave_their_bucket() -> None:
    assert divided(gradients_offloaded=True, bucket_elements=1000, bucket_lives="run").gradients == 4000


def test_the_optimizers_step_counts_where_it_needs_more_than_the_backward() -> None:
    """Rows of 4 tokens: next to no activations, and the temporaries are the peak."""
    short = divided(length=4, step_copies=3)
    assert short.total == (1 + 1 + 2 + 3) * WEIGHTS  # weights, gradients, moments, temporaries
    assert divided(length=4, step_copies=3, optimizer_offloaded=True).optimizer == 0
    said = "the optimizer's step needs more than the backward: its temporaries count as its state"
    assert said in short.assumptions
    long = divided(length=4096, step_copies=3)
    assert long.optimizer == 2 * WEIGHTS
    assert said not in long.assumptions
    # What is gathered for the backward is gone by then.
    assert divided(length=4, step_copies=3, weights=2, gathered_elements=10**9).total == (0.5 + 1 + 2 + 3) * WEIGHTS
