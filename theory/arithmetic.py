"""Small exact linear algebra on lists, over any numbers: rationals, rational functions, duals, floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Number = Any
Rows = list[list[Number]]


class Dual:
    """A number together with its derivatives along named directions: exact forward-mode differentiation."""

    __slots__ = ("slopes", "value")

    def __init__(self, value: Number, slopes: dict[Any, Number] | None = None) -> None:
        self.value = value
        self.slopes = slopes or {}

    def _combine(self, other: Any, value: Number, mine: Number, theirs: Number) -> Dual:
        slopes = {name: slope * mine for name, slope in self.slopes.items()}
        if isinstance(other, Dual):
            for name, slope in other.slopes.items():
                slopes[name] = slopes[name] + slope * theirs if name in slopes else slope * theirs
        return Dual(value, slopes)

    def __add__(self, other: Any) -> Dual:
        return self._combine(other, self.value + plain(other), 1, 1)

    def __mul__(self, other: Any) -> Dual:
        return self._combine(other, self.value * plain(other), plain(other), self.value)

    def __sub__(self, other: Any) -> Dual:
        return self._combine(other, self.value - plain(other), 1, -1)

    def __truediv__(self, other: Any) -> Dual:
        if isinstance(other, Dual):
            return self._combine(other, self.value / other.value, 1 / other.value, -self.value / other.value**2)
        return Dual(self.value / other, {name: slope / other for name, slope in self.slopes.items()})

    def __neg__(self) -> Dual:
        return self * -1

    def __rsub__(self, other: Any) -> Dual:
        return -self + other

    def __rtruediv__(self, other: Any) -> Dual:
        return Dual(other) / self

    def __pow__(self, power: int) -> Dual:
        return Dual(
            self.value**power, {n: power * self.value ** (power - 1) * slope for n, slope in self.slopes.items()}
        )

    __radd__ = __add__
    __rmul__ = __mul__


def plain(number: Number) -> Number:
    """The number without its derivatives."""
    return number.value if isinstance(number, Dual) else number


def product(left: Rows, right: Rows) -> Rows:
    """Matrix product."""
    columns = list(zip(*right, strict=True))
    if len(left[0]) != len(right):
        raise ValueError(f"cannot multiply {len(left)}x{len(left[0])} by {len(right)}x{len(right[0])}")
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in columns] for row in left]


def scaled(number: Number, matrix: Rows) -> Rows:
    """A number times a matrix."""
    return [[number * value for value in row] for row in matrix]


def plus(left: Rows, right: Rows) -> Rows:
    """Matrix sum."""
    if (len(left), len(left[0])) != (len(right), len(right[0])):
        raise ValueError(f"cannot add {len(left)}x{len(left[0])} and {len(right)}x{len(right[0])}")
    return [[x + y for x, y in zip(one, two, strict=True)] for one, two in zip(left, right, strict=True)]


def transposed(matrix: Rows) -> Rows:
    """Matrix transpose."""
    return [list(column) for column in zip(*matrix, strict=True)]


def column(values: list[Number]) -> Rows:
    """A list as a column vector."""
    return [[value] for value in values]


def each(function: Callable[[Number], Number], matrix: Rows) -> Rows:
    """A function of every entry."""
    return [[function(value) for value in row] for row in matrix]


def spectral_norm(matrix: Rows, sweeps: int = 60) -> float:
    """The largest singular value of a small real matrix by one-sided Jacobi rotations."""
    scale = max(abs(float(value)) for row in matrix for value in row)
    if scale == 0.0:
        return 0.0
    columns = [[float(value) / scale for value in line] for line in transposed(matrix)]
    for _ in range(sweeps):
        largest = 0.0
        for one in range(len(columns)):
            for two in range(one + 1, len(columns)):
                largest = max(largest, _rotate(columns, one, two))
        if largest < 1e-15:
            break
    return scale * max(math.sqrt(sum(value * value for value in line)) for line in columns)


def _rotate(columns: list[list[float]], one: int, two: int) -> float:
    """Makes two columns orthogonal; returns the cosine they had."""
    first, second = columns[one], columns[two]
    alpha, gamma = sum(x * x for x in first), sum(x * x for x in second)
    inner = sum(x * y for x, y in zip(first, second, strict=True))
    if inner == 0.0 or alpha * gamma == 0.0:
        return 0.0
    zeta = (gamma - alpha) / (2 * inner)
    tangent = math.copysign(1.0, zeta) / (abs(zeta) + math.sqrt(1 + zeta * zeta)) if abs(zeta) < 1e150 else 0.5 / zeta
    cosine = 1 / math.sqrt(1 + tangent * tangent)
    sine = cosine * tangent
    columns[one] = [cosine * x - sine * y for x, y in zip(first, second, strict=True)]
    columns[two] = [sine * x + cosine * y for x, y in zip(first, second, strict=True)]
    return abs(inner) / math.sqrt(alpha * gamma)
