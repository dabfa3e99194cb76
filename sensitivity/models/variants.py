"""What is done to the diagonal of a model's temporal attention, by name."""

from __future__ import annotations

from sensitivity.errors import InputError
from sensitivity.layers.diagonal import (
    Diagonal,
    DiagonalDropout,
    DiagonalLearnedPenalty,
    DiagonalLengthPenalty,
    DiagonalMask,
    DiagonalPenalty,
)
from sensitivity.layers.gate import ResidualGate

PUBLISHED = ("none", "no-residual", "mask", "dropout", "penalty")
"""The five variants of arXiv 2602.10956."""
VARIANTS = (*PUBLISHED, "learned-penalty", "length-penalty", "gate", "sink-penalty")
"""These, and what goes beyond them."""


def variant_diagonal(
    variant: str,
    *,
    p: float = 0.1,
    value: float = -0.05,
    where: str = "logits",
    shared: bool = False,
    heads: int = 4,
    length: int = 12,
    gate: float | int = 0.5,
    learned: bool = False,
) -> tuple[Diagonal | None, bool | ResidualGate]:
    """The diagonal regulariser and the residual of a variant.

    Args:
        variant: ``"none"``, ``"no-residual"``, ``"mask"``, ``"dropout"``, ``"penalty"`` (the published ones),
            ``"learned-penalty"``, ``"length-penalty"``, ``"gate"``, or ``"sink-penalty"`` (a term of the loss: the
            model itself is that of ``"none"``).
        p: rate of the dropout (not published; 0.1 by default).
        value: the penalty (published: -0.05); where a learned one begins; that at the length of training.
        where: ``"logits"`` or ``"weights"``, for the dropout.
        shared: one dropout draw for all samples and heads, as in the published code.
        heads: of the attention, for the learned penalty.
        length: of training, for the penalty that follows the length.
        gate: factor of the residual, for the gate.
        learned: whether the gate is trained, from that factor on.

    Raises:
        InputError: an unknown variant, or a value that its regulariser refuses.

    >>> variant_diagonal("no-residual")
    (None, False)
    >>> variant_diagonal("penalty")
    (DiagonalPenalty(value=-0.05), True)
    >>> variant_diagonal("gate")
    (None, ResidualGate(value=0.5, learned=False))
    """
    if variant not in VARIANTS:
        raise InputError(f"unknown variant {variant!r}; known: {', '.join(VARIANTS)}.")
    if variant == "gate":
        return None, ResidualGate(gate, learned)
    if variant == "mask":
        return DiagonalMask(), True
    if variant == "dropout":
        return DiagonalDropout(p, where, shared), True
    if variant == "penalty":
        return DiagonalPenalty(value), True
    if variant == "learned-penalty":
        return DiagonalLearnedPenalty(heads, value), True
    if variant == "length-penalty":
        return DiagonalLengthPenalty(value, length), True
    return None, variant != "no-residual"
