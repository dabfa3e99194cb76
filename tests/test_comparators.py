"""Encoders to compare with."""

import pytest
import torch
from oracles import dense_jacobian, draw

from sensitivity.errors import InputError
from sensitivity.models.comparators import COMPARATORS, ConvolutionEncoder, comparator


@pytest.mark.parametrize("kind", COMPARATORS)
@pytest.mark.parametrize("length", [1, 6])
def test_shape_and_causality(kind, length):
    torch.manual_seed(0)
    encoder = comparator(kind, 4, heads=2).double().eval()
    blocks = dense_jacobian(encoder, draw(2, length, 4)).abs().amax((-2, -1))
    assert blocks.shape == (2, length, length)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    if kind == "attention":
        assert (blocks > 0).all()
    else:
        assert (blocks[:, future] == 0).all()
        assert (blocks.diagonal(dim1=1, dim2=2) > 0).all()


@pytest.mark.parametrize(("depth", "seen"), [(1, 2), (2, 4), (3, 8)])
def test_reach_of_the_convolution(depth, seen):
    torch.manual_seed(0)
    blocks = dense_jacobian(ConvolutionEncoder(3, depth).double(), draw(1, 10, 3)).abs().amax((-2, -1))
    assert (blocks[0, 9] > 0).tolist() == [False] * (10 - seen) + [True] * seen


def test_unknown():
    with pytest.raises(
        InputError, match="unknown comparator 'lstm'; known: attention, causal-attention, convolution, gru"
    ):
        comparator("lstm", 4)
