"""Regularisers of the attention diagonal."""

import math

import pytest
import torch
from oracles import dense_jacobian, draw
from tolerances import assert_close

from sensitivity import measure
from sensitivity.errors import InputError
from sensitivity.layers import (
    DiagonalDropout,
    DiagonalLearnedPenalty,
    DiagonalLengthPenalty,
    DiagonalMask,
    DiagonalPenalty,
    ResidualGate,
    TemporalAttention,
    diagonal_from_config,
    residual_from_config,
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
    "diagonal",
    [
        DiagonalMask(),
        DiagonalPenalty(-0.05),
        DiagonalLearnedPenalty(2, 0.3),
        DiagonalLengthPenalty(-0.05, 12),
        DiagonalDropout(0.2),
        DiagonalDropout(0.3, "weights", True),
    ],
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
    with pytest.raises(
        InputError, match="unknown diagonal regulariser 'band'; known: dropout, learned-penalty, length"
    ):
        diagonal_from_config({"kind": "band"})
    with pytest.raises(InputError, match=r"DiagonalMask does not take the arguments \['p'\]"):
        diagonal_from_config({"kind": "mask", "p": 0.1})


# -- a penalty for each head ------------------------------------------------------------------------------------------


def test_a_learned_penalty_multiplies_the_odds_of_its_head():
    tokens, module = draw(3, T, 8), layer(DiagonalLearnedPenalty(2, 0.0))
    plain = on_diagonal(weights(module, tokens))
    with torch.no_grad():
        module.diagonal.penalty.copy_(torch.tensor([-2.0, 0.7]))
    moved = on_diagonal(weights(module, tokens))
    factor = torch.tensor([-2.0, 0.7]).double().exp()[:, None]
    assert_close(moved / (1 - moved), factor * plain / (1 - plain), "blocks")


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_learned_penalty_is_trained(need_weights, training):
    """Its gradient through the fused and the manual route, against finite differences."""
    tokens, module = draw(3, T, 8), layer(DiagonalLearnedPenalty(2, 0.2)).train(training)

    def loss():
        out = module(tokens, need_weights=need_weights)
        return (out[0] if need_weights else out).square().sum()

    (found,) = torch.autograd.grad(loss(), module.diagonal.penalty)
    expected, step = torch.zeros(2), 1e-5
    with torch.no_grad():
        for head in range(2):
            both = []
            for sign in (1, -1):
                module.diagonal.penalty[head] += sign * step
                both.append(loss())
                module.diagonal.penalty[head] -= sign * step
            expected[head] = (both[0] - both[1]) / (2 * step)
    assert found.abs().min() > 1e-3
    assert_close(found, expected, "differences")


def test_a_learned_penalty_fits_its_layer_only():
    with pytest.raises(InputError, match="the penalty is learned for 4 heads, but the layer has 2"):
        TemporalAttention(8, 2, DiagonalLearnedPenalty(4))
    with pytest.raises(InputError, match="needs a number of heads of at least 1, not 0"):
        DiagonalLearnedPenalty(0)
    with pytest.raises(InputError, match="DiagonalLearnedPenalty takes a finite number, not inf"):
        DiagonalLearnedPenalty(2, math.inf)


# -- a penalty that follows the length --------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [2, 5, 12, 90])
def test_with_uniform_logits_the_diagonal_weight_is_the_same_at_every_length(causal, length):
    module = layer(DiagonalLengthPenalty(0.4, 12), causal=causal)
    with torch.no_grad():
        module.projection.weight[:8] = 0
        module.projection.bias[:8] = 0  # no query, no logit
    found = on_diagonal(weights(module, draw(1, length, 8)))
    expected = math.exp(0.4) / (math.exp(0.4) + 11)
    seen = found[..., 1:] if causal else found  # the first row of a causal layer sees itself alone
    assert_close(seen, torch.full_like(seen, expected), "blocks")
    if causal:
        assert (found[..., 0] == 1).all()


def test_with_exchangeable_logits_the_mean_diagonal_weight_settles_where_it_would_vanish():
    means = {}
    for diagonal in (DiagonalPenalty(0.0), DiagonalLengthPenalty(0.0, 12)):
        module = layer(diagonal)
        with torch.no_grad():
            module.projection.weight *= 2
        means[diagonal.kind] = [
            float(on_diagonal(weights(module, draw(4, length, 8, seed=length))).mean().detach())
            for length in (12, 96, 768)
        ]
    plain, kept = means["penalty"], means["length-penalty"]
    assert plain[0] == pytest.approx(kept[0], rel=1e-9)  # the same at the length of training
    assert plain[2] < plain[0] / 30
    assert all(value == pytest.approx(kept[0], rel=0.2) for value in kept)


def test_at_the_length_of_training_it_is_the_constant_penalty():
    tokens = draw(3, T, 8)
    assert_close(layer(DiagonalLengthPenalty(-0.8, T))(tokens), layer(DiagonalPenalty(-0.8))(tokens), "blocks")


def test_a_length_penalty_is_measured_at_every_length_as_the_layer_acts_there():
    module = layer(DiagonalLengthPenalty(-0.5, 4)).eval()
    for length in (1, 2, 6):
        tokens = draw(2, length, 8)
        by_autograd = dense_jacobian(module, tokens).square().sum((-2, -1)).sqrt()
        assert_close(measure(module, tokens).norms, by_autograd, "maps")


@pytest.mark.parametrize("length", [1, 0, 2.5, True])
def test_a_length_penalty_needs_a_length(length):
    with pytest.raises(
        Exception, match=r"needs the length of training, an integer of at least 2|violates type|Type-check"
    ):
        DiagonalLengthPenalty(0.1, length)


# -- the gate on the residual -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["closed_form", "autodiff"])
@pytest.mark.parametrize("learned", [False, True])
def test_a_gate_scales_the_residual_path_and_no_other(backend, learned):
    tokens = draw(2, T, 8)
    plain, gated = layer(None).eval(), layer(None, residual=ResidualGate(-0.4, learned)).eval()
    assert_close(gated(tokens), plain(tokens) - 1.4 * tokens, "float32")
    factor = gated.residual.factor
    blocks = dense_jacobian(gated, tokens)
    expected = dense_jacobian(plain, tokens)
    expected.diagonal(dim1=1, dim2=2).diagonal(dim1=1, dim2=2).add_(factor - 1)
    assert_close(blocks, expected, "blocks")
    found, before = (measure(module, tokens, backend=backend) for module in (gated, plain))
    assert_close(found.norms, blocks.square().sum((-2, -1)).sqrt(), "maps")
    assert_close(found.diagonal, before.diagonal, "maps")  # with the residual removed there is no difference
    if backend == "closed_form":
        paths = measure(gated, tokens, paths=True).paths
        same = measure(plain, tokens, paths=True).paths
        assert_close(paths["residual"], abs(factor) * same["residual"], "blocks")
        for name in ("value", "key", "query"):
            assert_close(paths[name], same[name], "blocks")


@pytest.mark.parametrize("wanted", [True, False, 0.25])
@pytest.mark.parametrize("backend", ["closed_form", "autodiff"])
def test_the_residual_can_be_asked_for(wanted, backend):
    tokens, module = draw(2, T, 8), layer(None, residual=ResidualGate(0.6)).eval()
    found = measure(module, tokens, residual=wanted, backend=backend)
    blocks = dense_jacobian(lambda x: module(x) + (float(wanted) - 0.6) * x, tokens)
    assert_close(found.norms, blocks.square().sum((-2, -1)).sqrt(), "maps")
    assert_close(found.diagonal, measure(module, tokens).diagonal, "maps")


def test_a_gate_of_one_is_the_residual_and_a_learned_one_is_trained():
    tokens = draw(2, T, 8)
    assert_close(layer(None, residual=ResidualGate(1.0))(tokens), layer(None)(tokens), "blocks")
    module = layer(None, residual=ResidualGate(0.5, learned=True))
    (found,) = torch.autograd.grad(module(tokens).square().sum(), module.residual.gate)
    assert_close(found, 2 * (module(tokens) * tokens).sum(), "blocks")
    assert not dict(layer(None, residual=ResidualGate(0.5)).residual.named_parameters())


def test_gates_from_their_configuration():
    gate = residual_from_config(ResidualGate(0.5, learned=True).config())
    assert repr(gate) == "ResidualGate(value=0.5, learned=True)"
    assert residual_from_config(True) is True
    assert residual_from_config(False) is False
    with pytest.raises(InputError, match=r"residual must be True, False or the value and learned of a gate, not {'va"):
        residual_from_config({"value": 0.5})
    with pytest.raises(InputError, match="ResidualGate takes a finite number, not nan; 1 is the plain residual"):
        ResidualGate(math.nan)
