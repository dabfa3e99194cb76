"""What the description of a layer refuses before it is measured."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from oracles import draw

from sensitivity import InputError, SoftmaxAttention, measure
from sensitivity.attention.refusals import check, check_samples

LAYER = SoftmaxAttention.random(8, 2, biases=True, dtype=torch.float64)
HIDDEN = torch.ones(6, 6, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"bias": HIDDEN},
            r"bias is boolean, but it is added to the logits; give 0 where .*masked_fill\(mask, -torch",
        ),
        ({"bias": torch.zeros(6, 6, dtype=torch.int64)}, r"bias must be floating point, not torch\.int64; convert it"),
        ({"bias": torch.zeros(5, 6, 6)}, r"bias has shape \(5, 6, 6\), which does not broadcast to \(sample, 2 heads"),
        ({"multiplier": torch.ones(1, 1, 1, 1, 6, 6)}, r"multiplier has shape \(1, 1, 1, 1, 6, 6\), which does not"),
        ({"query_bias": torch.zeros(2, 3)}, r"query_bias has shape \(2, 3\), but needs \(2, 4\)"),
        ({"key_bias": torch.zeros(8)}, r"key_bias has shape \(8,\), but needs \(2, 4\)"),
        ({"value_bias": torch.zeros(2, 5)}, r"value_bias has shape \(2, 5\), but needs \(2, 4\)"),
        ({"output_bias": torch.zeros(7)}, r"output_bias has shape \(7,\), but needs \(8,\)"),
        (
            {"padding": torch.zeros(2, 6)},
            r"padding must be boolean \(sample, time\), True at .*, not torch\.float32 of sh",
        ),
        ({"padding": torch.zeros(6, dtype=torch.bool)}, r"padding must be boolean .* not torch\.bool of shape \(6,\)"),
        ({"residual": "x"}, "residual must be True, False or a finite factor, not 'x'"),
        ({"scale": "x"}, "scale must be a finite number, not 'x'; leave it out for 1 / sqrt"),
        ({"scale": math.nan}, "scale must be a finite number, not nan"),
        (
            {"key_weight": torch.ones(2, 4, 8, dtype=torch.int64)},
            r"key_weight must be floating point, not torch\.int64",
        ),
        (
            {"value_weight": torch.ones(2, 4, 8, dtype=torch.complex64)},
            r"value_weight must be .*, not torch\.complex64",
        ),
    ],
)
def test_a_part_that_does_not_fit(changes, text):
    """The tests' own type checker would stop some of these at the constructor; a user's program has none."""
    layer = copy.copy(LAYER)
    for name, value in changes.items():
        object.__setattr__(layer, name, value)
    with pytest.raises(InputError, match=text):
        check(layer, layer._tensors())


def test_the_constructor_checks():
    with pytest.raises(InputError, match=r"the attention layer's bias has shape \(5, 6, 6\), which does not broadcast"):
        dataclasses.replace(LAYER, bias=torch.zeros(5, 6, 6))


@pytest.mark.parametrize("keep", ["map", "statistics"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bias", torch.zeros(3, 2, 6, 6, dtype=torch.float64)),
        ("multiplier", torch.ones(3, 1, 6, 6, dtype=torch.float64)),
    ],
)
def test_masks_of_another_number_of_samples(name, value, keep):
    """Those of the surplus samples would be dropped without a word."""
    layer = dataclasses.replace(LAYER, **{name: value})
    with pytest.raises(InputError, match=f"layer's {name} is for 3 samples, but the tokens hold 2; give one for each"):
        measure(layer, draw(2, 6, 8), keep=keep)
    assert measure(layer, draw(3, 6, 8)).samples == 3


def test_padding_of_another_number_of_samples():
    layer = dataclasses.replace(LAYER, padding=torch.zeros(3, 6, dtype=torch.bool))
    with pytest.raises(InputError, match="layer's padding is for 3 samples, but the tokens hold 2"):
        check_samples(layer, 2)


def test_types_in_which_nothing_is_differentiated():
    with pytest.raises(InputError, match=r"dtype must be a floating type such as torch\.float64, not torch\.complex64"):
        SoftmaxAttention.random(8, 2, dtype=torch.complex64)
    for dtype in (torch.float8_e4m3fn, torch.bool):
        with pytest.raises(InputError, match=r"such as torch\.float64, not torch\."):
            LAYER.to(dtype)
        with pytest.raises(
            InputError, match=r"tokens must be floating point, not torch\..*; convert them to torch\.float32"
        ):
            measure(LAYER, torch.zeros(1, 6, 8).to(dtype))
    with pytest.raises(
        InputError, match=r"'nonsense' is neither a device, such as 'cpu' or 'cuda:0', nor a torch\.dtype"
    ):
        LAYER.to("nonsense")


@pytest.mark.parametrize(("gain", "offset"), [(4.0, 100.0), (2.0, 1000.0), (12.0, 0.0)])
def test_double_precision_keeps_its_digits_in_saturated_attention(gain, offset):
    """Where a query sees one key, the key path cancels beside terms that are far larger than what is left."""
    layer = SoftmaxAttention.random(32, 4, seed=1, gain=gain, dtype=torch.float64, residual=False)
    tokens = draw(2, 33, 32, seed=1) + offset
    found, wanted = (measure(layer, tokens, backend=backend).norms for backend in ("closed_form", "autodiff"))
    assert float((found - wanted).abs().max() / wanted.max()) < 2e-11
