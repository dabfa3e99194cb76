"""Runs every notebook and every script of this folder, each in a process of its own; they assert their own claims.

``pytest --override-ini testpaths=examples examples/run_examples.py``
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
SCRIPTS = sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "notebooks are stored without outputs: clear them before committing"
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    warned = [out.text for cell in notebook.cells for out in cell.get("outputs", ()) if out.get("name") == "stderr"]
    assert warned == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script(path: Path, tmp_path: Path) -> None:
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONWARNINGS": "error::UserWarning"}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
