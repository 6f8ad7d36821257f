"""The look at what the optimizer reads, on one rank: what a backend may do wrong, and what must not disturb it."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fleettune_core.errors import ExitCode, FtError
from fleettune_core.training.reduction import EXACT, MAX_STEPS, NUM_STEPS, ReductionProbe
from fleettune_core.types import WrapFacts, WrappedModel


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 12)
        self.tail = torch.nn.Linear(12, 9)
        self.head = torch.nn.Linear(9, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # As the loss at supervised positions does: the head's weight, without calling the head.
        return torch.nn.functional.linear(self.tail(self.body(inputs).relu()), self.head.weight)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def probe_of(net: torch.nn.Module, **more) -> ReductionProbe:
    optimizer = torch.optim.SGD([item for item in net.parameters() if item.requires_grad], lr=0.1)
    facts = WrapFacts(wrapper="Net", world_size=1)
    wrapped = WrappedModel(model=net, optimizer=optimizer, facts=facts, **more)
    return ReductionProbe(wrapped, backend="mine", tolerance=EXACT, head=getattr(net, "head", None))


def micro_batch(net, probe, *, sync: bool, meanwhile=None) -> None:
    probe.begin_micro_batch()
    net(torch.randn(5, 6)).square().sum().backward()
    if meanwhile is not None:
        meanwhile()
    probe.end_micro_batch(sync=sync)


def step(net, probe, meanwhile=None) -> None:
    micro_batch(net, probe, sync=False)
    micro_batch(net, probe, sync=True, meanwhile=meanwhile)
    net.zero_grad()


def test_it_is_done_after_some_right_steps_and_has_seen_the_last_matrix_that_a_module_computes_with(net):
    probe = probe_of(net)
    for _ in range(NUM_STEPS):
        assert not probe.done
        step(net, probe)
    assert probe.done
    assert probe.finding.weight == "tail.weight"
    assert probe.finding.distance < 1e-6
    assert not net.tail._forward_pre_hooks


def scale(net, factor):
    net.tail.weight.grad *= factor


def test_a_gradient_that_is_scaled_ends_the_run_and_says_by_how_much(net):
    with pytest.raises(FtError) as caught:
        step(net, probe_of(net), meanwhile=lambda: scale(net, 1.5))
    assert caught.value.exit_code == ExitCode.PLUGIN
    assert "1.5 times as large" in caught.value.problems[0]


def test_a_gradient_that_is_zero_or_not_finite_or_missing_ends_the_run(net):
    for spoil, words in (
        (partial(scale, net, 0), "it is zero"),
        (lambda: net.tail.weight.grad.fill_(float("nan")), "off by inf"),
        (lambda: setattr(net.tail.weight, "grad", None), "None after the gate"),
    ):
        net.zero_grad()
        with pytest.raises(FtError) as caught:
            step(net, probe_of(net), meanwhile=spoil)
        assert words in caught.value.problems[0]


def test_a_fault_in_the_second_step_is_seen_too(net):
    probe = probe_of(net)
    step(net, probe)
    with pytest.raises(FtError, match="step 2"):
        step(net, probe, meanwhile=lambda: scale(net, 2))


def test_an_optimizer_that_was_left_with_other_weights_ends_the_run(net):
    probe = probe_of(net)
    net.tail.weight = torch.nn.Parameter(net.tail.weight.detach().clone())
    with pytest.raises(FtError, match="does not hold the wrapped model's weights"):
        step(net, probe)


def test_an_engine_that_keeps_gradients_elsewhere_is_asked_for_them(net):
    probe = probe_of(net, read_gradient=lambda parameter: parameter.grad * 3)
    with pytest.raises(FtError, match="not the mean"):
        step(net, probe)


def test_gradients_that_overflow_are_not_judged(net):
    probe = probe_of(net)
    probe.begin_micro_batch()
    (net(torch.randn(5, 6)).sum() * float("inf")).backward()
    probe.end_micro_batch(sync=True)
    assert not probe.done


def test_a_weight_that_gets_no_gradient_is_given_up_after_some_steps_without_a_finding(net):
    probe = probe_of(net)
    for _ in range(MAX_STEPS):
        probe.begin_micro_batch()
        (net.body.weight.sum() * 0).backward()
        probe.end_micro_batch(sync=True)
    assert probe.done
    assert probe.finding is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputing_activations_counts_nothing_twice(net, reentrant):
    from torch.utils.checkpoint import checkpoint

    probe = probe_of(net)
    for sync in (False, True):
        probe.begin_micro_batch()
        inputs = torch.randn(5, 6, requires_grad=True)
        checkpoint(net, inputs, use_reentrant=reentrant).square().sum().backward()
        probe.end_micro_batch(sync=sync)
    assert probe.finding.distance < 1e-6


def test_a_forward_without_gradients_leaves_no_hook(net):
    probe = probe_of(net)
    probe.begin_micro_batch()
    with torch.no_grad():
        net(torch.randn(5, 6))
    assert not net.tail.weight._backward_hooks
    probe.end_micro_batch(sync=False)


def test_of_an_adapter_the_part_that_gets_a_gradient_at_once_is_watched():
    net = torch.nn.ModuleDict({"lora_A": torch.nn.Linear(6, 2, bias=False), "lora_B": torch.nn.Linear(2, 9)})
    net["lora_B"].bias.requires_grad_(False)
    assert probe_of(net)._name == "lora_B.weight"
