"""The loss at supervised positions only is the loss of the whole logits, and reaches every parameter."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fleettune_core.training import losses


def tiny_llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | changes))


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 97, (3, 11))
    labels = ids.clone()
    labels[0, :7] = losses.IGNORED
    labels[1, :] = losses.IGNORED
    return ids, labels


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, lambda: tiny_llama(tie_word_embeddings=True)])
def test_the_summed_loss_and_its_gradients_are_those_of_the_full_logits(make):
    ids, labels = batch()
    reference = make()
    logits = reference(input_ids=ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=losses.IGNORED, reduction="sum"
    )
    expected.backward()

    model = make()
    losses.add_summed_loss(model)
    loss = model(input_ids=ids, labels=labels, summed_loss=True)
    loss.backward()

    assert torch.allclose(loss, expected, rtol=1e-6)
    gradients = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name].grad, atol=1e-5), name


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, lambda: tiny_llama().bfloat16()])
def test_a_plain_head_is_recognised_by_its_loss(make):
    model = make().train()
    assert losses.agrees_with_logits(model)
    assert model.training


def test_a_head_that_does_more_than_its_last_layer_shows_is_found_out():
    model = tiny_llama()
    original = model.forward

    def scaled(*args, **kwargs):
        output = original(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = scaled
    assert losses.plain_head(model)
    assert not losses.agrees_with_logits(model)


def test_a_batch_of_fillers_gives_a_zero_loss_that_reaches_every_parameter():
    ids, labels = batch()
    model = tiny_llama()
    losses.add_summed_loss(model)
    loss = model(input_ids=ids, labels=torch.full_like(labels, losses.IGNORED), summed_loss=True)
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_without_the_flag_the_forward_is_the_models_own():
    ids, labels = batch()
    model = tiny_llama()
    expected = model(input_ids=ids, labels=labels)
    losses.add_summed_loss(model)
    got = model(input_ids=ids, labels=labels)
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.loss, expected.loss)


def test_bf16_weights_take_their_softmax_in_fp32():
    ids, labels = batch()
    model = tiny_llama().to(torch.bfloat16)
    losses.add_summed_loss(model)
    assert model(input_ids=ids, labels=labels, summed_loss=True).dtype is torch.float32


def test_models_that_scale_or_cap_their_logits_keep_their_own_head():
    from transformers import Gemma2ForCausalLM

    capped = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            final_logit_softcapping=30.0,
        )
    )
    assert losses.plain_head(tiny_llama())
    assert not losses.plain_head(capped)
