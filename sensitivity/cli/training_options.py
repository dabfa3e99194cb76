"""The options of a training run, for every command that trains. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from sensitivity.cli.options import device_option


def training_options(protocol: str = "dcrnn") -> Callable[[Any], Any]:
    """Options for the data, the model, the recipe and the regularisers; ``protocol`` is the default of that option."""
    options = _options(protocol)

    def decorate(command: Any) -> Any:
        for option in reversed(options):  # click lists the last one applied first
            command = option(command)
        return command

    return decorate


# fmt: off
def _options(protocol: str) -> list[Any]:
    option = click.option
    return [
        option("--data", default="synthetic", show_default=True, metavar="FILE", help="Traffic file (.h5, .npz, .npy, "
               ".csv), or 'synthetic' (also 'synthetic:nodes=10,days=7')."),
        option("--graph", metavar="FILE", help="Road graph, for --spatial distance."),
        option("--protocol", type=click.Choice(["dcrnn", "paper"]), default=protocol, show_default=True,
               help="Split and scaler."),
        option("--depth", type=int, default=2, show_default=True, help="Blocks (published: 12)."),
        option("--dim", type=int, default=32, show_default=True, help="Width (published: 72)."),
        option("--heads", type=int, default=4, show_default=True, help="Attention heads (published: 8)."),
        option("--spatial", type=click.Choice(["as_published", "adaptive", "distance", "none"]), show_default=True,
               default="as_published", help="How nodes are mixed; 'as_published' does not mix them."),
        option("--day-of-week", is_flag=True, help="Give the model the day of the week, beside the time of day."),
        option("--dropout", type=float, default=0.1, show_default=True, help="Dropout of the model."),
        option("--epochs", type=int, default=30, show_default=True, help="Passes over the training windows."),
        option("--batch-size", type=int, default=128, show_default=True, help="Windows in a step."),
        option("--lr", type=float, default=2e-4, show_default=True, help="Highest learning rate."),
        option("--weight-decay", type=float, default=0.01, show_default=True, help="Of AdamW."),
        option("--clip", type=float, default=5.0, show_default=True, help="Largest norm of the gradient."),
        option("--patience", type=int, default=20, show_default=True, help="Epochs without a better validation error."),
        option("--dropout-rate", type=float, default=0.1, show_default=True, help="For --variant dropout."),
        option("--where", type=click.Choice(["logits", "weights"]), default="logits", show_default=True,
               help="For --variant dropout."),
        option("--shared", is_flag=True, help="For --variant dropout: one draw for all samples and heads."),
        option("--penalty-value", type=float, default=-0.05, show_default=True, help="For --variant penalty; where "
               "learned-penalty begins; length-penalty: at the length of training."),
        option("--gate-value", type=float, default=0.5, show_default=True, help="For --variant gate: factor of the "
               "residual."),
        option("--gate-learned", is_flag=True, help="For --variant gate: train the factor, from --gate-value on."),
        device_option(),
    ]
