r"""What is added to the diagonal logits: one number, one for each head, or one that grows with the number of keys.

With uniform logits, a row that sees n other keys gives itself the weight :math:`e^b / (e^b + n)`. The bias

.. math:: b(n) = b_0 + \log\frac{n}{T_0 - 1}

keeps that weight at its value for :math:`T_0` tokens, :math:`e^{b_0} / (e^{b_0} + T_0 - 1)`, whatever n is. Where
logits vary but are exchangeable, the mean weight tends to a constant for many keys, where it would vanish without.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.errors import InputError


def at_length(bias: float | int | Tensor, length: int | None, others: int) -> Any:
    """The bias of a row that sees so many other keys; 0 for a row that sees none, where nothing depends on it.

    Args:
        bias: a number, or one for each head.
        length: :math:`T_0`, at which ``bias`` holds; None for every length.
        others: n.
    """
    if others < 1:
        return 0.0
    return bias if length is None else bias + math.log(others / (length - 1))


def of_rows(
    bias: float | int | Tensor,
    length: int | None,
    on_diagonal: Bool[Tensor, "row key"],
    hidden: Bool[Tensor, "#sample #head row key"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "#sample #head row"]:
    """The same for many rows at once; ``bias`` itself, not 0, for rows that see no other key.

    Args:
        bias: a number, or one for each head.
        length: :math:`T_0`, at which ``bias`` holds; None for every length.
        on_diagonal: True where a key is the row's own.
        hidden: pairs that a mask hides.
        dtype: of the result.
    """
    per_head = torch.as_tensor(bias, device=on_diagonal.device, dtype=dtype).reshape(1, -1, 1)
    if length is None:
        return per_head.expand(-1, -1, len(on_diagonal))
    others = ~on_diagonal if hidden is None else ~hidden & ~on_diagonal
    count = others.sum(dim=-1, dtype=torch.promote_types(dtype, torch.float32)).clamp_min(1)
    return per_head + (count / (length - 1)).log().to(dtype)


def adds(bias: float | int | Tensor, length: int | None) -> bool:
    """Whether a finite number is added to the diagonal logits."""
    if isinstance(bias, Tensor):
        return True
    return bias != -math.inf and (bias != 0 or length is not None)


def in_words(bias: float | int | Tensor, length: int | None) -> str:
    """Short, for ``repr``.

    >>> in_words(-0.5, None), in_words(torch.tensor([0.1, -0.2]), 12)
    ('-0.5', '[0.1, -0.2] at T=12')
    """
    text = f"[{', '.join(f'{one:g}' for one in bias.tolist())}]" if isinstance(bias, Tensor) else f"{bias:g}"
    return text if length is None else f"{text} at T={length}"


def check(bias: Any, length: Any, heads: int) -> None:
    """Refuses a bias that no layer can have.

    Raises:
        InputError: NaN, infinite (but for one ``-inf``, the hard mask), not one per head, or a length below 2.
    """
    if isinstance(bias, Tensor):
        if tuple(bias.shape) != (heads,):
            raise InputError(
                f"a diagonal_bias for each head needs the shape ({heads},), not {tuple(bias.shape)}; give one number "
                "for all heads."
            )
    elif math.isnan(bias) or bias == math.inf:
        raise InputError(f"diagonal_bias must be finite or -inf, not {bias}.")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 2):
        raise InputError(f"the length at which a diagonal bias holds must be an integer of at least 2, not {length!r}.")
