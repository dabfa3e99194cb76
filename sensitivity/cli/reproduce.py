"""``sensitivity reproduce``."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import click

from sensitivity.cli.options import LENGTHS, out_option
from sensitivity.cli.training_options import given, training_options
from sensitivity.errors import InputError

if TYPE_CHECKING:
    from sensitivity.reproduction import Cell, Comparison, Plan

_VARIANTS = "no-residual,none,mask,dropout,penalty"


@click.command(name="reproduce")
@training_options(protocol="paper")
@click.option("--variants", default=_VARIANTS, show_default=True, metavar="NAMES", help="Variants, separated by "
              "commas; differences are taken to 'none'.")  # fmt: skip
@click.option("--seeds", default="0-4", show_default=True, metavar="SEEDS", help="Seeds, as 0-4 or 0,1,2.")
@click.option("--jobs", type=int, default=1, show_default=True, help="Runs at a time, each on its share of the cores.")
@click.option("--lengths", type=LENGTHS, help="Sequence lengths at which the trained models are measured. "
              "[default: that of training, and eight times that]")  # fmt: skip
@click.option("--windows", type=int, default=16, show_default=True, help="Test windows that are measured.")
@click.option("--sensors", type=int, default=16, show_default=True, help="Sensors of each window that are measured.")
@click.option("--no-measure", is_flag=True, help="Only train and compare the test errors.")
@out_option("reproduction")
def command(variants: str, seeds: str, jobs: int, lengths: list[int] | None, windows: int, sensors: int,
            no_measure: bool, out: str, **options: Any) -> None:  # fmt: skip
    """Train the paper's variants over several seeds, compare and measure them.

    Run again, it takes up what an interrupted comparison has left; more seeds or variants may be added. Writes
    tables.md, tables.tex, scores.csv, paired.csv, sensitivity.csv, figures and manifest.json to --out; every run lies
    in DIR/runs.
    """
    from sensitivity.reproduction import Plan, Probe, reproduce
    from sensitivity.reproduction.contents import tables
    from sensitivity.reproduction.output import write
    from sensitivity.training import Settings

    names = [name.strip() for name in variants.split(",") if name.strip()]
    plan = Plan(Settings(**given(options)), out, tuple(names), parse_seeds(seeds))
    probe = None if no_measure else Probe(lengths, windows, sensors)
    try:
        found = reproduce(plan, probe, jobs=jobs, told=_Told(plan), measured=_measured)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt("interrupted; what is done is kept: the same command goes on from there.") from error
    for table in tables(found, found.lengths[:1]):
        click.echo(f"\n{table.console()}")
    _end(found, write(found))


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds such as ``0-4`` or ``0,1,7``.

    Raises:
        InputError: not integers, a range that runs backwards, or nothing.

    >>> parse_seeds("0-2,7")
    (0, 1, 2, 7)
    """
    seeds: list[int] = []
    for part in (piece.strip() for piece in text.split(",")):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise InputError(f"--seeds takes integers from 0 up, as 0-4 or 0,1,2; {text!r} has {part!r}.")
        seeds += range(int(first), int(last or first) + 1)
    return tuple(seeds)


class _Told:
    """Says on standard error which run begins and how it ended."""

    def __init__(self, plan: Plan) -> None:
        self.total = len(plan.cells)
        self.done = sum(cell.done for cell in plan.cells)
        if self.done:
            click.echo(f"{self.done} of {self.total} runs are there already", err=True)

    def __call__(self, cell: Cell, state: str) -> None:
        if state == "begins":
            click.echo(f"{cell.name}: {'goes on' if cell.begun else 'begins'}", err=True)
            return
        self.done += 1
        click.echo(f"{cell.name}: {state} ({self.done} of {self.total})", err=True)


def _measured(cell: Cell) -> None:
    click.echo(f"{cell.name}: measured", err=True)


def _end(found: Comparison, written: list[str]) -> None:
    """What stands below the tables."""
    click.echo()
    for name, reason in found.failures.items():
        click.echo(textwrap.fill(f"{name} failed: {reason}", 80, subsequent_indent="  "))
    figures = [name for name in written if name.endswith(".png")]
    shown = [name for name in written if name not in figures]
    shown += [f"{len(figures)} figures (variants_*.png)"] if figures else []
    text = f"wrote {found.plan.folder}: {', '.join(shown)}"
    click.echo(textwrap.fill(text, 80, subsequent_indent="  ", break_on_hyphens=False))
