"""The folder of a run: what is in it, what may be overwritten, and how a run is found again."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import torch

from sensitivity.checkpoint.saving import STATE
from sensitivity.errors import InputError
from sensitivity.files import write_bytes, write_text
from sensitivity.training.settings import Settings


class RunFolder:
    """The files of a run.

    ``settings.json``
        what the run was told, and on which data; written first.
    ``last.ckpt``
        the state after the last completed epoch, from which the run is continued; plain, safe to load.
    ``log.csv``
        one line for every completed epoch.
    ``ckpt.pt``
        the best model so far; at the end, the tested one with its scores.
    ``diagnostics.csv``
        statistics of the attention layers, if they were asked for.
    ``metrics.json``
        the scores; its presence says that the run is complete.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings, self.state, self.log = path / "settings.json", path / "last.ckpt", path / "log.csv"
        self.checkpoint, self.metrics = path / "ckpt.pt", path / "metrics.json"
        self.diagnostics = path / "diagnostics.csv"

    def begin(self, settings: Settings, data: dict[str, Any]) -> None:
        """Claims the folder for a new run.

        Raises:
            InputError: it holds a run already, or cannot be written to.
        """
        self.refuse_existing()
        write_text(self.settings, _json({"settings": settings.identity(), "data": data}))

    def refuse_existing(self) -> None:
        """Refuses to write over another run.

        Raises:
            InputError: one of the files of a run is there, or the path is not a folder.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {self.path} is a file; name a folder.")
        for file in (self.metrics, self.checkpoint, self.state, self.settings):
            if file.exists():
                raise InputError(
                    f"{self.path} already holds a run ({file.name}); add --resume to continue it, or choose another "
                    "--out."
                )

    def read_settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the run here was told: the settings' identity, and the description of the data.

        Raises:
            InputError: no run here, or a damaged file.
        """
        if not self.settings.is_file():
            raise InputError(f"there is no run to resume in {self.path}; leave out --resume to start one.")
        try:
            content = json.loads(self.settings.read_text(encoding="utf-8"))
            return dict(content["settings"]), dict(content["data"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.settings} cannot be read ({error}); start a new run in another --out.") from error

    def check_same(self, settings: Settings) -> None:
        """Refuses to continue a run with other settings.

        Raises:
            InputError: naming the first setting that differs.
        """
        stored = Settings.from_identity(self.read_settings()[0]).identity()  # an earlier release wrote fewer settings
        for name, value in settings.identity().items():
            if stored[name] != value:
                raise InputError(
                    f"the run in {self.path} has {name}={stored[name]!r}, so it cannot be resumed with {value!r}; "
                    "leave the option out, or start a new run in another --out."
                )

    def read_state(self) -> dict[str, Any] | None:
        """The state after the last completed epoch; None if there is none.

        Raises:
            InputError: a damaged or foreign file.
        """
        if not self.state.exists():
            return None
        try:
            state = torch.load(self.state, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged archives raise errors of many kinds
            raise InputError(
                f"{self.state} is damaged ({type(error).__name__}); start again in another --out."
            ) from error
        if not isinstance(state, dict) or state.get("format") != STATE:
            raise InputError(f"{self.state} is not the state of a training run; start again in another --out.")
        return state

    def write_state(self, state: dict[str, Any]) -> None:
        """Keeps the state of a run, and its log; both whole or not at all."""
        buffer = io.BytesIO()
        torch.save({"format": STATE, **state}, buffer)
        write_bytes(self.state, buffer.getvalue())
        write_text(self.log, csv_text(state["history"]))

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """Writes the scores."""
        write_text(self.metrics, _json(metrics))


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def csv_text(rows: list[dict[str, Any]]) -> str:
    """Rows as CSV, with a header of all their names; empty where a row lacks one."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
