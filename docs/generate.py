"""Pages that are written at build time: one API page per public module, the derivations, the bounds, the notebooks."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

GENERATED = "generated"
API = {
    "sensitivity": "The front door: measure a model, get a map.",
    "sensitivity.attention": "The canonical description of one attention layer.",
    "sensitivity.statistics": "Sinks, parroting, profiles.",
    "sensitivity.fit": "How fast sensitivity decays with the sequence length.",
    "sensitivity.sweep": "Measuring over many lengths.",
    "sensitivity.bounds": "Bounds and the law, evaluated on real layers.",
    "sensitivity.layers": "Temporal attention and the regularisers of its diagonal.",
    "sensitivity.models": "The forecaster, encoders to compare it with, naive forecasts.",
    "sensitivity.traffic": "METR-LA and its kin, and the synthetic city.",
    "sensitivity.training": "Training and masked metrics.",
    "sensitivity.checkpoint": "Safe checkpoints.",
    "sensitivity.adapters": "Layers of other libraries.",
    "sensitivity.plot": "Figures.",
    "sensitivity.report": "One page with everything.",
    "sensitivity.errors": "Errors and warnings.",
    "theory": "All derivations and bounds.",
    "theory.derivation": "Steps and derivations that are checked.",
    "theory.bounds": "Bounds as formulas with assumptions.",
}


def write_pages(docs: Path) -> None:
    """Writes everything generated below ``docs/generated``; what is gone from the code is gone from there too."""
    out = docs / GENERATED
    shutil.rmtree(out, ignore_errors=True)
    pages = api_pages() | theory_pages() | {"cli.md": cli_page()}
    for name, text in pages.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (out / "notebooks").mkdir()
    for notebook in sorted((docs.parent / "examples").glob("*.ipynb")):
        shutil.copy(notebook, out / "notebooks" / notebook.name)


def api_pages() -> dict[str, str]:
    """One page for each public module that exists, and their index."""
    modules = [name for name in API if importlib.util.find_spec(name) is not None]
    lines = "\n".join(modules)
    rows = "\n".join(f"| [`{name}`]({name}.md) | {API[name]} |" for name in modules)
    index = f"# API\n\n| module | |\n|---|---|\n{rows}\n\n```{{toctree}}\n:hidden:\n\n{lines}\n```\n"
    return {"api/index.md": index} | {f"api/{name}.md": api_page(name) for name in modules}


def api_page(name: str) -> str:
    """The page of one module: its docstring and its public names."""
    module = importlib.import_module(name)
    lines = [f".. automodule:: {name}"]
    if name == "sensitivity":  # what it exports from documented modules stands on their pages
        own = {item: getattr(module, item) for item in module.__all__ if not home(getattr(module, item))}
        kinds = {item: "class" if isinstance(value, type) else "function" for item, value in own.items()}
        lines += ["   :no-members:", ""]
        lines += [f".. auto{kinds[item]}:: {item}" for item in sorted(own, key=lambda item: kinds[item] == "class")]
    else:
        lines += ["   :members:"] + ["   :imported-members:"] * hasattr(module, "__path__")
    return "\n".join([f"# {name}", "", "```{eval-rst}", *lines, "```", ""])


def home(value: object) -> str:
    """The documented module, other than a top one, in which something was defined; empty if there is none."""
    where = str(getattr(value, "__module__", ""))
    return next((name for name in API if "." in name and f"{where}.".startswith(f"{name}.")), "")


def theory_pages() -> dict[str, str]:
    """The derivations and the bounds, as ``theory`` renders them."""
    from theory import render

    derivations, _, bounds = dollar_math(render.markdown()).partition("\n## Bounds\n")
    bounds = re.sub(r"^### ", "## ", bounds, flags=re.MULTILINE)
    return {"derivation.md": derivations, "bounds.md": f"# Bounds\n\n{BOUNDS}\n{bounds}"}


BOUNDS = """A bound is a proved limit with stated assumptions. The formulas below are printed by `theory`;
`sensitivity.bounds.check` evaluates them on a layer and its tokens, tests the assumptions there, and compares them with
what is measured ([check them yourself](../verify.md)). Norms are spectral unless marked otherwise; names are those of
the [notation](../notation.md) and the [derivation](derivation.md).
"""


CLI = """# Command line

Bad input is one sentence on standard error and exit code 2; a run that fails exits with 1, Ctrl-C with 130. `--debug`,
anywhere on the line, shows the traceback.
"""


def cli_page() -> str:
    """The help of every command, as the terminal shows it."""
    import click

    from sensitivity.cli import commands

    top = click.Context(commands, info_name="sensitivity", terminal_width=80)
    parts = [CLI]
    for name in commands.list_commands(top):
        command = commands.get_command(top, name)
        context = click.Context(command, info_name=name, parent=top, terminal_width=80)
        parts += [f"## {one.command_path}\n\n```text\n{one.command.get_help(one)}\n```\n" for one in leaves(context)]
    return "\n".join(parts)


def leaves(context: click.Context) -> list[click.Context]:
    """The command itself, or the commands of a group."""
    import click

    if not isinstance(context.command, click.Group):
        return [context]
    commands = [(name, context.command.get_command(context, name)) for name in context.command.list_commands(context)]
    return [click.Context(one, info_name=name, parent=context, terminal_width=80) for name, one in commands if one]


def dollar_math(markdown: str) -> str:
    """Formulas written as ``$`...`$`` for code hosts, as MyST reads them."""
    return re.sub(r"\$`(.+?)`\$", r"$\1$", markdown, flags=re.DOTALL)
