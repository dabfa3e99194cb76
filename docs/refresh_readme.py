"""Runs what the README shows and writes down what it prints: ``python docs/refresh_readme.py``.

Every block of Python, and every block of shell with one command, that a ``text`` block follows is run in a folder of
its own; the ``text`` block is replaced. The figure of the decay over T is taken from there, too.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BODY = r"((?:(?!```)[^\n]*\n)*)"
SHOWN = re.compile(rf"^```(python|sh)\n{BODY}```\n\n```text\n{BODY}```$", re.MULTILINE)
FIGURE = Path("decay") / "decay.png"


def printed(language: str, code: str) -> str:
    """What a block prints, on standard output or else on standard error; its figure is kept."""
    words = ["-c", code] if language == "python" else ["-m", "sensitivity.cli", *shlex.split(code)[1:]]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"COLUMNS": "80"}
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if (Path(folder) / FIGURE).is_file():
            shutil.copy(Path(folder) / FIGURE, ROOT / "docs" / "images" / FIGURE.name)
    lines = (done.stdout or done.stderr).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def refreshed(found: re.Match[str]) -> str:
    """The two blocks, with the second one as it is now."""
    language, code, _ = found.groups()
    return f"```{language}\n{code}```\n\n```text\n{printed(language, code)}```"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(SHOWN.sub(refreshed, readme.read_text("utf-8")), encoding="utf-8")
