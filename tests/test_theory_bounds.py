"""The formulas of the bounds against what the toolkit evaluates, and the law's identities with matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sensitivity import SoftmaxAttention
from sensitivity.bounds import check
from sensitivity.bounds.evaluate import EVALUATE
from sensitivity.bounds.layer import LayerConstants
from sensitivity.bounds.local import top_eigenvalue
from sensitivity.bounds.problem import Problem
from sensitivity.bounds.rowwise import largest_weights
from theory import meanfield
from theory.bounds import BOUNDS, DEFINITIONS, MEANING


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def problem() -> Problem:
    return Problem(SoftmaxAttention.random(12, 3, seed=4, gain=0.3), normal(1, 6, 12), "spectral")


def rows(values: torch.Tensor) -> list[float]:
    return [float(value) for value in values]


def test_ball_formulas_are_what_is_evaluated(problem):
    ball, sizes = problem.on_ball, rows(problem.constants.sizes)
    heads = {"mu": sizes, "omega": rows(ball.gradient), "rho": rows(ball.radius)}
    length = {"T": 6, "R": problem.ball.radius}
    worst = BOUNDS["worst_case"].evaluate(heads, **length)
    found = EVALUATE["worst_case"][0](problem).bound
    assert worst == pytest.approx(float(found[0, 0, 1]))
    assert BOUNDS["expected_ball"].evaluate(heads, n=5) == pytest.approx(
        float(EVALUATE["expected_ball"][0](problem).bound[0, 0])
    )
    upper = BOUNDS["diagonal_ball"].evaluate(heads, delta=1, C=float(ball.query), **length)
    assert upper == pytest.approx(float(EVALUATE["diagonal_ball"][0](problem).bound[0, 0]))
    whole = BOUNDS["lipschitz"].evaluate(heads, delta=1, C=float(ball.query), T=6)
    assert whole == pytest.approx(float(EVALUATE["lipschitz"][0](problem).bound[0]))


def test_row_formulas_are_what_is_evaluated(problem):
    gradient, cloud = problem.gradients[0, 2], problem.cloud
    length = gradient.norm(dim=-1)
    along = torch.einsum("hod,hd->ho", problem.constants.value_maps, gradient).norm(dim=-1) / length
    sizes = problem.constants.sizes
    heads = {"mu": rows(sizes), "omega": rows(length), "rho": rows(cloud.radius[0]), "eta": rows(along)}
    found = float(EVALUATE["expected"][0](problem).bound[0, 2])
    assert found <= BOUNDS["expected"].evaluate(heads, n=5) * (1 + 1e-9)
    per_head = [BOUNDS["expected"].evaluate({name: [row[h]] for name, row in heads.items()}, n=5) for h in range(3)]
    sums = [(heads["mu"][h] + heads["omega"][h] * heads["rho"][h]) / 5 for h in range(3)]
    assert found == pytest.approx(sum(map(min, per_head, sums)))
    own = {"a": rows(problem.local[2][0, 2])}
    upper = BOUNDS["diagonal"].evaluate(heads | own, delta=1, C=float(cloud.query[0]))
    assert upper == pytest.approx(float(EVALUATE["diagonal"][0](problem).bound[0, 2]))


def test_the_local_formula_bounds_what_is_evaluated(problem):
    """Sorted weights and subset norms by hand, the narrow part by a singular value decomposition."""
    constants, attention, tokens = problem.constants, problem.attention, problem.tokens
    weights = attention.weights(tokens)[0, :, 2, 4]
    order = weights.argsort(descending=True)
    norms = [float(torch.linalg.matrix_norm(constants.value_maps[order[: k + 1]].sum(dim=0), ord=2)) for k in range(3)]
    values = torch.einsum("hod,td->hto", constants.value_maps, tokens[0])
    mean = torch.einsum("ht,hto->ho", attention.weights(tokens)[0, :, 2], values)
    gradient = constants.gradients(tokens[0, 2])
    basis, coordinates = torch.linalg.qr(gradient.mT)
    narrow = torch.einsum("h,hod,dp->op", weights, constants.value_maps, basis)
    narrow = narrow + torch.einsum("h,ho,ph->op", weights, values[:, 4] - mean, coordinates)
    gamma = float(torch.linalg.matrix_norm(narrow, ord=2))
    limit = BOUNDS["local"].evaluate({"beta": rows(weights[order]), "nu": norms}, **{r"\gamma": gamma})
    measured, found = float(problem.measured[0, 2, 4]), float(problem.local[0][0, 2, 4])
    assert measured <= limit
    assert found == pytest.approx(limit, rel=0.05)  # the top eigenvalue is taken from a high power
    upsilon = (values[:, 4] - mean).norm(dim=-1)
    heads = {
        "a": rows(weights), "mu": rows(constants.sizes), "upsilon": rows(upsilon), "omega": rows(gradient.norm(dim=-1))
    }  # fmt: skip
    assert BOUNDS["triangle"].evaluate(heads) == pytest.approx(float(problem.local[1][0, 2, 4]))


def test_the_lower_formula_is_what_is_evaluated():
    problem = Problem(SoftmaxAttention.random(8, 1, seed=4, gain=0.3), normal(1, 6, 8), "spectral")
    found = EVALUATE["diagonal_lower"][0](problem)
    weakest = float(problem.constants.outputs[-1])
    inner = (1 - float(found.bound[0, 0])) / weakest
    assert BOUNDS["diagonal_lower"].evaluate(**{r"\sigma_{\min}": weakest, "C_V": inner}) == pytest.approx(
        float(found.bound[0, 0])
    )
    assert found.lower
    assert BOUNDS["diagonal_lower"].kind == "lower"


@pytest.mark.parametrize(("layers", "kernel"), [(1, 3), (4, 3), (5, 2)])
def test_convolutions_attain_the_number_of_paths(layers, kernel):
    """Taps of one: the Jacobian of the stack is exactly the number of paths, and grows with the lag at first."""
    length = layers * (kernel - 1) + 1
    signal = torch.zeros(1, 1, 2 * length, dtype=torch.float64)
    signal[0, 0, 0] = 1
    taps = torch.ones(1, 1, kernel, dtype=torch.float64)
    for _ in range(layers):
        signal = torch.nn.functional.conv1d(torch.nn.functional.pad(signal, (kernel - 1, 0)), taps)
    paths = [BOUNDS["convolution"].evaluate(L=layers, K=kernel, tau=lag, **{"lambda": 1.0}) for lag in range(length)]
    assert paths == signal[0, 0, :length].tolist()
    assert np.sum(paths) == kernel**layers


def test_top_eigenvalue_is_a_close_upper_bound():
    factors = normal(500, 8, 8) * torch.logspace(-3, 3, 500, dtype=torch.float64)[:, None, None]
    gram = factors @ factors.mT
    top = torch.linalg.eigvalsh(gram)[:, -1]
    found = top_eigenvalue(gram)
    assert (found >= top * (1 - 1e-12)).all()
    assert (found <= top * 8 ** (1 / 32) * (1 + 1e-12)).all()
    identity = torch.eye(8, dtype=torch.float64)[None]
    assert float(top_eigenvalue(identity)[0]) == pytest.approx(8 ** (1 / 32))
    assert float(top_eigenvalue(0 * identity)[0]) == 0


@pytest.mark.parametrize("spectral", [True, False])
def test_mixtures_of_heads_are_bounded(spectral):
    constants = LayerConstants.of(SoftmaxAttention.random(12, 4, seed=1, dtype=torch.float64), spectral)
    weights = normal(300, 4).abs() ** 3
    whole = torch.einsum("nh,hod->nod", weights, constants.value_maps)
    norms = torch.linalg.matrix_norm(whole, ord=2 if spectral else "fro")
    found = constants.mixture(weights)
    assert (found >= norms * (1 - 1e-12)).all()
    assert float((norms / found).median()) > (0.8 if spectral else 1 - 1e-9)
    signed = normal(300, 4)
    whole = torch.einsum("nh,hod->nod", signed, constants.value_maps)
    assert (
        constants.mixture(signed) >= torch.linalg.matrix_norm(whole, ord=2 if spectral else "fro") * (1 - 1e-12)
    ).all()
    assert (found <= (weights * constants.sizes).sum(dim=-1) * (1 + 1e-12)).all()


def test_heads_too_many_for_a_table_are_bounded_by_products():
    attention = SoftmaxAttention.random(128, 16, seed=1)
    assert LayerConstants.of(attention, spectral=True).subsets is None
    found = check(attention, normal(1, 8, 128), ["local", "triangle"])
    assert found["local"].violations == 0
    assert found["local"].tightness > found["triangle"].tightness


def test_the_largest_weight_is_attained():
    """One score at the top of its range, all others at the bottom, on any prior."""
    prior = torch.softmax(normal(5), dim=0)
    for spread in (0.0, 0.5, 3.0):
        weight, product = largest_weights(prior[:, None], torch.tensor([spread], dtype=torch.float64))
        scores = torch.full((5,), -spread, dtype=torch.float64)
        scores[2] = 0
        attained = torch.softmax(prior.log() + scores, dim=0)[2]
        assert float(weight[2, 0]) == pytest.approx(float(attained))
        assert float(product[2, 0]) == pytest.approx(min(float(attained), 0.5) * (1 - min(float(attained), 0.5)))


@pytest.mark.parametrize("name", BOUNDS)
def test_every_bound_is_documented(name):
    bound = BOUNDS[name]
    assert bound.name == name
    assert len(bound.proof) > 60
    assert bound.latex().count(r"\le " if bound.kind == "upper" else r"\ge ") >= 1
    symbols = {
        str(symbol).lstrip("\\").replace("{", "").replace("}", "").replace("\\", "")
        for symbol in bound.full().free_symbols
    }
    known = {key.split("_h")[0].split("_k")[0] for key in MEANING} | {
        "H",
        "T",
        "R",
        "L",
        "K",
        "tau",
        "lambda",
        "i",
        "j",
    }
    assert {symbol for symbol in symbols if not symbol.startswith(("N^", "A")) and "[" not in symbol} <= known | {"a"}
    assert DEFINITIONS


def test_a_missing_value_is_named():
    with pytest.raises(ValueError, match="the bound 'lipschitz' needs a value for T"):
        BOUNDS["lipschitz"].evaluate({"mu": [1.0], "omega": [1.0], "rho": [1.0]}, C=0, delta=0)


@pytest.mark.parametrize("dim", [1, 2])
def test_the_law_holds_with_matrices(dim):
    meanfield.check_dimension(dim)


def test_a_wrong_law_is_caught(monkeypatch):
    claimed = meanfield._claimed
    monkeypatch.setattr(meanfield, "_claimed", lambda *parts: claimed(*parts) + 1)
    with pytest.raises(ValueError, match="the mean of the bracket is not what is claimed"):
        meanfield.check_dimension(1)


def test_tilting_is_what_softmax_does_to_many_tokens():
    """The identity of the derivation against a softmax over a large sample."""
    mean, root = normal(3, seed=1), torch.tril(normal(3, 3, seed=2))
    gradient = torch.tensor([0.4, -0.3, 0.2], dtype=torch.float64)
    tokens = mean + normal(400_000, 3, seed=3) @ root.mT
    weights = torch.softmax(tokens @ gradient, dim=0)
    centre = weights @ tokens
    covariance = (weights[:, None] * (tokens - centre)).mT @ (tokens - centre)
    expected = root @ root.mT
    torch.testing.assert_close(centre, mean + expected @ gradient, atol=0.02, rtol=0)
    torch.testing.assert_close(covariance, expected, atol=0.06, rtol=0)
    assert math.isfinite(float(covariance.sum()))
