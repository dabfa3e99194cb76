"""Automatic differentiation along random vectors: unbiased, with an error bar, and reproducible."""

from __future__ import annotations

import pytest
import torch
from oracles import draw, norm_map
from sequence_models import DIM, LENGTH, build
from tolerances import assert_close

from sensitivity.jacobian.autodiff import norm_maps

TOKENS = draw(3, LENGTH, DIM)


def test_probes_are_unbiased_in_the_square():
    model = build("transformer")
    exact = norm_map(model, TOKENS).square()
    squares = torch.stack(
        [
            norm_maps(model, TOKENS, probes=4, generator=torch.Generator().manual_seed(seed)).total.square()
            for seed in range(120)
        ]
    )
    error = (squares.mean(dim=0) - exact).abs() / (squares.std(dim=0) / 120**0.5)
    assert error.max() < 5
    assert error.square().mean() == pytest.approx(1, abs=0.5)


def test_standard_error_covers():
    model = build("transformer")
    exact = norm_map(model, TOKENS)
    inside = []
    for seed in range(60):
        maps = norm_maps(model, TOKENS, probes=5, generator=torch.Generator().manual_seed(seed))
        inside.append((maps.total - exact).abs() <= 2 * maps.standard_error)
    assert 0.8 < torch.stack(inside).double().mean() < 0.99


def test_probes_have_their_own_generator():
    model = build("transformer")
    first, again = (norm_maps(model, TOKENS, probes=3) for _ in range(2))
    other = norm_maps(model, TOKENS, probes=3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first.total, again.total)
    assert not torch.equal(first.total, other.total)
    assert first.engine.startswith("3 Rademacher probes per query, vmapped VJP")


def test_as_many_probes_as_features_are_exact():
    model = build("transformer")
    maps = norm_maps(model, TOKENS, probes=DIM)
    assert_close(maps.total, norm_map(model, TOKENS), "maps")
    assert maps.standard_error is None
    assert "exact rows instead of 6 probes" in maps.notes[0]
