"""Diagonal blocks' norms of one head from a kernel of its keys, and the ways that are taken where it loses digits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import shaped
from oracles import dense_jacobian, draw
from tolerances import assert_close

from sensitivity import SoftmaxAttention
from sensitivity.jacobian import closed_form, diagonal_kernel, diagonal_ways
from sensitivity.jacobian.diagonal import DiagonalBlocks, norms_of_blocks
from sensitivity.jacobian.norms import PATHS, block_norms
from sensitivity.jacobian.query_rows import RowSource

SHAPES = {
    "as wide as the tokens": shaped(12, 1, 12, 12, residual=True),
    "wider than the tokens": shaped(6, 1, 9, 11, residual=-0.3),
    "keys wider than values": shaped(8, 1, 7, 3),
    "values wider than keys": shaped(8, 1, 3, 7, residual=True),
    "other width out": shaped(12, 1, 12, 12, out=20),
    "causal": shaped(12, 1, 12, 12, residual=True, causal=True),
}
each_shape = pytest.mark.parametrize("attention", SHAPES.values(), ids=SHAPES)


@pytest.fixture(autouse=True)
def no_row_is_spared(monkeypatch):
    """Sends the few rows of these layers where those of long sequences go."""
    monkeypatch.setattr(diagonal_ways, "SPARED", 0)
    monkeypatch.setattr(diagonal_ways, "FRAMED", 0)


@pytest.fixture
def ways_taken(monkeypatch):
    """The ways by which diagonal blocks are found, in the order in which they are."""
    taken = []

    def watch(kind, label):
        original = kind.squares

        def squares(self, rows):
            taken.append((label, len(rows.index)))
            return original(self, rows)

        monkeypatch.setattr(kind, "squares", squares)

    def of(attention, rows, *options):
        taken.append(("blocks", len(rows.index)))
        return built(attention, rows, *options)

    watch(diagonal_kernel.DiagonalKernel, "kernel")
    watch(diagonal_ways.DiagonalForms, "forms")
    built = DiagonalBlocks.of
    monkeypatch.setattr(DiagonalBlocks, "of", of)
    return taken


@each_shape
@pytest.mark.parametrize("panel", [4, 256])
def test_squares_are_those_of_the_blocks(attention, panel, monkeypatch):
    monkeypatch.setattr(diagonal_kernel, "PANEL", panel)
    tokens, index = draw(2, 9, attention.dim), torch.tensor([1, 2, 5, 7, 8])
    source = RowSource(attention, tokens, table=False)
    squares = diagonal_kernel.DiagonalKernel(source).squares(source.rows(index))
    blocks = DiagonalBlocks.of(attention, RowSource(attention, tokens).rows(index))
    expected = norms_of_blocks(blocks, attention, "frobenius", True, False)
    assert_close(squares.total.sqrt(), expected.total, "maps")
    assert_close(squares.query.sqrt(), expected.query, "maps")
    removed = expected.total if expected.removed is None else expected.removed
    assert_close(squares.removed.sqrt(), removed, "maps")


@each_shape
def test_covariances_row_by_row_are_those_of_the_table(attention):
    tokens, index = draw(2, 9, attention.dim), torch.tensor([0, 3, 8])
    tabled, alone = (RowSource(attention, tokens, table=table).rows(index) for table in (True, False))
    assert_close(alone.mean, tabled.mean, "blocks")
    assert_close(alone.covariance(), tabled.covariance(), "blocks")
    assert_close(alone.covariance(slice(1, 2)), tabled.covariance()[..., 1:2], "blocks")


@each_shape
def test_maps(attention, ways_taken):
    tokens = draw(2, 9, attention.dim)
    found = closed_form.norm_maps(attention, tokens, paths=True)
    assert ways_taken[0] == ("kernel", 9)
    assert_close(found.total, block_norms(dense_jacobian(attention, tokens), "frobenius"), "maps")
    by_path = closed_form.blocks(attention, tokens)
    for path in PATHS:
        assert_close(found.paths[path], block_norms(by_path[path], "frobenius"), "maps")


def test_it_pays_for_one_wide_head_and_a_short_sequence():
    wide, narrow, two = SHAPES["as wide as the tokens"], shaped(12, 1, 3, 3), shaped(12, 2, 12, 12)
    assert [diagonal_kernel.pays(wide, length) for length in (9, 90, 91)] == [True, True, False]
    assert not diagonal_kernel.pays(narrow, 9)
    assert not diagonal_kernel.pays(two, 9)
    assert not diagonal_kernel.pays(dataclasses.replace(wide, multiplier=torch.ones(9, 9)), 9)
    huge = SoftmaxAttention.random(512, 1)  # half the square of the length is held, whatever the width
    assert [diagonal_kernel.pays(huge, length) for length in (8192, 8193)] == [True, False]


def test_long_sequences_take_forms(ways_taken):
    attention = SHAPES["as wide as the tokens"]
    closed_form.norm_maps(attention, draw(1, 91, 12))
    assert {way for way, _ in ways_taken} == {"forms"}


def test_a_first_row_that_sees_itself_alone_is_one_block(ways_taken):
    attention, tokens = SHAPES["causal"], draw(2, 9, 12)
    found = closed_form.norm_maps(attention, tokens, paths=True)
    assert ways_taken == [("kernel", 9), ("blocks", 1)]
    assert (found.paths["query"][:, 0] == 0).all()


def sharp(attention: SoftmaxAttention, size: float) -> SoftmaxAttention:
    """A layer in which every query sees one key, or as good as one."""
    return dataclasses.replace(attention, query_weight=size * attention.query_weight)


@pytest.mark.parametrize("size", [3, 30])
@pytest.mark.parametrize("few", [0, 2**22], ids=["forms", "blocks"])
def test_sharp_attention_goes_other_ways(size, few, ways_taken, monkeypatch):
    monkeypatch.setattr(diagonal_ways, "FEW", few)
    attention, tokens = sharp(SHAPES["as wide as the tokens"], size), draw(2, 40, 12)
    for dtype, close in ((torch.float64, "maps"), (torch.float32, "float32")):
        ways_taken.clear()
        found = closed_form.norm_maps(attention.to(dtype=dtype), tokens.to(dtype))
        exact = attention.to(dtype=dtype).to(dtype=torch.float64), tokens.to(dtype).double()
        assert_close(found.total.double(), block_norms(dense_jacobian(*exact), "frobenius"), close)
        assert [way for way, _ in ways_taken][:2] == ["kernel", "blocks" if few else "forms"]


def test_a_kernel_that_loses_most_rows_is_asked_once(ways_taken, monkeypatch):
    monkeypatch.setattr(diagonal_ways, "FEW", 0)
    attention, tokens = sharp(SHAPES["as wide as the tokens"], 300), draw(1, 40, 12)
    found = list(closed_form.tiles(attention, tokens, size=10 * (40 + 12 * 12)))
    assert [len(tile.rows) for tile in found] == [10] * 4
    assert [way for way, _ in ways_taken] == ["kernel", "forms", "forms", "forms", "forms"]
    expected = block_norms(dense_jacobian(attention, tokens), "frobenius")
    assert_close(torch.cat([tile.maps.total for tile in found], dim=1), expected, "maps")


def test_single_precision():
    plain = SoftmaxAttention.random(64, 1, dtype=torch.float64, biases=True)
    attention = dataclasses.replace(plain, value_bias=plain.value_bias + 100).to(dtype=torch.float32)
    tokens = draw(1, 500, 64).float()
    found = closed_form.norm_maps(attention, tokens, paths=True)
    exact = closed_form.norm_maps(attention.to(dtype=torch.float64), tokens.double(), paths=True, heads=True)
    assert_close(found.diagonal, exact.diagonal, "float32")
    assert_close(found.paths["query"], exact.paths["query"], "float32")
