"""How large the tiles of the closed form are, and about how many bytes it takes to work with them."""

from __future__ import annotations

from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.jacobian.norms import Norm

TILE = 2**21  # numbers in one (head, row, key) tile: a few MB, what the caches hold
HEIGHT, WIDEST = 16, 2**25  # rows of a tile, so that what all keys share is read once for so many; and its most numbers
LEAST = 2**17  # numbers in a tile, below which it is mostly overhead


def tile_size(attention: SoftmaxAttention, length: int) -> int:
    """Numbers in a (head, row, key) tile: more for long sequences, where one of the usual size would be a few rows."""
    return max(TILE, min(HEIGHT * length * attention.heads, WIDEST))


def fitting_size(attention: SoftmaxAttention, tokens: Tensor, norm: Norm, allowed: int) -> int:
    """The usual size, or as many times smaller as it takes to leave most of ``allowed`` bytes to the maps."""
    size = tile_size(attention, tokens.shape[1])
    while size > LEAST and tile_bytes(attention, tokens, norm, size) > allowed // 4:
        size //= 2
    return size


def working_bytes(attention: SoftmaxAttention, tokens: Tensor, norm: Norm, size: int) -> int:
    """About how many bytes the closed form needs at a time, for the samples of a tile of this size."""
    length, item = tokens.shape[1], tokens.element_size()
    heads, width, value = attention.heads, attention.width, attention.value_weight.shape[1]
    pairs = heads * (heads + 1) // 2
    per_time = 4 * heads * max(width, value) + pairs * (2 * value + 2)
    together = max(1, min(tokens.shape[0], size // max(1, heads * length**2)))
    products = min(heads * length * width * value, 2**25)
    return item * (together * (length * per_time + products)) + tile_bytes(attention, tokens, norm, size)


def tile_bytes(attention: SoftmaxAttention, tokens: Tensor, norm: Norm, size: int) -> int:
    """About how many bytes of them are for the tile itself."""
    size = min(size, tokens.shape[0] * attention.heads * tokens.shape[1] ** 2)
    if norm == "spectral":
        size *= 8
    return tokens.element_size() * size * (attention.heads + 1) * 3 // 2
