"""The largest eigenvalue of many tridiagonal matrices against a dense decomposition."""

from __future__ import annotations

import torch
from oracles import draw
from tolerances import assert_close

from sensitivity.jacobian.tridiagonal import largest_eigenvalue


def _lanczos(matrix: torch.Tensor, start: torch.Tensor, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Diagonal and side entries of one matrix's Lanczos iteration, with full reorthogonalisation."""
    basis, diagonal, beside = [start / start.norm()], [], []
    for _ in range(steps):
        image = matrix @ basis[-1]
        diagonal.append(image @ basis[-1])
        for known in (*basis, *basis):
            image = image - (known @ image) * known
        beside.append(image.norm())
        basis.append(image / image.norm())
    return diagonal, beside


def test_the_largest_root_is_the_largest_eigenvalue():
    diagonal, beside = draw(7, 50).abs(), draw(6, 50, seed=1).abs()
    dense = torch.diag_embed(diagonal.T) + torch.diag_embed(beside.T, 1) + torch.diag_embed(beside.T, -1)
    top, _, _ = largest_eigenvalue(list(diagonal), list(beside), draw(50, seed=2).abs(), 1e-6, 0.05)
    assert_close(top, torch.linalg.eigvalsh(dense)[:, -1], "maps")


def test_close_means_close_and_far_means_far():
    """Along an iteration the estimate says so as soon as the value is there, and not long before."""
    matrix = draw(20, 30)
    matrix = matrix @ matrix.T
    truth, early = torch.linalg.eigvalsh(matrix)[-1], []
    diagonal, beside = _lanczos(matrix, draw(20, seed=1), 18)
    for step in range(2, 18):
        top, close, _ = largest_eigenvalue(diagonal[:step], beside[: step - 1], beside[step - 1], 1e-6, 0.05)
        assert not close or abs(top / truth - 1) < 1e-5
        early.append(bool(close))
    assert not early[0]
    assert early[-1]


def test_a_start_that_misses_the_largest_eigenvector_is_told_of():
    """The smallest part that could stay unseen is above the part that is there."""
    values = torch.cat([torch.linspace(0.1, 1.0, 19, dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)])
    for part in (1e-3, 1e-6):
        start = torch.ones(20, dtype=torch.float64)
        start[-1] = part
        diagonal, beside = _lanczos(torch.diag(values), start, 12)
        for step in range(1, 13):
            top, _, unseen = largest_eigenvalue(diagonal[:step], beside[: step - 1], beside[step - 1], 1e-6, 0.05)
            assert top > 2.9 or unseen > part / start.norm()
