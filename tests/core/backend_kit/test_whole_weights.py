"""Whole weights come by name, one at a time, and tied ones are gathered once."""

from __future__ import annotations

import torch

from fleettune_core.backend_kit.whole_weights import whole_weights


class Tied(torch.nn.Module):
    """An embedding whose weight is the head's too, a norm that is frozen, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 2)
        self.norm = torch.nn.LayerNorm(2).requires_grad_(False)
        self.head = torch.nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("derived", torch.ones(1), persistent=False)


class Gather:
    """Remembers what it was asked for."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.names = {id(value): name for name, value in [*model.named_parameters(), *model.named_buffers()]}
        self.asked: list[str] = []

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        self.asked.append(self.names[id(value)])
        return value.detach().clone()


def test_the_names_are_those_of_the_state_dict() -> None:
    model = Tied()
    whole = dict(whole_weights(model, Gather(model), trained_only=False))
    expected = model.state_dict()
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], value) for name, value in expected.items())


def test_tied_weights_are_gathered_once_and_are_one_tensor() -> None:
    model = Tied()
    gather = Gather(model)
    whole = dict(whole_weights(model, gather, trained_only=False))
    assert gather.asked == ["embed.weight", "norm.weight", "norm.bias", "kept"]
    assert whole["head.weight"] is whole["embed.weight"]


def test_only_what_is_trained_is_gathered_where_no_more_is_wanted() -> None:
    model = Tied()
    gather = Gather(model)
    assert [name for name, _ in whole_weights(model, gather, trained_only=True)] == ["embed.weight", "head.weight"]
    assert gather.asked == ["embed.weight"]


def test_one_weight_is_gathered_at_a_time() -> None:
    model = Tied()
    gather = Gather(model)
    weights = whole_weights(model, gather, trained_only=False)
    next(weights)
    assert gather.asked == ["embed.weight"]
