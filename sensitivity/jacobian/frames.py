"""Orthonormal coordinates of a layer's heads, in which the query path's norm is that of a covariance."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.attention import SoftmaxAttention


@dataclass(frozen=True)
class TokenFrame:
    r"""Coordinates :math:`z = X x` of tokens, of which those of values and keys are multiples.

    Second moments of values and keys are then those of one vector with itself: symmetric, so half of them are known.

    Attributes:
        tokens: :math:`X`.
        values: what takes :math:`z` to the value coordinates, entry by entry.
        keys: what takes :math:`z` to the key coordinates, entry by entry.
    """

    tokens: Float[Tensor, "dim dim"]
    values: Float[Tensor, " dim"]
    keys: Float[Tensor, " dim"]


@dataclass(frozen=True)
class Frame:
    r"""A layer in orthonormal bases :math:`U^h` of what its heads put out and :math:`P^h` of what their queries read.

    With :math:`W_O^h = U^h R^h` and :math:`c W_Q^{hT} = P^h S^h` the query path of the diagonal block is
    :math:`\sum_h U^h C^h_i P^{hT}`, where :math:`C^h_i` is the weighted covariance of :math:`R^h v^h` and
    :math:`S^h k^h`, and its Frobenius norm for one head is that of :math:`C^h_i` itself.

    Attributes:
        attention: the same layer, up to a constant, with the values :math:`R^h v^h` and the output weights :math:`U^h`.
        keys: :math:`S^h`, which takes keys to their coordinates.
        reads: :math:`P^h`.
        by_token: coordinates of the tokens, where one head is so wide that they are worth it.
    """

    attention: SoftmaxAttention
    keys: Float[Tensor, "head coordinate width"]
    reads: Float[Tensor, "head dim coordinate"]
    by_token: TokenFrame | None = None

    @classmethod
    def of(cls, attention: SoftmaxAttention) -> Frame:
        """The frame of ``attention``; decomposed in double precision, or its rounding would be that of every block."""
        query_weight = attention.scale * _double(attention.query_weight).mT
        if _is_wide(attention):
            return cls._of_tokens(attention, query_weight)
        outputs, values = torch.linalg.qr(_double(attention.output_weight))
        reads, keys = torch.linalg.qr(query_weight)
        turned = _turned(attention, outputs, values, values @ _double(attention.value_weight))
        return cls(turned, _like(attention, keys), _like(attention, reads))

    @classmethod
    def _of_tokens(cls, attention: SoftmaxAttention, query_weight: Tensor) -> Frame:
        r"""The generalised singular value decomposition of :math:`W_O W_V` and :math:`c W_Q^T W_K`.

        An orthonormal basis of both, one above the other, is that of neither; turned so that its upper part has
        orthogonal columns, its lower part has them too. Both are brought to size one first: the smaller would drown.
        """
        w_o, w_v = _double(attention.output_weight)[0], _double(attention.value_weight)[0]
        key_map = query_weight[0] @ _double(attention.key_weight)[0]
        value_map, value_size = _unit(w_o @ w_v)
        key_map, key_size = _unit(key_map)
        both, triangle = torch.linalg.qr(torch.cat([value_map, key_map]))
        outputs, cosines, turn = torch.linalg.svd(both[: len(w_o)])
        lower = both[len(w_o) :] @ turn.mT
        sines = torch.linalg.vector_norm(lower, dim=0)
        reads = lower / sines.clamp_min(torch.finfo(sines.dtype).tiny)
        tokens = turn @ triangle
        cosines, sines = value_size * cosines, key_size * sines
        frame = TokenFrame(*(_like(attention, part) for part in (tokens, cosines, sines)))
        turned = _turned(attention, outputs[None], (outputs.mT @ w_o)[None], (cosines[:, None] * tokens)[None])
        keys = reads.mT @ query_weight[0]
        return cls(turned, _like(attention, keys)[None], _like(attention, reads)[None], frame)


def _unit(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix at size one, and its size; a matrix of zeros stays one."""
    size = torch.linalg.vector_norm(matrix)
    size = torch.where(size > 0, size, 1.0)
    return matrix / size, size


def _is_wide(attention: SoftmaxAttention) -> bool:
    """Whether the products of a token with itself are fewer than those of a head's value with its key."""
    dim = attention.dim
    width = min(attention.width, dim) * min(attention.value_weight.shape[1], dim)
    alone = attention.heads == 1 and attention.multiplier is None and attention.out_dim == dim
    return alone and dim * (dim + 1) // 2 < width


def _turned(attention: SoftmaxAttention, outputs: Tensor, values: Tensor, value_weight: Tensor) -> SoftmaxAttention:
    bias = attention.value_bias
    if bias is not None and attention.multiplier is not None:
        bias = _like(attention, (values @ _double(bias)[..., None])[..., 0])
    else:  # it shifts all states alike, and would only cost digits
        bias = None
    return dataclasses.replace(
        attention,
        value_weight=_like(attention, value_weight),
        value_bias=bias,
        output_weight=_like(attention, outputs),
    )


def _double(values: Tensor) -> Tensor:
    return values.detach().cpu().double()  # small, and not every device knows double precision


def _like(attention: SoftmaxAttention, values: Tensor) -> Tensor:
    return values.to(attention.value_weight)
