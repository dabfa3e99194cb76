"""What every backend returns, and the norms it can take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from sensitivity.errors import InputError

Norm: TypeAlias = str  # one of NORMS; checked by check_norm, so that a wrong one gets a sentence
NORMS = ("frobenius", "rms", "spectral")
PATHS = ("residual", "value", "key", "query")


@dataclass
class NormMaps:
    """Norms of every block :math:`J_{ij} = dh_i/dx_j`, as one backend computed them.

    Attributes:
        total: ``(sample, query, key)``.
        diagonal: norms of the diagonal blocks with the residual path (the identity) removed, ``(sample, query)``; None
            where input and output widths or lengths differ.
        paths: norms of each path's blocks, ``(sample, query, key)``, by name; empty unless asked for.
        heads: norms of each head's blocks, its paths together without the residual, ``(sample, head, query, key)``.
        attention: attention weights before dropout, ``(sample, head, query, key)``.
        standard_error: standard error of ``total`` where it was estimated from probes.
        engine: which way the numbers were computed, in words.
        notes: what the reader should know, such as why a faster engine was not used.
    """

    total: Float[Tensor, "sample query key"]
    diagonal: Float[Tensor, "sample query"] | None = None
    paths: dict[str, Float[Tensor, "sample query key"]] = field(default_factory=dict)
    heads: Float[Tensor, "sample head query key"] | None = None
    attention: Float[Tensor, "sample head query key"] | None = None
    standard_error: Float[Tensor, "sample query key"] | None = None
    engine: str = ""
    notes: list[str] = field(default_factory=list)


def check_norm(norm: str) -> None:
    """Refuses an unknown norm."""
    if norm not in NORMS:
        raise InputError(f"unknown norm {norm!r}; choose one of {', '.join(NORMS)}.")


def largest_singular_values(blocks: Float[Tensor, "*axes out in"]) -> Float[Tensor, "*axes"]:
    """Spectral norms from the products of blocks with themselves: the largest value loses no digits to the squares."""
    size = blocks.abs().amax(dim=(-2, -1), keepdim=True)
    unit = blocks / torch.where(size > 0, size, 1.0)
    return torch.linalg.eigvalsh(unit @ unit.mT)[..., -1].clamp_min(0).sqrt() * size[..., 0, 0]


def block_norms(blocks: Float[Tensor, "*axes out in"], norm: Norm) -> Float[Tensor, "*axes"]:
    """Norm of every block: ``frobenius``, ``rms`` (Frobenius over sqrt(in): 1 for the identity), or ``spectral``."""
    if norm == "spectral":
        left_out = torch.isnan(blocks).any(dim=-1).any(dim=-1)  # padded pairs, which the decomposition would refuse
        clean = blocks.masked_fill(left_out[..., None, None], 0.0)
        return torch.linalg.matrix_norm(clean, ord=2).masked_fill(left_out, math.nan)
    frobenius = torch.linalg.vector_norm(blocks, dim=(-2, -1))
    return frobenius / math.sqrt(blocks.shape[-1]) if norm == "rms" else frobenius
