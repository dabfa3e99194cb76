"""``sensitivity demo``."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sensitivity.cli.options import out_option, seed_option
from sensitivity.errors import InputError

if TYPE_CHECKING:
    from sensitivity.sweep import Sweep


@dataclass(frozen=True)
class Tour:
    """Sizes of the tour: the data, the model and the measurement."""

    city: str
    dim: int
    heads: int
    epochs: int
    lengths: tuple[int, ...]
    samples: int


FULL = Tour("nodes=10,days=14", 32, 4, 10, (12, 24, 48, 96, 192), 12)
QUICK = Tour("nodes=3,days=3", 8, 2, 2, (12, 24, 36, 48), 3)


@click.command(name="demo")
@out_option("demo")
@seed_option()
@click.option("--quick", is_flag=True, help="A tiny model and short sequences: seconds, to see that everything runs.")
def command(out: str, seed: int, quick: bool) -> None:
    """Train a small model on a synthetic city, measure it, and show what is found.

    Takes about two minutes on two cores. Run again, it takes up what an interrupted run has left.
    """
    from sensitivity.cli.measuring import folder, job, table

    tour = QUICK if quick else FULL
    model, place = Path(out) / "model", Path(out) / "measurement"
    metrics = _train(tour, model, seed)
    work = job.of_model(str(model / "ckpt.pt"), None, None, list(tour.lengths), None, tour.samples, "frobenius", seed)
    click.echo("2. How much does every state depend on every input? Measuring ...", err=True)
    measured = folder.Folder(str(place), work)
    found = measured.measure(resume=True)
    measured.write(found)
    table.show(found, [*work.headline, *work.notes])
    for line in story(found, metrics, place):
        click.echo(textwrap.fill(line, 80, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False))


def _train(tour: Tour, folder: Path, seed: int) -> dict[str, Any]:
    """Trains the model, or takes up the run that is there; returns its scores."""
    from sensitivity.training import Settings, fit
    from sensitivity.training.folder import RunFolder

    settings = Settings(
        data=f"synthetic:{tour.city},seed={seed}",
        out=str(folder),
        dim=tour.dim,
        heads=tour.heads,
        epochs=tour.epochs,
        lr=3e-3,
        seed=seed,
        resume=(folder / "settings.json").exists(),
        device="cpu",
    )
    if settings.resume and not _same(RunFolder(folder), settings.identity()):
        raise InputError(f"{folder} holds another run; choose another folder with --out.")
    click.echo("1. A synthetic city with rush hours and travelling congestion; training a small model ...", err=True)
    if settings.resume and (folder / "metrics.json").exists():
        return dict(json.loads((folder / "metrics.json").read_text(encoding="utf-8")))
    return fit(settings).metrics


def _same(run: Any, wanted: dict[str, Any]) -> bool:
    stored, _ = run.read_settings()
    return all(stored.get(name) == value for name, value in wanted.items())


def story(found: Sweep, metrics: dict[str, Any], folder: Path) -> list[str]:
    """What the numbers say, line by line, with the figure that shows it."""
    longest, layer = found.lengths[-1], found.layers[0]
    one = found.record(layer).statistics
    diagonal = {name: one[f"diagonal_{name}"] for name in ("residual", "value", "key", "query")}
    shares = {name: value / sum(diagonal.values()) for name, value in diagonal.items()}
    mass, sink = one["diagonal_attention"], one["sink_ratio"]
    return [
        _forecast(metrics),
        f"In {folder}, of {layer}:",
        *_decay(found, layer),
        f"heatmap_{layer}.png: at T={longest} a state depends {sink:.0f} times as much on its own input as "
        f"on another one, and {one['sink_ratio_residual_removed']:.0f} times with the residual connection left out.",
        f"path_shares.png: of the sensitivity to its own input, {_percent(shares['residual'])} is the residual and "
        f"{_percent(shares['query'])} the query path; the value path, which attention weights scale, is "
        f"{_percent(shares['value'])} of it. The weight on itself is {_percent(mass)}; 1/T is {_percent(mass.null)}.",
        _verdict(found),
        "Numbers: summary.json and measurement.nc.",
    ]


def _decay(found: Sweep, layer: str) -> list[str]:
    off, on = found.decay(layer), found.decay(layer, "diagonal")
    if off is None or on is None:
        return []
    low, high = off.interval
    return [
        f"decay.png: the sensitivity to other times goes as T^{_power(-off.exponent)} (95 % interval of the exponent: "
        f"{_power(-high)} to {_power(-low)}), the sensitivity to its own input as T^{_power(-on.exponent)}."
    ]


def _power(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"


def _forecast(metrics: dict[str, Any]) -> str:
    step = "12" if "12" in metrics["test"] else next(iter(metrics["test"]))
    minutes = int(step) * metrics["data"]["step_minutes"]
    ours, naive = metrics["test"][step]["mae"], metrics["naive"]["last non-zero value"][step]["mae"]
    return (
        f"The model: {minutes:.0f} minutes ahead its mean error is {ours:.1f} mph; repeating the last reading gives "
        f"{naive:.1f}."
    )


def _verdict(found: Sweep) -> str:
    verdicts = [v for record in found.records.values() for v in record.bounds.values() if v.applies]
    violations, blocks = sum(v.violations for v in verdicts), sum(v.blocks for v in verdicts)
    names = len({v.name for v in verdicts})
    return f"Theory: {names} bounds compared with {blocks} measured blocks, {violations} violations."


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %"
