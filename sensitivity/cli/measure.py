"""``sensitivity measure``."""

from __future__ import annotations

import textwrap
from typing import Any

import click

from sensitivity.cli.options import LENGTHS, data_options, out_option, seed_option
from sensitivity.errors import InputError


def _of_data(command: Any) -> Any:
    for option in reversed(data_options()):
        command = option(command)
    return command


@click.command(name="measure")
@click.option("--model", metavar="FILE", help="Checkpoint of the model, such as ckpt.pt of a training run.")
@click.option("--random", metavar="SPEC", help="Random layers at tokens N(0, I) instead of a model: dim=72,heads=8, "
              "and gain=, causal=, residual=, biases=, mask=, layers=.")  # fmt: skip
@click.option("--data", metavar="FILE", help="Traffic file, or 'synthetic'. [default: what the model was trained on]")
@click.option("--graph", metavar="FILE", help="Road graph of --data.")
@_of_data
@click.option("--lengths", type=LENGTHS, help="Sequence lengths, as 12,24,48 or 8,...,1024. "
              "[default: training length times 1, 2, 4, 8; --random: 8,...,256]")  # fmt: skip
@click.option("--layers", metavar="NAMES", help="Attention layers, separated by commas. [default: all]")
@click.option("--samples", type=int, help="Windows of data, or random sequences. [default: 16; --random: 8]")
@click.option("--sensors", type=int, help="Sensors of each window that are measured. [default: 32, or all if fewer]")
@click.option("--norm", type=click.Choice(["frobenius", "rms", "spectral"]), default="frobenius", show_default=True,
              help="Norm of the Jacobian blocks.")  # fmt: skip
@click.option("--keep", type=click.Choice(["map", "statistics"]), default="map", show_default=True,
              help="'statistics' keeps no maps and draws no heatmaps, for sequences that are long.")  # fmt: skip
@click.option(
    "--rows", type=int, help="Measure so many query rows, drawn with --seed; keeps statistics. [default: all]"
)
@seed_option()
@out_option("measurement")
@click.option("--json", "as_json", is_flag=True, help="Print the content of summary.json and nothing else.")
@click.option("--resume", is_flag=True, help="Take up the lengths that an interrupted measurement has finished.")
@click.option("--trust-pickle", is_flag=True, help="Let the checkpoint run code; only if you trust its maker.")
@click.option("--builder", metavar="PKG.MOD:FN", help="Function that builds the model which the weights belong to.")
def command(as_json: bool, resume: bool, out: str, **options: Any) -> None:
    """Measure the sensitivity of every attention layer over sequence lengths.

    Writes measurement.nc, summary.json and figures to --out.
    """
    from sensitivity.cli.measuring import folder, table

    job = _job(options)
    place = folder.Folder(out, job)
    found = place.measure(resume)
    written = place.write(found)
    if as_json:
        click.echo(folder.as_json(found), nl=False)
        return
    table.show(found, [*job.headline, *job.notes])
    heatmaps = [name for name in written if name.startswith("heatmap_")]
    if len(heatmaps) > 2:
        written = [*(name for name in written if name not in heatmaps), f"{len(heatmaps)} heatmaps"]
    click.echo(textwrap.fill(f"wrote {out}: {', '.join(written)}", 80, subsequent_indent="  ", break_on_hyphens=False))


def _job(options: dict[str, Any]) -> Any:
    """What to measure, checked before anything is computed or written."""
    from sensitivity.cli.measuring import job

    if (options["model"] is None) == (options["random"] is None):
        raise InputError("say what to measure, either with --model FILE or with --random dim=72,heads=8.")
    for name in ("samples", "sensors", "rows"):
        if options[name] is not None and options[name] < 1:
            raise InputError(f"--{name} must be at least 1, not {options[name]}.")
    streaming = {name: options.pop(name) for name in ("keep", "rows")}
    if options["random"] is None:
        found = job.of_model(**{name: value for name, value in options.items() if name != "random"})
        return job.streaming(found, **streaming)
    names = ("data", "graph", "key", "channel", "layers", "sensors", "builder")
    others = [name for name in names if options[name] not in (None, 0)]
    if others:
        raise InputError(f"--random draws its own layers and tokens, so --{others[0]} has no meaning; leave it out.")
    found = job.of_random(**{name: options[name] for name in ("random", "lengths", "samples", "norm", "seed")})
    return job.streaming(found, **streaming)
