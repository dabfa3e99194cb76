"""Where and when a section was measured, and the file that keeps what all sections found."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.tables import Findings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FORMAT = 1


def circumstances(threads: int) -> dict[str, Any]:
    """Code, machine, versions and date."""
    import numpy
    import torch

    import sensitivity

    return {
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "code": git("rev-parse", "--short", "HEAD:sensitivity"),
        "changed": bool(git("status", "--porcelain", "--", "sensitivity")),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count() or 1,
            "threads": threads,
            "memory": memory(),
            "system": platform.system(),
        },
        "versions": {
            "sensitivity": sensitivity.__version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
    }


def git(*words: str) -> str:
    """What git says, or nothing outside a checkout."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def processor() -> str:
    """The processor's name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read(folder: Path) -> dict[str, Any]:
    """The sections that were measured so far, by name."""
    path = folder / "benchmarks.json"
    if not path.is_file():
        return {}
    kept = json.loads(path.read_text("utf-8"))
    if kept["format"] != FORMAT:
        raise SystemExit(f"{path} has format {kept['format']}, not {FORMAT}: remove it and measure again.")
    return kept["sections"]


def keep(folder: Path, name: str, findings: Findings, about: dict[str, Any]) -> None:
    """Puts a section's findings into the file; the others stay."""
    sections = read(folder) | {name: findings.plain() | about}
    path = folder / "benchmarks.json"
    temporary = path.with_suffix(".tmp")
    text = json.dumps({"format": FORMAT, "sections": sections}, indent=1)
    temporary.write_text(f"{text}\n", encoding="utf-8")
    temporary.replace(path)
