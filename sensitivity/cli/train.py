"""``sensitivity train``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from sensitivity.cli.options import device_option, seed_option

_PLACE = ("out", "resume", "device", "tensorboard")


@click.command(name="train")
@click.option("--data", default="synthetic", show_default=True, metavar="FILE", help="Traffic file (.h5, .npz, .npy, "
              ".csv), or 'synthetic' (also 'synthetic:nodes=10,days=7').")  # fmt: skip
@click.option("--graph", metavar="FILE", help="Road graph, for --spatial distance.")
@click.option("--protocol", type=click.Choice(["dcrnn", "paper"]), default="dcrnn", show_default=True,
              help="Split and scaler.")  # fmt: skip
@click.option("--variant", type=click.Choice(["none", "no-residual", "mask", "dropout", "penalty"]), default="none",
              show_default=True, help="What is done to the diagonal.")  # fmt: skip
@click.option("--depth", type=int, default=2, show_default=True, help="Blocks (published: 12).")
@click.option("--dim", type=int, default=32, show_default=True, help="Width (published: 72).")
@click.option("--heads", type=int, default=4, show_default=True, help="Attention heads (published: 8).")
@click.option("--spatial", type=click.Choice(["as_published", "adaptive", "distance", "none"]), show_default=True,
              default="as_published", help="How nodes are mixed; 'as_published' does not mix them.")  # fmt: skip
@click.option("--dropout", type=float, default=0.1, show_default=True, help="Dropout of the model.")
@click.option("--epochs", type=int, default=30, show_default=True, help="Passes over the training windows.")
@click.option("--batch-size", type=int, default=128, show_default=True, help="Windows in a step.")
@click.option("--lr", type=float, default=2e-4, show_default=True, help="Highest learning rate.")
@click.option("--weight-decay", type=float, default=0.01, show_default=True, help="Of AdamW.")
@click.option("--clip", type=float, default=5.0, show_default=True, help="Largest norm of the gradient.")
@click.option("--patience", type=int, default=20, show_default=True, help="Epochs without a better validation error.")
@seed_option()
@click.option("--dropout-rate", type=float, default=0.1, show_default=True, help="For --variant dropout.")
@click.option("--where", type=click.Choice(["logits", "weights"]), default="logits", show_default=True,
              help="For --variant dropout.")  # fmt: skip
@click.option("--shared", is_flag=True, help="For --variant dropout: one draw for all samples and heads.")
@click.option("--penalty-value", type=float, default=-0.05, show_default=True, help="For --variant penalty.")
@click.option("--out", required=True, metavar="DIR", help="Folder of the run.")
@click.option("--resume", is_flag=True, help="Continue the run in --out from its last completed epoch.")
@device_option()
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
            f"model: {metrics['parameters']} parameters; {speed:.0f} training windows per second",
            f"wrote: {out / 'ckpt.pt'}, {out / 'metrics.json'}",
        ]
    )


def _settings(ctx: click.Context, options: dict[str, Any]) -> Any:
    """The settings; with ``--resume``, what is not typed is as in the run that is resumed."""
    from sensitivity.training import Settings
    from sensitivity.training.folder import RunFolder

    settings = Settings(**options)
    if not settings.resume:
        return settings
    stored, _ = RunFolder(settings.folder).read_settings()
    typed = {name: value for name, value in options.items() if _typed(ctx, name) or name in _PLACE}
    return dataclasses.replace(Settings.from_identity(stored), **typed)


def _typed(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) not in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP, None)
