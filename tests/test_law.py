"""The law against simulation, against direct sampling of its parts, and in its limits."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from sensitivity import InputError, SoftmaxAttention
from sensitivity.bounds import Law, law
from sensitivity.bounds import gaussian as limits
from sensitivity.bounds.gaussian import Tokens
from sensitivity.bounds.layer import LayerConstants
from sensitivity.bounds.one_head import OneHead
from sensitivity.jacobian import closed_form

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def correlated(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean, and a covariance far from the identity."""
    factor = normal(dim, dim, seed=3) / dim**0.5
    return 0.3 * normal(dim, seed=4), factor @ factor.mT + 0.2 * torch.eye(dim, dtype=DOUBLE)


def simulate(
    attention: SoftmaxAttention, length: int, samples: int, mean: torch.Tensor, covariance: torch.Tensor
) -> tuple[float, float, float, float]:
    """RMS norm off the diagonal and mean norm on it, each with its standard error, from sampled sequences."""
    tokens = mean + normal(samples, length, attention.dim, seed=17) @ torch.linalg.cholesky(covariance).mT
    norms = closed_form.norm_maps(attention, tokens, weights=False).total
    visible = ~attention.hidden(length)[0].all(dim=0) & ~torch.eye(length, dtype=torch.bool)
    off = norms.square()[:, visible].mean(dim=1)
    on = norms.diagonal(dim1=1, dim2=2).mean(dim=1)
    root, many = off.mean().sqrt(), samples**0.5
    return float(root), float(off.std() / many / (2 * root)), float(on.mean()), float(on.std() / many)


def agrees(found: Law, place: int, simulated: tuple[float, float, float, float], percent: float) -> None:
    """Off the diagonal to so many percent beyond three standard errors of both sides."""
    off, error, _, _ = simulated
    law_off, law_error = float(found.off_diagonal[place]), float(found.standard_error[place])
    assert abs(off - law_off) < percent / 100 * law_off + 3 * math.hypot(error, law_error)
    assert math.hypot(error, law_error) < 0.03 * law_off  # or the comparison says nothing


def test_one_head_is_within_one_percent_at_every_length():
    """D = 32, one head, tokens N(0, I), T from 4 to 1024; the limit of large T is far off until T = 512."""
    attention = SoftmaxAttention.random(32, 1, seed=0, dtype=DOUBLE)
    lengths = [4, 32, 256, 1024]
    found = law(attention, lengths)
    plain = torch.zeros(32, dtype=DOUBLE), torch.eye(32, dtype=DOUBLE)
    for place, (length, samples) in enumerate(zip(lengths, (2500, 400, 24, 4), strict=True)):
        simulated = simulate(attention, length, samples, *plain)
        agrees(found, place, simulated, percent=1)
        on, error = simulated[2:]
        assert abs(on - float(found.diagonal[place])) < 0.01 * on + 3 * error
        if length >= 256:
            assert abs(on - float(found.asymptotic_diagonal[place])) < 0.01 * on
    assert found.valid.all()
    ratios = (found.off_diagonal / found.asymptotic_off_diagonal).tolist()
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.7
    assert ratios[-1] > 0.95
    assert found.asymptotic_valid.tolist() == [False, False, False, True]


def test_several_heads_with_correlated_tokens_are_within_five_percent():
    """D = 12, three heads, biases, mean and covariance: here the limit of large T does not even exist."""
    attention = SoftmaxAttention.random(12, 3, seed=0, dtype=DOUBLE, biases=True)
    mean, covariance = correlated(12)
    lengths = [2, 8, 32, 192]
    found = law(attention, lengths, mean, covariance)
    for place, (length, samples) in enumerate(zip(lengths, (5000, 2000, 500, 100), strict=True)):
        agrees(found, place, simulate(attention, length, samples, mean, covariance), percent=1 if length < 100 else 5)
    assert torch.isinf(found.asymptotic_off_diagonal).all()
    assert not found.asymptotic_valid.any()


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"diagonal_bias": -math.inf},
        {"causal": True, "diagonal_bias": 1.5, "residual": False},
        {"diagonal_bias": 1.5, "diagonal_length": 6, "residual": 0.3},
        {"diagonal_bias": -0.5, "diagonal_length": 20, "causal": True, "residual": -2.0},
    ],
    ids=["causal", "mask", "causal penalty", "length penalty and gate", "causal length penalty and gate"],
)
def test_masks_penalties_and_causal_rows(heads, options):
    attention = SoftmaxAttention.random(12, heads, seed=0, dtype=DOUBLE, gain=0.9, biases=True, **options)
    mean, covariance = correlated(12)
    lengths = [3, 12, 48]
    found = law(attention, lengths, mean, covariance)
    for place, (length, samples) in enumerate(zip(lengths, (4000, 1500, 250), strict=True)):
        simulated = simulate(attention, length, samples, mean, covariance)
        agrees(found, place, simulated, percent=1)
        on, error = simulated[2:]
        assert abs(on - float(found.diagonal[place])) < 0.012 * on + 3 * error


def test_sampled_scores_agree_with_exact_integrals():
    """One head computed as if it were several: two methods, one number."""
    attention = SoftmaxAttention.random(8, 1, seed=5, dtype=DOUBLE, diagonal_bias=-0.7)
    names = ("query_weight", "key_weight", "value_weight", "output_weight")
    doubled = {name: torch.cat([getattr(attention, name), 0 * getattr(attention, name)]) for name in names}
    padded = dataclasses.replace(attention, **doubled)
    exact, sampled = law(attention, [2, 10, 50]), law(padded, [2, 10, 50])
    assert exact.method != sampled.method
    error = (exact.standard_error**2 + sampled.standard_error**2).sqrt()
    assert ((exact.off_diagonal - sampled.off_diagonal).abs() < 4 * error + 1e-9).all()
    torch.testing.assert_close(exact.diagonal, sampled.diagonal, rtol=5e-3, atol=0)


def test_moments_of_weights_are_exact_given_the_query():
    """Two tokens: one other token, so that the second moment is a one-dimensional Gauss-Hermite integral."""
    attention = SoftmaxAttention.random(4, 1, seed=2, dtype=DOUBLE, diagonal_bias=0.4)
    layer = LayerConstants.of(attention, spectral=False)
    tokens = Tokens.of(torch.zeros(4, dtype=DOUBLE), torch.eye(4, dtype=DOUBLE))
    query = normal(5, 4, seed=8)
    found = OneHead(layer, tokens, query, 1, lambda _: 0.4).second_moments(1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    grid = torch.tensor(np.stack(np.meshgrid(*[nodes] * 4), axis=-1).reshape(-1, 4))
    mass = torch.tensor(np.stack(np.meshgrid(*[weights] * 4), axis=-1).reshape(-1, 4)).prod(dim=-1)
    pairs = torch.stack([query[0].expand_as(grid), grid], dim=1)
    norms = closed_form.norm_maps(attention, pairs, weights=False).total[:, 0, 1]
    assert float(found[0]) == pytest.approx(float((mass * norms**2).sum() / mass.sum()), rel=1e-5)


def test_the_limit_is_the_expectation_of_its_integrand():
    """The closed Gaussian integral against plain sampling of what it integrates."""
    attention = SoftmaxAttention.random(6, 2, seed=1, dtype=DOUBLE, gain=0.7, biases=True)
    layer, (mean, covariance) = LayerConstants.of(attention, spectral=False), correlated(6)
    tokens = Tokens.of(mean, covariance)
    queries = tokens.draw(normal(400_000, 6, seed=6))
    gradient, value = layer.gradients(queries), layer.value_maps
    image = torch.einsum("hod,de,nge->nhgo", value, covariance, gradient)  # M_h S w_g
    gain = torch.einsum("god,nhd->nhgo", value, gradient)  # M_g w_h
    angle = gradient @ gradient.mT
    trace = torch.einsum("hod,de,goe->hg", value, covariance, value)
    inner = torch.einsum("nhgo,nhgo->nhg", image, gain)
    bracket = torch.einsum("hod,god->hg", value, value) + inner + inner.mT
    bracket = bracket + angle * (trace + torch.einsum("nhgo,ngho->nhg", image, image))
    sample = (torch.exp(torch.einsum("nhd,de,nge->nhg", gradient, covariance, gradient)) * bracket).sum(dim=(1, 2))
    error = float(sample.std()) / len(sample) ** 0.5
    assert abs(limits.limit_off_diagonal(layer, tokens) - float(sample.mean())) < 4 * error
    assert error < 0.01 * float(sample.mean())


def test_the_limit_stops_existing_where_theory_says():
    """Eigenvalues of N^T S N reach one half: gain^4 scales them."""
    attention = SoftmaxAttention.random(8, 1, seed=0, dtype=DOUBLE)
    constants = LayerConstants.of(attention, spectral=False)
    top = float(torch.linalg.matrix_norm(constants.score_maps[0], ord=2)) ** 2
    edge = (0.5 / top) ** 0.25
    for gain, finite in ((0.98 * edge, True), (1.02 * edge, False)):
        scaled = SoftmaxAttention.random(8, 1, seed=0, dtype=DOUBLE, gain=gain)
        found = law(scaled, [8], finite=False)
        assert bool(torch.isfinite(found.off_diagonal).all()) is finite
        assert found.diagonal.isfinite().all()


def test_uniform_attention_has_a_law_by_hand():
    """Without scores every weight is 1/T: the norm off the diagonal is |M| / T and the diagonal I + M / T."""
    attention = SoftmaxAttention.random(8, 2, seed=0, dtype=DOUBLE, gain=0.0)
    found = law(attention, [1, 2, 7, 100])
    value = (attention.output_weight @ attention.value_weight).sum(dim=0)
    size = float(torch.linalg.matrix_norm(value))
    assert math.isnan(float(found.off_diagonal[0]))
    for length, off, on in zip(found.lengths, found.off_diagonal, found.diagonal, strict=True):
        if length > 1:
            assert float(off) == pytest.approx(size / length, rel=1e-9)
        block = torch.eye(8, dtype=DOUBLE) + value / length
        assert float(on) == pytest.approx(float(torch.linalg.matrix_norm(block)), rel=1e-9)
    assert found.asymptotic_off_diagonal[3] == pytest.approx(size / 100)
    assert law(attention, [100], finite=False).valid.all()


def test_the_limit_knows_where_it_is_valid():
    attention = SoftmaxAttention.random(32, 1, seed=0, dtype=DOUBLE)
    lengths = [16, 128, 512, 2048]
    told = law(attention, lengths, finite=False)
    assert told.valid.tolist() == law(attention, lengths).asymptotic_valid.tolist() == [False, False, True, True]
    assert told.method == "limit of large T"


def test_real_tokens_are_predicted_from_a_pool():
    """Skewed tokens, most of them silent: the pool's law against sequences drawn from the same distribution."""
    attention = SoftmaxAttention.random(10, 2, seed=0, dtype=DOUBLE)

    def tokens(count: int, seed: int) -> torch.Tensor:
        busy = torch.rand(count, 1, generator=torch.Generator().manual_seed(seed + 100)) < 0.2
        return torch.nn.functional.layer_norm(normal(count, 10, seed=seed).exp(), (10,)) * busy

    lengths = [4, 16, 64]
    found = law(attention, lengths, tokens=tokens(2000, 1), draws=4000)
    gaussian = law(attention, lengths[-1:], tokens(2000, 1).mean(0), tokens(2000, 1).T.cov())
    for place, (length, samples) in enumerate(zip(lengths, (1500, 400, 60), strict=True)):
        sequences = tokens(samples * length, 2).unflatten(0, (samples, length))
        norms = closed_form.norm_maps(attention, sequences, weights=False).total
        measured = float(norms.square()[:, ~torch.eye(length, dtype=torch.bool)].mean().sqrt())
        assert abs(measured / float(found.off_diagonal[place]) - 1) < 0.03
        assert abs(float(norms.diagonal(dim1=1, dim2=2).mean()) / float(found.diagonal[place]) - 1) < 0.02
    assert abs(measured / float(gaussian.off_diagonal[-1]) - 1) > 0.05  # a Gaussian would not have done
    assert found.method == "rows resampled from the pool"


def test_a_pool_without_replacement_is_the_sequence_itself():
    """A row that takes every token of a pool of T tokens has the norms that the sequence has, in any order."""
    attention, tokens = SoftmaxAttention.random(6, 2, seed=0, dtype=DOUBLE), normal(1, 9, 6)
    found = law(attention, [9], tokens=tokens, draws=4000)
    norms = closed_form.norm_maps(attention, tokens, weights=False).total[0]
    off = norms[~torch.eye(9, dtype=torch.bool)].square().mean().sqrt()
    assert float(found.off_diagonal[0]) == pytest.approx(float(off), rel=0.02)
    assert float(found.diagonal[0]) == pytest.approx(float(norms.diagonal().mean()), rel=0.01)


def test_sequences_of_their_own_are_pools_of_their_own():
    """Two sequences that lie apart: a row never mixes them, so the offset between them changes nothing."""
    attention = SoftmaxAttention.random(6, 1, seed=0, dtype=DOUBLE, gain=0.0)
    near = normal(2, 20, 6)
    apart = near + torch.tensor([0.0, 50.0], dtype=DOUBLE)[:, None, None]
    assert law(attention, [5], tokens=near).off_diagonal == pytest.approx(
        law(attention, [5], tokens=apart).off_diagonal
    )


def test_the_same_seed_gives_the_same_law():
    attention = SoftmaxAttention.random(8, 2, seed=0)
    state = torch.get_rng_state()
    first, second, other = (law(attention, [4, 16], seed=seed, draws=256) for seed in (0, 0, 1))
    assert torch.equal(first.off_diagonal, second.off_diagonal)
    assert not torch.equal(first.off_diagonal, other.off_diagonal)
    assert torch.equal(state, torch.get_rng_state())


def test_bad_input_is_refused():
    attention = SoftmaxAttention.random(6, 2, seed=0, dtype=DOUBLE)
    eye = torch.eye(6, dtype=DOUBLE)
    with pytest.raises(InputError, match="the law holds for exchangeable tokens, but the layer has a multiplier"):
        law(dataclasses.replace(attention, multiplier=torch.ones(4, 4, dtype=DOUBLE)), [4])
    with pytest.raises(InputError, match="but the layer has a bias"):
        law(dataclasses.replace(attention, bias=torch.zeros(4, 4, dtype=DOUBLE)), [4])
    with pytest.raises(InputError, match="give either tokens or a mean and covariance, not both"):
        law(attention, [4], covariance=eye, tokens=normal(9, 6))
    with pytest.raises(InputError, match=r"the mean has shape \(5,\), but the layer takes 6 features"):
        law(attention, [4], mean=torch.zeros(5, dtype=DOUBLE))
    with pytest.raises(InputError, match=r"the covariance has shape \(5, 5\); the layer needs \(6, 6\)"):
        law(attention, [4], covariance=torch.eye(5, dtype=DOUBLE))
    with pytest.raises(InputError, match="positive semi-definite, but its smallest eigenvalue is -1"):
        law(attention, [4], covariance=-eye)
    with pytest.raises(InputError, match="lengths must be at least 1, not 0"):
        law(attention, [0, 4])
    with pytest.raises(InputError, match="tokens have 5 features, but the layer takes 6"):
        law(attention, [4], tokens=normal(9, 5))


def test_a_penalty_that_follows_the_length_has_a_curve_but_no_limit():
    attention = SoftmaxAttention.random(8, 2, dtype=DOUBLE, diagonal_bias=0.2, diagonal_length=12)
    found = law(attention, [12, 48], draws=64)
    assert torch.isfinite(found.off_diagonal).all()
    assert found.asymptotic_off_diagonal.isnan().all()
    assert not found.asymptotic_valid.any()
    with pytest.raises(InputError, match=r"keeps the weight of a token on itself from vanishing.*use finite=True"):
        law(attention, [12, 48], finite=False)
