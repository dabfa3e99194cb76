"""The Jacobian of a softmax attention layer in closed form: blocks by path, and norm maps without any block.

Formulas: ``docs/derivation``; the split into value path and weight path follows arXiv 2602.10956.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.attention.refusals import check_samples
from sensitivity.errors import InputError
from sensitivity.jacobian import tile_sizes
from sensitivity.jacobian.memory import keep_freed_memory
from sensitivity.jacobian.norms import PATHS, Norm, NormMaps, check_norm
from sensitivity.jacobian.query_rows import RowSource
from sensitivity.jacobian.tile_maps import FrobeniusTiles, SpectralTiles
from sensitivity.jacobian.visibility import left_out


def blocks(
    attention: SoftmaxAttention,
    tokens: Float[Tensor, "sample time dim"],
) -> dict[str, Float[Tensor, "sample query key out dim"]]:
    r"""Every block :math:`J_{ij} = dh_i/dx_j`, by path.

    ==========  ==========================================================================
    residual    :math:`\delta_{ij} \gamma I`
    value       :math:`\sum_h m_{ij} a_{ij} W_O W_V`
    key         :math:`\sum_h c\, a_{ij} W_O (m_{ij} v_j - o_i) (W_K^T q_i)^T`
    query       :math:`\delta_{ij} \sum_h c\, W_O \sum_l a_{il} (m_{il} v_l - o_i) k_l^T W_Q`
    ==========  ==========================================================================

    Returns:
        The four paths by name; their sum is the Jacobian. Rows and columns of padded positions are NaN.
    """
    check_self_attention(attention)
    check_samples(attention, tokens.shape[0])
    samples, length, _ = tokens.shape
    source = RowSource(attention, tokens)
    rows = source.rows(torch.arange(length, device=tokens.device))
    w_o, w_v = attention.output_weight, attention.value_weight
    deviation = rows.alpha[..., None] * source.value[:, :, None] - rows.weights[..., None] * rows.mean[..., None, :]
    gradient = attention.scale * torch.einsum("shqw,hwd->shqd", rows.query, attention.key_weight)
    diagonal = torch.eye(length, dtype=tokens.dtype, device=tokens.device)
    identity = torch.eye(attention.out_dim, attention.dim, dtype=tokens.dtype, device=tokens.device)
    query = torch.einsum("hov,shvwq,hwd->sqod", w_o, attention.scale * rows.covariance(), attention.query_weight)
    found = {
        "residual": (float(attention.residual) * diagonal[..., None, None] * identity).repeat(samples, 1, 1, 1, 1),
        "value": torch.einsum("shqk,hov,hvd->sqkod", rows.alpha, w_o, w_v),
        "key": torch.einsum("shqkv,hov,shqd->sqkod", deviation, w_o, gradient),
        "query": torch.einsum("qk,sqod->sqkod", diagonal, query),
    }
    if attention.padding is not None:
        padded = left_out(attention.padding)
        found = {name: block.masked_fill(padded[..., None, None], math.nan) for name, block in found.items()}
    return found


@dataclass
class Tile:
    """Norms of the blocks of some samples and some query rows; fields as in ``NormMaps``."""

    samples: slice
    rows: Int[Tensor, " row"]
    maps: NormMaps


def norm_maps(
    attention: SoftmaxAttention,
    tokens: Float[Tensor, "sample time dim"],
    *,
    norm: Norm = "frobenius",
    paths: bool = False,
    heads: bool = False,
    weights: bool = True,
    tolerance: float = 1e-6,
) -> NormMaps:
    r"""Norm of every block, at about the cost of a forward pass and without building a block off the diagonal.

    Off the diagonal, with one inner product per head pair of a feature of row i and a feature of column j,

    .. math:: \|J_{ij}\|_F^2 = \sum_{h,g} a^h_{ij} a^g_{ij}
        \langle M_h + (u^h_j - \bar u^h_i) w_h^T, M_g + (u^g_j - \bar u^g_i) w_g^T \rangle .

    The T diagonal blocks are formed exactly.

    Args:
        attention: the layer, in the dtype of the tokens.
        tokens: ``(sample, time, dim)``.
        norm: ``frobenius``, ``rms`` (Frobenius over sqrt(dim)) or ``spectral`` (Lanczos iteration on the structured
            product, to the relative ``tolerance``).
        paths: also the map of each path.
        heads: also the map of each head (its value, key and query paths together).
        weights: also return the attention weights.
        tolerance: relative tolerance of the spectral norm.

    Returns:
        The maps; rows and columns of padded positions are NaN.
    """
    samples, length, _ = tokens.shape

    def empty(*shape: int) -> Tensor:
        return tokens.new_empty(shape)

    result = NormMaps(
        total=empty(samples, length, length),
        diagonal=empty(samples, length) if attention.out_dim == attention.dim else None,
        paths={name: empty(samples, length, length) for name in PATHS} if paths else {},
        heads=empty(samples, attention.heads, length, length) if heads else None,
        attention=empty(samples, attention.heads, length, length) if weights else None,
        engine="closed form",
    )
    for tile in tiles(attention, tokens, norm=norm, paths=paths, heads=heads, tolerance=tolerance):
        here, maps = tile.samples, tile.maps
        rows = slice(int(tile.rows[0]), int(tile.rows[-1]) + 1)
        result.total[here, rows] = maps.total
        if result.diagonal is not None and maps.diagonal is not None:
            result.diagonal[here, rows] = maps.diagonal
        for name, values in maps.paths.items():
            result.paths[name][here, rows] = values
        if result.heads is not None and maps.heads is not None:
            result.heads[here, :, rows] = maps.heads
        if result.attention is not None and maps.attention is not None:
            result.attention[here, :, rows] = maps.attention
    _mark_padding(result, attention)
    return result


def tiles(
    attention: SoftmaxAttention,
    tokens: Float[Tensor, "sample time dim"],
    *,
    norm: Norm = "frobenius",
    paths: bool = False,
    heads: bool = False,
    rows: Int[Tensor, " row"] | None = None,
    tolerance: float = 1e-6,
    size: int | None = None,
) -> Iterator[Tile]:
    """Norms of the blocks, some samples and query rows at a time, each tile sized to cache.

    Args:
        attention: the layer, in the dtype of the tokens.
        tokens: ``(sample, time, dim)``.
        norm: see ``norm_maps``.
        paths: see ``norm_maps``.
        heads: see ``norm_maps``.
        rows: the query rows that are wanted; all of them by default.
        tolerance: see ``norm_maps``.
        size: numbers in a ``(sample, head, row, key)`` tile; that of ``tile_sizes`` by default.
    """
    check_norm(norm)
    check_self_attention(attention)
    check_samples(attention, tokens.shape[0])
    keep_freed_memory()
    samples, length, _ = tokens.shape
    wanted = torch.arange(length, device=tokens.device) if rows is None else rows
    per_row = attention.heads * (length + attention.width * attention.value_weight.shape[1])
    size = tile_sizes.tile_size(attention, length) if size is None else size
    spectral = norm == "spectral"
    if spectral:  # the iteration keeps some ten vectors a pair
        per_row, size = 8 * length * attention.dim, 16 * size
    height = max(1, min(len(wanted), size // per_row))
    batch = max(1, min(samples, size // (per_row * height)))
    kind: SpectralTiles | FrobeniusTiles
    with torch.inference_mode():  # many small steps, which autograd's bookkeeping would slow down by a tenth
        if spectral:
            kind = SpectralTiles(attention, paths, heads, tolerance)
        else:
            kind = FrobeniusTiles(attention, length, samples * len(wanted), paths, heads)
    for start in range(0, samples, batch):
        here = slice(start, min(start + batch, samples))
        with torch.inference_mode():
            maps_of = kind.of(tokens, here)
        for low in range(0, len(wanted), height):
            some = wanted[low : low + height]
            with torch.inference_mode():
                maps = maps_of(some)
                maps = _scaled(maps, 1 / math.sqrt(attention.dim)) if norm == "rms" else maps
            yield Tile(here, some, maps)


def _scaled(maps: NormMaps, factor: float) -> NormMaps:
    """The maps times ``factor``; attention weights stay as they are."""
    return NormMaps(
        total=maps.total * factor,
        diagonal=None if maps.diagonal is None else maps.diagonal * factor,
        paths={name: values * factor for name, values in maps.paths.items()},
        heads=None if maps.heads is None else maps.heads * factor,
        attention=maps.attention,
    )


def _mark_padding(maps: NormMaps, attention: SoftmaxAttention) -> None:
    """Padded rows and columns become NaN: they are left out, which is not the same as no influence."""
    if attention.padding is None:
        return
    padded = left_out(attention.padding)
    for values in (maps.total, *maps.paths.values()):
        values.masked_fill_(padded, math.nan)
    if maps.heads is not None:
        maps.heads.masked_fill_(padded[:, None], math.nan)
    if maps.diagonal is not None:
        maps.diagonal.masked_fill_(attention.padding, math.nan)


def check_self_attention(attention: SoftmaxAttention) -> None:
    """Refuses a layer whose keys or values are read from tokens of another width than its queries."""
    widths = (attention.dim, attention.key_weight.shape[2], attention.value_weight.shape[2])
    if len(set(widths)) > 1:
        raise InputError(
            f"queries, keys and values read tokens of different widths {widths}: this is cross-attention, which has no "
            "derivative of a state with respect to its own sequence; measure a self-attention layer."
        )
