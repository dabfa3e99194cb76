"""What several commands read from the command line. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

import click

from sensitivity.errors import InputError

_ELLIPSES = ("...", "…")


def parse_lengths(text: str) -> list[int]:
    """Sequence lengths: ``12,24,48``, or ``8,...,1024`` for doubling from 8 to 1024; sorted, without repeats.

    Raises:
        InputError: nothing given, not an integer, below 1, or an end that doubling does not reach.

    >>> parse_lengths("12,24,48")
    [12, 24, 48]
    >>> parse_lengths("8,...,64")
    [8, 16, 32, 64]
    """
    parts = [part.strip() for part in text.split(",")]
    lengths: list[int] = []
    for index, part in enumerate(parts):
        if part in _ELLIPSES:
            if not 0 < index < len(parts) - 1 or parts[index + 1] in _ELLIPSES:
                raise InputError(f"lengths {text!r}: '...' stands between two lengths, as in 8,...,1024.")
            lengths += _doubled(lengths[-1], _length(parts[index + 1], text))
        else:
            lengths.append(_length(part, text))
    return sorted(set(lengths))


def _length(part: str, text: str) -> int:
    try:
        value = int(part)
    except ValueError:
        what = repr(part) if part else "an empty place"
        raise InputError(f"lengths must be integers, but {text!r} has {what}; write them as 12,24,48.") from None
    if value < 1:
        raise InputError(f"lengths must be at least 1, not {value}.")
    return value


def _doubled(first: int, last: int) -> list[int]:
    """The lengths after ``first``, up to ``last``."""
    if last < first:
        raise InputError(f"doubling from {first} never comes down to {last}; give the shortest length first.")
    lengths, value = [], first
    while value < last:
        value *= 2
        lengths.append(value)
    if value != last:
        raise InputError(
            f"doubling from {first} does not reach {last}; end at {value // 2} or {value}, or write every length."
        )
    return lengths


def parse_assignments(text: str, known: dict[str, Any], what: str) -> dict[str, Any]:
    """Values such as ``dim=72,heads=8``.

    Args:
        text: what the user typed.
        known: names, and the function that reads each value.
        what: what the message calls the option.

    Raises:
        InputError: an unknown name, or a value that cannot be read.

    >>> parse_assignments("dim=72,heads=8", {"dim": int, "heads": int}, "--random")
    {'dim': 72, 'heads': 8}
    """
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in known or not equals:
            raise InputError(f"{what} takes {', '.join(f'{name}=...' for name in known)}; {part!r} is none of them.")
        try:
            values[name] = known[name](value)
        except ValueError:
            kind = {int: "an integer", float: "a number", flag: "true or false"}.get(known[name], "another value")
            raise InputError(f"{what}: {name} must be {kind}, not {value!r}.") from None
    return values


def flag(text: str) -> bool:
    """``true`` or ``false``, for :func:`parse_assignments`."""
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError(text)
    return text.lower() in ("true", "1", "yes")


class Lengths(click.ParamType):
    """``--lengths 12,24,48`` or ``--lengths 8,...,1024``."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The list of lengths."""
        return parse_lengths(value) if isinstance(value, str) else list(value)


LENGTHS = Lengths()


def seed_option(default: int = 0) -> Any:
    """``--seed``."""
    return click.option("--seed", type=click.IntRange(min=0), default=default, show_default=True, help="Random seed.")


def device_option() -> Any:
    """``--device``."""
    kinds = click.Choice(["auto", "cpu", "cuda", "mps"])
    return click.option("--device", type=kinds, default="auto", show_default=True, help="Where to compute.")


def data_options() -> list[Any]:
    """``--key`` and ``--channel``: which of the numbers in a traffic file are meant."""
    return [
        click.option("--key", metavar="NAME", help="Table or array of the traffic file, where it has several."),
        click.option("--channel", type=int, default=0, show_default=True, help="Of an array (time, node, channel)."),
    ]


def named_folder(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuses an empty name, which would be the current folder.

    Raises:
        InputError: nothing but blanks.
    """
    if value is not None and not value.strip():
        raise InputError("--out is empty; name a folder.")
    return value


def out_option(default: str | None = None, required: bool = False) -> Any:
    """``--out``, a folder."""
    shown = default is not None
    return click.option(
        "--out",
        metavar="DIR",
        default=default,
        required=required,
        show_default=shown,
        callback=named_folder,
        help="Folder for the results.",
    )
