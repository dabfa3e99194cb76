"""Spectral maps by iteration beside a batched decomposition of the blocks."""

from __future__ import annotations

import torch

import sensitivity
from benchmarks.subjects import attention, single, tokens
from benchmarks.tables import Findings, Table, Target
from benchmarks.timing import interleaved, median, ratio, spread

ABOUT = """`measure(layer, tokens, norm="spectral")` against `torch.linalg.svdvals` on the $T^2$ blocks in one
batch. The blocks are handed to the decomposition for nothing: only it is timed, on all blocks of a few query times
spread over the sequence, times the number of query times over their number. The error is the largest over those
blocks, relative to each block's own norm, against a decomposition in double precision."""


def run(length: int = 512, dim: int = 64, heads: int = 4, rows: int = 8, rounds: int = 3) -> Findings:
    """Times and compares one layer."""
    layer, data = attention(dim, heads), tokens(length, dim)
    chosen = torch.linspace(0, length - 1, rows).round().long()
    blocks = _blocks(layer, data, chosen)
    found: list[sensitivity.SensitivityMap] = []
    times = interleaved(
        {
            "map": lambda: found.append(sensitivity.measure(layer, data, norm="spectral")),
            "svd": lambda: torch.linalg.svdvals(blocks),
        },
        rounds,
    )
    truth = torch.linalg.svdvals(_blocks(layer.double(), data.double(), chosen))[..., 0]
    ours = found[-1].norms[0].double()[chosen]
    error = float(((ours - truth).abs() / truth).max())
    scale = length / rows
    table = Table(
        f"D={dim}, H={heads}, T={length}; medians of {rounds} rounds, the decomposition extrapolated from {rows} of "
        f"{length} query times.",
        {"spectral map": "s", "decomposition": "s", "ratio": "x", "range": "", "error": "e", "blocks compared": ""},
    )
    times["svd"] = [scale * one for one in times["svd"]]
    quotient = ratio(times["svd"], times["map"])
    table.rows.append(
        [median(times["map"]), median(times["svd"]), quotient, spread(times["svd"], times["map"]), error, truth.numel()]
    )
    where = f"T={length}, D={dim}, H={heads}"
    return Findings(
        [table],
        [
            Target(f"batched SVD over spectral map, {where}", quotient, 20.0, least=True, note="SVD extrapolated"),
            Target(f"error of the spectral map, {where}", error, 1e-4, unit="e"),
        ],
    )


def _blocks(layer: torch.nn.Module, data: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The blocks of some query times by ``jacrev``, ``(query, key, out, in)``."""
    whole = single(layer)
    return torch.func.jacrev(lambda x: whole(x)[rows], chunk_size=64)(data[0]).transpose(1, 2).contiguous()
