"""What reaches the layers of a model when it runs."""

from __future__ import annotations

import pytest
import torch
from oracles import dense_jacobian, draw
from sequence_models import DIM, LENGTH, seeded, transformer
from tolerances import assert_close
from torch import Tensor, nn

from sensitivity.adapters import attention_layers, capture, capture_input, submodule_function
from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.jacobian.autodiff import blocks, norm_maps
from sensitivity.layers import TemporalAttention
from sensitivity.models import Forecaster

TOKENS = draw(3, LENGTH, DIM)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[False] * 5, [False, True, True, False, False], [False, False, False, False, True]])
LEFT = torch.tensor([[False] * 5, [True, True, False, False, False], [False, False, False, False, True]])
"""Under a causal mask, the first two rows of the second sample see no key."""


class Shared(nn.Module):
    """One attention layer used twice, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.idle = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        for _ in range(2):
            tokens = tokens + self.attention(tokens, tokens, tokens)[0]
        tokens += 1
        return tokens


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = tokens.flip(1)
        return self.attention(tokens, memory, memory)[0]


class WeightsOnly(nn.Module):
    """Uses an attention layer's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens @ self.attention.in_proj_weight[:DIM].T


def attend(module: nn.MultiheadAttention, tokens: Tensor, **options: object) -> Tensor:
    return module(tokens, tokens, tokens, **options)[0]


@pytest.mark.parametrize("batch_first", [True, False])
def test_stock_encoder(batch_first):
    model = seeded(lambda: transformer(2, batch_first=batch_first))
    tokens = TOKENS if batch_first else TOKENS.transpose(0, 1)
    found = capture(model, tokens)
    assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"] == list(attention_layers(model))
    first = found["layers.0.self_attn"]
    assert torch.equal(first.tokens, TOKENS)
    reached = model.layers[0](tokens).detach()
    assert_close(found["layers.1.self_attn"].tokens, reached if batch_first else reached.transpose(0, 1), "blocks")
    out = attend(model.layers[0].self_attn, tokens)
    assert_close(first.attention(TOKENS), out if batch_first else out.transpose(0, 1), "blocks")
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_masks_of_the_call_are_in_the_description():
    model = seeded(lambda: transformer(2))
    found = capture(model, TOKENS, ["layers.1.self_attn"], lambda m, x: m(x, CAUSAL, PADDED))["layers.1.self_attn"]
    assert torch.equal(found.attention.padding, PADDED)
    hidden = found.attention.hidden(LENGTH)[:, 0]
    assert torch.equal(hidden, CAUSAL | PADDED[:, None, :])


class Roots(nn.Module):
    """Square roots, NaN below zero, before attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        roots = tokens.sqrt()
        return self.attention(roots, roots, roots)[0]


@pytest.mark.parametrize("catch", [lambda m, x: capture(m, x), lambda m, x: submodule_function(m, x, "attention")])
def test_nan_that_the_model_makes_itself(catch):
    tokens = TOKENS.abs()
    tokens[1, 2, 3] = -1
    message = r"the tokens that reach 'attention' must be finite, .*\(1, 2, 3\)\); look at the layers before it"
    with pytest.raises(InputError, match=message):
        catch(seeded(Roots), tokens)


def test_wrapped_model():
    model = seeded(lambda: transformer(1))
    found = capture(nn.DataParallel(torch.compile(model, backend="eager")), TOKENS)
    assert list(found) == ["layers.0.self_attn"]


def test_layer_called_twice_has_two_names():
    model = seeded(Shared)
    with pytest.warns(SensitivityWarning, match="did not run when the model ran: idle"):
        found = capture(model, TOKENS)
    assert list(found) == ["attention@0", "attention@1"]
    assert torch.equal(found["attention@0"].tokens, TOKENS)
    second = TOKENS + attend(model.attention, TOKENS)
    assert_close(found["attention@1"].tokens, second, "blocks")


def test_own_layers_in_the_forecaster():
    model = seeded(lambda: Forecaster(4, dim=8, depth=2, heads=2, spatial="adaptive"))
    inputs = draw(2, 12, 4, 2)
    found = capture(model, inputs, forward=lambda m, x: m.encode(x))
    assert list(found) == ["blocks.0.temporal", "blocks.1.temporal"]
    second = found["blocks.1.temporal"]
    assert second.shape == (2, 4, 12, 8)
    assert second.tokens.shape == (8, 12, 8)
    function, tokens = submodule_function(model, inputs, "blocks.1.temporal")
    assert torch.equal(tokens, second.tokens)
    assert_close(blocks(function, tokens), dense_jacobian(second.attention, tokens), "blocks")


def test_own_layer_with_padding():
    layer = seeded(lambda: TemporalAttention(DIM, 2))
    found = capture(layer, TOKENS, forward=lambda m, x: m(x, padding=PADDED))
    assert torch.equal(found[""].attention.padding, PADDED)


@pytest.mark.parametrize(
    ("make", "layers", "message"),
    [
        (
            lambda: transformer(1),
            ["layers.7.self_attn"],
            "unknown layer: 'layers.7.self_attn'; known .* layers.0.self_attn",
        ),
        (lambda: transformer(1), ["layers.0.linear1"], "Linear is not an attention layer: 'layers.0.linear1'"),
        (lambda: nn.Linear(DIM, DIM), None, "Linear has no attention layer that can be described"),
        (Shared, ["idle"], "layer 'idle' did not run when the model ran"),
        (Crossing, None, r"keys or values that are not its queries \(cross-attention\)"),
        (WeightsOnly, None, r"none of the model's attention layers \(attention\) ran as a module"),
    ],
)
def test_what_cannot_be_captured(make, layers, message):
    with pytest.raises(InputError, match=message):
        capture(seeded(make), TOKENS, layers)


# -- any submodule -----------------------------------------------------------------------------------------------------


def test_input_of_any_submodule():
    model = seeded(lambda: transformer(2))
    call = capture_input(model, TOKENS, "layers.1", lambda m, x: m(x, CAUSAL))
    assert_close(call.args[0], model.layers[0](TOKENS, CAUSAL), "blocks")
    assert call.kwargs["src_mask"].shape == (LENGTH, LENGTH)


def test_submodule_that_runs_twice():
    model = seeded(Shared)
    with pytest.raises(InputError, match=r"ran 2 times in one pass of the model; .*attention@0 to attention@1"):
        capture_input(model, TOKENS, "attention")
    assert torch.equal(capture_input(model, TOKENS, "attention@0").args[0], TOKENS)
    with pytest.raises(InputError, match="ran 2 times, so 'attention@2' does not exist"):
        capture_input(model, TOKENS, "attention@2")
    with pytest.raises(InputError, match=r"unknown layer 'other'; known: attention, attention.out_proj, idle"):
        capture_input(model, TOKENS, "other")


MAKES_NAN = torch.torch_version.TorchVersion(torch.__version__) < "2.5"
HIDDEN_ROWS = pytest.mark.skipif(MAKES_NAN, reason="torch before 2.5 makes NaN of a row whose every key is hidden")


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padding", [PADDED, pytest.param(LEFT, marks=HIDDEN_ROWS)], ids=["padded", "left"])
@pytest.mark.parametrize("name", ["layers.1", "layers.0.self_attn", "layers.0.norm1"])
def test_submodule_as_a_function(name, padding, batch_first):
    model = seeded(lambda: transformer(2, batch_first=batch_first))
    given = TOKENS if batch_first else TOKENS.transpose(0, 1)
    function, tokens = submodule_function(model, given, name, forward=lambda m, x: m(x, CAUSAL, padding))
    assert tokens.shape == TOKENS.shape
    assert_close(blocks(function, tokens), dense_jacobian(function, tokens), "blocks")
    if name == "layers.1":
        expected = model(given, CAUSAL, padding)
        assert_close(function(tokens), expected if batch_first else expected.transpose(0, 1), "blocks")


def test_submodule_that_mixes_a_middle_axis():
    model = seeded(lambda: Forecaster(4, dim=8, depth=1, heads=2, spatial="adaptive"))
    function, tokens = submodule_function(model, draw(2, 12, 4, 2), "blocks.0.spatial")
    maps = norm_maps(function, tokens)
    assert_close(blocks(function, tokens), dense_jacobian(function, tokens), "blocks")
    assert maps.engine.startswith("vmapped VJP")


def test_submodule_without_tokens():
    model = nn.Sequential(nn.Embedding(5, DIM), nn.Linear(DIM, DIM)).double()
    ids = torch.tensor([[0, 1, 2]])
    with pytest.raises(InputError, match="layer '0' takes no floating tokens"):
        submodule_function(model, ids, "0")
    function, tokens = submodule_function(model, ids, "1")
    assert_close(blocks(function, tokens), dense_jacobian(function, tokens), "blocks")
