"""Finite penalties on the diagonal logits: a constant, one that is learned, and one that follows the length."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sensitivity.errors import InputError
from sensitivity.layers.diagonal.base import Diagonal


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
        self.value = _finite(value, "DiagonalPenalty")

    @property
    def bias(self) -> float:
        """The penalty itself."""
        return self.value

    @property
    def length(self) -> None:
        """The same at every length."""
        return

    def config(self) -> dict[str, Any]:
        """``{"kind": "penalty", "value": value}``."""
        return {"kind": self.kind, "value": self.value}

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"value={self.value:g}"


class DiagonalLearnedPenalty(Diagonal):
    r"""A penalty for each head that is trained with the model: :math:`s^h_{ii} + \beta_h`.

    Every head finds out by itself how much of its own token it needs. All four paths keep their form; the value and key
    paths on the diagonal move with :math:`a^h_{ii}`, and the query path by
    :math:`d\,\mathrm{Cov}_i / d\beta`. After training the layer is described with the values that were learned.

    Args:
        heads: of the attention layer.
        value: where every head begins.

    Raises:
        InputError: ``heads`` is below 1, or ``value`` is not a finite number.
    """

    kind = "learned-penalty"

    def __init__(self, heads: int, value: float = 0.0) -> None:
        super().__init__()
        if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
            raise InputError(f"DiagonalLearnedPenalty needs a number of heads of at least 1, not {heads!r}.")
        self.value = _finite(value, "DiagonalLearnedPenalty")
        self.penalty = nn.Parameter(torch.full((heads,), self.value))

    @property
    def bias(self) -> Tensor:
        """The penalties as they are now, ``(head,)``, with their graph."""
        return self.penalty

    @property
    def length(self) -> None:
        """The same at every length."""
        return

    def config(self) -> dict[str, Any]:
        """``{"kind": "learned-penalty", "heads": heads, "value": value}``, with the value that they began with."""
        return {"kind": self.kind, "heads": len(self.penalty), "value": self.value}

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"heads={len(self.penalty)}, value={self.value:g}"


class DiagonalLengthPenalty(Diagonal):
    r"""A penalty that keeps the expected diagonal weight constant in T.

    A constant penalty :math:`\beta` loses its grip as the sequence grows: with uniform logits
    :math:`a_{ii} = e^\beta / (e^\beta + T - 1)`, which vanishes as :math:`e^\beta / T`. Here

    .. math:: \beta(n) = \beta_0 + \log\frac{n}{T_0 - 1}

    where n is the number of other keys that a row sees (T - 1; fewer in a causal layer or beside padding), so that
    :math:`a_{ii} = e^{\beta_0} / (e^{\beta_0} + T_0 - 1)` at every length. This is exact for uniform logits. For
    exchangeable ones (no positional information in the tokens) it holds of the limit: the mean weight tends to a
    constant, where otherwise it tends to zero.

    All four paths keep their form. On the diagonal the value and key paths no longer vanish with T; off it the weights
    keep falling as 1 / T, a little smaller than without.

    Args:
        value: :math:`\beta_0`, the penalty at ``length``.
        length: :math:`T_0`, the length of training.

    Raises:
        InputError: ``value`` is not a finite number, or ``length`` is below 2.

    >>> from sensitivity.diagonal_bias import at_length
    >>> penalty = DiagonalLengthPenalty(-0.5, length=12)
    >>> [round(at_length(penalty.bias, penalty.length, T - 1), 3) for T in (12, 24, 96)]
    [-0.5, 0.238, 1.656]
    """

    kind = "length-penalty"

    def __init__(self, value: float, length: int) -> None:
        super().__init__()
        self.value = _finite(value, "DiagonalLengthPenalty")
        if isinstance(length, bool) or not isinstance(length, int) or length < 2:
            raise InputError(
                f"DiagonalLengthPenalty needs the length of training, an integer of at least 2, not {length!r}."
            )
        self.trained = length

    @property
    def bias(self) -> float:
        """The penalty at the length of training."""
        return self.value

    @property
    def length(self) -> int:
        """The length of training."""
        return self.trained

    def config(self) -> dict[str, Any]:
        """``{"kind": "length-penalty", "value": value, "length": length}``."""
        return {"kind": self.kind, "value": self.value, "length": self.trained}

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        return f"value={self.value:g}, length={self.trained}"


def _finite(value: float, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name} takes a finite number, not {value!r}; for a hard mask use DiagonalMask().")
    return float(value)
