"""The comparison of arXiv 2602.10956: variants of one model over several seeds, with the differences between them.

>>> from sensitivity.reproduction import Plan
>>> from sensitivity.training import Settings
>>> plan = Plan(Settings(epochs=6), "runs/comparison", variants=("none", "dropout"), seeds=(0, 1))
>>> [cell.name for cell in plan.cells]
['none-0', 'dropout-0', 'none-1', 'dropout-1']
"""

from sensitivity.reproduction.compare import Comparison, reproduce
from sensitivity.reproduction.plan import PAPER, Cell, Plan
from sensitivity.reproduction.sensitivities import Probe

__all__ = ["PAPER", "Cell", "Comparison", "Plan", "Probe", "reproduce"]
