"""Temporal attention, positions and graph convolutions."""

import math

import pytest
import torch
from oracles import dense_jacobian, draw
from tolerances import assert_close
from torch import nn

from sensitivity import SoftmaxAttention
from sensitivity.errors import InputError
from sensitivity.layers import (
    DiagonalDropout,
    DiagonalLearnedPenalty,
    DiagonalLengthPenalty,
    DiagonalMask,
    DiagonalPenalty,
    ResidualGate,
    TemporalAttention,
    propagate,
    row_normalised,
    spatial_layer,
    time_encoding,
)


def spread(diagonal):
    """Every head with a penalty of its own, as training leaves it."""
    with torch.no_grad():
        diagonal.penalty.copy_(torch.tensor([-1.5, 0.2, 0.9]))
    return diagonal


DIAGONALS = {
    "none": None,
    "mask": DiagonalMask(),
    "penalty": DiagonalPenalty(-0.7),
    "learned": spread(DiagonalLearnedPenalty(3)),
    "length": DiagonalLengthPenalty(0.6, 4),
    "logits": DiagonalDropout(0.4),
    "logits shared": DiagonalDropout(0.4, shared=True),
    "weights": DiagonalDropout(0.4, "weights"),
    "weights shared": DiagonalDropout(0.4, "weights", shared=True),
}
every_diagonal = pytest.mark.parametrize("diagonal", DIAGONALS.values(), ids=DIAGONALS.keys())
every_causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def layer(diagonal=None, dim=12, heads=3, **options):
    torch.manual_seed(1)
    return TemporalAttention(dim, heads, diagonal, **options).double()


# -- the layer and its description --------------------------------------------------------------------------------


@every_diagonal
@every_causality
@pytest.mark.parametrize("residual", [False, True, ResidualGate(0.3), ResidualGate(-1.2, learned=True)])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_describes_itself(diagonal, causal, residual, length):
    tokens = draw(4, length, 12)
    module = layer(diagonal, causal=causal, residual=residual, dropout=0.3, output_dropout=0.2).eval()
    attention = SoftmaxAttention.from_module(module)
    factor = residual.factor if isinstance(residual, ResidualGate) else residual
    assert (attention.residual, attention.causal) == (factor, causal)
    assert_close(attention(tokens), module(tokens), "blocks")
    assert_close(attention.weights(tokens), module(tokens, need_weights=True)[1], "blocks")


@every_diagonal
@every_causality
@pytest.mark.parametrize("length", [1, 2, 9])
def test_describes_itself_under_a_training_draw(diagonal, causal, length, generator):
    tokens = draw(4, length, 12)
    module = layer(diagonal, causal=causal, dropout=0.3).train()
    drawn = module.draw(tokens, generator=generator)
    attention = module.softmax_attention(bias=drawn.bias, multiplier=drawn.multiplier)
    assert_close(attention(tokens), module(tokens, draw=drawn), "blocks")
    assert_close(dense_jacobian(attention, tokens), dense_jacobian(lambda x: module(x, draw=drawn), tokens), "blocks")


@every_diagonal
@every_causality
def test_padding(diagonal, causal):
    tokens, padding = draw(3, 6, 12), torch.zeros(3, 6, dtype=torch.bool)
    padding[0, :2], padding[1, 4:] = True, True
    module = layer(diagonal, causal=causal).eval()
    out, weights = module(tokens, need_weights=True, padding=padding)
    assert_close(module.softmax_attention(padding=padding).weights(tokens), weights, "blocks")
    assert (weights.transpose(1, 3)[padding] == 0).all()
    assert_close(module(tokens, padding=padding), out, "blocks")
    short = module(tokens[:1, 2:])
    assert_close(out[:1, 2:], short, "blocks")


@every_diagonal
@every_causality
@pytest.mark.parametrize("training", [False, True])
def test_fused_and_manual_routes_agree(diagonal, causal, training):
    tokens, offset = draw(3, 5, 12), draw(3, 5, 12, seed=1)
    module = layer(diagonal, causal=causal).train(training)
    drawn = module.draw(tokens, generator=torch.Generator().manual_seed(2)) if training else None
    fused = module(tokens, offset, draw=drawn)
    manual, _ = module(tokens, offset, need_weights=True, draw=drawn)
    assert_close(fused, manual, "blocks")


def test_equals_the_stock_layer():
    tokens = draw(2, 6, 12)
    module = layer(residual=False)
    stock = nn.MultiheadAttention(12, 3, batch_first=True).double()
    stock.load_state_dict(
        {
            "in_proj_weight": module.projection.weight,
            "in_proj_bias": module.projection.bias,
            "out_proj.weight": module.output.weight,
            "out_proj.bias": module.output.bias,
        }
    )
    assert_close(module(tokens), stock(tokens, tokens, tokens)[0], "blocks")


def test_leading_axes_are_free():
    tokens, offset = draw(2, 3, 5, 12), draw(2, 1, 5, 12, seed=1)
    module = layer(DiagonalPenalty(0.3)).eval()
    out, weights = module(tokens, offset, need_weights=True)
    assert out.shape == tokens.shape
    assert weights.shape == (2, 3, 3, 5, 5)
    assert_close(module(tokens[1, 2], offset[1, 0]), out[1, 2], "blocks")


def test_the_offset_goes_under_the_output_dropout_and_not_through_the_attention():
    tokens, offset = draw(2, 5, 12), draw(2, 5, 12, seed=1)
    module = layer(output_dropout=0.5).eval()
    assert_close(module(tokens, offset), module(tokens) + offset, "blocks")
    module.train()
    torch.manual_seed(3)
    found = module(tokens, offset) - tokens
    torch.manual_seed(3)
    bare = module(tokens) - tokens
    kept = bare != 0
    assert_close(found, torch.where(kept, bare + 2 * offset, 0.0), "blocks")
    assert 0.2 < kept.double().mean() < 0.8


@every_causality
def test_weights_are_those_before_dropout(causal):
    tokens = draw(2, 5, 12)
    module = layer(dropout=0.5, causal=causal).train()
    _, weights = module(tokens, need_weights=True)
    assert_close(weights.sum(-1), torch.ones(2, 3, 5), "blocks")
    assert_close(weights, module.softmax_attention().weights(tokens), "blocks")


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_dropout_is_right_in_the_mean(need_weights):
    tokens = draw(1, 4, 12).expand(20_000, 4, 12)
    module = layer(dropout=0.3, residual=False).train()
    torch.manual_seed(0)
    out = module(tokens, need_weights=need_weights)
    out = out[0] if need_weights else out
    deviation = (out.mean(0) - module.eval()(tokens[0])).abs() / (out.std(0) / math.sqrt(len(out)))
    assert out.std(0).min() > 0
    assert deviation.max() < 5


def test_causal_outputs_ignore_the_future_exactly():
    blocks = dense_jacobian(layer(DiagonalMask(), causal=True).eval(), draw(1, 5, 12))
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert (blocks[:, future] == 0).all()
    assert (blocks[:, ~future].abs().amax((-2, -1)) > 0).all()


# -- rows that could see nothing ----------------------------------------------------------------------------------


@every_diagonal
@every_causality
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_outputs_and_gradients_are_finite(diagonal, causal, training, need_weights, length):
    tokens = draw(16, length, 12).requires_grad_(True)
    module = layer(diagonal, causal=causal).train(training)
    torch.manual_seed(0)
    out = module(tokens, need_weights=need_weights)
    if need_weights:
        out, weights = out
        assert_close(weights.sum(-1), torch.ones(16, 3, length), "blocks")
    out.square().sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(tokens.grad).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())


@pytest.mark.parametrize("diagonal", [DiagonalMask(), DiagonalDropout(1.0)])
def test_the_only_visible_key_stays(diagonal):
    module = layer(diagonal, causal=True).train()
    _, weights = module(draw(1, 3, 12), need_weights=True)
    diagonal_weights = weights.diagonal(dim1=-2, dim2=-1)
    assert (diagonal_weights[..., 0] == 1).all()
    assert (diagonal_weights[..., 1:] == 0).all()
    padding = torch.tensor([[False, True, True]])
    _, weights = module(draw(1, 3, 12), need_weights=True, padding=padding)
    assert (weights[..., 0] == 1).all()


@every_diagonal
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_row_without_any_key_does_not_disturb_the_others(diagonal, need_weights):
    tokens, padding = draw(2, 4, 12).requires_grad_(True), torch.tensor([[True] * 4, [True, False, False, False]])
    module = layer(diagonal, causal=True).eval()
    out = module(tokens, padding=padding, need_weights=need_weights)
    out = out[0] if need_weights else out
    assert_close(out[0], tokens[0] + module.output.bias, "blocks")
    assert_close(out[1, 1:], module(tokens[1, 1:]), "blocks")
    out.square().sum().backward()
    assert torch.isfinite(tokens.grad).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())


def test_length_is_free_and_nothing_is_buffered():
    module = layer()
    assert not dict(module.named_buffers())
    assert {module(draw(1, length, 12)).shape[1] for length in (1, 3, 500)} == {1, 3, 500}


# -- errors -------------------------------------------------------------------------------------------------------


def test_errors():
    with pytest.raises(InputError, match="dim=10 is not divisible by heads=3"):
        TemporalAttention(10, 3)
    with pytest.raises(InputError, match="tokens have 8 features, but the layer takes 12"):
        layer()(draw(1, 3, 8))
    with pytest.raises(InputError, match=r"tokens are empty: shape \(2, 0, 12\)"):
        layer()(draw(2, 0, 12))
    for rate in (1.0, -0.1, math.nan):
        with pytest.raises(InputError, match=f"output_dropout must be a rate of at least 0 and below 1, not {rate}"):
            TemporalAttention(12, 3, output_dropout=rate)


# -- positions ----------------------------------------------------------------------------------------------------


def test_time_encoding_is_the_formula():
    table = time_encoding(12, 72, 12, dtype=torch.float64)
    assert table.shape == (12, 72)
    for step, k in [(0, 0), (1, 0), (5, 7), (11, 35)]:
        angle = step * 10000 ** (-2 * k / 72) * 72 / 12
        assert table[step, 2 * k].item() == pytest.approx(math.sin(angle), abs=1e-12)
        assert table[step, 2 * k + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_a_longer_time_encoding_begins_with_the_shorter():
    assert torch.equal(time_encoding(500, 9, 12)[:12], time_encoding(12, 9, 12))
    assert time_encoding(1, 1, 1).tolist() == [[0.0]]


def test_time_encoding_errors():
    with pytest.raises(InputError, match="length of a time encoding must be at least 1, not 0"):
        time_encoding(0, 8, 12)


# -- graph convolutions -------------------------------------------------------------------------------------------


def spatial(kind, graph=None):
    torch.manual_seed(2)
    return spatial_layer(kind, 4, 6, graph=graph).double()


def by_loops(states, linear, terms):
    """The definition: concatenate [x, P1 x, ...] node by node, then project."""
    mixed = [torch.stack([sum(p[n, m] * states[:, m] for m in range(4)) for n in range(4)], 1) for p in terms]
    return linear(torch.cat([states, *mixed], dim=-1))


@pytest.mark.parametrize("kind", ["as_published", "adaptive", "distance"])
def test_graph_convolutions_are_their_definition(kind):
    states, graph = draw(2, 4, 3, 6), draw(4, 4, seed=1).abs().float()
    module = spatial(kind, graph if kind == "distance" else None)
    if kind == "distance":
        weights = module.graph
        a, b = weights / weights.sum(1, keepdim=True), weights.T / weights.T.sum(1, keepdim=True)
    else:
        source, target = module.tables.source, module.tables.target
        a = torch.softmax(torch.relu(source @ target.T), 1)
        b = torch.softmax(torch.relu(target @ source.T), 1)
    if kind == "as_published":
        a, b = a.diagonal().diag(), b.diagonal().diag()
    assert_close(module(states), by_loops(states, module.linear, (a, a @ a, b, b @ b)), "blocks")


def test_no_spatial_module():
    assert spatial_layer("none", 4, 6) is None


def test_an_isolated_node_stays_alone():
    graph = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    assert torch.equal(row_normalised(graph), torch.tensor([[0.0, 0.0], [0.25, 0.75]]))
    states = draw(1, 2, 3, 4)
    assert propagate(states, row_normalised(graph).double(), row_normalised(graph).double()).shape == (1, 2, 3, 20)


def test_spatial_errors():
    with pytest.raises(InputError, match="unknown spatial module 'gat'; known: as_published, adaptive, distance, none"):
        spatial_layer("gat", 4, 6)
    with pytest.raises(InputError, match="spatial='distance' needs the road graph; give graph="):
        spatial_layer("distance", 4, 6)
    with pytest.raises(InputError, match=r"the road graph has shape \(3, 3\), but there are 4 nodes"):
        spatial_layer("distance", 4, 6, graph=torch.eye(3))
    with pytest.raises(InputError, match="entries that are negative or not finite"):
        spatial_layer("distance", 4, 6, graph=-torch.eye(4))
