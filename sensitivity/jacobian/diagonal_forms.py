r"""Frobenius norms of diagonal blocks as sums of products of small matrices, in the coordinates of a ``Frame``.

With :math:`\gamma I` for :math:`M_0` and :math:`\gamma` for :math:`\alpha^0`, a diagonal block is

.. math:: J_{ii} = \sum_k \alpha^k M_k + \sum_h (U^h r^h) w_h^T + \sum_h U^h C^h P^{hT} .

Its square is a sum of the products of two of these terms, all of which are forms in vectors and matrices as wide as a
head, where the block is as wide as the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.jacobian.frames import Frame
from sensitivity.jacobian.geometry import Geometry
from sensitivity.jacobian.query_rows import Rows

LOST = 1e-2  # smallest square, relative to the terms that it is the sum of, that is taken for exact
CACHED = 2**19  # numbers in the covariances that are worked on at a time, for the caches to hold


class DiagonalSquares(NamedTuple):
    """Squared norms of the diagonal blocks of some rows.

    Attributes:
        removed: of the blocks without the residual.
        total: of the whole blocks.
        query: of the query path alone.
        doubtful: where one of them is so small beside its terms that rounding has eaten digits.
    """

    removed: Float[Tensor, "sample row"]
    total: Float[Tensor, "sample row"]
    query: Float[Tensor, "sample row"]
    doubtful: Bool[Tensor, "sample row"]


@dataclass(frozen=True)
class DiagonalForms:
    r"""What the squares need of a layer, and no row.

    ``k`` runs over the heads and, where blocks are square, the identity.

    Attributes:
        outputs: :math:`U^{gT} U^h`, the matrices of all ``g`` one above the other.
        reads: :math:`P^{gT} P^h`.
        values: :math:`\langle M_h, M_g \rangle`.
        traces: of :math:`M_h`; None where blocks are not square.
        linear: :math:`U^{hT} M_k P^h`, flattened: their products with :math:`C^h`.
        keys: what :math:`q^h` is multiplied by, one above the other: :math:`c U^{hT} M_k W_K^{hT}` for every ``k``,
            :math:`c P^{gT} W_K^{hT}` for every ``g``, :math:`c^2 W_K^g W_K^{hT}` for every ``g``.
        identity: :math:`\|I\|^2`.
        residual: :math:`\gamma`.
    """

    outputs: Float[Tensor, "head outputs value_width"]
    reads: Float[Tensor, "head head coordinate coordinate"]
    values: Float[Tensor, "head head"]
    traces: Float[Tensor, " head"] | None
    linear: Float[Tensor, "head k entry"]
    keys: Float[Tensor, "head forms width"]
    identity: int
    residual: float

    @classmethod
    def of(cls, frame: Frame, geometry: Geometry) -> DiagonalForms:
        """The forms of a framed layer with the geometry ``geometry``."""
        attention, reads = frame.attention, frame.reads
        w_o, w_v = attention.output_weight, attention.value_weight
        w_k, side = (attention.scale * attention.key_weight).flatten(0, 1), reads.movedim(0, 1).flatten(1)

        def of_pairs(products: Tensor) -> Tensor:
            return products.unflatten(1, (attention.heads, -1)).unflatten(0, (attention.heads, -1)).movedim(2, 1)

        linear = geometry.outputs @ of_pairs(w_v.flatten(0, 1) @ side).transpose(0, 1)
        onto, traces = geometry.turned.mT.transpose(0, 1), None
        if attention.out_dim == attention.dim:
            linear = torch.cat([linear, (w_o.mT @ reads)[:, None]], dim=1)
            own_keys = attention.scale * w_o.mT @ attention.key_weight.mT
            onto = torch.cat([onto, own_keys[:, None]], dim=1)
            traces = (w_v.mT * w_o).sum(dim=(1, 2))
        above = (onto, of_pairs(side.mT @ w_k.mT).transpose(0, 1), geometry.keys.mT)
        return cls(
            outputs=geometry.outputs.mT.flatten(1, 2),
            reads=of_pairs(side.mT @ side),
            values=geometry.values,
            traces=traces,
            linear=linear.flatten(2),
            keys=torch.cat([part.flatten(1, 2) for part in above], dim=1),
            identity=attention.dim,
            residual=float(attention.residual),
        )

    def squares(self, rows: Rows) -> DiagonalSquares:
        """The squares of some framed rows, a few rows at a time."""
        alpha, deviation = rows.on_diagonal()
        samples, heads, count, _ = alpha.shape
        step = max(1, CACHED // (samples * heads * self.linear.shape[2]))
        parts = []
        for low in range(0, count, step):
            some = slice(low, low + step)
            vectors = (alpha[:, :, some, 0], deviation[:, :, some].mT, rows.query[:, :, some].mT)
            parts.append(self._squares(rows.covariance(some), *vectors))
        return DiagonalSquares(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))

    def _squares(
        self,
        covariance: Float[Tensor, "sample head value_width coordinate row"],
        alpha: Float[Tensor, "sample head row"],
        deviation: Float[Tensor, "sample head value_width row"],
        query: Float[Tensor, "sample head width row"],
    ) -> DiagonalSquares:
        heads, width, kinds = deviation.shape[1], deviation.shape[2], self.linear.shape[1]
        left = (self.outputs @ deviation).unflatten(2, (heads, width))
        sizes = (kinds * width, heads * covariance.shape[3], heads * query.shape[2])
        on_maps, on_reads, on_keys = (self.keys @ query).split(sizes, dim=2)
        key = (left * deviation[:, None]).sum(dim=3)
        key *= (on_keys.unflatten(2, (heads, -1)) * query[:, None]).sum(dim=3)
        linear = self.linear @ covariance.flatten(2, 3)
        linear += (on_maps.unflatten(2, (kinds, width)) * deviation[:, :, None]).sum(dim=3)
        linear = linear.sum(dim=1)
        mixed, own = _mixed_and_own(left, on_reads.unflatten(2, (heads, -1)), covariance)
        squared = own + self._between_heads(covariance)
        removed = (alpha * (self.values @ alpha + 2 * linear[:, :heads])).sum(dim=1)
        removed += key.sum(dim=(1, 2)) + 2 * mixed + squared
        scale = own + key.diagonal(dim1=1, dim2=2).sum(dim=-1) + self.values.diagonal() @ alpha.square()
        doubtful = (removed < LOST * scale) | (squared < LOST * own)
        if self.traces is None:
            return DiagonalSquares(removed, removed, squared, doubtful)
        added = self.residual**2 * self.identity
        total = removed + 2 * self.residual * (linear[:, -1] + self.traces @ alpha) + added
        return DiagonalSquares(removed, total, squared, doubtful | (total < LOST * (scale + added)))

    def _between_heads(self, covariance: Tensor) -> Float[Tensor, "sample row"]:
        r""":math:`2 \sum_{h < g} \langle U^h C^h P^{hT}, U^g C^g P^{gT} \rangle`, each with a factor on one side."""
        found = covariance.new_zeros(covariance.shape[0], covariance.shape[-1])
        outputs = self.outputs.unflatten(1, (-1, self.outputs.shape[2])).mT
        for head in range(1, covariance.shape[1]):
            left = (outputs[head, :head] @ covariance[:, :head].flatten(3)).unflatten(3, covariance.shape[3:])
            right = self.reads[:head, head].flatten(0, 1) @ covariance[:, head]
            found += left.mul_(right.unflatten(2, (head, -1)).movedim(2, 1)).sum(dim=(1, 2, 3))
        return found.mul_(2)


def _mixed_and_own(
    left: Float[Tensor, "sample head head value_width row"],
    right: Float[Tensor, "sample head head coordinate row"],
    covariance: Float[Tensor, "sample head value_width coordinate row"],
) -> tuple[Float[Tensor, "sample row"], Float[Tensor, "sample row"]]:
    r"""Products of the :math:`C^g` with the key path, and with themselves."""
    work = left[:, 0, :, :, None] * right[:, 0, :, None]
    for head in range(1, left.shape[1]):
        work.addcmul_(left[:, head, :, :, None], right[:, head, :, None])
    mixed = work.mul_(covariance).sum(dim=(1, 2, 3))
    return mixed, torch.mul(covariance, covariance, out=work).sum(dim=(1, 2, 3))
