"""The closed form against automatic differentiation, case by case."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases import DIM, LENGTH, Case, attention_cases
from oracles import dense_jacobian, draw, finite_differences
from tolerances import assert_close

from sensitivity import InputError, SoftmaxAttention
from sensitivity.jacobian import closed_form
from sensitivity.jacobian.norms import NORMS, PATHS, block_norms

CASES = attention_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def counted(case: Case, values: torch.Tensor) -> torch.Tensor:
    """The oracle's values with padded rows and columns marked as the closed form marks them."""
    padding = case.attention.padding
    if padding is None:
        return values
    left_out = padding[:, :, None] | padding[:, None, :]
    return values.masked_fill(left_out.reshape(*left_out.shape, *(1,) * (values.ndim - 3)), math.nan)


@each_case
def test_paths_sum_to_the_jacobian(case):
    found = closed_form.blocks(case.attention, case.tokens)
    assert tuple(found) == PATHS
    assert_close(sum(found.values()), counted(case, dense_jacobian(case.attention, case.tokens)), "blocks")


@each_case
@pytest.mark.parametrize("norm", NORMS)
def test_norm_maps_are_the_norms_of_the_blocks(case, norm):
    attention, tokens = case.attention, case.tokens
    maps = closed_form.norm_maps(attention, tokens, norm=norm, paths=True, heads=True)
    kind = "spectral" if norm == "spectral" else "maps"
    dense = dense_jacobian(attention, tokens)
    assert_close(maps.total, counted(case, block_norms(dense, norm)), kind)
    by_path = closed_form.blocks(attention, tokens)
    for path in PATHS:
        assert_close(maps.paths[path], block_norms(by_path[path], norm), kind)
    identity = float(attention.residual) * torch.eye(DIM, dtype=torch.float64)
    diagonal = dense.diagonal(dim1=1, dim2=2).movedim(-1, 1) - identity
    expected = block_norms(diagonal, norm)
    if attention.padding is not None:
        expected = expected.masked_fill(attention.padding, math.nan)
    assert_close(maps.diagonal, expected, kind)
    for head in range(attention.heads):
        alone = closed_form.blocks(_one_head(attention, head), tokens)
        assert_close(maps.heads[:, head], block_norms(alone["value"] + alone["key"] + alone["query"], norm), kind)


def _one_head(attention: SoftmaxAttention, head: int) -> SoftmaxAttention:
    names = ("query_weight", "key_weight", "value_weight", "output_weight", "query_bias", "key_bias", "value_bias")
    here = slice(head, head + 1)
    cut = {name: getattr(attention, name)[here] for name in names if getattr(attention, name) is not None}
    for name in ("bias", "multiplier"):
        value = getattr(attention, name)
        if value is not None and value.shape[1] > 1:
            cut[name] = value[:, here]
    if isinstance(attention.diagonal_bias, torch.Tensor):
        cut["diagonal_bias"] = attention.diagonal_bias[here]
    return dataclasses.replace(attention, **cut)


def test_blocks_agree_with_finite_differences():
    attention = SoftmaxAttention.random(6, 2, seed=5, biases=True, causal=True, dtype=torch.float64)
    tokens = draw(2, 4, 6)
    assert_close(
        sum(closed_form.blocks(attention, tokens).values()), finite_differences(attention, tokens), "differences"
    )


def test_causal_zeros_are_exact():
    attention = SoftmaxAttention.random(12, 3, causal=True, dtype=torch.float64)
    maps = closed_form.norm_maps(attention, draw(2, 7, 12), paths=True)
    for values in (maps.total, *maps.paths.values()):
        assert not values.triu(1).any()
    assert (maps.total.tril() > 0).sum() == 2 * 7 * 8 / 2


def test_common_shift_of_all_tokens():
    """The sum over j of the blocks is the derivative along a shift of every token."""
    attention, tokens = SoftmaxAttention.random(8, 2, biases=True, dtype=torch.float64), draw(1, 5, 8)
    direction, step = draw(8, seed=9), 1e-6
    moved = (attention(tokens + step * direction) - attention(tokens - step * direction)) / (2 * step)
    assert_close(sum(closed_form.blocks(attention, tokens).values()).sum(dim=2) @ direction, moved, "differences")


def test_the_query_path_survives_a_hard_diagonal_mask():
    attention = SoftmaxAttention.random(8, 2, diagonal_bias=-math.inf, dtype=torch.float64)
    maps = closed_form.norm_maps(attention, draw(1, 6, 8), paths=True)
    on_diagonal = {path: values.diagonal(dim1=1, dim2=2) for path, values in maps.paths.items()}
    assert not on_diagonal["value"].any()
    assert not on_diagonal["key"].any()
    assert (on_diagonal["query"] > 0.01).all()


def test_rows_and_tiles_are_parts_of_the_whole():
    attention, tokens = SoftmaxAttention.random(16, 4, biases=True, dtype=torch.float64), draw(5, 33, 16)
    whole = closed_form.norm_maps(attention, tokens)
    rows = torch.tensor([30, 2, 7])
    for tile in closed_form.tiles(attention, tokens, rows=rows, size=400):
        assert_close(tile.maps.total, whole.total[tile.samples][:, tile.rows], "maps")
    covered = torch.zeros(5, 33)
    for tile in closed_form.tiles(attention, tokens, size=3000):
        assert_close(tile.maps.total, whole.total[tile.samples][:, tile.rows], "maps")
        covered[tile.samples, tile.rows] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("shift", [0.0, 100.0])
@pytest.mark.parametrize("gain", [1.0, 4.0])
def test_float32_agrees_with_float64(shift, gain):
    """Also where a large common offset of the values would cost digits."""
    attention = SoftmaxAttention.random(64, 4, seed=3, gain=gain, biases=True, dtype=torch.float64)
    attention = dataclasses.replace(attention, value_bias=attention.value_bias + shift)
    attention, tokens = attention.to(dtype=torch.float32), draw(1, 128, 64, dtype=torch.float32)
    single = closed_form.norm_maps(attention, tokens, paths=True)
    double = closed_form.norm_maps(attention.to(dtype=torch.float64), tokens.double(), paths=True)
    assert_close(single.total, double.total, "float32")
    off = ~torch.eye(128, dtype=torch.bool)
    assert_close(single.total[:, off], double.total[:, off], "float32")


def test_identical_tokens_have_no_key_path():
    """Every value equals its mean, so the key path cancels exactly; rounding must not show up as influence."""
    attention = SoftmaxAttention.random(DIM, 3, seed=2, dtype=torch.float64)
    tokens = draw(1, 1, DIM).expand(1, LENGTH, DIM).contiguous()
    maps = closed_form.norm_maps(attention, tokens, paths=True)
    assert maps.paths["key"].max() < 1e-12
    assert_close(maps.total, block_norms(dense_jacobian(attention, tokens), "frobenius"), "maps")


@pytest.mark.parametrize("norm", NORMS)
def test_one_token(norm):
    attention, tokens = SoftmaxAttention.random(8, 2, dtype=torch.float64), draw(1, 1, 8)
    maps = closed_form.norm_maps(attention, tokens, norm=norm, paths=True)
    assert_close(maps.total, block_norms(dense_jacobian(attention, tokens), norm), "spectral")


def test_spectral_norms_of_vanishing_blocks():
    """Weights of 1e-200 have norms of 1e-200, not zero: squares must not underflow."""
    bias = torch.zeros(4, 4, dtype=torch.float64)
    bias[0, 1:] = -460.0
    attention, tokens = SoftmaxAttention.random(8, 1, bias=bias, dtype=torch.float64), draw(1, 4, 8)
    maps = closed_form.norm_maps(attention, tokens, norm="spectral")
    expected = block_norms(sum(closed_form.blocks(attention, tokens).values()), "spectral")
    assert torch.allclose(maps.total[0, 0, 1:], expected[0, 0, 1:], rtol=1e-5, atol=0)


def test_cross_attention_is_refused():
    good = SoftmaxAttention.random(8, 2, dtype=torch.float64)
    crossed = dataclasses.replace(good, key_weight=good.key_weight[..., :6])
    with pytest.raises(InputError, match=r"different widths \(8, 6, 8\): this is cross-attention"):
        closed_form.norm_maps(crossed, draw(1, 4, 8))


def test_unknown_norm_is_refused():
    with pytest.raises(InputError, match="unknown norm 'nuclear'; choose one of frobenius, rms, spectral"):
        closed_form.norm_maps(SoftmaxAttention.random(8, 2), draw(1, 4, 8, dtype=torch.float32), norm="nuclear")
