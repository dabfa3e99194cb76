"""Diagonal blocks' norms from forms in a frame, where no block is built."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import LENGTH, attention_cases, shaped
from oracles import dense_jacobian, draw
from tolerances import assert_close

from sensitivity import SoftmaxAttention
from sensitivity.jacobian import closed_form, diagonal_ways
from sensitivity.jacobian.diagonal import DiagonalBlocks, norms_of_blocks
from sensitivity.jacobian.diagonal_forms import DiagonalForms
from sensitivity.jacobian.frames import Frame
from sensitivity.jacobian.geometry import Geometry
from sensitivity.jacobian.norms import PATHS, block_norms
from sensitivity.jacobian.query_rows import RowSource

CASES = attention_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

SHAPES = {
    "narrow heads": shaped(12, 3, 4, 4, residual=True),
    "keys wider than values": shaped(12, 2, 7, 3, residual=0.5),
    "values wider than keys": shaped(12, 2, 3, 7),
    "heads wider than tokens": shaped(6, 2, 9, 8, residual=True),
    "one wide head": shaped(12, 1, 12, 12, residual=True),
    "one head wider than tokens": shaped(6, 1, 9, 11, residual=-0.3),
    "other width out": shaped(12, 3, 4, 4, out=5),
    "one wide head, other width out": shaped(12, 1, 12, 12, out=20),
}
each_shape = pytest.mark.parametrize("attention", SHAPES.values(), ids=SHAPES)


@pytest.fixture(autouse=True)
def no_row_is_spared(monkeypatch):
    """Sends the few rows of these layers where those of long sequences go."""
    monkeypatch.setattr(diagonal_ways, "SPARED", 0)
    monkeypatch.setattr(diagonal_ways, "FRAMED", 0)


@each_case
@pytest.mark.parametrize("norm", ["frobenius", "rms"])
def test_maps_without_heads_are_the_norms_of_the_blocks(case, norm):
    maps = closed_form.norm_maps(case.attention, case.tokens, norm=norm, paths=True)
    by_path = closed_form.blocks(case.attention, case.tokens)
    assert_close(maps.total, block_norms(sum(by_path.values()), norm), "maps")
    for path in PATHS:
        assert_close(maps.paths[path], block_norms(by_path[path], norm), "maps")
    removed = block_norms(sum(by_path[path] for path in PATHS[1:]), norm)
    assert_close(maps.diagonal, removed.diagonal(dim1=1, dim2=2), "maps")


@each_shape
def test_every_shape_of_layer(attention):
    tokens = draw(2, 9, attention.dim)
    found = closed_form.norm_maps(attention, tokens)
    assert_close(found.total, block_norms(dense_jacobian(attention, tokens), "frobenius"), "maps")


@each_shape
def test_the_framed_layer_is_the_layer(attention):
    frame, tokens = Frame.of(attention), draw(2, 9, attention.dim)
    shift = attention(tokens) - frame.attention(tokens)
    assert_close(shift, shift[:1, :1].expand_as(shift), "blocks")
    coordinates = frame.attention.output_weight.shape[2]
    identity = torch.eye(coordinates, dtype=torch.float64).expand(attention.heads, -1, -1)
    assert_close(frame.attention.output_weight.mT @ frame.attention.output_weight, identity, "blocks")
    assert_close(frame.reads @ frame.keys, attention.scale * attention.query_weight.mT, "maps")


def test_only_one_wide_head_has_a_frame_of_tokens():
    framed = {name for name, attention in SHAPES.items() if Frame.of(attention).by_token is not None}
    assert framed == {"one wide head", "one head wider than tokens"}


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_a_wide_head_whose_values_and_keys_differ_in_size(size):
    whole = SHAPES["one wide head"]
    attention, tokens = (
        dataclasses.replace(whole, output_weight=size * whole.output_weight, residual=False),
        draw(2, 9, 12),
    )
    found = closed_form.norm_maps(attention, tokens, paths=True)
    for path, norms in closed_form.blocks(attention, tokens).items():
        assert_close(found.paths[path], block_norms(norms, "frobenius"), "maps")


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_a_wide_head_without_full_rank(rank):
    whole = SHAPES["one wide head"]
    left, right = draw(1, 12, 5)[..., :rank], draw(1, 5, 12, seed=1)[:, :rank]
    for name in ("query_weight", "value_weight", "output_weight"):
        attention, tokens = dataclasses.replace(whole, **{name: left @ right}), draw(2, 9, 12)
        found = closed_form.norm_maps(attention, tokens, paths=True)
        assert_close(found.total, block_norms(dense_jacobian(attention, tokens), "frobenius"), "maps")
        query = block_norms(closed_form.blocks(attention, tokens)["query"], "frobenius")
        assert (found.paths["query"] - query).abs().max() < 1e-12 * found.total.max()


@pytest.mark.parametrize("heads", [1, 3])
def test_blocks_that_cancel_are_built(heads, generator):
    """A layer that takes away what its residual adds: its diagonal is a millionth of the terms that it is made of."""
    dim, size = 12, 1e-6
    outputs = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]
    tiny = size * torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    plain = SoftmaxAttention.random(dim, heads, dtype=torch.float64)
    attention = dataclasses.replace(
        plain,
        output_weight=outputs.unflatten(1, (heads, -1)).movedim(1, 0),
        value_weight=(outputs.mT @ (tiny - torch.eye(dim, dtype=torch.float64))).unflatten(0, (heads, -1)),
        causal=True,
    )
    tokens = torch.randn(2, LENGTH, dim, generator=generator, dtype=torch.float64)
    found = closed_form.norm_maps(attention, tokens)
    expected = block_norms(dense_jacobian(attention, tokens), "frobenius")
    assert_close(found.total[:, 0, 0], torch.linalg.matrix_norm(tiny).expand(2), "maps")  # sees itself alone
    assert_close(found.total, expected, "maps")
    single = closed_form.norm_maps(attention.to(dtype=torch.float32), tokens.float())
    assert_close(single.total[:, 0, 0].double(), expected[:, 0, 0], "half")  # rounding of the identity itself
    assert_close(single.total.double(), expected, "float32")


def test_few_rows_are_cheaper_as_blocks(monkeypatch):
    attention, tokens = SHAPES["narrow heads"], draw(2, 9, 12)
    by_forms = closed_form.norm_maps(attention, tokens, paths=True)
    monkeypatch.setattr(diagonal_ways, "FRAMED", 36)  # 18 rows, twice for the query path alone
    assert [diagonal_ways.blocks_pay(attention, 9, rows) for rows in (36, 37)] == [True, False]
    assert not diagonal_ways.blocks_pay(SHAPES["one wide head"], 9, 18)  # its kernel is cheaper still
    monkeypatch.setattr(DiagonalForms, "squares", None)
    by_blocks = closed_form.norm_maps(attention, tokens, paths=True)
    assert_close(by_blocks.total, by_forms.total, "maps")
    assert_close(by_blocks.diagonal, by_forms.diagonal, "maps")
    assert_close(by_blocks.paths["query"], by_forms.paths["query"], "maps")


@pytest.mark.parametrize("spared", [0, 2**27], ids=["forms", "blocks"])
@pytest.mark.parametrize("dim", [4, 8, 12])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("dropped", [False, True], ids=["", "dropout"])
def test_saturated_attention_keeps_its_digits(heads, dim, spared, dropped, monkeypatch):
    """Where a query sees one key, a covariance from a table is the rounding of large means."""
    monkeypatch.setattr(diagonal_ways, "SPARED", spared)
    multiplier = (draw(2, heads, 9, 9, seed=2) > -0.5).float() if dropped else None
    attention = SoftmaxAttention.random(dim, heads, multiplier=multiplier)
    tokens = 1e4 * draw(2, 9, dim).float()
    exact = block_norms(dense_jacobian(attention.to(dtype=torch.float64), tokens.double()), "frobenius")
    for options in ({}, {"heads": True}):
        found = closed_form.norm_maps(attention, tokens, **options).total.double()
        assert_close(found / exact.max(), exact / exact.max(), "float32")


def test_doubt_is_rare():
    attention = SoftmaxAttention.random(64, 4)
    frame = Frame.of(attention)
    forms = DiagonalForms.of(frame, Geometry.of(frame.attention))
    rows = RowSource(attention, draw(1, 300, 64).float(), frame=frame).rows(torch.arange(300))
    assert not forms.squares(rows).doubtful.any()


@each_shape
def test_forms_are_the_norms_of_blocks_also_in_parts(attention, monkeypatch):
    tokens, frame = draw(3, 9, attention.dim), Frame.of(attention)
    forms, index = DiagonalForms.of(frame, Geometry.of(frame.attention)), torch.tensor([1, 2, 5, 7, 8])
    squares = forms.squares(RowSource(attention, tokens, frame=frame).rows(index))
    blocks = DiagonalBlocks.of(attention, RowSource(attention, tokens).rows(index))
    expected = norms_of_blocks(blocks, attention, "frobenius", True, False)
    assert_close(squares.total.sqrt(), expected.total, "maps")
    assert_close(squares.query.sqrt(), expected.query, "maps")
    if expected.removed is not None:
        assert_close(squares.removed.sqrt(), expected.removed, "maps")
    monkeypatch.setattr("sensitivity.jacobian.diagonal_forms.CACHED", 1)
    one_by_one = forms.squares(RowSource(attention, tokens, frame=frame).rows(index))
    assert_close(one_by_one.total, squares.total, "blocks")


@pytest.mark.parametrize("heads", [1, 4])
def test_single_precision(heads):
    plain = SoftmaxAttention.random(64, heads, dtype=torch.float64, biases=True)
    attention = dataclasses.replace(plain, value_bias=plain.value_bias + 100).to(dtype=torch.float32)
    tokens = draw(1, 200, 64).float()
    found = closed_form.norm_maps(attention, tokens, paths=True)
    exact = closed_form.norm_maps(attention.to(dtype=torch.float64), tokens.double(), paths=True)
    assert_close(found.diagonal, exact.diagonal, "float32")
    assert_close(found.paths["query"], exact.paths["query"], "float32")
