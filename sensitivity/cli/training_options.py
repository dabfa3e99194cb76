"""The options of a training run, for every command that trains. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from sensitivity.cli.options import data_options, device_option


def training_options(protocol: str = "dcrnn") -> Callable[[Any], Any]:
    """Options for the data, the model, the recipe and the regularisers; ``protocol`` is the default of that option."""
    options = _options(protocol)

    def decorate(command: Any) -> Any:
        for option in reversed(options):  # click lists the last one applied first
            command = option(command)
        return command

    return decorate


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that were left to their backbone and recipe."""
    return {name: value for name, value in options.items() if value is not None}


# fmt: off
def _options(protocol: str) -> list[Any]:
    option = click.option
    return [
        option("--data", default="synthetic", show_default=True, metavar="FILE", help="Traffic file (.h5, .npz, .npy, "
               ".csv), or 'synthetic' (also 'synthetic:nodes=10,days=7')."),
        option("--graph", metavar="FILE", help="Road graph, for --spatial distance."),
        *data_options(),
        option("--protocol", type=click.Choice(["dcrnn", "paper"]), default=protocol, show_default=True,
               help="Split and scaler."),
        option("--backbone", type=click.Choice(["forecaster", "staeformer"]), default="forecaster", show_default=True,
               help="The paper's model, or a stronger one; it sets the defaults of what follows."),
        option("--depth", type=int, help="Blocks (published: 12). [default: 2; staeformer: 3 over time, 3 over nodes]"),
        option("--dim", type=int, help="Width (published: 72). [default: 32; staeformer: 152]"),
        option("--heads", type=int, help="Attention heads (published: 8). [default: 4]"),
        option("--spatial", type=click.Choice(["as_published", "adaptive", "distance", "none"]), help="How a "
               "forecaster mixes nodes; 'as_published' does not. [default: as_published]"),
        option("--day-of-week/--no-day-of-week", default=None, help="Give the model the day of the week, beside the "
               "time of day. [default: no; staeformer: yes]"),
        option("--dropout", type=float, default=0.1, show_default=True, help="Dropout of the model."),
        option("--epochs", type=int, default=30, show_default=True, help="Passes over the training windows."),
        option("--recipe", type=click.Choice(["cosine", "steps"]), help="AdamW with warm-up and a half cosine, or Adam "
               "with steps down after 20 and 30 epochs. [default: cosine; staeformer: steps]"),
        option("--batch-size", type=int, help="Windows in a step. [default: 128; steps: 16]"),
        option("--lr", type=float, help="Highest learning rate. [default: 2e-4; steps: 1e-3]"),
        option("--weight-decay", type=float, help="Of the optimiser. [default: 0.01; steps: 3e-4]"),
        option("--clip", type=float, help="Largest norm of the gradient, 0 for any. [default: 5; steps: 0]"),
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
        option("--sink-weight", type=float, help="Weight of the log sink ratio in the loss. [default: 0.1 for "
               "--variant sink-penalty, else 0]"),
        option("--sink-sequences", type=int, default=8, show_default=True, help="Sequences of a step that the sink "
               "ratio is taken of."),
        option("--precision", type=click.Choice(["32", "bf16"]), default="32", show_default=True,
               help="Arithmetic of the network in training; the loss and all scores are in float32."),
        option("--as-published", is_flag=True, help="Train with every quirk of the published code: loss and scores in "
               "bf16, last weights tested, validation averaged over batches, zeros in the scaler, shared dropout of "
               "diagonal logits."),
        device_option(),
    ]
