"""Dropout of the diagonal."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.errors import InputError
from sensitivity.layers.diagonal.base import Diagonal

PLACES = ("logits", "weights")


class DiagonalDropout(Diagonal):
    r"""Dropout of the diagonal, in training only; in evaluation the layer is the plain one.

    ``where="logits"``: a chosen :math:`s_{ii}` becomes :math:`-\infty` before the softmax. That row then behaves as
    under ``DiagonalMask`` (no value and key path on the diagonal, query path over the other keys); the row still sums
    to 1 and nothing is rescaled. A row whose only visible key is its own keeps it.

    ``where="weights"``: :math:`a_{ii}` is multiplied by :math:`m_i`, 0 or :math:`1 / (1 - p)`, after the softmax. The
    value path becomes :math:`m_i a_{ii} W_O W_V`; the key path :math:`c a_{ii} W_O (m_i v_i - o_i)(W_K^\top
    q_i)^\top` survives a zero, because the softmax still normalises over the diagonal. The mean over draws of the
    layer's output is the plain output.

    Args:
        p: probability that a diagonal entry is dropped; below 1 for ``where="weights"``.
        where: ``"logits"`` (the published code) or ``"weights"`` (the published text).
        shared: one Bernoulli vector of length T per layer and forward pass, shared by samples and heads (the published
            code), instead of one draw per sample, head and position.

    Raises:
        InputError: ``p`` is not a probability, or ``where`` is not a known place.
    """

    kind = "dropout"

    def __init__(self, p: float, where: str = "logits", shared: bool = False) -> None:
        super().__init__()
        if where not in PLACES:
            raise InputError(f"DiagonalDropout acts on where='logits' or where='weights', not {where!r}.")
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
            raise InputError(f"DiagonalDropout takes a probability p between 0 and 1, not {p!r}.")
        if where == "weights" and p == 1:
            raise InputError("DiagonalDropout(where='weights') rescales by 1 / (1 - p), so p must be below 1, not 1.")
        self.p, self.where, self.shared = float(p), where, bool(shared)

    @property
    def bias(self) -> float:
        """Zero: evaluation is not touched."""
        return 0.0

    @property
    def length(self) -> None:
        """The same at every length."""
        return

    def sample_hidden(
        self, samples: int, heads: int, length: int, device: torch.device, generator: torch.Generator | None = None
    ) -> Bool[Tensor, "#sample #head time"] | None:
        """One draw of the logits that become ``-inf``, each with probability ``p``; None if none ever does."""
        if self.where != "logits" or self.p == 0:
            return None
        return self._dropped(samples, heads, length, device, generator)

    def sample_multiplier(
        self, samples: int, heads: int, length: int, like: Tensor, generator: torch.Generator | None = None
    ) -> Float[Tensor, "#sample #head time"] | None:
        """One draw of the factors on the weights, 0 or ``1 / (1 - p)``, in the type of ``like``; None if all are 1."""
        if self.where != "weights" or self.p == 0:
            return None
        kept = ~self._dropped(samples, heads, length, like.device, generator)
        return kept.to(like.dtype) / (1 - self.p)

    def config(self) -> dict[str, Any]:
        """``{"kind": "dropout", "p": p, "where": where, "shared": shared}``."""
        return {"kind": self.kind, "p": self.p, "where": self.where, "shared": self.shared}

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"p={self.p:g}, where={self.where!r}, shared={self.shared}"

    def _dropped(
        self, samples: int, heads: int, length: int, device: torch.device, generator: torch.Generator | None
    ) -> Bool[Tensor, "sample head time"]:
        shape = (1, 1, length) if self.shared else (samples, heads, length)
        return torch.rand(shape, device=device, generator=generator) < self.p
