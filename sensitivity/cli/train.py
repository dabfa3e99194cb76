"""``sensitivity train``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from sensitivity.cli.options import named_folder, seed_option
from sensitivity.cli.training_options import given, training_options

_VARIANTS = ["none", "no-residual", "mask", "dropout", "penalty", "learned-penalty", "length-penalty", "gate",
             "sink-penalty"]  # fmt: skip
_PLACE = ("out", "resume", "device", "tensorboard", "diagnose_every")


@click.command(name="train")
@training_options()
@click.option("--variant", type=click.Choice(_VARIANTS), metavar="NAME", default="none", show_default=True,
              help=f"What is done to the diagonal: {', '.join(_VARIANTS)}.")  # fmt: skip
@seed_option()
@click.option("--out", required=True, metavar="DIR", callback=named_folder, help="Folder of the run.")
@click.option("--resume", is_flag=True, help="Continue the run in --out from its last completed epoch.")
@click.option("--devices", type=int, default=1, show_default=True, help="Processes that share every batch, each on a "
              "device of its own, or on the CPU.")  # fmt: skip
@click.option("--diagnose-every", type=int, default=0, metavar="EPOCHS", help="Look at the attention layers every "
              "so many epochs, and write DIR/diagnostics.csv.")  # fmt: skip
@click.option("--tensorboard", is_flag=True, help="Also write a TensorBoard log.")
@click.pass_context
def command(ctx: click.Context, **options: Any) -> None:
    """Train a forecaster and test it beside the naive forecasts.

    Writes DIR/ckpt.pt (the best model, safe to load), DIR/metrics.json, DIR/log.csv, and what --resume needs.
    """
    from sensitivity.training import fit
    from sensitivity.training.table import score_table

    result = fit(_settings(ctx, options))
    click.echo(score_table(result.metrics))
    click.echo(_notes(result.metrics, result.checkpoint.parent))


def _notes(metrics: dict[str, Any], out: Path) -> str:
    """What stands below the table."""
    data, validation, speed = metrics["data"], metrics["validation"]["mae"], metrics["windows_per_second"]
    return "\n".join(
        [
            "MAE and RMSE in mph, MAPE in %.",
            f"data: {data['name']}, protocol {data['protocol']}, {metrics['windows']['test']} test windows",
            f"best epoch: {metrics['best_epoch']} of {metrics['epochs']} (validation MAE {validation:.3f})",
            *_unusual(metrics),
            f"model: {metrics['parameters']} parameters; {speed:.0f} training windows per second",
            f"wrote: {out / 'ckpt.pt'}, {out / 'metrics.json'}",
        ]
    )


def _unusual(metrics: dict[str, Any]) -> list[str]:
    """What a reader of the table must know of the arithmetic and of the published quirks."""
    if metrics["quirks"]:
        return [f"as published: {', '.join(metrics['quirks'])}"]
    precision = metrics["precision"]
    if precision["training"] == precision["evaluation"]:
        return []
    return [f"precision: {precision['training']} in training, float32 in validation and test"]


def _settings(ctx: click.Context, options: dict[str, Any]) -> Any:
    """The settings; with ``--resume``, what is not typed is as in the run that is resumed."""
    from sensitivity.training import Settings
    from sensitivity.training.folder import RunFolder

    settings = Settings(**given(options))
    if not settings.resume:
        return settings
    stored, _ = RunFolder(settings.folder).read_settings()
    typed = {name: value for name, value in options.items() if _typed(ctx, name) or name in _PLACE}
    return dataclasses.replace(Settings.from_identity(stored), **typed)


def _typed(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) not in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP, None)
