"""Encodings of time positions; computed for any length, kept in no buffer."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.errors import InputError


def time_encoding(
    length: int,
    dim: int,
    scale_length: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Float[Tensor, "time dim"]:
    r"""The fixed tAPE table (time absolute position encoding).

    .. math::

        P_{t, 2k} = \sin(t \omega_k), \quad P_{t, 2k+1} = \cos(t \omega_k), \qquad
        \omega_k = 10000^{-2k/D} \, D / T_{\max}

    :math:`T_{\max}` is an argument of its own and not the length: the table of a longer series begins with the table
    of a shorter one, so a model that was trained on 12 steps sees the positions it knows first, whatever it is later
    run on.

    Args:
        length: number of time steps, of any size.
        dim: features.
        scale_length: :math:`T_{\max}`, the length that the frequencies are spread for.
        dtype: floating type of the table (computed in float64 first).
        device: where the table lives.

    Raises:
        InputError: one of the sizes is below 1.

    Source: Foumani et al., "Improving position encoding of transformers for multivariate time series classification",
    2023 (arXiv 2305.16642).
    """
    for name, value in (("length", length), ("dim", dim), ("scale_length", scale_length)):
        if value < 1:
            raise InputError(f"{name} of a time encoding must be at least 1, not {value}.")
    step = torch.arange(length, dtype=torch.float64, device=device)
    even = torch.arange(0, dim, 2, dtype=torch.float64, device=device)
    angle = step[:, None] * (10000.0 ** (-even / dim) * dim / scale_length)
    table = torch.stack([angle.sin(), angle.cos()], dim=-1).reshape(length, -1)
    return table[:, :dim].to(dtype)
