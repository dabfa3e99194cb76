"""``sensitivity verify``."""

from __future__ import annotations

from typing import Any

import click

from sensitivity.cli.options import LENGTHS, seed_option
from sensitivity.errors import InputError, RunError


@click.command(name="verify")
@click.option("--model", metavar="FILE", help="Checkpoint of the model, such as ckpt.pt of a training run.")
@click.option("--random", metavar="SPEC", help="Random layers at tokens N(0, I) instead of a model: dim=32,heads=4, "
              "and gain=, causal=, residual=, biases=, mask=, layers=.")  # fmt: skip
@click.option("--data", metavar="FILE", help="Traffic file, or 'synthetic'. [default: what the model was trained on]")
@click.option("--graph", metavar="FILE", help="Road graph of --data.")
@click.option("--lengths", type=LENGTHS, help="Sequence lengths, as 12,24,48 or 8,...,128. "
              "[default: training length times 1, 2, 4, 8; --random: 8,...,128]")  # fmt: skip
@click.option("--layers", metavar="NAMES", help="Attention layers, separated by commas. [default: all]")
@click.option("--samples", type=int, help="Windows of data, or random sequences. [default: 16; --random: 8]")
@click.option("--norm", type=click.Choice(["frobenius", "rms", "spectral"]), default="spectral", show_default=True,
              help="Norm of the Jacobian blocks.")  # fmt: skip
@seed_option()
@click.option("--law", is_flag=True, help="With --random: also compare the law of Gaussian tokens with simulation.")
@click.option("--trust-pickle", is_flag=True, help="Let the checkpoint run code; only if you trust its maker.")
@click.option("--builder", metavar="PKG.MOD:FN", help="Function that builds the model which the weights belong to.")
def command(law: bool, **options: Any) -> None:
    """Check closed forms against autodiff, and every bound against what is measured.

    Exits with 1 on a violation.
    """
    from sensitivity.cli.verifying import compare, table

    job = _job(options, law)
    found = compare.verify(job)
    table.show(found, [*job.headline, *job.notes])
    if law:
        table.show_law(compare.laws(job))
    if found.faults():
        raise RunError(f"{'; '.join(found.faults())}.")


def _job(options: dict[str, Any], law: bool) -> Any:
    """What to verify, checked before anything is computed."""
    from sensitivity.cli.measuring import job

    if (options["model"] is None) == (options["random"] is None):
        raise InputError("say what to verify, either with --model FILE or with --random dim=32,heads=4.")
    if options["samples"] is not None and options["samples"] < 1:
        raise InputError(f"--samples must be at least 1, not {options['samples']}.")
    if options["random"] is None:
        if law:
            raise InputError(
                "--law is about random tokens; use it with --random, or call sensitivity.bounds.law(tokens=)."
            )
        return job.of_model(**{name: value for name, value in options.items() if name != "random"})
    others = [name for name in ("data", "graph", "layers", "builder") if options[name] is not None]
    if others:
        raise InputError(f"--random draws its own layers and tokens, so --{others[0]} has no meaning; leave it out.")
    options["lengths"] = options["lengths"] or [8, 16, 32, 64, 128]
    return job.of_random(**{name: options[name] for name in ("random", "lengths", "samples", "norm", "seed")})
