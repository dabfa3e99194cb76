"""Spectral norms by iteration against decompositions, on blocks that are hard for an iteration."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import shaped
from oracles import draw

from sensitivity import blocks, measure
from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian import closed_form, lanczos, search, spectral
from sensitivity.jacobian.operator import BlockOperator
from sensitivity.jacobian.query_rows import RowSource
from sensitivity.jacobian.segments import Segments, taken


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
    value, deviation = torch.ones(1, 1, 1, pairs).to(values), torch.zeros(1, 1, size, pairs).to(values)
    return BlockOperator(
        value, deviation, basis * values.sqrt(), torch.zeros(1, 1, size).to(values), torch.eye(size).to(values)
    )


def _to(operator: BlockOperator, dtype: torch.dtype) -> BlockOperator:
    parts = {field.name: getattr(operator, field.name).to(dtype) for field in dataclasses.fields(operator)}
    return BlockOperator(**parts)


def _start(size: int) -> torch.Tensor:
    return torch.randn(2, size, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[0, :, 0]


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


@pytest.mark.parametrize("heads", [1, 3])
def test_fourth_powers_are_those_of_the_blocks(heads, monkeypatch):
    attention, tokens = SoftmaxAttention.random(24, heads, seed=1, dtype=torch.float64), draw(1, 6, 24)
    values = torch.linalg.svdvals(_blocks(attention, tokens))
    row, key = torch.tensor([0, 2, 2, 5]), torch.tensor([3, 1, 2, 0])
    expected = values[row, key].pow(8).sum(dim=1)
    operator = _operator(attention, tokens)
    torch.testing.assert_close(operator.fourth(row, key), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(operator.largest(row, key), values[row, key, 0].square(), rtol=1e-12, atol=0)
    monkeypatch.setattr("sensitivity.jacobian.operator.BUILT", 1)
    torch.testing.assert_close(operator.fourth(row, key), expected, rtol=1e-12, atol=0)


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
@pytest.mark.parametrize("many", [0, 100], ids=["iterated again", "decomposed"])
def test_a_start_that_misses_the_largest_value(dtype, gap, many, monkeypatch):
    """The next value converges to the last digit, and yet is not taken for the largest."""
    monkeypatch.setattr(spectral, "MANY", many)
    monkeypatch.setattr(lanczos, "_turned", lambda start, *_: start[0])
    values = torch.cat([torch.ones(1), (1 - gap) * 0.85 ** torch.arange(39)]).double()
    operator = _to(_diagonal(values, _start(40)), dtype)
    assert spectral.norms(operator, 1e-6).double().sub(1).abs().max() < 1e-5
    monkeypatch.setattr("sensitivity.jacobian.operator.PROVABLE", 0)  # without a proof the start is believed
    if dtype == torch.float64:  # in single precision, rounding brings the largest value back
        assert spectral.norms(operator, 1e-6).sub((1 - gap) ** 0.5).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["flat", "one", "two", "slope", "zero"])
def test_spectra_without_a_lone_top(dtype, kind):
    flat, one = torch.ones(32), torch.zeros(32)
    one[0] = 1
    two = torch.where(torch.arange(32) < 2, 1.0, 0.5)
    values = {"flat": flat, "one": one, "two": two, "slope": torch.linspace(1, 0.5, 32), "zero": 0 * one}[kind]
    operator = _to(_diagonal(values.double(), torch.ones(32, dtype=torch.float64)), dtype)
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


NARROW = {
    "fewer out than inside": {"dim": 24, "heads": 3, "width": 8, "value_width": 8, "out": 5},
    "heads wider than tokens": {"dim": 3, "heads": 3, "width": 8, "value_width": 8},
    "one number out": {"dim": 8, "heads": 2, "width": 4, "value_width": 4, "out": 1},
    "two numbers out": {"dim": 8, "heads": 1, "width": 4, "value_width": 6, "out": 2},
}


@pytest.mark.parametrize("shape", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.float64, 2e-6)])
@pytest.mark.parametrize("path", [None, "value", "key"])
def test_layers_that_put_out_less_than_their_heads_hold(shape, dtype, error, path, monkeypatch):
    """What the outputs do not see of a vector must not grow; and such blocks are iterated on, not decomposed."""
    decomposed = []
    largest = BlockOperator.largest
    monkeypatch.setattr(
        BlockOperator, "largest", lambda self, row, key: decomposed.append(len(row)) or largest(self, row, key)
    )
    attention, tokens = shaped(**shape).to(dtype=dtype), 3 * draw(1, 40, shape["dim"]).to(dtype)
    found = spectral.norms(_operator(attention, tokens).only(path=path), 1e-6).double()
    parts = closed_form.blocks(attention.to(dtype=torch.float64), tokens.double())
    blocks = parts["value"] + parts["key"] if path is None else parts[path]
    expected = torch.linalg.matrix_norm(blocks[0], ord=2)
    assert ((found - expected).abs() <= error * expected + 1e-2 * error * expected.max()).all()
    assert sum(decomposed) <= search.FEW


@pytest.mark.parametrize("dim", [6, 48])
@pytest.mark.parametrize("least", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("path", [None, "value"])
def test_outputs_that_hardly_see_a_direction(dim, least, path):
    plain = SoftmaxAttention.random(dim, 2, seed=1, dtype=torch.float64)
    left, sizes, right = torch.linalg.svd(draw(dim, dim, seed=1))
    weight = (left * torch.where(torch.arange(dim) < dim - 1, sizes, least * sizes[0])) @ right
    attention = dataclasses.replace(plain, output_weight=weight.unflatten(1, (2, -1)).movedim(1, 0))
    attention, tokens = attention.to(dtype=torch.float32), draw(1, 40, dim).float()
    parts = closed_form.blocks(attention.to(dtype=torch.float64), tokens.double())
    blocks = parts["value"] + parts["key"] if path is None else parts[path]
    found = spectral.norms(_operator(attention, tokens).only(path=path), 1e-6).double()
    assert_within(found, torch.linalg.matrix_norm(blocks[0], ord=2), 1e-5)


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_without_full_rank(rank, dtype):
    plain = SoftmaxAttention.random(12, 2, seed=1, dtype=dtype)
    left, right = draw(12, rank, seed=1), draw(rank, 12, seed=2)
    attention = dataclasses.replace(plain, output_weight=(left @ right).to(dtype).unflatten(1, (2, 6)).movedim(1, 0))
    tokens = draw(1, 30, 12).to(dtype)
    operator = _operator(attention, tokens)
    assert operator.rank == max(rank, 1)
    expected = torch.linalg.matrix_norm(_blocks(attention, tokens), ord=2)
    assert ((spectral.norms(operator, 1e-6).double() - expected).abs() <= 1e-5 * expected.max()).all()


def test_nearly_all_blocks_are_iterated(monkeypatch):
    """Not decomposed: that would be right, and a hundred times slower."""
    decomposed = []
    largest = BlockOperator.largest
    monkeypatch.setattr(
        BlockOperator, "largest", lambda self, row, key: decomposed.append(len(row)) or largest(self, row, key)
    )
    attention, tokens = SoftmaxAttention.random(32, 4, seed=1), draw(1, 40, 32, dtype=torch.float32)
    spectral.norms(_operator(attention, tokens), 1e-6)
    assert sum(decomposed) <= search.FEW


def _pairs(found: Segments) -> list[tuple[int, int]]:
    """The rows and keys of the open pairs, in their order."""
    return [
        (int(row), int(key))
        for row, keys, there in zip(found.row, found.key, found.open, strict=True)
        for key in keys[there]
    ]


@pytest.mark.parametrize("keys", [3, 32, 70, 300])
def test_open_pairs_are_packed(keys, generator):
    wanted = torch.rand(5, keys, generator=generator) < 0.7
    wanted[2], wanted[3] = False, True
    found = Segments.of(wanted)
    assert _pairs(found) == [tuple(pair) for pair in wanted.nonzero().tolist()]
    features = torch.randn(5, 4, keys, generator=generator)
    spread = found.spread(features)
    for row, key, there, feature in zip(found.row, found.key, found.open, spread, strict=True):
        assert torch.equal(feature[:, there], features[row][:, key[there]])
    found.open[torch.rand(found.open.shape, generator=generator) < 0.6] = False
    packed, at = found.packed()
    assert _pairs(packed) == _pairs(found)
    assert len(packed.row) == found.needed
    (kept,) = taken([spread], at)
    assert torch.equal(kept.movedim(1, 2)[packed.open], spread.movedim(1, 2)[found.open])


def test_every_pair_is_spread_in_order(generator):
    features = torch.randn(3, 4, 64, generator=generator)
    spread = Segments.of(torch.ones(3, 64, dtype=torch.bool)).spread(features)
    assert torch.equal(spread, features.unflatten(2, (2, 32)).movedim(2, 1).flatten(0, 1))


@pytest.mark.parametrize("gain", [1.0, 3.0, 10.0])
def test_values_that_converge_at_once_are_not_lost(gain, monkeypatch):
    """Sharp attention leaves one value in sight, found in a step or two: the third is past where it can be proved."""
    again = []
    run = search.Search.run
    monkeypatch.setattr(search.Search, "run", lambda self: again.append(int(self.left.sum())) or run(self))
    attention, tokens = SoftmaxAttention.random(32, 4, seed=1, gain=gain), draw(1, 60, 32, dtype=torch.float32)
    found = spectral.norms(_operator(attention, tokens), 1e-6).double()
    expected = torch.linalg.svdvals(_blocks(attention, tokens))[..., 0]
    assert len(again) == 1  # no other search for more than a few
    assert ((found - expected).abs() <= 1e-4 * expected + 1e-7 * expected.amax(dim=1, keepdim=True)).all()


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
