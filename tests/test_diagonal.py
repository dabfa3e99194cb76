"""Regularisers of the attention diagonal."""

import math

import pytest
import torch
from oracles import dense_jacobian, draw
from tolerances import assert_close

from sensitivity.errors import InputError
from sensitivity.layers import (
    DiagonalDropout,
    DiagonalMask,
    DiagonalPenalty,
    TemporalAttention,
    diagonal_from_config,
)

T = 7


def layer(diagonal, **options):
    torch.manual_seed(0)
    return TemporalAttention(8, 2, diagonal, **options).double()


def weights(module, tokens, **options):
    return module(tokens, need_weights=True, **options)[1]


def on_diagonal(matrices):
    return matrices.diagonal(dim1=-2, dim2=-1)


@pytest.mark.parametrize("training", [False, True])
def test_mask_and_penalty_act_in_both_modes(training):
    tokens = draw(3, T, 8)
    plain = weights(layer(None).train(training), tokens)
    masked = weights(layer(DiagonalMask()).train(training), tokens)
    assert (on_diagonal(masked) == 0).all()
    off = plain - torch.diag_embed(on_diagonal(plain))
    assert_close(masked, off / off.sum(-1, keepdim=True), "blocks")

    punished = weights(layer(DiagonalPenalty(-0.5)).train(training), tokens)
    odds = on_diagonal(punished) / (1 - on_diagonal(punished))
    assert_close(odds, math.exp(-0.5) * on_diagonal(plain) / (1 - on_diagonal(plain)), "blocks")


@pytest.mark.parametrize("where", ["logits", "weights"])
@pytest.mark.parametrize("shared", [False, True])
def test_dropout_acts_in_training_only(where, shared):
    tokens = draw(3, T, 8)
    plain = layer(None).eval()
    module = layer(DiagonalDropout(0.5, where, shared))
    assert_close(module.eval()(tokens), plain(tokens), "blocks")
    assert (module.train()(tokens) - plain(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize(("shared", "shape"), [(False, (5, 3, 40)), (True, (1, 1, 40))])
def test_what_one_draw_of_dropped_logits_is_shared_by(shared, shape, generator):
    hidden = DiagonalDropout(0.3, shared=shared).sample_hidden(5, 3, 40, torch.device("cpu"), generator)
    assert tuple(hidden.shape) == shape
    assert hidden.any()
    assert not hidden.all()
    if not shared:
        assert not torch.equal(hidden[0, 0], hidden[0, 1])
        assert not torch.equal(hidden[0, 0], hidden[1, 0])


def test_dropped_logits_are_a_mask_of_those_rows_without_rescaling(generator):
    tokens = draw(2, T, 8)
    module = layer(DiagonalDropout(0.5))
    drawn = module.draw(tokens, generator=generator)
    gone = on_diagonal(drawn.bias) == -math.inf
    found = weights(module, tokens, draw=drawn)
    plain, masked = weights(layer(None), tokens), weights(layer(DiagonalMask()), tokens)
    assert_close(found, torch.where(gone[..., None], masked, plain), "blocks")
    assert drawn.multiplier is None
    assert 0 < gone.double().mean() < 1


def test_dropped_weights_are_right_in_the_mean_and_in_rate(generator):
    factors = DiagonalDropout(0.3, "weights").sample_multiplier(100, 10, 100, torch.zeros(1).double(), generator)
    assert set(factors.unique().tolist()) == {0.0, 1 / 0.7}
    assert abs(factors.mean().item() - 1) < 4 * math.sqrt(0.3 / 0.7 / factors.numel())
    hidden = DiagonalDropout(0.3).sample_hidden(100, 10, 100, torch.device("cpu"), generator)
    assert abs(hidden.double().mean().item() - 0.3) < 4 * math.sqrt(0.21 / hidden.numel())


@pytest.mark.parametrize("where", ["logits", "weights"])
def test_no_dropout_samples_nothing(where, generator):
    module = layer(DiagonalDropout(0.0, where))
    drawn = module.draw(draw(2, T, 8), generator=generator)
    assert drawn.bias is None
    assert drawn.multiplier is None


def test_a_hard_mask_leaves_the_query_path_on_the_diagonal():
    tokens = draw(1, T, 8)
    module = layer(DiagonalMask(), residual=False).eval()
    blocks = dense_jacobian(module, tokens)
    diagonal = blocks.diagonal(dim1=1, dim2=2)
    assert diagonal.abs().max() > 1e-3
    with torch.no_grad():
        module.projection.weight[:8] = 0  # queries no longer depend on the tokens: their path is gone
    silent = dense_jacobian(module, tokens).diagonal(dim1=1, dim2=2)
    assert silent.abs().max() == 0


@pytest.mark.parametrize(
    "diagonal", [DiagonalMask(), DiagonalPenalty(-0.05), DiagonalDropout(0.2), DiagonalDropout(0.3, "weights", True)]
)
def test_config_rebuilds(diagonal):
    again = diagonal_from_config(diagonal.config())
    assert type(again) is type(diagonal)
    assert again.config() == diagonal.config()
    assert repr(again) == repr(diagonal)


def test_no_config_is_no_regulariser():
    assert diagonal_from_config(None) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "0.1", None, True])
def test_penalty_refuses_what_is_not_a_finite_number(value):
    with pytest.raises(
        Exception, match=r"DiagonalPenalty takes a finite number|violates type hint|Type-check"
    ) as found:
        DiagonalPenalty(value)
    if isinstance(value, float):
        assert isinstance(found.value, InputError)
        assert "for a hard mask use DiagonalMask()" in str(found.value)


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_dropout_refuses_what_is_no_probability(p):
    with pytest.raises(InputError, match=rf"takes a probability p between 0 and 1, not {p}"):
        DiagonalDropout(p)


def test_dropout_refuses_unknown_places_and_rescaling_by_infinity():
    with pytest.raises(InputError, match="where='logits' or where='weights', not 'scores'"):
        DiagonalDropout(0.1, where="scores")
    with pytest.raises(InputError, match="p must be below 1, not 1"):
        DiagonalDropout(1.0, where="weights")
    assert DiagonalDropout(1.0).p == 1


def test_unknown_configurations():
    with pytest.raises(InputError, match="unknown diagonal regulariser 'band'; known: dropout, mask, penalty"):
        diagonal_from_config({"kind": "band"})
    with pytest.raises(InputError, match=r"DiagonalMask does not take the arguments \['p'\]"):
        diagonal_from_config({"kind": "mask", "p": 0.1})
