r"""A stack of layers: the product of the norm maps bounds the end-to-end map, entry by entry."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.bounds.verdict import Comparison
from sensitivity.jacobian.closed_form import blocks, norm_maps
from sensitivity.jacobian.norms import Norm, block_norms


def compare(layers: Sequence[SoftmaxAttention], tokens: Float[Tensor, "sample time dim"], norm: Norm) -> Comparison:
    r""":math:`N(J^{(L \dots 1)}_{ij}) \le (N^{(L)} \cdots N^{(1)})_{ij}`: a sum over all paths through the layers.

    Frobenius norms are submultiplicative too; all factors but the first may be spectral, which is sharper. Blocks of
    the end-to-end Jacobian are formed, so this is for sequences of moderate length.
    """
    first: Norm = "spectral" if norm == "spectral" else "frobenius"
    state, end_to_end, product = tokens.double(), None, None
    for layer in layers:
        layer = layer.to(dtype=torch.float64)
        step = sum(blocks(layer, state).values()).nan_to_num()  # type: ignore[union-attr]
        end_to_end = step if end_to_end is None else torch.einsum("sikab,skjbc->sijac", step, end_to_end)
        norms = norm_maps(layer, state, norm=first if product is None else "spectral").total.nan_to_num()
        product = norms if product is None else norms @ product
        state = layer(state)
    assert end_to_end is not None
    assert product is not None
    measured = block_norms(end_to_end, first)
    compared = (product > 0) & torch.isfinite(measured)
    for layer in layers:
        if layer.padding is not None:
            seen = ~layer.padding.expand(tokens.shape[0], tokens.shape[1])
            compared = compared & seen[:, :, None] & seen[:, None, :]
    return Comparison(measured, product, compared, int(compared.sum()))


def unit(norm: Norm, dim: int) -> float:
    """What norms are divided by."""
    return math.sqrt(dim) if norm == "rms" else 1.0
