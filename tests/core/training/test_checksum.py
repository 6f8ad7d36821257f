"""The checksum of weights: parts add up to the whole, and what differs, differs."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleettune_core.training.checksum import _digest, checksums

MASK = (1 << 64) - 1
TYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64)


@given(st.sampled_from(TYPES), st.integers(1, 3000), st.lists(st.integers(0, 3000), max_size=4))
def test_parts_cut_anywhere_add_up_to_the_whole(dtype, length, cuts):
    values = (torch.arange(length) % 119 - 50).to(dtype)
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    parts = [_digest(values[start:end], start) for start, end in itertools.pairwise(edges)]
    assert sum(parts) & MASK == _digest(values, 0) & MASK


@pytest.fixture
def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(40, 30, generator=generator), torch.randn(30, generator=generator)]


def test_equal_weights_have_equal_checksums(weights):
    assert checksums(weights) == checksums([weight.clone() for weight in weights])


@pytest.mark.parametrize("where", [(0, 0), (39, 29), (17, 3)])
def test_one_bit_of_one_weight_shows(weights, where):
    before = checksums(weights)
    weights[0].view(torch.int32)[where] ^= 1
    assert checksums(weights) != before


def test_the_order_of_weights_and_of_rows_shows(weights):
    assert checksums(weights[::-1]) != checksums(weights)
    assert checksums([weights[0].flip(0), weights[1]]) != checksums(weights)


def test_values_that_move_from_one_weight_to_another_show(weights):
    left, right = weights[1][:15], weights[1][15:]
    assert checksums([left, right]) != checksums([right, left])
