"""The bounds of ``theory`` and the law, evaluated on real layers and checked against what is measured."""

from sensitivity.bounds.assumptions import Assumption
from sensitivity.bounds.checking import NAMES, check
from sensitivity.bounds.curve import Law
from sensitivity.bounds.prediction import law
from sensitivity.bounds.verdict import BoundCheck

__all__ = ["NAMES", "Assumption", "BoundCheck", "Law", "check", "law"]
