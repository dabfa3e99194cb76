"""What accompanies a training: keeping its state, and showing its progress. This module needs Lightning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from torch import Tensor, nn

from sensitivity.training.folder import RunFolder


class Keeper(Checkpoint):
    """After every epoch: judges it by the validation error, and writes the state to continue from.

    Args:
        folder: where the state is written.
        patience: epochs without improvement after which the training stops.
        state: of an earlier part of the run.
        improved: called with the epoch and its validation error when the model is the best so far.
    """

    def __init__(
        self,
        folder: RunFolder,
        patience: int,
        state: dict[str, Any] | None = None,
        improved: Callable[[int, float], None] = lambda epoch, mae: None,
    ) -> None:
        self.folder, self.patience, self.improved = folder, patience, improved
        earlier = state or {}
        self.best: dict[str, Any] = earlier.get("best", {"epoch": 0, "mae": float("inf"), "weights": {}})
        self.history: list[dict[str, float]] = list(earlier.get("history", []))

    @property
    def exhausted(self) -> bool:
        """True if the patience is at an end."""
        return len(self.history) - self.best["epoch"] >= self.patience

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Keeps the epoch; nothing is kept of one that failed."""
        logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "step"}
        epoch, mae = len(self.history) + 1, logged["validation_mae"]
        rate = round(float(pl_module.windows_per_second), 1)
        self.history.append({"epoch": epoch, **logged, "windows_per_second": rate})
        better = mae < self.best["mae"]
        if better:
            self.best = {"epoch": epoch, "mae": mae, "weights": copied(pl_module.model)}
        if trainer.is_global_zero:
            self._write(trainer, pl_module)
            if better:
                self.improved(epoch, mae)
        trainer.should_stop = trainer.should_stop or self.exhausted

    def _write(self, trainer: Trainer, pl_module: Any) -> None:
        self.folder.write_state(
            {
                "epoch": len(self.history),
                "weights": copied(pl_module.model),
                "optimizer": trainer.optimizers[0].state_dict(),
                "best": self.best,
                "history": self.history,
            }
        )


class EpochProgress(Callback):
    """A progress bar over all steps, with the last and the best validation error; redrawn four times a second.

    Args:
        console: a rich console on a terminal.
        title: what is going on.
        keeper: knows the epochs so far.
        epochs: of the whole run.
        steps: in an epoch.
    """

    def __init__(self, console: Any, title: str, keeper: Keeper, epochs: int, steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.keeper, self.epochs, self.steps = keeper, epochs, steps
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn())
        self._bar = Progress(
            *columns, TextColumn("{task.fields[note]}"), console=console, transient=True, refresh_per_second=4
        )
        self._console, self._title = console, title
        self._task = self._bar.add_task("epoch", total=epochs * steps, note="")

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Says what begins."""
        self._console.print(self._title, highlight=False)
        self._bar.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """One step further."""
        done = trainer.current_epoch * self.steps + trainer.fit_loop.batch_idx + 1
        self._bar.update(self._task, completed=done, description=f"epoch {trainer.current_epoch + 1}/{self.epochs}")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Shows the errors so far."""
        if self.keeper.history:
            last, best = self.keeper.history[-1], self.keeper.best
            note = f"validation MAE {last['validation_mae']:.3f}, best {best['mae']:.3f} (epoch {best['epoch']})"
            self._bar.update(self._task, note=note)

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Clears the bar, also after an error."""
        self._bar.stop()


def copied(model: nn.Module) -> dict[str, Tensor]:
    """The weights on the CPU, as a copy."""
    return {name: copy.deepcopy(value.detach().cpu()) for name, value in model.state_dict().items()}


def progress_bar(title: str, keeper: Keeper, epochs: int, steps: int, wanted: bool | None) -> list[Callback]:
    """The progress bar on standard error: if ``wanted``, or, by default, on a terminal; else nothing."""
    from rich.console import Console

    console = Console(stderr=True)
    shown = console.is_terminal if wanted is None else wanted
    return [EpochProgress(console, title, keeper, epochs, steps)] if shown else []
