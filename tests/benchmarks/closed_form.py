"""The closed-form map beside the layer's own forward pass."""

from __future__ import annotations

import torch
from torch import nn

import sensitivity
from benchmarks import child
from benchmarks.subjects import attention, tokens
from benchmarks.tables import Cell, Findings, Table, Target
from benchmarks.timing import Job, median, ratio, spread

ABOUT = """The whole $T \\times T$ map of Frobenius norms of one attention layer (`measure(layer, tokens)`, one
sample) against the forward pass of the same layer under `no_grad`, which runs torch's fused attention kernel; the same
with the attention weights of all heads, which a map computes when they are first asked for; and the maps of all four
paths at once (`paths=True`) against the one total map. The second table sets the same maps against two slower forward
passes: torch's own layer, and $\\mathrm{softmax}(QK^T)V$ written out. Each layer has a process of its own. A pass that
is written out makes arrays of $T^2$ numbers anew, which the C library takes from the system and gives back at every
pass; to fetch those pages is half to two thirds of its time. With *memory held* the library is told to keep what is
freed (`GLIBC_TUNABLES`), as it also does on its own once a process has held much more."""

SHAPES = {(64, 4): 3.0, (72, 8): 3.0, (64, 1): 12.0}  # (dim, heads): times the forward pass that a map may take
PATHS = 2.0
FORWARDS = {
    "written out": "plain attention written out",
    "held": "plain attention written out, memory held",
    "forward": "torch's fused kernel",
}
HELD = {"GLIBC_TUNABLES": f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={2**34}"}


def run(
    shapes: dict[tuple[int, int], float] = SHAPES, lengths: tuple[int, ...] = (2048, 4096), rounds: int = 7
) -> Findings:
    """Times every shape at every length."""
    first = Table(
        f"Medians of {rounds} rounds; the range is that of the ratio over rounds.",
        {"layer": "", "T": "", "forward": "s", "map": "s", "map / forward": "x", "range": ""}
        | {"map and weights": "s", "four paths": "s", "paths / map": "x"},
    )
    second = Table(
        "The same maps against other forward passes.",
        {
            "layer": "",
            "T": "",
            "`nn.MultiheadAttention`": "s",
            "map over it": "x",
            "written out": "s",
            "map over that": "x",
            "the same, memory held": "s",
            "map over that, held": "x",
        },
    )
    maps: dict[tuple[int, int], list[dict[str, float]]] = {shape: [] for shape in shapes}
    paths: list[float] = []
    for shape in shapes:
        for length in lengths:
            times, held = (_times(*shape, length, rounds, environment) for environment in (None, HELD))
            label: list[Cell] = [f"D={shape[0]}, H={shape[1]}", length]
            over = {name: ratio(times["map"], times[name]) for name in ("forward", "stock", "written out")}
            over["held"] = ratio(held["map"], held["written out"])
            maps[shape].append(over)
            paths.append(ratio(times["paths"], times["map"]))
            middle = {name: median(found) for name, found in times.items()}
            quotients = spread(times["map"], times["forward"])
            both = [middle["weights"], middle["paths"], paths[-1]]
            first.rows.append([*label, middle["forward"], middle["map"], over["forward"], quotients, *both])
            others = [middle["stock"], over["stock"], middle["written out"], over["written out"]]
            second.rows.append([*label, *others, median(held["written out"]), over["held"]])
    return Findings([first, second], _targets(shapes, lengths, maps, paths))


def _times(
    dim: int, heads: int, length: int, rounds: int, environment: dict[str, str] | None
) -> dict[str, list[float]]:
    found = child.run("passes", environment=environment, dim=dim, heads=heads, length=length, rounds=rounds)
    if "error" in found:
        raise RuntimeError(found["error"])
    return found["times"]


def jobs(dim: int, heads: int, length: int) -> dict[str, Job]:
    """The maps and the forward passes of one layer."""
    layer, data = attention(dim, heads), tokens(length, dim)
    stock = nn.MultiheadAttention(dim, heads, batch_first=True).eval()
    written = sensitivity.SoftmaxAttention.from_module(layer)
    return {
        "forward": torch.no_grad()(lambda: layer(data)),
        "map": lambda: sensitivity.measure(layer, data),
        "weights": lambda: sensitivity.measure(layer, data).attention,
        "paths": lambda: sensitivity.measure(layer, data, paths=True),
        "stock": torch.no_grad()(lambda: stock(data, data, data, need_weights=False)),
        "written out": torch.no_grad()(lambda: written(data)),
    }


def _targets(
    shapes: dict[tuple[int, int], float],
    lengths: tuple[int, ...],
    maps: dict[tuple[int, int], list[dict[str, float]]],
    paths: list[float],
) -> list[Target]:
    where = " and ".join(f"{length:,}" for length in lengths)
    targets = [
        Target(f"map over {what}, D={dim}, H={heads}, worse of T={where}", max(o[key] for o in maps[dim, heads]), limit)
        for (dim, heads), limit in shapes.items()
        for key, what in FORWARDS.items()
    ]
    return [*targets, Target("four paths over one map, worst of all", max(paths), PATHS)]
