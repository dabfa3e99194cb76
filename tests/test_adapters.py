"""torch's attention described, and outputs of every shape selected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from oracles import draw
from sequence_models import DIM, LENGTH, seeded, transformer
from tolerances import assert_close
from torch import Tensor, nn
from torch.nn import functional

import sensitivity.adapters as adapters
from sensitivity.attention import SoftmaxAttention
from sensitivity.errors import InputError

TOKENS = draw(3, LENGTH, DIM)
HEADS = 2
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[False] * 5, [True, True, False, False, False], [False, False, False, False, True]])
NUMBERS = draw(LENGTH, LENGTH, seed=1)
PER_HEAD = draw(3 * HEADS, LENGTH, LENGTH, seed=2)


def layer(**options: object) -> nn.MultiheadAttention:
    made = seeded(lambda: nn.MultiheadAttention(DIM, HEADS, **{"batch_first": True, **options}))
    with torch.no_grad():
        for index, value in enumerate(value for value in made.parameters() if value.ndim == 1):
            value.copy_(draw(*value.shape, seed=10 + index))
    return made


def call(module: nn.MultiheadAttention, tokens: Tensor, **options: object) -> Tensor:
    tokens = tokens if module.batch_first else tokens.transpose(0, 1)
    out = module(tokens, tokens, tokens, need_weights=False, **options)[0]
    return out if module.batch_first else out.transpose(0, 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_multihead_attention_is_described(bias, batch_first, separate):
    module = layer(bias=bias, batch_first=batch_first)
    if separate:
        module = separated(module)
        assert module.in_proj_weight is None
    described = SoftmaxAttention.from_module(module)
    assert not described.residual
    assert_close(described(TOKENS), call(module, TOKENS), "blocks")


def separated(module: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """The same layer with separate projections, as kdim and vdim make it."""
    made = nn.MultiheadAttention(DIM, HEADS, bias=module.in_proj_bias is not None, batch_first=module.batch_first)
    made._qkv_same_embed_dim = False
    for name, part in zip("qkv", module.in_proj_weight.chunk(3), strict=True):
        setattr(made, f"{name}_proj_weight", nn.Parameter(part.detach().clone()))
    made.in_proj_weight = None
    made.in_proj_bias, made.out_proj = module.in_proj_bias, module.out_proj
    return made.double().eval()


def test_other_key_and_value_widths():
    module = layer(kdim=4, vdim=3)
    described = SoftmaxAttention.from_module(module)
    assert described.key_weight.shape == (HEADS, DIM // HEADS, 4)
    assert described.value_weight.shape == (HEADS, DIM // HEADS, 3)
    query = functional.linear(TOKENS, module.q_proj_weight, module.in_proj_bias[:DIM])
    assert_close(
        torch.cat(list(described.query_weight)) @ TOKENS[0, 0] + described.query_bias.flatten(), query[0, 0], "blocks"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": CAUSAL},
        {"attn_mask": NUMBERS},
        {"attn_mask": NUMBERS.masked_fill(CAUSAL, -math.inf)},
        {"attn_mask": PER_HEAD},
        {"attn_mask": PER_HEAD > 0.8},
        {"attn_mask": CAUSAL, "is_causal": True},
    ],
)
def test_masks_mean_what_they_mean_in_torch(options):
    module = layer()
    described = SoftmaxAttention.from_module(module, **options)
    assert_close(described(TOKENS), call(module, TOKENS, **options), "blocks")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_padding_means_what_it_means_in_torch(dtype):
    module = layer()
    mask = PADDED if dtype == torch.bool else torch.zeros(3, LENGTH, dtype=dtype).masked_fill(PADDED, -math.inf)
    described = SoftmaxAttention.from_module(module, key_padding_mask=mask)
    assert torch.equal(described.padding, PADDED)
    keep = ~PADDED
    assert_close(described(TOKENS)[keep], call(module, TOKENS, key_padding_mask=mask)[keep], "blocks")


def test_padding_with_numbers_and_a_mask_per_head():
    module = layer()
    mask = draw(3, LENGTH, seed=4).masked_fill(PADDED, -math.inf)
    described = SoftmaxAttention.from_module(module, key_padding_mask=mask, attn_mask=PER_HEAD)
    keep = ~PADDED
    expected = call(module, TOKENS, key_padding_mask=mask, attn_mask=PER_HEAD)
    assert_close(described(TOKENS)[keep], expected[keep], "blocks")


def test_is_causal_acts_by_itself():
    module = layer()
    described = SoftmaxAttention.from_module(module, is_causal=True)
    assert_close(described(TOKENS), call(module, TOKENS, attn_mask=CAUSAL), "blocks")


def test_visible_has_the_opposite_meaning():
    module = layer()
    hidden = SoftmaxAttention.from_module(module, attn_mask=CAUSAL)
    visible = SoftmaxAttention.from_module(module, visible=~CAUSAL)
    assert torch.equal(hidden(TOKENS), visible(TOKENS))
    query, key, value = visible.project(TOKENS)
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=~CAUSAL)
    out = functional.linear(mixed.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    assert_close(visible(TOKENS), out, "blocks")


class Overridden(nn.MultiheadAttention):
    def forward(self, *args: object, **options: object) -> Tensor:
        return super().forward(*args, **options)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: layer(add_bias_kv=True), {}, r"add_bias_kv=True\) adds a learned key that is at no time step"),
        (lambda: layer(add_zero_attn=True), {}, r"add_zero_attn=True\) adds a zero key"),
        (lambda: Overridden(DIM, HEADS), {}, "Overridden has a forward of its own"),
        (layer, {"attn_mask": CAUSAL.long()}, r"attn_mask must be boolean \(True = hidden\) or floating"),
        (layer, {"attn_mask": NUMBERS[0]}, r"axes \(query, key\), not the shape \(5,\)"),
        (layer, {"attn_mask": PER_HEAD[:5]}, "its 5 is no multiple of 2 heads"),
        (layer, {"key_padding_mask": PADDED.long()}, r"key_padding_mask must be boolean \(True = padding\)"),
        (layer, {"key_padding_mask": PADDED | True}, "sample 0 is padding throughout"),
    ],
)
def test_what_cannot_be_described(make, options, message):
    with pytest.raises(InputError, match=message):
        SoftmaxAttention.from_module(make(), **options)


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...] = ()


class Named(NamedTuple):
    first: Tensor
    second: Tensor


SCALAR = torch.ones(())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda out: out,
        lambda out: (out, None),
        lambda out: (None, out, out[:, 0]),
        lambda out: [SCALAR, out],
        lambda out: ((out, out + 1), out + 2),
        lambda out: {"last_hidden_state": out, "pooled": out[:, 0]},
        lambda out: {"logits": out, "weights": out + 1},
        lambda out: {"mine": out, "loss": SCALAR, "none": None},
        lambda out: Output(SCALAR, out, (out + 1,)),
        lambda out: Output(None, out),
    ],
)
def test_output_without_select(wrap):
    function = adapters.as_sequence_function(lambda tokens: wrap(2 * tokens))
    assert torch.equal(function(TOKENS), 2 * TOKENS)


@pytest.mark.parametrize("select", ["b", lambda out: out["b"]])
def test_output_by_key_or_callable(select):
    function = adapters.as_sequence_function(lambda tokens: {"a": tokens, "b": 2 * tokens}, select)
    assert torch.equal(function(TOKENS), 2 * TOKENS)


@pytest.mark.parametrize("select", [1, -1])
def test_output_by_index(select):
    assert torch.equal(adapters.select_output((TOKENS, 2 * TOKENS), select), 2 * TOKENS)
    assert torch.equal(adapters.select_output(Named(TOKENS, 2 * TOKENS), select), 2 * TOKENS)


@pytest.mark.parametrize(
    ("output", "select", "message"),
    [
        ({"a": TOKENS, "b": TOKENS}, None, r"a dict, holds several tensors; .* 'a' \(3, 5, 6\), 'b' \(3, 5, 6\)"),
        ({"logits": TOKENS, "last_hidden_state": TOKENS}, None, "several tensors; pass select="),
        (Named(TOKENS, TOKENS), None, "a Named, holds several tensors; .* 'first'"),
        (
            Output(None, TOKENS),
            "weights",
            r"select='weights' is not a part of the output, an Output; 'loss' \(NoneType\)",
        ),
        ((TOKENS,), 3, "select=3 is not a part of the output, a tuple; 0"),
        ({"a": None}, None, r"holds no floating tensor; 'a' \(NoneType\)"),
        ((None,), None, "holds no floating tensor"),
        ({}, None, "holds no floating tensor; it has no parts"),
        ((TOKENS, None), 1, "select=1 picks NoneType from the output, not a tensor"),
    ],
)
def test_ambiguous_outputs_list_the_choices(output, select, message):
    with pytest.raises(InputError, match=message):
        adapters.select_output(output, select)


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: nn.LSTM(DIM, 4, **options),
        lambda **options: nn.MultiheadAttention(DIM, HEADS, **options),
        lambda **options: transformer(1, **options),
        lambda **options: nn.TransformerEncoderLayer(DIM, HEADS, 8, **options),
    ],
)
def test_time_first_modules_get_their_own_order(make):
    usual = seeded(lambda: make(batch_first=True))
    other = seeded(lambda: make(batch_first=False))
    other.load_state_dict(usual.state_dict())
    expected = adapters.as_sequence_function(usual)(TOKENS)
    assert expected.shape[:2] == TOKENS.shape[:2]
    assert_close(adapters.as_sequence_function(other)(TOKENS), expected, "blocks")
