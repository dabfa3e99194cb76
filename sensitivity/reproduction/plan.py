"""What is to be trained: variants x seeds, each in a folder of its own, listed in a manifest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sensitivity import __version__, files
from sensitivity.errors import InputError
from sensitivity.models import VARIANTS
from sensitivity.training import Settings
from sensitivity.training.settings import SINK_WEIGHT

PAPER = ("no-residual", "none", "mask", "dropout", "penalty")
"""The five variants, in the paper's order."""

BASE = "none"
"""The variant that the others are compared with."""

SINK = "sink-penalty"
"""The variant that a sink weight belongs to; the others are trained without it."""

_VARIED = ("variant", "seed")


@dataclass(frozen=True)
class Cell:
    """One run of the plan.

    Attributes:
        variant: what is done to the diagonal.
        seed: of the run.
        folder: where it is.
        settings: what it is told.
    """

    variant: str
    seed: int
    folder: Path
    settings: Settings

    @property
    def name(self) -> str:
        """``variant-seed``."""
        return f"{self.variant}-{self.seed}"

    @property
    def begun(self) -> bool:
        """Whether there is something to take up."""
        return (self.folder / "settings.json").is_file()

    @property
    def done(self) -> bool:
        """Whether its scores are there."""
        return (self.folder / "metrics.json").is_file()

    def metrics(self) -> dict[str, Any]:
        """The scores of a finished run.

        Raises:
            InputError: the file is damaged.
        """
        path = self.folder / "metrics.json"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}); remove {self.folder} to run it again.") from error


@dataclass(frozen=True)
class Plan:
    """Variants x seeds of one setting.

    Attributes:
        settings: of all runs; its variant, seed, folder and ``resume`` are set run by run.
        out: the folder of the comparison; runs lie in ``out/runs``.
        variants: names, in the order of the tables.
        seeds: of the runs; the same for every variant, so that differences are paired.

    Raises:
        InputError: no variant or seed, an unknown variant, one that is named twice, or a negative seed.
    """

    settings: Settings
    out: str | Path
    variants: Sequence[str] = PAPER
    seeds: Sequence[int] = (0, 1, 2, 3, 4)

    def __post_init__(self) -> None:
        for what, given in (("variants", self.variants), ("seeds", self.seeds)):
            if not given:
                raise InputError(f"the comparison needs at least one of {what}; none was given.")
            twice = [value for value in dict.fromkeys(given) if list(given).count(value) > 1]
            if twice:
                raise InputError(f"{what} must differ, but {twice[0]!r} is named twice.")
        for name in self.variants:
            if name not in VARIANTS:
                raise InputError(f"unknown variant {name!r}; choose from {', '.join(VARIANTS)}.")
        if self.settings.sink_weight and SINK not in self.variants:
            names = ", ".join(self.variants)
            raise InputError(f"a sink weight belongs to the variant {SINK}, which is not among {names}.")
        for seed in self.seeds:
            dataclasses.replace(self.settings, seed=seed)  # the settings know which seeds are good

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All runs, seed by seed, so that an interrupted comparison has whole pairs."""
        return tuple(self._cell(variant, seed) for seed in self.seeds for variant in self.variants)

    @property
    def folder(self) -> Path:
        """The folder of the comparison."""
        return Path(self.out)

    def identity(self) -> dict[str, Any]:
        """What all runs have in common."""
        return {name: value for name, value in self.settings.identity().items() if name not in _VARIED}

    def claim(self) -> None:
        """Makes the folder this comparison's; variants and seeds may be added to one that is there.

        Raises:
            InputError: the folder holds a comparison of other settings, or cannot be written to.
        """
        files.check_folder(self.folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"--out {self.out} is a file; name a folder.")
        stored = self._stored()
        for name, value in self.identity().items():
            if stored.get(name, value) != value:
                raise InputError(
                    f"{self.out} holds a comparison with {name}={stored[name]!r}, not {value!r}; choose another --out, "
                    "or the same settings to take it up."
                )
        self.write_manifest({})

    def write_manifest(self, failures: Mapping[str, str]) -> None:
        """Writes ``manifest.json``: the common settings, and every run with its state.

        Args:
            failures: why runs failed, by name.
        """
        runs = [_entry(cell, self.folder, failures.get(cell.name)) for cell in self.cells]
        content = {"version": __version__, "settings": self.identity(), "runs": runs}
        files.write_text(self.folder / "manifest.json", json.dumps(content, indent=2) + "\n")

    def _cell(self, variant: str, seed: int) -> Cell:
        folder = self.folder / "runs" / f"{variant}-{seed}"
        # the settings have filled in the weight of a run without the penalty: 0
        weight = (self.settings.sink_weight or SINK_WEIGHT) if variant == SINK else 0.0
        varied: dict[str, Any] = {"variant": variant, "sink_weight": weight, "seed": seed}
        settings = dataclasses.replace(self.settings, **varied, out=str(folder), resume=False)
        return Cell(variant, seed, folder, settings)

    def _stored(self) -> dict[str, Any]:
        path = self.folder / "manifest.json"
        if not path.is_file():
            return {}
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))["settings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} cannot be read ({error}); choose another --out.") from error


def _entry(cell: Cell, root: Path, failure: str | None) -> dict[str, Any]:
    state = "done" if cell.done else "failed" if failure else "begun" if cell.begun else "waiting"
    entry: dict[str, Any] = {"variant": cell.variant, "seed": cell.seed, "folder": str(cell.folder.relative_to(root))}
    entry["state"] = state
    if state == "failed":
        entry["reason"] = failure
    if cell.done:
        metrics = cell.metrics()
        entry |= {name: metrics[name] for name in ("best_epoch", "epochs", "windows_per_second", "parameters")}
    return entry
