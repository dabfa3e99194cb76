"""Largest eigenvalues of many tridiagonal matrices, and bounds of the rest, against dense decompositions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from oracles import draw
from tolerances import assert_close

from sensitivity.jacobian.tridiagonal import (
    Lines,
    beyond,
    beyond_squared,
    is_alone,
    is_below,
    largest_eigenvalue,
    largest_of,
    residual,
    unseen,
)


def _lanczos(matrix: torch.Tensor, start: torch.Tensor, steps: int) -> Lines:
    """Lines of one matrix's Lanczos iteration, with full reorthogonalisation."""
    basis, diagonal, beside = [start / start.norm()], [], []
    for _ in range(steps):
        image = matrix @ basis[-1]
        diagonal.append(image @ basis[-1])
        for known in (*basis, *basis):
            image = image - (known @ image) * known
        beside.append(image.norm())
        basis.append(image / image.norm())
    return Lines(torch.stack(diagonal)[:, None], torch.stack(beside)[:, None])


def _first(lines: Lines, steps: int) -> Lines:
    return Lines(lines.diagonal[:steps], lines.beside[:steps])


def _dense(lines: Lines) -> torch.Tensor:
    sides = lines.beside[:-1].T
    return torch.diag_embed(lines.diagonal.T) + torch.diag_embed(sides, 1) + torch.diag_embed(sides, -1)


def _positive(size: int, seed: int = 0) -> torch.Tensor:
    matrix = draw(size, size + 10, seed=seed)
    return matrix @ matrix.T


def test_the_largest_root_is_the_largest_eigenvalue():
    for steps in (1, 2, 7, 20):
        lines = Lines(draw(steps, 50).abs(), draw(steps, 50, seed=1).abs())
        top, settled = largest_eigenvalue(lines, 1e-9)
        assert settled.all()
        assert_close(top, torch.linalg.eigvalsh(_dense(lines))[:, -1], "maps")


def test_close_eigenvalues_are_told_apart():
    """Laguerre's method reaches the larger of two roots a hundred millionth apart, never the other."""
    diagonal = torch.tensor([[1.0], [0.3], [1.0 + 1e-8]], dtype=torch.float64)
    lines = Lines(diagonal, torch.tensor([[1e-12], [1e-12], [0.0]], dtype=torch.float64))
    assert float(largest_eigenvalue(lines, 1e-12)[0]) == pytest.approx(1 + 1e-8, abs=1e-13)


def test_zeros_have_the_largest_eigenvalue_zero():
    top, settled = largest_eigenvalue(Lines(*torch.zeros(2, 5, 3, dtype=torch.float64)), 1e-9)
    assert settled.all()
    assert (top == 0).all()


def test_the_bound_of_the_rest_holds_and_is_tight():
    """Of all numbers with a sum and a sum of squares, one above and the others equal have the largest maximum."""
    values = draw(12, 200).abs()
    assert (largest_of(values.sum(0), values.square().sum(0), 12) >= values.amax(0) * (1 - 1e-12)).all()
    extreme = torch.tensor([[3.0]] + [[1.0]] * 11, dtype=torch.float64)
    assert float(largest_of(extreme.sum(0), extreme.square().sum(0), 12)) == pytest.approx(3.0)


def _outside(matrix: torch.Tensor, start: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Largest eigenvalue of the compression to what is orthogonal to the Lanczos vectors, step by step."""
    krylov = [start]
    for step in range(1, 12):
        basis = torch.linalg.qr(torch.stack(krylov, 1), mode="complete")[0][:, step:]
        yield step, torch.linalg.eigvalsh(basis.T @ matrix @ basis)[-1]
        krylov.append(matrix @ krylov[-1] / 100)


def test_beyond_bounds_the_part_outside_the_iteration():
    """The operator's compression to what is orthogonal to the Lanczos vectors has no eigenvalue above the bound."""
    matrix, start = _positive(20), draw(20, seed=1)
    lines, nothing = _lanczos(matrix, start, 19), torch.zeros(1, dtype=torch.float64)
    trace, square = matrix.trace()[None], matrix.square().sum()[None]
    for step, outside in _outside(matrix, start):
        bound = beyond(_first(lines, step), trace, square, 20, nothing)
        assert outside * (1 - 1e-9) <= bound <= outside * 2.5


@pytest.mark.parametrize("seed", range(5))
def test_fourth_powers_bound_it_closer(seed):
    """Of eigenvalues that fall off, fourth powers leave less room than squares do."""
    matrix, start = _positive(20, seed), draw(20, seed=1)
    lines, nothing = _lanczos(matrix, start, 18), torch.zeros(1, dtype=torch.float64)
    trace, square = matrix.trace()[None], matrix.square().sum()[None]
    fourth = (matrix @ matrix).square().sum()[None]
    for step, outside in _outside(matrix, start):
        bound = beyond_squared(_first(lines, step), square, fourth, 20, nothing)
        assert outside * (1 - 1e-9) <= bound <= outside * 1.8
        assert step > 6 or bound < beyond(_first(lines, step), trace, square, 20, nothing)


def test_a_value_is_proved_only_when_it_is_there():
    """With the bound for a corner no eigenvalue is above the place, from the step on at which the estimate says so."""
    for seed in range(5):
        matrix = _positive(20, seed)
        truth = torch.linalg.eigvalsh(matrix)[-1]
        lines, nothing = _lanczos(matrix, draw(20, seed=1), 18), torch.zeros(1, dtype=torch.float64)
        proofs = []
        for step in range(2, 18):
            some = _first(lines, step)
            top, _ = largest_eigenvalue(some, 1e-8)
            corner = beyond(some, matrix.trace()[None], matrix.square().sum()[None], 20, nothing)
            proofs.append(bool(is_below(some, corner, top * (1 + 2e-6))))
            assert not proofs[-1] or abs(top / truth - 1) < 2e-6
            bordered = Lines(torch.cat([some.diagonal, corner[None]]), lines.beside[: step + 1])
            largest = torch.linalg.eigvalsh(_dense(bordered))[0, -1]
            assert proofs[-1] == bool(largest < top * (1 + 2e-6))
        assert not proofs[0]
        assert proofs[-1]


def test_a_start_that_misses_the_largest_eigenvector_proves_nothing():
    """And the smallest part that could stay unseen is above the part that is there."""
    values = torch.cat([torch.linspace(0.1, 1.0, 19, dtype=torch.float64), torch.tensor([1.01], dtype=torch.float64)])
    nothing = torch.zeros(1, dtype=torch.float64)
    for part in (0.0, 1e-9, 1e-6):
        start = torch.ones(20, dtype=torch.float64)
        start[-1] = part
        lines = _lanczos(torch.diag(values), start, 16)
        for step in range(1, 17):
            some = _first(lines, step)
            top, _ = largest_eigenvalue(some, 1e-9)
            corner = beyond(some, values.sum()[None], values.square().sum()[None], 20, nothing)
            assert top > 1.0099 or not is_below(some, corner, top * 1.00001)
            assert top > 1.0099 or unseen(some, torch.full_like(top, 1.01)) >= part / start.norm() * (1 - 1e-9)


def test_the_residual_is_that_of_the_ritz_vector():
    lines = _lanczos(_positive(20), draw(20, seed=1), 12)
    for step in (2, 5, 9):
        some = _first(lines, step)
        values, vectors = torch.linalg.eigh(_dense(some)[0])
        expected = some.beside[-1] * vectors[-1, -1].abs()
        assert residual(some, values[-1:]).item() == pytest.approx(expected.item(), rel=1e-6)


def test_neighbours_are_counted():
    lines = Lines(torch.tensor([[1.0], [0.9]], dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64))
    top = torch.ones(1, dtype=torch.float64)
    assert is_alone(lines, top, torch.tensor([0.05], dtype=torch.float64))
    assert not is_alone(lines, top, torch.tensor([0.2], dtype=torch.float64))
