"""The one table of tolerances; a test names the comparison that it makes, not a number.

Each entry is the largest error that is allowed, relative to the largest entry of what is expected, so that exact zeros
make no comparison vacuous or impossible.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCES = {
    "blocks": 1e-12,  # two exact computations of Jacobian blocks in float64
    "maps": 1e-10,  # two exact computations of norm maps in float64
    "spectral": 1e-6,  # iterated spectral norms against an SVD, float64
    "differences": 1e-6,  # central finite differences in float64
    "float32": 1e-5,  # float32 against float64
    "float32_model": 1e-4,  # a deep float32 model against float64
    "half": 2e-2,  # bfloat16 and float16
    "law": 5e-2,  # asymptotic laws against simulation
}


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest expected magnitude; NaN must stand in the same places."""
    actual, expected = torch.as_tensor(actual).detach().double(), torch.as_tensor(expected).detach().double()
    assert actual.shape == expected.shape, f"shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    assert torch.equal(actual.isnan(), expected.isnan()), "NaN in different places"
    difference = (actual - expected).nan_to_num().abs().max().item() if actual.numel() else 0.0
    scale = expected.nan_to_num().abs().max().item() if expected.numel() else 0.0
    return difference / scale if scale > 0 else difference


def assert_close(actual: Tensor, expected: Tensor, kind: str) -> None:
    """Asserts that ``actual`` is ``expected`` to the tolerance of this kind of comparison."""
    found = error(actual, expected)
    assert found <= TOLERANCES[kind], f"relative error {found:.3g} exceeds {TOLERANCES[kind]:.0e} ({kind})"
