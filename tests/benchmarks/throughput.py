"""Training in windows per second beside a plain forecaster of the published design."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.reference import PlainForecaster
from benchmarks.tables import Findings, Table, Target
from benchmarks.timing import Job, interleaved, median, ratio, spread
from sensitivity.models import Forecaster
from sensitivity.traffic import Split, Window, split, synthetic_city
from sensitivity.training import Settings, fit

ABOUT = """One training step (forward, masked error in mph, backward, clipping, AdamW) of the toolkit's forecaster
with `spatial="as_published"`, as `sensitivity train` does it, against a plain forecaster of the published design:
`nn.MultiheadAttention` with its weights returned, each hop of the propagation a product of its own, the hops
concatenated. Both compute the same function, which a test holds to 12 digits, with the same dropout rates, on the
same windows of a synthetic city. The last column is the whole loop of `sensitivity train`, loading and logging
included."""


@dataclass(frozen=True)
class Size:
    """Sizes of a model, its data and its batches; ``whole``: also run the whole loop for two epochs."""

    depth: int
    nodes: int
    batch: int
    dim: int = 72
    heads: int = 8
    whole: bool = False

    def __str__(self) -> str:
        return f"depth {self.depth}, width {self.dim}, {self.heads} heads, {self.nodes} nodes, batch {self.batch}"


SIZES = (Size(12, 207, 8), Size(3, 10, 128, whole=True))


def run(sizes: tuple[Size, ...] = SIZES, days: int = 3, rounds: int = 7) -> Findings:
    """Times a step at every size."""
    table = Table(
        f"Windows per second, medians of {rounds} rounds.",
        {"model": "", "plain": "1/s", "toolkit": "1/s", "ratio": "x", "range": "", "whole loop": "1/s"},
    )
    targets = []
    for size in sizes:
        with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            parts = split(synthetic_city(nodes=size.nodes, days=days))
            times = interleaved(_jobs(size, parts, folder), rounds)
            whole = _whole(size, folder, days) if size.whole else None
        speeds = {name: size.batch / median(found) for name, found in times.items()}
        gain = ratio(times["plain"], times["ours"])
        table.rows.append(
            [str(size), speeds["plain"], speeds["ours"], gain, spread(times["plain"], times["ours"]), whole]
        )
        targets.append(Target(f"training step, toolkit over plain, {size}", gain, 2.0, least=True))
    return Findings([table], targets)


def _jobs(size: Size, parts: Split, folder: str) -> dict[str, Job]:
    batch = next(iter(parts.train.batches(size.batch, torch.Generator().manual_seed(0))))
    plain = PlainForecaster(size.nodes, size.dim, size.depth, size.heads)
    return {"plain": _plain_step(plain, batch, parts), "ours": _our_step(size, batch, parts, folder)}


def _plain_step(model: nn.Module, batch: Window, parts: Split) -> Job:
    settings = Settings()
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    mean, std = parts.scaler.mean, parts.scaler.std

    def loss() -> Tensor:
        error = (model(batch.inputs) * std + mean - batch.target).abs() * batch.mask
        return error.sum() / batch.mask.sum()

    return lambda: _step(loss, model, optimizer, settings.clip)


def _our_step(size: Size, batch: Window, parts: Split, folder: str) -> Job:
    from sensitivity.training.module import ForecastModule

    settings = _settings(size, folder)
    model = Forecaster(size.nodes, dim=size.dim, depth=size.depth, heads=size.heads, spatial="as_published")
    module = ForecastModule(model, parts.scaler, settings, steps=100).train()
    optimizer: Any = module.configure_optimizers()
    return lambda: _step(lambda: module.training_step(batch, 0), module, optimizer, settings.clip)


def _step(loss: Any, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> None:
    optimizer.zero_grad()
    loss().backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def _settings(size: Size, folder: str) -> Settings:
    return Settings(
        out=f"{folder}/run", depth=size.depth, dim=size.dim, heads=size.heads, batch_size=size.batch, epochs=2,
        device="cpu",
    )  # fmt: skip


def _whole(size: Size, folder: str, days: int) -> float:
    """Windows per second of the loop that the command runs."""
    result = fit(_settings(size, folder), traffic=synthetic_city(nodes=size.nodes, days=days), progress=False)
    return float(result.metrics["windows_per_second"])
