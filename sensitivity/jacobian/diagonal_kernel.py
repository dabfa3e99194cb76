r"""Frobenius norms of one head's diagonal blocks from inner products of its keys, without their covariance.

The query path :math:`Q_i = \sum_j \alpha_{ij}\, u_j p_j^T - \bar u_i \bar p_i^T` is a weighted sum of outer products of
:math:`u_j = W_O v_j` and :math:`p_j = c W_Q^T k_j`. The product of two outer products is that of their left vectors
times that of their right ones, so

.. math::
    \Big\| \sum_j \alpha_{ij}\, u_j p_j^T \Big\|_F^2
    = \sum_{jl} \alpha_{ij} \alpha_{il} (u_j \cdot u_l) (p_j \cdot p_l),

a quadratic form whose matrix all queries share. Where a sequence is shorter than the covariance of a wide head has
entries, that is less to compute.
"""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian.diagonal_forms import LOST, DiagonalSquares
from sensitivity.jacobian.query_rows import Rows, RowSource

PANEL = 256  # columns of the kernel that are multiplied at a time; what is above its diagonal there is wasted
CHEAPER = 1.25  # keys for each entry of a symmetric covariance up to which the kernel was the faster
LONGEST = 2**13  # keys of a kernel that may be held: it has half the square of their number in entries


def pays(attention: SoftmaxAttention, length: int) -> bool:
    """Whether the kernel of one head is cheaper than the covariances of the rows, which are symmetric at best."""
    width = min(attention.width, attention.dim) * min(attention.value_weight.shape[1], attention.dim)
    alone = attention.heads == 1 and attention.multiplier is None  # what is dropped keeps values from being centred
    return alone and length <= min(CHEAPER * width / 2, LONGEST)


class DiagonalKernel:
    """What the diagonal blocks of some samples have in common.

    Args:
        source: the samples, not in the coordinates of a frame.
    """

    def __init__(self, source: RowSource) -> None:
        self.attention = attention = source.attention
        self.outputs, self.map = attention.output_weight[0], (attention.output_weight @ attention.value_weight)[0]
        self._reads = attention.scale * attention.query_weight[0]
        self._key_reads = attention.scale * attention.key_weight[0]
        self.left, self.right = source.value[:, 0] @ self.outputs.mT, source.key[:, 0] @ self._reads
        self.panels = [self._panel(low) for low in range(0, self.left.shape[1], PANEL)]

    def _panel(self, low: int) -> Float[Tensor, "sample below column"]:
        """Some columns of the kernel from its diagonal down; below their own rows they stand for two entries each."""
        columns, below = slice(low, low + PANEL), slice(low, None)
        panel = self.left[:, below] @ self.left[:, columns].mT
        panel *= self.right[:, below] @ self.right[:, columns].mT
        panel[:, PANEL:] *= 2
        return panel

    @cached_property
    def _forms(self) -> Float[Tensor, "sample form key"]:
        return self._forms_of(self.left, self.right)

    def _forms_of(
        self, left: Float[Tensor, "sample time out"], right: Float[Tensor, "sample time dim"]
    ) -> Float[Tensor, "sample form time"]:
        r""":math:`|u|^2`, :math:`|p|^2`, and the products of :math:`u p^T` with the value path's matrix and identity.

        The latter in square blocks only.
        """
        found = [_dot(left, left), _dot(right, right), _dot(left @ self.map, right)]
        if self.attention.out_dim == self.attention.dim:
            found.append(_dot(left, right))
        return torch.stack(found, dim=1)

    def _quadratic(self, alpha: Float[Tensor, "sample row key"]) -> Float[Tensor, "sample row"]:
        found = alpha.new_zeros(alpha.shape[:2])
        for number, panel in enumerate(self.panels):
            low = number * PANEL
            product = alpha[:, :, low:] @ panel
            found += product.mul_(alpha[:, :, low : low + PANEL]).sum(dim=2)
        return found

    def _between(
        self,
        alpha: Float[Tensor, "sample row key"],
        left: Float[Tensor, "sample row out"],
        right: Float[Tensor, "sample row dim"],
    ) -> Float[Tensor, "sample row"]:
        r""":math:`l^T \sum_j \alpha_j u_j p_j^T r`, from right to left."""
        onto = (right @ self.right.mT).mul_(alpha)
        return (onto @ self.left).mul_(left).sum(dim=2)

    def squares(self, rows: Rows) -> DiagonalSquares:
        """The squares of some rows."""
        every, query = rows.alpha[:, 0], rows.query[:, 0]
        alpha, deviation = (part[:, 0] for part in rows.on_diagonal())
        alpha, deviation, gradient = alpha[..., 0], deviation @ self.outputs.mT, query @ self._key_reads
        left, right = rows.mean[:, 0] @ self.outputs.mT, rows.mean_key[:, 0] @ self._reads
        of_means, of_key = self._forms_of(left, right).unbind(dim=1), self._forms_of(deviation, gradient).unbind(dim=1)
        forms = (every @ self._forms.mT).unbind(dim=2)
        kept, lost, key = self._quadratic(every), of_means[0] * of_means[1], of_key[0] * of_key[1]
        # the kernel's terms are of this size where keys have a mean in common, which then cancels
        common = kept + of_means[0] * forms[1] + forms[0] * of_means[1]
        squared = kept - 2 * self._between(every, left, right) + lost
        mixed = self._between(every, deviation, gradient) - _dot(left, deviation) * _dot(right, gradient)
        on_map, *on_identity = (a - b + c for a, b, c in zip(forms[2:], of_means[2:], of_key[2:], strict=True))
        own = alpha.square() * self.map.square().sum()
        removed = own + key + squared + 2 * (mixed + alpha * on_map)
        scale = own + key + common
        doubtful = (removed < LOST * scale) | (squared < LOST * common)
        if not on_identity:
            return DiagonalSquares(removed, removed, squared, doubtful)
        residual = float(self.attention.residual)
        added = residual**2 * self.attention.dim
        total = removed + 2 * residual * (alpha * self.map.trace() + on_identity[0]) + added
        return DiagonalSquares(removed, total, squared, doubtful | (total < LOST * (scale + added)))


def _dot(left: Float[Tensor, "*axes width"], right: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes"]:
    return (left * right).sum(dim=-1)
