"""The learning rate over a run: linear warm-up and a half cosine, or a step down at two epochs."""

from __future__ import annotations

import math

FLOOR = 1e-6
START = 0.1
WARM_UP = 5.0
SHARE = 0.1
MILESTONES, DROP = (20, 30), 0.1


def warm_up(epochs: int) -> float:
    """Epochs of warm-up: five, as published for 150 epochs, but never more than a tenth of the run.

    >>> warm_up(150), warm_up(10)
    (5.0, 1.0)
    """
    return min(WARM_UP, SHARE * epochs)


def learning_rate(done: float | int, epochs: int, peak: float, floor: float = FLOOR) -> float:
    r"""The learning rate after ``done`` epochs (with fractions, step by step).

    .. math::

        \eta(t) = \begin{cases} \eta_0 (0.1 + 0.9\, t / w) & t < w \\
        f + (\eta_0 - f) \frac{1 + \cos(\pi (t - w) / (E - w))}{2} & t \ge w \end{cases}

    with the peak :math:`\eta_0`, the floor :math:`f`, :math:`E` epochs and :math:`w` of warm-up. Source: the recipe
    of arXiv 2602.10956, which takes whole epochs as steps.

    Args:
        done: epochs done, from 0 to ``epochs``.
        epochs: of the whole run.
        peak: highest rate.
        floor: last rate (the peak, where that is lower).

    >>> [round(learning_rate(t, 10, 1e-3), 6) for t in (0, 1, 5.5, 10)]
    [0.0001, 0.001, 0.000501, 1e-06]
    """
    warm, floor = warm_up(epochs), min(floor, peak)
    if done < warm:
        return peak * (START + (1 - START) * done / warm)
    share = min(1.0, (done - warm) / (epochs - warm))
    return floor + (peak - floor) * (1 + math.cos(math.pi * share)) / 2


def stepped_rate(done: float | int, peak: float) -> float:
    """The learning rate of the recipe of STAEformer on METR-LA: a tenth after 20 epochs, a hundredth after 30.

    Args:
        done: epochs done.
        peak: the first rate.

    >>> [round(stepped_rate(t, 1e-3), 6) for t in (0, 19.9, 20, 30)]
    [0.001, 0.001, 0.0001, 1e-05]
    """
    return peak * DROP ** sum(done >= milestone for milestone in MILESTONES)


def rate_of(recipe: str, done: float | int, epochs: int, peak: float) -> float:
    """The learning rate of a recipe after ``done`` of ``epochs`` epochs."""
    return stepped_rate(done, peak) if recipe == "steps" else learning_rate(done, epochs, peak)
