"""The files of a comparison."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sensitivity import __version__, files, plot
from sensitivity.reproduction.compare import Comparison
from sensitivity.reproduction.contents import csv_files, paper_table, tables
from sensitivity.reproduction.sensitivities import mean_map


def write(found: Comparison) -> list[str]:
    """Writes tables and figures to the folder of the plan; returns their names.

    ``tables.md``, ``tables.tex``
        what is printed, at all lengths, after the wide table in the paper's form.
    ``scores.csv``, ``paired.csv``, ``sensitivity.csv``
        every number in full.
    ``variants_LAYER_T.png``
        attention and sensitivity maps of all variants, mean over seeds, in common colours.
    ``comparison.json``
        settings, data and versions; written last, so it says that all is there.
    """
    folder, shown = found.plan.folder, [paper_table(found), *tables(found)]
    content = {
        "tables.md": "\n".join(table.markdown() for table in shown),
        "tables.tex": "\n".join(table.latex() for table in shown),
        **csv_files(found),
    }
    for name, text in content.items():
        files.write_text(folder / name, text)
    drawn = _figures(found, folder) if found.sweeps else []
    files.write_text(folder / "comparison.json", json.dumps(_origin(found), indent=2) + "\n")
    return [*content, *drawn, "comparison.json"]


def _figures(found: Comparison, folder: Path) -> list[str]:
    names = []
    for layer in found.layers:
        for length in found.lengths:
            maps = {name: mean_map(found.sweeps[name], layer, length) for name in found.variants}
            seeds = {len(found.sweeps[name]) for name in found.variants}
            title = f"{layer}, T={length}; mean over {max(seeds)} seed{'s' if max(seeds) > 1 else ''}"
            name = f"variants_{re.sub(r'[^A-Za-z0-9.-]+', '_', layer)}_T{length}.png"
            plot.save(plot.variants(maps, title=title)[0, 0], folder / name)
            names.append(name)
    return names


def _origin(found: Comparison) -> dict[str, Any]:
    import torch

    return {
        "versions": {"attention-sensitivity": __version__, "torch": str(torch.__version__)},
        "settings": found.plan.identity(),
        "data": found.data,
        "runs": {name: len(found.done(name)) for name in found.plan.variants},
        "failures": dict(found.failures),
        "lengths": list(found.lengths),
    }
