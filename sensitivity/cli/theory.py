"""``sensitivity theory``."""

from __future__ import annotations

import textwrap
from typing import Any

import click

from sensitivity.errors import InputError, RunError


@click.command(name="theory")
@click.argument("names", nargs=-1)
@click.option("--latex", "form", flag_value="latex", default=None, help="Print a LaTeX document.")
@click.option("--markdown", "form", flag_value="markdown", help="Print Markdown with LaTeX formulas.")
@click.option("--check", is_flag=True, help="Check every step again (about half a minute for all).")
def command(names: tuple[str, ...], form: str | None, check: bool) -> None:
    """Print the derivations and bounds, or check them.

    NAMES picks derivations and bounds; without it all are meant. Without an option, names alone print Markdown, and no
    name at all prints the list.
    """
    from theory import render

    chosen = _chosen(names)
    if check:
        _check(chosen)
    if form == "latex":
        click.echo(render.latex(names or None), nl=False)
    elif form == "markdown" or (names and not check):
        click.echo(render.markdown(names or None), nl=False)
    elif not check:
        _list(chosen)


def _chosen(names: tuple[str, ...]) -> list[Any]:
    """The derivations and bounds with these names, all without names.

    Raises:
        InputError: a name that nothing has.
    """
    import theory
    from theory.render import bounds

    known = {item.name: item for item in (*theory.derivations(), *bounds())}
    for name in names:
        if name not in known:
            raise InputError(f"no derivation or bound is called {name!r}; choose from: {', '.join(known)}.")
    return [known[name] for name in dict.fromkeys(names)] if names else list(known.values())


def _check(chosen: list[Any]) -> None:
    """Checks the derivations among the chosen, one line for each.

    Raises:
        RunError: a step does not hold.
    """
    from theory.derivation import DerivationError

    for item in chosen:
        if not hasattr(item, "steps"):
            continue
        try:
            item.check()
        except DerivationError as error:
            raise RunError(str(error)) from error
        click.echo(f"{item.name}: {len(item.steps)} steps hold")


def _list(chosen: list[Any]) -> None:
    width = max(len(item.name) for item in chosen)
    for item in chosen:
        kind = f"{item.title} ({len(item.steps)} steps)" if hasattr(item, "steps") else "bound"
        click.echo(textwrap.fill(f"{item.name:<{width}}  {kind}", 80, subsequent_indent=" " * (width + 2)))
    click.echo("Print one with: sensitivity theory NAME\nAll with: sensitivity theory --markdown (or --latex)")
