"""Dropout with cheap masks: the rate, the scale, the stream it draws from, and the gradient."""

import math

import pytest
import torch

from sensitivity.errors import InputError
from sensitivity.layers import Dropout
from sensitivity.layers.dropout import dropout, factors

RATES = [0.1, 0.5, 0.9, 0.001]


@pytest.mark.parametrize("rate", RATES)
def test_entries_are_zero_at_the_rate_and_the_others_make_the_mean_one(rate):
    torch.manual_seed(0)
    drawn = factors(torch.Size([400_000]), rate, torch.float64)
    grid = round(rate * 2**16) / 2**16
    assert set(drawn.unique().tolist()) == {0.0, 1 / (1 - grid)}
    deviation = 5 * math.sqrt(rate * (1 - rate) / drawn.numel())
    assert abs(float((drawn == 0).double().mean()) - grid) < deviation
    assert abs(grid - rate) <= 2**-17


def test_entries_are_independent_of_each_other_and_of_earlier_calls():
    torch.manual_seed(0)
    first, second = (factors(torch.Size([1 << 18]), 0.3, torch.float64) == 0 for _ in range(2))

    def correlation(a, b):
        return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])

    bound = 5 / math.sqrt(len(first))
    assert abs(correlation(first, second)) < bound
    for lag in (1, 2, 3, 4, 5, 12, 144):
        assert abs(correlation(first[lag:], first[:-lag])) < bound


def test_the_stream_is_that_of_torch():
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(dropout(torch.ones(1001), 0.5))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (0, 4)])
def test_shape_and_type_stay(dtype, shape):
    out = dropout(torch.ones(shape, dtype=dtype), 0.25)
    assert (out.shape, out.dtype) == (torch.Size(shape), dtype)


def test_the_gradient_is_the_factor():
    torch.manual_seed(0)
    values = torch.randn(50, dtype=torch.float64, requires_grad=True)
    out = dropout(values, 0.4)
    out.sum().backward()
    assert torch.equal(values.grad * values.detach(), out.detach())
    assert 0 < int((out == 0).sum()) < 50


def test_nothing_is_drawn_in_evaluation_or_at_rate_zero():
    values, before = torch.randn(5), torch.get_rng_state()
    assert torch.equal(Dropout(0.5).eval()(values), values)
    assert torch.equal(Dropout(0.0)(values), values)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(Dropout(0.5)(values), values)


@pytest.mark.parametrize("rate", [1, 1.0, -0.1, float("nan"), True])
def test_a_rate_outside_is_refused(rate):
    with pytest.raises(InputError, match="dropout must be a rate of at least 0 and below 1, not"):
        Dropout(rate)


def test_it_says_its_rate():
    assert repr(Dropout(0.25)) == "Dropout(p=0.25)"
