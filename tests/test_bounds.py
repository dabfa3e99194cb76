"""Bounds against dense autograd, over random and extreme layers, and what check() says about them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import random_layers
import torch
from oracles import dense_jacobian, norm_map
from tolerances import TOLERANCES

import theory
from sensitivity import InputError, SoftmaxAttention
from sensitivity.bounds import NAMES, BoundCheck, check
from sensitivity.bounds import stack as stacks
from sensitivity.bounds.checking import _layers
from sensitivity.bounds.evaluate import EVALUATE
from sensitivity.bounds.problem import Problem

SINGLE = tuple(EVALUATE)
NORMS = ("spectral", "frobenius", "rms")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(heads: int = 3, dim: int = 12, **options: object) -> SoftmaxAttention:
    return SoftmaxAttention.random(dim, heads, seed=1, dtype=torch.float64, **options)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_violates_a_bound(seed):
    """Thousands of blocks of layers with any mask, bias, multiplier, logits and dtype; every bound, every norm."""
    generator = torch.Generator().manual_seed(seed)
    for turn in range(3):
        dtype = (torch.float32, torch.float64)[turn % 2]
        attention, tokens = random_layers.draw(generator, dtype, blocks=2_000, lengths=(1, 2, 3, 5, 8, 16, 33))
        for name, found in check(attention, tokens, norm=NORMS[turn]).items():
            assert found.violations == 0, (name, found)


@pytest.mark.slow
def test_nothing_violates_a_bound_in_a_million_blocks():
    """The same until every bound has been compared on a million blocks (many minutes)."""
    counts = dict.fromkeys(SINGLE, 0)
    generator, turn = torch.Generator().manual_seed(2024), 0
    while min(counts.values()) < 10**6:
        turn += 1
        short = turn % 8 != 0  # diagonal blocks are many in short sequences
        lengths = (1, 2, 3, 5, 8) if short else (*random_layers.LENGTHS, 512)
        dtype = (torch.float32, torch.float64)[turn % 2]
        attention, tokens = random_layers.draw(generator, dtype, blocks=40_000 if short else 30_000, lengths=lengths)
        wanted = [name for name in SINGLE if counts[name] < 10**6]
        for name, found in check(attention, tokens, wanted, norm=NORMS[turn % 3]).items():
            assert found.violations == 0, (turn, name, found)
            counts[name] += found.blocks
    print(turn, counts)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", SINGLE[:-1])
def test_bounds_hold_against_dense_autograd(name, norm):
    """The measured side comes from autograd here, not from the closed form that the toolkit uses."""
    for options in (
        {},
        {"causal": True},
        {"biases": True, "diagonal_bias": -math.inf},
        {"residual": False},
        {"residual": -0.7},
    ):
        attention, tokens = layer(**options), normal(2, 6, 12)
        measured = norm_map(attention, tokens, norm)
        found = check(attention, tokens, [name], norm, measured=measured)[name]
        if name == "diagonal_lower" and not attention.residual:
            assert not found.applies
        else:
            assert found.applies
            assert found.violations == 0


def test_lipschitz_measures_the_whole_map():
    attention, tokens = layer(), normal(3, 5, 12)
    blocks = dense_jacobian(attention, tokens)
    whole = torch.linalg.matrix_norm(blocks.transpose(2, 3).reshape(3, 60, 60), ord=2)
    found = check(attention, tokens, ["lipschitz"])["lipschitz"]
    assert found.measured == pytest.approx(float(whole.mean()), rel=1e-2)
    assert found.measured <= float(whole.mean()) * (1 + 1e-9)
    assert found.bound > found.measured


@pytest.mark.parametrize("name", SINGLE[:-1])
def test_a_violation_is_found_and_placed(name):
    """Measured values that are planted beyond the bound are violations, at the place where they were planted."""
    attention, tokens = layer(), normal(2, 8, 12)
    problem = Problem(attention, tokens, "spectral")
    measured = problem.measured.clone()
    key = 3 if name.startswith("diagonal") else 6
    measured[1, 3, key] *= 1e-9 if name == "diagonal_lower" else 1e9
    found = check(attention, tokens, [name], measured=measured)[name]
    assert found.violations == 1
    assert not found
    assert found.where is not None
    assert found.where[:2] == (1, 3)
    if name in ("local", "triangle", "worst_case"):
        assert found.where[2] == 6
    assert math.isfinite(found.quantiles[1.0])


@pytest.mark.parametrize(("heads", "dim", "target"), [(1, 32, 0.8), (3, 12, 0.7), (4, 32, 0.7), (8, 64, 0.7)])
def test_the_local_bound_is_tight(heads, dim, target):
    tokens = normal(2, 48, dim)
    found = check(SoftmaxAttention.random(dim, heads, seed=2), tokens, ["local", "triangle"])
    assert found["local"].tightness > target
    assert found["local"].tightness > found["triangle"].tightness
    assert found["local"].quantiles[1.0] <= 1


@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (3, 12), (4, 32), (8, 64)])
def test_the_expected_bound_is_within_a_factor_of_five_on_normalised_tokens(heads, dim):
    tokens = torch.nn.functional.layer_norm(normal(4, 64, dim), (dim,))
    found = check(SoftmaxAttention.random(dim, heads, seed=2), tokens, ["expected"])["expected"]
    assert found.tightness > 1 / 5
    assert found.bound / found.measured < 5


def test_expected_bound_halves_when_the_length_doubles():
    attention = layer()
    bounds = [check(attention, normal(1, length, 12), ["expected_ball"])["expected_ball"] for length in (16, 32)]
    radii = [next(one.value for text, one in found.assumptions.items() if "ball" in text) for found in bounds]
    assert bounds[1].bound / bounds[0].bound == pytest.approx(15 / 31 * (radii[1] / radii[0]) ** 2, rel=0.15)


def test_the_diagonal_is_bounded_from_both_sides_at_every_length():
    """Theta(1): a ball's bounds do not move with T, and the norm lies between a lower and an upper one."""
    attention, uppers = layer(1, 16), []
    for length in (8, 64, 256):
        tokens = torch.nn.functional.layer_norm(normal(1, length, 16), (16,))
        found = check(attention, tokens, ["diagonal", "diagonal_ball", "diagonal_lower"])
        assert 0 < found["diagonal_lower"].bound <= found["diagonal_lower"].measured <= found["diagonal"].bound
        uppers.append(found["diagonal_ball"].bound)
    assert max(uppers) / min(uppers) < 1.25


def test_the_query_constant_is_attained_by_antipodal_tokens():
    r"""Half of the weight on each of +-R x gives a query path of R^2 |M x| |N^T x|; kappa is its maximum."""
    from sensitivity.bounds.cloud import paired_size
    from sensitivity.bounds.layer import LayerConstants

    constants = LayerConstants.of(layer(1, 8), spectral=True)
    kappa = float(paired_size(constants.value_maps, constants.score_maps))
    directions = torch.nn.functional.normalize(normal(200_000, 8), dim=-1)
    products = (directions @ constants.value_maps[0].mT).norm(dim=-1) * (directions @ constants.score_maps[0]).norm(
        dim=-1
    )
    best = directions[products.argmax()].clone().requires_grad_(True)
    for _ in range(300):  # ascent from the best of many directions reaches the maximum
        unit = best / best.norm()
        value = (constants.value_maps[0] @ unit).norm() * (constants.score_maps[0].mT @ unit).norm()
        (gradient,) = torch.autograd.grad(value, best)
        best = (best + 0.05 * gradient).detach().requires_grad_(True)
    value = value.detach()
    assert float(value) <= kappa * (1 + 1e-9)
    assert float(value) >= kappa * 0.995
    unit = unit.detach()
    covariance = torch.outer(unit, unit)
    query = constants.value_maps[0] @ covariance @ constants.score_maps[0]
    assert float(torch.linalg.matrix_norm(query, ord=2)) == pytest.approx(float(value), rel=1e-9)


def test_heads_that_attend_to_different_keys_attain_the_sum_over_heads():
    """Why heads add in the expected bound: heads that see different keys reach the sum of the value maps' norms."""
    attention = layer(2, 8, residual=False)
    hidden = torch.full((2, 3, 3), -math.inf, dtype=torch.float64)
    hidden[0, :, 1], hidden[1, :, 2] = 0.0, 0.0
    quiet = dataclasses.replace(attention, bias=hidden, query_weight=0 * attention.query_weight)
    found = check(quiet, normal(1, 3, 8), ["expected"])["expected"]
    sizes = torch.linalg.matrix_norm(attention.output_weight @ attention.value_weight, ord=2)
    assert found.quantiles[1.0] == pytest.approx(1.0, rel=TOLERANCES["spectral"])
    assert found.measured * 2 >= float(sizes.sum()) * 0.5


def test_a_stack_is_bounded_by_the_product_of_its_norm_maps():
    layers = [layer(3, 12, causal=True), layer(2, 12, causal=True), layer(4, 12)]
    tokens = normal(2, 7, 12)
    comparison = stacks.compare(layers, tokens, "spectral")

    def whole(value: torch.Tensor) -> torch.Tensor:
        for one in layers:
            value = one(value)
        return value

    torch.testing.assert_close(comparison.measured, norm_map(whole, tokens, "spectral"), rtol=1e-9, atol=1e-12)
    for norm in NORMS:
        found = check(layers, tokens, norm=norm)["stack"]
        assert found.violations == 0
        assert 0 < found.tightness <= 1


def test_causal_stacks_collect_more_paths_from_early_tokens():
    """The neighbour that theory names: the product of causal maps with residuals favours the first tokens."""
    bound = theory.BOUNDS["causal_paths"]
    rows = torch.softmax(torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf), dim=-1).double()
    product = torch.linalg.matrix_power(torch.eye(6, dtype=torch.float64) + 0.7 * rows, 4)
    powers = {k: torch.linalg.matrix_power(rows, k) for k in range(5)}
    expression = bound.expression.subs({"L": 4}).doit()
    assert bound.kind == "upper"
    terms = sum(math.comb(4, k) * 0.7**k * powers[k] for k in range(5))
    torch.testing.assert_close(product, terms)
    assert expression is not None
    assert (product[5, :-1].diff() < 0).all()


def test_what_does_not_apply_says_why():
    tokens = normal(2, 5, 12)
    dropped = layer(multiplier=torch.ones(1, 1, 5, 5, dtype=torch.float64) * 2)
    found = check(dropped, tokens)
    assert found["local"].applies
    assert found["local"].violations == 0
    assert {name for name, one in found.items() if not one.applies} == set(SINGLE) - {"local", "triangle"}
    assert "multiplier" in found["expected"].reason
    single = check(layer(), tokens[:, :1])
    assert single["expected"].reason == "no pair off the diagonal is visible"
    assert check(layer(residual=False), tokens)["diagonal_lower"].reason.startswith("there is no residual")
    assert check(layer(), tokens, ["stack"])["stack"].reason == "a stack needs at least two layers"
    assert "several were given" in check([layer(), layer()], tokens, ["local"])["local"].reason


def test_assumptions_are_tested_on_the_data():
    attention = layer()
    plain = _held(check(attention, normal(8, 24, 12), ["expected_ball"])["expected_ball"])
    assert plain == {"multiplier": True, "ball": True, "bias": True, "exchangeable": True, "layer-normalised": False}
    walks = _held(check(attention, normal(8, 24, 12).cumsum(dim=1), ["expected_ball"])["expected_ball"])
    assert not walks["exchangeable"]
    placed = normal(8, 24, 12) + 2 * torch.sin(torch.arange(24.0).double())[:, None]
    assert not _held(check(attention, placed, ["expected_ball"])["expected_ball"])["exchangeable"]
    scored = dataclasses.replace(attention, bias=normal(24, 24))
    assert not _held(check(scored, normal(8, 24, 12), ["expected"])["expected"])["bias"]
    unit = torch.nn.functional.layer_norm(normal(8, 24, 12), (12,))
    found = check(dataclasses.replace(attention, causal=True), unit, ["expected_ball"])["expected_ball"]
    assert _held(found) == dict.fromkeys(("multiplier", "ball", "bias", "exchangeable", "layer-normalised"), True)
    radius = next(one.value for text, one in found.assumptions.items() if "ball" in text)
    assert radius == pytest.approx(12**0.5, rel=0.05)


def _held(found: BoundCheck) -> dict[str, bool]:
    words = ("multiplier", "ball", "bias", "exchangeable", "layer-normalised")
    return {word: bool(one) for word in words for text, one in found.assumptions.items() if word in text}


def test_rows_are_spread_and_rms_is_a_scaled_frobenius():
    attention, tokens = layer(), normal(2, 30, 12)
    some = check(attention, tokens, ["local", "expected"], "frobenius", rows=5)
    assert some["local"].blocks == 2 * 5 * 30
    assert some["expected"].blocks == 2 * 5 * 29
    every = check(attention, tokens, ["local"], "frobenius")["local"]
    rms = check(attention, tokens, ["local"], "rms")["local"]
    assert rms.tightness == pytest.approx(every.tightness)
    assert rms.bound * 12**0.5 == pytest.approx(every.bound)
    measured = norm_map(attention, tokens[:, :8], "rms")
    given = check(attention, tokens[:, :8], ["local"], "rms", measured=measured)["local"]
    assert given.measured == pytest.approx(float(measured.mean()))


def test_padding_is_left_out():
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = True
    attention, tokens = layer(padding=padding), normal(2, 9, 12)
    found = check(attention, tokens)
    assert found["local"].blocks == 6**2 + 9**2
    assert found["diagonal"].blocks == 6 + 9
    tokens[0, 6:] = 1e6
    again = check(attention, tokens)
    for name, one in found.items():
        assert again[name].violations == 0
        # How far a block is iterated depends on its tile, so two runs differ by up to both of their tolerances.
        assert again[name].bound == pytest.approx(one.bound, rel=2 * TOLERANCES["spectral"])


def test_names_agree_with_theory_and_bad_input_is_refused():
    assert set(NAMES) <= set(theory.BOUNDS)
    with pytest.raises(InputError, match="unknown bound 'locl'; choose from local, triangle"):
        check(layer(), normal(1, 4, 12), ["locl"])
    with pytest.raises(InputError, match="unknown norm 'l1'"):
        check(layer(), normal(1, 4, 12), norm="l1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="there is no layer to check"):
        check([], normal(1, 4, 12))
    with pytest.raises(InputError, match="bounds are for a SoftmaxAttention, not Linear; describe an attention module"):
        _layers(torch.nn.Linear(12, 12))  # the tests' own type checker would stop it at check()
    with pytest.raises(InputError, match="tokens have 11 features, but the layer takes 12"):
        check(layer(), normal(1, 4, 11))
