"""What importing and asking for help cost."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from benchmarks.record import ROOT
from benchmarks.tables import Findings, Table, Target
from benchmarks.timing import interleaved, median, ratio, spread

ABOUT = """Fresh interpreters, in turns. `import sensitivity` loads its parts when they are used first; the third
row therefore asks for `measure`, which loads torch and all that measuring needs."""

COMMANDS = {
    "`import torch`": ["-c", "import torch"],
    "`import sensitivity`": ["-c", "import sensitivity"],
    "`from sensitivity import measure`": ["-c", "from sensitivity import measure"],
    "`sensitivity --help`": ["-m", "sensitivity.cli", "--help"],
}
BASE, BARE, FULL, HELP = COMMANDS


def run(rounds: int = 9) -> Findings:
    """Times every command."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = {name: lambda words=words: _run(words, folder) for name, words in COMMANDS.items()}
        times = interleaved(jobs, rounds, cold=jobs)
    base = times[BASE]
    table = Table(
        f"Medians of {rounds} processes each.", {"process": "", "time": "s", "over `import torch`": "x", "range": ""}
    )
    for name, found in times.items():
        table.rows.append([name, median(found), ratio(found, base), spread(found, base)])
    more = median([one - other for one, other in zip(times[HELP], base, strict=True)])
    return Findings(
        [table],
        [
            Target(f"{BARE} over {BASE}", ratio(times[BARE], base), 1.15),
            Target(f"{FULL} over {BASE}", ratio(times[FULL], base), 1.15),
            Target(f"{HELP} beyond {BASE}", more, 0.3, unit="s"),
        ],
    )


def _run(words: list[str], folder: str) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
