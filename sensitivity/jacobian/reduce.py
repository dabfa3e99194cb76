"""What becomes of rows as they stream by: norms, or the blocks themselves."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.checks import all_finite
from sensitivity.errors import RunError
from sensitivity.jacobian.cotangents import Cotangents
from sensitivity.jacobian.norms import NormMaps
from sensitivity.jacobian.replicated import Rows


@runtime_checkable
class Reduction(Protocol):
    """Takes rows one chunk at a time."""

    def add(self, chunk: Rows) -> None:
        """Takes one chunk of rows."""


class FrobeniusMaps:
    """Squared Frobenius norms, summed over rows in float64; from probes, their mean and its standard error.

    Args:
        tokens: where the derivative is taken.
        cotangents: the rows.
        times: the input time that is each query's own, so that the identity can be taken off; None if there is none.
        residual: the multiple of the identity that is taken off.
    """

    def __init__(
        self, tokens: Tensor, cotangents: Cotangents, times: Int[Tensor, " query"] | None, residual: float = 1.0
    ) -> None:
        self.cotangents, self.residual = cotangents, residual
        self.like = tokens
        shape = (tokens.shape[0], cotangents.queries, tokens.shape[1])
        self.squares = torch.zeros(shape, dtype=torch.float64, device=tokens.device)
        self.fourths = torch.zeros_like(self.squares) if cotangents.signs is not None else None
        self.times = times
        self.diagonal = None if times is None else self.squares.new_zeros(shape[:2])

    def add(self, chunk: Rows) -> None:
        """Adds the squares of the rows' entries, key by key."""
        queries = self.cotangents.query(chunk.rows)
        squares = chunk.gradients.to(torch.float64, copy=True).square_().sum(dim=-1)  # torch's norms convert far slower
        check_finite(squares, chunk, queries, self.like)
        keys = slice(0, squares.shape[-1])
        self.squares[chunk.samples, :, keys].index_add_(1, queries, squares)
        if self.fourths is not None:
            self.fourths[chunk.samples, :, keys].index_add_(1, queries, squares.square())
        if self.diagonal is not None and self.times is not None:
            index = torch.arange(len(queries), device=queries.device)
            moved = chunk.gradients[:, index, self.times[queries]] - self.residual * chunk.vectors
            self.diagonal[chunk.samples].index_add_(1, queries, moved.double().square().sum(dim=-1))

    def maps(self, norm: str) -> NormMaps:
        """The norms, in the type of the tokens (float32 for half precision)."""
        dtype = torch.promote_types(self.like.dtype, torch.float32)
        width = self.like.shape[-1] if norm == "rms" else 1
        count = 1 if self.fourths is None else self.cotangents.per_query
        error = None
        if self.fourths is not None:
            mean = self.squares / count
            spread = ((self.fourths / count - mean.square()).clamp_min(0) / (count - 1)).sqrt()
            error = torch.where(mean > 0, spread / (2 * mean.sqrt()), 0.0).div(math.sqrt(width)).to(dtype)
        return NormMaps(
            total=self.squares.div(count * width).sqrt().to(dtype),
            diagonal=None if self.diagonal is None else self.diagonal.div(count * width).sqrt().to(dtype),
            standard_error=error,
        )


class SpectralMaps:
    """Largest singular values, from the blocks of one query at a time; arguments as in ``FrobeniusMaps``."""

    def __init__(
        self, tokens: Tensor, cotangents: Cotangents, times: Int[Tensor, " query"] | None, residual: float = 1.0
    ) -> None:
        self.cotangents, self.residual = cotangents, residual
        self.like = tokens
        self.dtype = torch.promote_types(tokens.dtype, torch.float32)
        samples, length = tokens.shape[:2]
        self.total = torch.zeros(samples, cotangents.queries, length, dtype=self.dtype, device=tokens.device)
        self.times = times
        self.diagonal = None if times is None else self.total.new_zeros(samples, cotangents.queries)
        self.waiting: dict[tuple[int, int], list[Tensor]] = {}

    def add(self, chunk: Rows) -> None:
        """Keeps rows until the blocks of their query are complete, then takes their norms."""
        queries = self.cotangents.query(chunk.rows)
        check_finite(chunk.gradients.abs().amax(dim=-1), chunk, queries, self.like)
        for query in queries.unique().tolist():
            rows = self.waiting.setdefault((chunk.samples.start, query), [])
            rows.append(chunk.gradients[:, queries == query].to(self.dtype, copy=True))
            if sum(part.shape[1] for part in rows) == self.cotangents.per_query:
                self._finish(chunk.samples, query, torch.cat(self.waiting.pop((chunk.samples.start, query)), dim=1))

    def _finish(self, samples: slice, query: int, blocks: Float[Tensor, "sample out key in"]) -> None:
        self.total[samples, query, : blocks.shape[2]] = largest_singular_value(blocks.transpose(1, 2))
        if self.diagonal is not None and self.times is not None:
            identity = self.residual * torch.eye(blocks.shape[1], dtype=self.dtype, device=blocks.device)
            self.diagonal[samples, query] = largest_singular_value(blocks[:, :, self.times[query]] - identity)

    def maps(self, norm: str) -> NormMaps:
        """The norms; ``norm`` is the spectral one."""
        return NormMaps(total=self.total, diagonal=self.diagonal)


def largest_singular_value(blocks: Float[Tensor, "*axes out in"]) -> Float[Tensor, "*axes"]:
    """Spectral norms by the eigenvalues of the smaller Gram matrix, which give the largest one to rounding.

    Blocks are scaled first, so that squares neither overflow nor vanish.
    """
    scale = blocks.abs().amax(dim=(-2, -1), keepdim=True)
    scaled = blocks / torch.where(scale > 0, scale, 1.0)
    gram = scaled @ scaled.mT if blocks.shape[-2] < blocks.shape[-1] else scaled.mT @ scaled
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt() * scale[..., 0, 0]


class Blocks:
    """The blocks themselves, ``(sample, query, key, out, in)``."""

    def __init__(self, tokens: Tensor, cotangents: Cotangents) -> None:
        self.cotangents = cotangents
        self.like = tokens
        samples, length, width = tokens.shape
        self.blocks = tokens.new_zeros(samples, cotangents.queries, length, cotangents.out, width)

    def add(self, chunk: Rows) -> None:
        """Puts the rows into their places."""
        queries = self.cotangents.query(chunk.rows)
        check_finite(chunk.gradients.abs().amax(dim=-1), chunk, queries, self.like)
        part = self.blocks[chunk.samples, :, : chunk.gradients.shape[2]]
        part[:, queries, :, chunk.rows % self.cotangents.per_query] = chunk.gradients.transpose(0, 1)


def check_finite(values: Float[Tensor, "sample row key"], chunk: Rows, queries: Tensor, tokens: Tensor) -> None:
    """Refuses a derivative that is not finite.

    Raises:
        RunError: names the first (sample, query, key), the type and the attention backend.
    """
    if all_finite(values):
        return
    sample, row, key = (int(part) for part in (~torch.isfinite(values)).nonzero()[0])
    raise RunError(
        f"the derivative at (sample {chunk.samples.start + sample}, query {int(queries[row])}, key {key}) is not "
        f"finite, in {tokens.dtype} under the math attention backend, although the output is; if a mask hides every "
        "key of some row, let that row see one key, and look for square roots and divisions at zero in the model."
    )
