"""Dropout whose random masks are cheap on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from sensitivity.errors import InputError

_GRID = 1 << 16
_WORD = 4  # masks in one 64-bit draw


class Dropout(nn.Module):
    """Sets entries to zero with probability ``p`` in training, and scales the others so that the mean stays.

    The masks come from torch's random stream, as in ``torch.nn.Dropout``, but not entry by entry: see :func:`factors`.

    Args:
        p: the rate, in [0, 1).

    Raises:
        InputError: ``p`` is not in [0, 1).
    """

    def __init__(self, p: float | int = 0.1, name: str = "dropout") -> None:
        super().__init__()
        self.p = check_dropout(p, name)

    def forward(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The values, with some of them dropped in training."""
        return dropout(values, self.p) if self.training else values

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"p={self.p:g}"


def dropout(values: Float[Tensor, "*shape"], rate: float | int) -> Float[Tensor, "*shape"]:
    """The values with entries dropped at this rate; torch's own kernel wherever it is the faster one."""
    if rate == 0:
        return values
    if not _own_masks(values):
        return functional.dropout(values, rate)
    return values * _factors_like(values, rate)


def branch(
    values: Float[Tensor, "*shape"], offset: Tensor | None, rate: float | int, skip: Tensor | None
) -> Float[Tensor, "*shape"]:
    """``skip + dropout(values + offset)``, the end of a residual branch in training.

    Args:
        values: a result that nobody else holds: it is overwritten, which saves three passes over fresh memory.
        offset: added before the dropout; broadcasts to ``values``.
        rate: of the dropout.
        skip: added after the dropout.
    """
    values = values if offset is None else values.add_(offset)
    if rate > 0:
        values = values.mul_(_factors_like(values, rate)) if _own_masks(values) else functional.dropout(values, rate)
    return values if skip is None else values.add_(skip)


def _own_masks(values: Tensor) -> bool:
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def _factors_like(values: Tensor, rate: float | int) -> Tensor:
    """Factors in the memory order of the values, which is faster where that is permuted."""
    drawn = factors(values.shape, rate, values.dtype)
    strides = torch.empty_like(values).stride()
    dense = values.stride() == strides != drawn.stride()
    return drawn.as_strided(values.shape, strides) if dense else drawn


def factors(shape: torch.Size, rate: float | int, dtype: torch.dtype = torch.float32) -> Tensor:
    r"""Dropout factors on the CPU: 0 with probability :math:`q`, else :math:`1 / (1 - q)`.

    torch draws one double for every entry, a fifth of the time of a training step. Here one draw of torch's stream
    seeds a small generator (SFC64), and every 64 bits of it decide four entries. So :math:`q` is the rate rounded to
    a multiple of :math:`2^{-16}`, and the factor belongs to the rounded rate: the mean is exactly 1.

    Args:
        shape: of the factors.
        rate: wanted rate, in [0, 1).
        dtype: floating type of the factors.
    """
    dropped = min(round(rate * _GRID), _GRID - 1)
    count = shape.numel()
    seed = int(torch.randint(2**63 - 1, ()))
    words = np.random.SFC64(seed).random_raw(-(-count // _WORD)).view(np.int16)[:count]
    kept = torch.empty(count, dtype=dtype)
    torch.ge(torch.from_numpy(words), dropped - _GRID // 2, out=kept)
    return kept.mul_(_GRID / (_GRID - dropped)).reshape(shape)


def check_dropout(value: float | int, name: str) -> float:
    """Checks a dropout rate.

    Raises:
        InputError: not a number in [0, 1).
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InputError(f"{name} must be a rate of at least 0 and below 1, not {value!r}.")
    return float(value)
