r"""The derivations of the Jacobian of temporal attention, its bounds, and its law, as code that checks itself.

>>> import theory
>>> value = theory.find("value")
>>> value.check()
>>> print(value.steps[-1].latex())
\sum_{l} a_{il}\,\delta_{lj}\,W_{O}\,W_{V} = a_{ij}\,W_{O}\,W_{V}

Importing the package is cheap; SymPy is loaded by the first call.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theory.derivation import Derivation

#: Title of a section -> the module with its derivations, in reading order.
SECTIONS = {
    "The softmax": "theory.softmax",
    "One attention layer": "theory.attention",
    "Regularised diagonals": "theory.regularised",
    "Other variants": "theory.variants",
    "Inequalities": "theory.inequalities",
    "The law of large T": "theory.meanfield",
}

__all__ = ["BOUNDS", "SECTIONS", "derivations", "find"]


def derivations() -> tuple[Derivation, ...]:
    """Every derivation, in reading order; each has ``check()``, ``latex()`` and ``markdown()``."""
    return tuple(found for module in SECTIONS.values() for found in importlib.import_module(module).derivations())


def find(name: str) -> Derivation:
    """The derivation called ``name``.

    Raises:
        KeyError: there is none; the message lists those that there are.
    """
    known = {found.name: found for found in derivations()}
    if name not in known:
        raise KeyError(f"no derivation is called {name!r}; there are {', '.join(known)}")
    return known[name]


def __getattr__(name: str) -> Any:
    """``BOUNDS``: the bounds by name, loaded when asked for."""
    if name == "BOUNDS":
        return importlib.import_module("theory.bounds").BOUNDS
    raise AttributeError(f"module 'theory' has no attribute {name!r}")
