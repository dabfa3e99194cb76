"""What every regulariser of the diagonal has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn


class Diagonal(nn.Module, ABC):
    """A regulariser of the diagonal logits.

    What it does in training and evaluation alike is a bias, with or without weights of its own; what it samples in
    training only is decided by its ``training`` flag (``DiagonalDropout``).
    """

    kind: str

    @property
    @abstractmethod
    def bias(self) -> float | Tensor:
        """What is added to the diagonal logits: 0, a finite number or one for each head, or ``-inf``, which hides."""

    @property
    @abstractmethod
    def length(self) -> int | None:
        """The length at which ``bias`` holds, where it follows the number of keys; None where it does not."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Plain values from which ``diagonal_from_config`` builds it again; learned values are no part of it."""
