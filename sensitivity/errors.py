"""The errors that the toolkit raises: one clear sentence, the offending value, the way out."""

from __future__ import annotations


class SensitivityError(Exception):
    """Base of every error that the toolkit raises on purpose."""


class InputError(SensitivityError, ValueError):
    """What was handed in cannot be used; the message names the value and the way out (command line: exit 2)."""


class RunError(SensitivityError, RuntimeError):
    """A run that started in good order failed (command line: exit 1)."""


class SensitivityWarning(UserWarning):
    """Something the reader of a result should know, although the result is right."""
