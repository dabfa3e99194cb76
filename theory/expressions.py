"""The expressions that derivations are written in: SymPy matrix expressions with time and head indices.

A formula such as ``c a_ij W_O (v_j - vbar_i) (W_K^T q_i)^T`` is a SymPy tree whose leaves carry *index symbols*: it is
read for abstract ``T``, ``D`` and ``H``, and gets a value once an :class:`theory.instance.Instance` says what the
leaves are and an environment says what the indices are.
"""

from __future__ import annotations

from typing import Any

from sympy import (
    Add,
    Expr,
    Identity,
    KroneckerDelta,
    MatAdd,
    MatMul,
    Mul,
    S,
    Symbol,
    Transpose,
    ZeroMatrix,
    sympify,
)
from sympy.core.basic import Basic
from sympy.core.symbol import Str
from sympy.matrices.expressions.matexpr import MatrixExpr

HEADS = (Symbol("h", integer=True, positive=True), Symbol("g", integer=True, positive=True))
TIMES = tuple(Symbol(name, integer=True, positive=True) for name in "ijklmn")
INDICES = HEADS + TIMES


class Block(MatrixExpr):
    """A named vector or matrix with indices: ``W_K`` of head h, ``x_i``. Arguments: name, rows, columns, indices."""

    def __new__(cls, name: str | Str, rows: Any, columns: Any, *indices: Any) -> Block:
        """Builds the leaf; the name is kept as a SymPy string so that SymPy can rebuild the tree."""
        return super().__new__(cls, Str(str(name)), sympify(rows), sympify(columns), *map(sympify, indices))

    @property
    def name(self) -> str:
        """The name without its indices."""
        return str(self.args[0])

    @property
    def shape(self) -> tuple[Any, Any]:
        """Rows and columns."""
        return self.args[1], self.args[2]

    @property
    def indices(self) -> tuple[Any, ...]:
        """Head index first (where given), then time indices."""
        return tuple(self.args[3:])

    def _entry(self, i: Any, j: Any, **_: Any) -> Expr:
        raise NotImplementedError("blocks get entries from an Instance")

    def _sympystr(self, printer: Any) -> str:
        return self.name + (f"[{', '.join(map(printer._print, self.indices))}]" if self.indices else "")


class Entry(Expr):
    """A named real number with indices: the weight ``a_ij``, the score ``s_ij``. Arguments: name, indices."""

    is_commutative = True
    is_real = True
    _NONNEGATIVE = ("a", "b", "m", "sigma", "w_max")

    def __new__(cls, name: str | Str, *indices: Any) -> Entry:
        """Builds the leaf; the name is kept as a SymPy string so that SymPy can rebuild the tree."""
        return super().__new__(cls, Str(str(name)), *map(sympify, indices))

    @property
    def name(self) -> str:
        """The name without its indices."""
        return str(self.args[0])

    @property
    def indices(self) -> tuple[Any, ...]:
        """Head index first (where given), then time indices."""
        return tuple(self.args[1:])

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.name in self._NONNEGATIVE else None

    def _sympystr(self, printer: Any) -> str:
        return self.name + (f"[{', '.join(map(printer._print, self.indices))}]" if self.indices else "")


class Inner(Expr):
    """The inner product of two vectors."""

    is_commutative = True
    is_real = True


class Norm(Expr):
    """The spectral norm of a matrix, which is the Euclidean norm of a vector."""

    is_commutative = True
    is_real = True

    def _eval_is_nonnegative(self) -> bool:
        return True


class Expectation(Expr):
    """The expectation over exchangeable tokens."""

    is_commutative = True
    is_real = True

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.args[0].is_nonnegative else None


class ScalarSum(Expr):
    """Sum of numbers over one index. Arguments: body, index and, optionally, the value that the index skips."""

    is_commutative = True
    is_real = True

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.args[0].is_nonnegative else None

    def _eval_is_positive(self) -> bool | None:
        return True if self.args[0].is_positive and len(self.args) == 2 else None


class MatrixSum(MatrixExpr):
    """Sum of blocks over one index. Arguments: body, index and, optionally, the value that the index skips."""

    @property
    def shape(self) -> tuple[Any, Any]:
        """Rows and columns of one term."""
        return self.args[0].shape

    def _entry(self, i: Any, j: Any, **_: Any) -> Expr:
        raise NotImplementedError("sums get entries from an Instance")


class Partial(MatrixExpr):
    """The derivative of a vector or a number along a vector, one row per output. Arguments: function, variable."""

    @property
    def shape(self) -> tuple[Any, Any]:
        """Outputs and inputs."""
        function, variable = self.args
        return (function.shape[0] if is_matrix(function) else S.One), variable.shape[0]

    def _entry(self, i: Any, j: Any, **_: Any) -> Expr:
        raise NotImplementedError("derivatives get entries from an Instance")


class Slope(Expr):
    """The derivative of a number along a number. Arguments: function, variable."""

    is_commutative = True
    is_real = True


class MatrixSlope(MatrixExpr):
    """The derivative of a block along a number, entry by entry. Arguments: function, variable."""

    @property
    def shape(self) -> tuple[Any, Any]:
        """Rows and columns of the function."""
        return self.args[0].shape

    def _entry(self, i: Any, j: Any, **_: Any) -> Expr:
        raise NotImplementedError("derivatives get entries from an Instance")


def is_matrix(expression: Basic) -> bool:
    """Whether the expression is a vector or matrix rather than a number."""
    return isinstance(expression, MatrixExpr)


def mul(*factors: Any) -> Any:
    """The product in the order given: numbers first, then blocks; nested products are flattened."""
    flat: list[Any] = []
    for factor in map(sympify, factors):
        flat.extend(factor.args if isinstance(factor, MatMul) else [factor])
    if not any(is_matrix(factor) for factor in flat):
        return Mul(*flat)
    if any(factor is S.Zero for factor in flat):
        return ZeroMatrix(*MatMul(*(factor for factor in flat if is_matrix(factor))).shape)
    kept = [factor for factor in flat if factor is not S.One]
    matrices = [factor for factor in kept if is_matrix(factor)]
    if len(matrices) > 1:
        kept = [factor for factor in kept if not isinstance(factor, Identity)] or [matrices[0]]
    return kept[0] if len(kept) == 1 else MatMul(*kept)


def add(*terms: Any) -> Any:
    """The sum in the order given; nested sums are flattened and zeros dropped."""
    flat: list[Any] = []
    for term in map(sympify, terms):
        flat.extend(term.args if isinstance(term, MatAdd) else [term])
    if not any(is_matrix(term) for term in flat):
        return Add(*flat)
    kept = [term for term in flat if not isinstance(term, ZeroMatrix)]
    if not kept:
        return flat[0]
    return kept[0] if len(kept) == 1 else MatAdd(*kept)


def sub(left: Any, right: Any) -> Any:
    """The difference ``left - right``."""
    return add(left, mul(-1, right)) if is_matrix(left) else left - right


def transpose(matrix: Any) -> Any:
    """The transpose, not pushed inside products: derivations do that as a step."""
    return matrix.arg if isinstance(matrix, Transpose) else Transpose(matrix)


def total(body: Any, index: Symbol, skip: Any = None) -> Any:
    """The sum of ``body`` over ``index`` from 1 to T (from 1 to H for a head), leaving out the value ``skip``."""
    arguments = (body, index) if skip is None else (body, index, skip)
    return MatrixSum(*arguments) if is_matrix(body) else ScalarSum(*arguments)


def norm(matrix: Any) -> Any:
    """The spectral norm, with nonnegative numbers drawn out of it: ``|a M| = a |M|``."""
    if isinstance(matrix, Identity):
        return S.One
    if not isinstance(matrix, MatMul):
        return Norm(matrix)
    numbers = [factor for factor in matrix.args if not is_matrix(factor)]
    blocks = [factor for factor in matrix.args if is_matrix(factor)]
    drawn = [abs(factor) if factor.is_number else factor for factor in numbers]
    if not all(factor.is_nonnegative for factor in drawn):
        return Norm(matrix)
    return Mul(*drawn, norm(mul(*blocks)) if len(blocks) == 1 else Norm(mul(*blocks)))


def delta(left: Any, right: Any) -> KroneckerDelta:
    """The Kronecker delta of two indices."""
    return KroneckerDelta(left, right)


def free_indices(*expressions: Basic) -> list[Symbol]:
    """The index symbols that an expression leaves open, in a fixed order."""
    found: set[Symbol] = set()
    for expression in expressions:
        found |= _open(expression)
    return [index for index in INDICES if index in found]


def _open(expression: Basic) -> set[Symbol]:
    if expression in INDICES:
        return {expression}
    inside: set[Symbol] = set().union(*map(_open, expression.args)) if expression.args else set()
    if isinstance(expression, ScalarSum | MatrixSum):
        inside = _open(expression.args[0]) - {expression.args[1]}
        inside = inside.union(*map(_open, expression.args[2:]))
    return inside
