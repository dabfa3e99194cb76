r"""What may be done to the diagonal of an attention matrix, as one interface.

With logits :math:`s_{ij}`, weights :math:`a_{ij}` and the four paths of the block Jacobian (residual, value, key,
query), three regularisers act on the pairs :math:`(i, i)`:

=====================  ==========================  ================  =================================================
regulariser            acts on                     acts in           effect on the diagonal block
=====================  ==========================  ================  =================================================
``DiagonalMask``       logit to :math:`-\infty`    train and eval    value and key paths vanish; query path stays
``DiagonalPenalty``    logit plus a constant       train and eval    all paths stay; their weight :math:`a_{ii}` changes
``DiagonalDropout``    logit or weight, sampled    train             see the class
=====================  ==========================  ================  =================================================

None of them touches the residual path. Source: arXiv 2602.10956 and its public code.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sensitivity.errors import InputError

PLACES = ("logits", "weights")


class Diagonal(nn.Module, ABC):
    """A regulariser of the diagonal; it holds no weights, and its ``training`` flag switches what is sampled."""

    kind: str

    @property
    @abstractmethod
    def bias(self) -> float:
        """The constant on the diagonal logits in training and evaluation: 0, a finite penalty, or ``-inf``."""

    @abstractmethod
    def sample_hidden(
        self, samples: int, heads: int, length: int, device: torch.device, generator: torch.Generator | None = None
    ) -> Bool[Tensor, "#sample #head time"] | None:
        """One draw of the diagonal logits that become ``-inf``; None if none ever does."""

    @abstractmethod
    def sample_multiplier(
        self, samples: int, heads: int, length: int, like: Tensor, generator: torch.Generator | None = None
    ) -> Float[Tensor, "#sample #head time"] | None:
        """One draw of the factors on the diagonal weights, in the type and on the device of ``like``; None if all 1."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Plain values from which ``diagonal_from_config`` builds it again."""


class DiagonalMask(Diagonal):
    r"""The hard mask: :math:`s_{ii} = -\infty` in training and evaluation, so :math:`a_{ii} = 0`.

    The value path :math:`a_{ii} W_O W_V` and the key path vanish on the diagonal. The query path
    :math:`c W_O \mathrm{Cov}_i W_Q` does not: it sums over the other keys. A row whose only visible key is its own (one
    token; the first row of a causal layer) keeps it, so that every row is defined.

    >>> DiagonalMask().bias
    -inf
    """

    kind = "mask"

    @property
    def bias(self) -> float:
        """Minus infinity."""
        return -math.inf

    def sample_hidden(
        self, samples: int, heads: int, length: int, device: torch.device, generator: torch.Generator | None = None
    ) -> None:
        """Nothing is sampled."""
        return

    def sample_multiplier(
        self, samples: int, heads: int, length: int, like: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """Nothing is sampled."""
        return

    def config(self) -> dict[str, Any]:
        """``{"kind": "mask"}``."""
        return {"kind": self.kind}


class DiagonalPenalty(Diagonal):
    r"""The penalty: :math:`s_{ii}` plus ``value``, in training and evaluation.

    A negative value lowers :math:`a_{ii}` (the published value is -0.05), a positive one raises it: the odds
    :math:`a_{ii} / (1 - a_{ii})` are multiplied by :math:`e^{value}`. All four paths keep their form.

    Args:
        value: the constant, in units of the logits.

    Raises:
        InputError: ``value`` is not a finite number.
    """

    kind = "penalty"

    def __init__(self, value: float) -> None:
        super().__init__()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(
                f"DiagonalPenalty takes a finite number, not {value!r}; for a hard mask use DiagonalMask()."
            )
        self.value = float(value)

    @property
    def bias(self) -> float:
        """The penalty itself."""
        return self.value

    def sample_hidden(
        self, samples: int, heads: int, length: int, device: torch.device, generator: torch.Generator | None = None
    ) -> None:
        """Nothing is sampled."""
        return

    def sample_multiplier(
        self, samples: int, heads: int, length: int, like: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """Nothing is sampled."""
        return

    def config(self) -> dict[str, Any]:
        """``{"kind": "penalty", "value": value}``."""
        return {"kind": self.kind, "value": self.value}

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"value={self.value:g}"


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

    def sample_hidden(
        self, samples: int, heads: int, length: int, device: torch.device, generator: torch.Generator | None = None
    ) -> Bool[Tensor, "#sample #head time"] | None:
        """True, with probability ``p``, where a diagonal logit becomes ``-inf``."""
        if self.where != "logits" or self.p == 0:
            return None
        return self._dropped(samples, heads, length, device, generator)

    def sample_multiplier(
        self, samples: int, heads: int, length: int, like: Tensor, generator: torch.Generator | None = None
    ) -> Float[Tensor, "#sample #head time"] | None:
        """Zero with probability ``p``, else ``1 / (1 - p)``."""
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


_KINDS: dict[str, type[Diagonal]] = {kind.kind: kind for kind in (DiagonalMask, DiagonalPenalty, DiagonalDropout)}


def diagonal_from_config(config: dict[str, Any] | None) -> Diagonal | None:
    """The regulariser that ``Diagonal.config`` described; None for None.

    Raises:
        InputError: an unknown kind, or arguments that this kind does not take.
    """
    if config is None:
        return None
    arguments = {name: value for name, value in config.items() if name != "kind"}
    kind = _KINDS.get(config.get("kind", ""))
    if kind is None:
        raise InputError(f"unknown diagonal regulariser {config.get('kind')!r}; known: {', '.join(sorted(_KINDS))}.")
    try:
        return kind(**arguments)
    except TypeError:
        raise InputError(f"{kind.__name__} does not take the arguments {sorted(arguments)}.") from None
