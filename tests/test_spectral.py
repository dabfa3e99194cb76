"""Spectral norms by iteration against decompositions, on blocks that are hard for an iteration."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from oracles import draw

from sensitivity import blocks, measure
from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian import closed_form, search, spectral
from sensitivity.jacobian.operator import BlockOperator
from sensitivity.jacobian.query_rows import RowSource


def _blocks(attention: SoftmaxAttention, tokens: torch.Tensor) -> torch.Tensor:
    """Blocks ``(query, key, out, in)`` of the first sample off the diagonal, in double precision."""
    blocks = closed_form.blocks(attention.to(dtype=torch.float64), tokens.double())
    return (blocks["value"] + blocks["key"])[0]


def _operator(attention: SoftmaxAttention, tokens: torch.Tensor) -> BlockOperator:
    return BlockOperator.of(attention, RowSource(attention, tokens).rows(torch.arange(tokens.shape[1])))


def _diagonal(values: torch.Tensor, avoid: torch.Tensor, pairs: int = 40) -> BlockOperator:
    """Pairs whose products have these eigenvalues, the largest with an eigenvector orthogonal to ``avoid``."""
    size = len(values)
    first = draw(size, seed=5)
    first -= (first @ avoid) / (avoid @ avoid) * avoid
    basis = torch.linalg.qr(torch.cat([first[:, None], draw(size, size - 1, seed=6)], dim=1))[0]
    inside = torch.zeros(1, size + 1, size + 1, dtype=values.dtype)
    inside[0, :size, :size] = (basis * values) @ basis.T
    value, deviation = torch.ones(1, 1, 1, pairs).to(values), torch.zeros(1, 1, size, pairs).to(values)
    return BlockOperator(value, deviation, inside, torch.eye(size).to(values), size)


def _start(size: int) -> torch.Tensor:
    return torch.randn(size, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[:, 0]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("out", [7, 24])
def test_traces_are_those_of_the_blocks(heads, out):
    attention = SoftmaxAttention.random(24, heads, seed=1, dtype=torch.float64)
    attention = dataclasses.replace(
        attention, output_weight=attention.output_weight[:, :out], output_bias=None, residual=0
    )
    tokens = draw(1, 6, 24)
    blocks = closed_form.blocks(attention, tokens)
    product = sum(blocks[path][0] for path in ("value", "key"))
    product = product @ product.mT
    trace, square = _operator(attention, tokens).traces()
    torch.testing.assert_close(trace, product.diagonal(dim1=-2, dim2=-1).sum(-1), rtol=1e-12, atol=0)
    torch.testing.assert_close(square, product.square().sum(dim=(-2, -1)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("gain", "error"), [(1.0, 1e-5), (3.0, 1e-4)])
def test_every_block_of_a_map_in_single_precision(seed, gain, error):
    """None of some thousand, whichever spectrum it has; sharper attention has weights that rounding moves more."""
    attention = SoftmaxAttention.random(64, 4, seed=seed, gain=gain, dtype=torch.float32)
    tokens = draw(1, 96, 64, seed=seed, dtype=torch.float32)
    found = spectral.norms(_operator(attention, tokens), 1e-6).double()
    expected = torch.linalg.svdvals(_blocks(attention, tokens))[..., 0]
    assert float((found / expected - 1).abs().max()) < error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [0.3, 0.01, 1e-3])
def test_a_start_that_misses_the_largest_value(dtype, gap):
    """The next value converges to the last digit, and yet is not taken for the largest."""
    values = torch.cat([torch.ones(1), (1 - gap) * 0.85 ** torch.arange(39)]).double()
    operator = _diagonal(values, _start(40)).to(dtype)
    assert spectral.norms(operator, 1e-6).double().sub(1).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["flat", "one", "two", "slope", "zero"])
def test_spectra_without_a_lone_top(dtype, kind):
    flat, one = torch.ones(32), torch.zeros(32)
    one[0] = 1
    two = torch.where(torch.arange(32) < 2, 1.0, 0.5)
    values = {"flat": flat, "one": one, "two": two, "slope": torch.linspace(1, 0.5, 32), "zero": 0 * one}[kind]
    operator = _diagonal(values.double(), torch.ones(32, dtype=torch.float64)).to(dtype)
    found = spectral.norms(operator, 1e-6).double()
    assert (found - (0.0 if kind == "zero" else 1.0)).abs().max() < 1e-5


def test_a_tight_tolerance_is_kept():
    attention, tokens = SoftmaxAttention.random(16, 2, seed=2, dtype=torch.float64), draw(1, 12, 16)
    expected = torch.linalg.svdvals(_blocks(attention, tokens))[..., 0]
    assert (spectral.norms(_operator(attention, tokens), 1e-12) / expected - 1).abs().max() < 2e-12


def test_a_layer_too_wide_for_a_proof():
    attention, tokens = SoftmaxAttention.random(144, 2, seed=2), draw(1, 5, 144, dtype=torch.float32)
    operator = _operator(attention, tokens)
    assert not operator.provable
    expected = torch.linalg.svdvals(_blocks(attention, tokens))[..., 0]
    assert (spectral.norms(operator, 1e-6).double() / expected - 1).abs().max() < 1e-5


def test_more_heads_than_a_proof_is_worth():
    attention, tokens = SoftmaxAttention.random(20, 10, seed=2, dtype=torch.float64), draw(1, 5, 20)
    operator = _operator(attention, tokens)
    assert not operator.provable
    expected = torch.linalg.svdvals(_blocks(attention, tokens))[..., 0]
    assert (spectral.norms(operator, 1e-8) / expected - 1).abs().max() < 1e-7


def test_nearly_all_blocks_are_iterated(monkeypatch):
    """Not decomposed: that would be right, and a hundred times slower."""
    decomposed = []
    largest = BlockOperator.largest
    monkeypatch.setattr(BlockOperator, "largest", lambda self: decomposed.append(len(self.value)) or largest(self))
    attention, tokens = SoftmaxAttention.random(32, 4, seed=1), draw(1, 40, 32, dtype=torch.float32)
    spectral.norms(_operator(attention, tokens), 1e-6)
    assert sum(decomposed) <= search.FEW


def test_chosen_pairs_are_packed():
    chosen = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]], dtype=torch.bool)
    kept, keys, mask = search.pack(chosen)
    assert kept.tolist() == [0, 2]
    assert keys[:, 0].tolist() == [1, 2]
    assert keys[0].tolist() == [1, 3]
    assert mask.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("dtype", "gain"), [(torch.float32, 0.1), (torch.float32, 0.3), (torch.float64, 1e-3)])
def test_a_path_that_is_small_beside_the_others_keeps_its_digits(heads: int, dtype: torch.dtype, gain: float) -> None:
    """Nearly uniform attention: the key path shrinks with the logits, and its operator with their square."""
    attention = SoftmaxAttention.random(32, heads, gain=gain, seed=1, dtype=dtype)
    tokens = draw(2, 16, 32).to(dtype)
    found = measure(attention, tokens, norm="spectral", paths=True).paths["key"].double()
    wanted = torch.linalg.svdvals(blocks(attention, tokens, paths=True)["key"].double())[..., 0]
    assert_within(found, wanted, 1e-5)


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
def test_large_tokens_under_uniform_attention(size: float) -> None:
    """Every block is the same matrix, however large the values are that have no part in it."""
    attention = SoftmaxAttention.random(32, 4, gain=0.0, residual=False, seed=0)
    found = measure(attention, size * draw(1, 8, 32).float(), norm="spectral").norms.double()
    weights = attention.output_weight.double() @ attention.value_weight.double()
    assert_within(found, (torch.linalg.svdvals(weights.sum(dim=0))[0] / 8).expand_as(found), 1e-5)


def assert_within(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert float(((found - wanted).abs() / wanted).max()) < tolerance
