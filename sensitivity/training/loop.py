"""Lightning's loop as this toolkit wants it: silent, interruptible, and started at any epoch.

Lightning is imported inside the functions, so that importing this module costs nothing.
"""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sensitivity.errors import InputError, SensitivityWarning
from sensitivity.traffic import Split
from sensitivity.training.data import WindowLoader
from sensitivity.training.evaluate import BATCH
from sensitivity.training.ranks import check_devices, processes_end, rank
from sensitivity.training.settings import Settings

_INSTALL = "run pip install 'attention-sensitivity[train]'"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a training; the message says how to go on."""


def require_lightning() -> None:
    """Imports Lightning.

    Raises:
        InputError: it is not installed.
    """
    try:
        with quiet():
            import lightning.pytorch  # noqa: F401
    except ImportError as error:
        raise InputError(f"training needs the package lightning, which is not installed; {_INSTALL}.") from error


def choose_device(name: str) -> torch.device:
    """The device of a run; ``auto`` takes an accelerator if torch finds one.

    Raises:
        InputError: a device that is not there.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, present in there.items() if present and kind != "mps"))
    if not there[name]:
        raise InputError(f"device {name!r} was asked for, but torch finds none here; use 'cpu' or 'auto'.")
    return torch.device(name)


def run_epochs(settings: Settings, module: Any, parts: Split, callbacks: Sequence[Any], done: int) -> None:
    """Trains ``module`` from epoch ``done`` to the last one.

    Raises:
        Interrupted: Ctrl-C, or a request to terminate.
    """
    from lightning.pytorch import Trainer

    device = choose_device(settings.device)
    check_devices(device, settings.devices)
    with quiet(), _sigint_stays(), processes_end():
        trainer = Trainer(
            accelerator=device.type,
            devices=settings.devices,
            strategy="ddp" if settings.devices > 1 else "auto",
            use_distributed_sampler=False,
            max_epochs=settings.epochs,
            gradient_clip_val=settings.clip,
            callbacks=list(callbacks),
            logger=_tensorboard(settings),
            default_root_dir=settings.out,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        epochs: Any = trainer.fit_loop.epoch_progress.current
        epochs.processed = epochs.completed = done
        there = parts.to(trainer.strategy.root_device)
        share = rank(settings.devices), settings.devices
        train = WindowLoader(there.train, settings.batch_size, settings.seed, lambda: trainer.current_epoch, share)
        size = settings.batch_size if settings.as_published else BATCH
        try:
            trainer.fit(module, train, WindowLoader(there.validation, size, share=share))
        except SystemExit:  # how Lightning leaves on Ctrl-C and on a request to terminate
            if not trainer.interrupted:
                raise
        if trainer.interrupted:
            raise Interrupted(
                f"interrupted; the completed epochs are kept: sensitivity train --resume --out {settings.out} goes on."
            )


def _tensorboard(settings: Settings) -> Any:
    """The TensorBoard logger, or False.

    Raises:
        InputError: TensorBoard is not installed.
    """
    if not settings.tensorboard:
        return False
    from lightning.pytorch.loggers import TensorBoardLogger

    try:
        return TensorBoardLogger(settings.out, name="tensorboard", version="")
    except ModuleNotFoundError as error:
        raise InputError(f"the package tensorboard is not installed; {_INSTALL}, or leave it out.") from error


@contextmanager
def _sigint_stays() -> Iterator[None]:
    """Lightning leaves Ctrl-C ignored after it was pressed; here the handler is put back."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


@contextmanager
def quiet() -> Iterator[None]:
    """No banners, tips and warnings of Lightning; the toolkit's own warnings stay."""
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("default", SensitivityWarning, append=True)
            warnings.simplefilter("ignore", append=True)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
