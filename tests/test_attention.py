"""The canonical description of an attention layer."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from oracles import draw
from tolerances import assert_close
from torch.nn import functional

from sensitivity import InputError, SoftmaxAttention
from sensitivity.checks import head_width


def layer(**options):
    return SoftmaxAttention.random(8, 2, seed=1, dtype=torch.float64, **options)


def test_equals_scaled_dot_product_attention():
    attention, tokens = layer(biases=True), draw(3, 5, 8)
    query, key, value = attention.project(tokens)
    mixed = functional.scaled_dot_product_attention(query, key, value)
    expected = torch.einsum("shtv,hov->sto", mixed, attention.output_weight) + attention.output_bias + tokens
    assert_close(attention(tokens), expected, "blocks")


def test_causal_weights_are_exactly_zero_above_the_diagonal():
    weights = layer(causal=True).weights(draw(2, 6, 8))
    assert not weights.triu(1).any()
    assert_close(weights.sum(-1), torch.ones(2, 2, 6), "blocks")


def test_diagonal_mask_keeps_the_only_visible_key():
    causal = layer(causal=True, diagonal_bias=-math.inf).weights(draw(1, 4, 8))
    assert torch.equal(causal[..., 0, 0], torch.ones(1, 2, dtype=torch.float64))
    assert not causal.diagonal(dim1=-2, dim2=-1)[..., 1:].any()
    one = layer(diagonal_bias=-math.inf)(draw(1, 1, 8))
    assert torch.isfinite(one).all()


def test_padding_hides_keys_and_changes_nothing_else():
    tokens, padding = draw(1, 6, 8), torch.tensor([[True, True, False, False, False, False]])
    padded = layer(padding=padding)
    assert_close(padded(tokens)[:, 2:], layer()(tokens[:, 2:]), "blocks")
    assert not padded.weights(tokens)[..., :2].any()


def test_a_row_that_attends_to_nothing_is_named():
    bias = torch.zeros(4, 4, dtype=torch.float64)
    bias[2] = -math.inf
    with pytest.raises(InputError, match=r"row 2 attends to nothing \(sample 0, head 0\)"):
        layer(bias=bias)(draw(1, 4, 8))


def test_scores_add_bias_and_penalty_before_the_softmax():
    bias, tokens = draw(5, 5, seed=3), draw(2, 5, 8)
    plain = layer().scores(tokens)
    assert_close(layer(bias=bias).scores(tokens), plain + bias, "blocks")
    assert_close(layer(diagonal_bias=-0.3).scores(tokens), plain - 0.3 * torch.eye(5).double(), "blocks")


def test_random_is_seeded_and_leaves_the_global_generator():
    before = torch.get_rng_state()
    one, same, other = layer(), layer(), SoftmaxAttention.random(8, 2, seed=2, dtype=torch.float64)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.query_weight, same.query_weight)
    assert not torch.equal(one.query_weight, other.query_weight)


def test_sample_cuts_every_per_sample_tensor():
    bias, padding = draw(3, 1, 5, 5), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 0] = True
    attention, tokens = layer(bias=bias, padding=padding), draw(3, 5, 8)
    assert_close(attention.sample(slice(1, 2))(tokens[1:2]), attention(tokens)[1:2], "blocks")


def test_to_moves_floating_tensors_only():
    moved = layer(padding=torch.zeros(1, 4, dtype=torch.bool)).to(dtype=torch.float32)
    assert moved.dtype == torch.float32
    assert moved.padding.dtype == torch.bool


def test_to_takes_what_tensors_take():
    assert layer().to(torch.float32).dtype == torch.float32
    assert layer().to("cpu", torch.float32).dtype == torch.float32
    assert layer().to(torch.device("cpu")).dtype == torch.float64
    with pytest.raises(InputError, match=r"dtype must be a floating type such as torch\.float64, not torch\.int64"):
        layer().to(torch.int64)
    with pytest.raises(InputError, match="the attention layer's query_weight is on the meta device, which holds no"):
        layer().to("meta")


@pytest.mark.parametrize(
    ("dim", "heads", "text"),
    [
        (8, 3, "dim=8 is not divisible by heads=3; nearest that fit: 6 and 9"),
        (8, 0, "dim=8 is not divisible by heads=0"),
        (True, 1, "dim must be an integer, not True"),
        (8, True, "heads must be an integer, not True"),
    ],
)
def test_heads_must_divide_dim(dim, heads, text):
    with pytest.raises(InputError, match=text):
        head_width(dim, heads)


@pytest.mark.parametrize("gain", [math.nan, math.inf])
def test_gain_must_be_finite(gain):
    with pytest.raises(InputError, match=f"gain must be a finite number, not {gain}"):
        layer(gain=gain)


def test_unfit_weights_are_refused():
    good = layer()
    with pytest.raises(InputError, match="query, key and value weights disagree"):
        dataclasses.replace(good, key_weight=good.key_weight[:1])
    with pytest.raises(InputError, match="does not fit the value weight"):
        dataclasses.replace(good, output_weight=good.output_weight[..., :2])
    with pytest.raises(InputError, match="a residual needs equal widths in and out, not 8 and 3"):
        dataclasses.replace(good, output_weight=good.output_weight[:, :3])
    bad = good.value_weight.clone()
    bad[0, 1, 2] = math.nan
    with pytest.raises(InputError, match="layer's value_weight must be finite, but 1 of 64 entries are not"):
        dataclasses.replace(good, value_weight=bad)
    with pytest.raises(InputError, match=r"bias holds NaN or \+inf"):
        dataclasses.replace(good, bias=torch.full((3, 3), math.inf))
    with pytest.raises(InputError, match="diagonal_bias must be finite or -inf, not nan"):
        dataclasses.replace(good, diagonal_bias=math.nan)
    with pytest.raises(InputError, match=r"a diagonal_bias for each head needs the shape \(2,\), not \(3,\)"):
        dataclasses.replace(good, diagonal_bias=torch.zeros(3, dtype=torch.float64))
    with pytest.raises(InputError, match="layer's diagonal_bias must be finite, but 1 of 2 entries are not"):
        dataclasses.replace(good, diagonal_bias=torch.tensor([0.0, -math.inf], dtype=torch.float64))
    with pytest.raises(
        InputError, match="length at which a diagonal bias holds must be an integer of at least 2, not 1"
    ):
        dataclasses.replace(good, diagonal_length=1)
    with pytest.raises(InputError, match="residual must be True, False or a finite factor, not inf"):
        dataclasses.replace(good, residual=math.inf)


def test_masks_of_another_length_are_refused():
    with pytest.raises(InputError, match=r"bias is \(4, 4\) \(query, key\), but there are 5 tokens"):
        layer(bias=torch.zeros(4, 4, dtype=torch.float64))(draw(1, 5, 8))
    with pytest.raises(InputError, match="padding covers 4 positions, but there are 5 tokens"):
        layer(padding=torch.zeros(1, 4, dtype=torch.bool))(draw(1, 5, 8))


def test_unknown_modules_are_refused_with_the_known_ones():
    with pytest.raises(InputError, match="Linear is not an attention layer that can be described; known: "):
        SoftmaxAttention.from_module(torch.nn.Linear(2, 2))


def test_repr_says_what_matters():
    shown = repr(layer(causal=True, diagonal_bias=-0.5))
    assert shown == "SoftmaxAttention(dim=8, heads=2, causal, diagonal_bias=-0.5, residual, float64)"
    shown = repr(layer(diagonal_bias=torch.tensor([0.5, -1.0]).double(), diagonal_length=12, residual=0.25))
    assert shown == "SoftmaxAttention(dim=8, heads=2, diagonal_bias=[0.5, -1] at T=12, residual=0.25, float64)"
