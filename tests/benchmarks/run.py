"""Measures, keeps the numbers, and writes the page: ``python tests/benchmarks/run.py [--only SECTION,...]``.

A plain harness and not pytest-benchmark: that one runs each benchmark to its end before the next, so that a machine
whose speed drifts decides the ratios, and it knows no peak memory of a process. Every section is kept as soon as it is
measured; the page and the figures are written from what is kept.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch  # noqa: E402 - the line above says which package is measured

from benchmarks import record  # noqa: E402
from benchmarks.figures import FIGURES  # noqa: E402
from benchmarks.page import render  # noqa: E402
from benchmarks.sections import SECTIONS, Section  # noqa: E402
from benchmarks.tables import Findings  # noqa: E402


def main(words: list[str] | None = None) -> None:
    """Runs the sections that were asked for."""
    options = parsed(words)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of child processes
    torch.set_num_threads(options.threads)
    failed = []
    for name in options.only:
        try:
            measure(name, options)
        except Exception:  # the other sections are worth their minutes all the same
            traceback.print_exc()
            failed.append(name)
    write(options.out)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the others are kept")


def parsed(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures, keeps the numbers, and writes docs/benchmarks.md.")
    parser.add_argument("--only", type=names, default=list(SECTIONS), help=f"comma-separated: {', '.join(SECTIONS)}")
    parser.add_argument("--missing", action="store_true", help="only the sections that this code was not measured in")
    parser.add_argument("--render", action="store_true", help="measure nothing, write the page from what is kept")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works; needs --out")
    parser.add_argument("--rounds", type=int, help="readings of each job, in sections that take several")
    parser.add_argument("--threads", type=int, default=2, help="that torch may use (2)")
    parser.add_argument("--out", type=Path, default=record.DOCS, help="folder of benchmarks.json and the page (docs)")
    options = parser.parse_args(words)
    if options.quick and options.out == record.DOCS:
        parser.error("--quick needs --out FOLDER: its numbers mean nothing")
    if options.missing:
        code, kept = record.git("rev-parse", "--short", "HEAD:sensitivity"), record.read(options.out)
        options.only = [name for name in options.only if name not in kept or kept[name]["code"] != code]
    if options.render:
        options.only = []
    return options


def names(text: str) -> list[str]:
    """Section names."""
    found = text.split(",")
    unknown = [name for name in found if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    return found


def measure(name: str, options: argparse.Namespace) -> None:
    """Measures one section and keeps it."""
    print(f"{name} ...", flush=True)
    about, begin = record.circumstances(options.threads), time.perf_counter()
    findings = SECTIONS[name].run(**arguments(SECTIONS[name], options))
    took = time.perf_counter() - begin
    record.keep(options.out, name, findings, about | {"took": took})
    for table in findings.tables:
        print(table.markdown(), end="\n\n")
    for target in findings.targets:
        print(target.row())
    print(f"{name}: {took:.0f} s", flush=True)


def arguments(section: Section, options: argparse.Namespace) -> dict[str, Any]:
    """What the command line changes of a section's sizes."""
    chosen = dict(section.quick) if options.quick else {}
    if options.rounds and "rounds" in inspect.signature(section.run).parameters:
        chosen["rounds"] = options.rounds
    return chosen


def write(folder: Path) -> None:
    """The page and its figures, from what is kept."""
    sections = record.read(folder)
    (folder / "images").mkdir(exist_ok=True)
    for name, figures in FIGURES.items():
        for file, _, draw in figures if name in sections else []:
            draw(Findings.of(sections[name]).data, folder / "images" / file)
    (folder / "benchmarks.md").write_text(render(sections), encoding="utf-8")


if __name__ == "__main__":
    main()
