"""LaTeX of the expressions that derivations are written in."""

# ruff: noqa: N802, N815 - the names that SymPy's printer looks for

from __future__ import annotations

import re
from typing import Any

import sympy
from sympy import Basic, S
from sympy.printing.latex import LatexPrinter

from theory.expressions import HEADS, ScalarSum, is_matrix
from theory.symbols import NAMES

#: Order of numeric factors in a product; what is not listed comes last.
_RANK = ("c", "delta", "T", "D", "p", "m", "sigma", "a", "b", "s")


class Printer(LatexPrinter):
    """Prints blocks, sums and derivatives the way the field writes them, keeping the order of factors."""

    def _print_Block(self, node: Any, transposed: bool = False) -> str:
        base, *rest = re.split(r"\^\{(.*)\}$", NAMES[node.name][0])
        base, _, letter = base.partition("_") if base.startswith(("W_", "b_")) else (base, "", "")
        upper = [*(part for part in rest if part), *(self._print(index) for index in node.indices if index in HEADS)]
        lower = [self._print(index) for index in node.indices if index not in HEADS]
        if r"\setminus" in upper:
            upper[upper.index(r"\setminus")] += f" {lower[0]}" + ("," if len(upper) > 1 else "")
        if transposed:
            upper.append(r"\top")
        down = letter + "".join(lower)
        return base + (f"_{{{down}}}" if down else "") + (f"^{{{' '.join(upper)}}}" if upper else "")

    _print_Entry = _print_Block

    def _print_Transpose(self, node: Any) -> str:
        if hasattr(node.arg, "indices"):
            return self._print_Block(node.arg, transposed=True)
        return self._wrapped(node.arg) + r"^{\top}"

    def _wrapped(self, node: Basic) -> str:
        inside = self._print(node)
        size = "Big" if r"\frac" in inside or r"\sum" in inside else "big"
        return rf"\{size}l({inside}\{size}r)"

    def _print_Pow(self, node: Any) -> str:
        if isinstance(node.base, ScalarSum) and node.exp.is_Integer and node.exp > 0:
            return rf"{self._wrapped(node.base)}^{{{node.exp}}}"
        return super()._print_Pow(node)

    def _factor(self, node: Any) -> str:
        """One factor of a product: sums get parentheses."""
        loose = node.is_Add or node.is_MatAdd or node.func.__name__ in ("ScalarSum", "MatrixSum")
        return self._wrapped(node) if loose else self._print(node)

    def _print_Mul(self, node: Any) -> str:
        top, bottom = sympy.fraction(node, exact=True)
        if bottom is not S.One:
            if not top.is_Add and top.could_extract_minus_sign():
                return rf"-\frac{{{self._print(-top)}}}{{{self._print(bottom)}}}"
            return rf"\frac{{{self._print(top)}}}{{{self._print(bottom)}}}"
        factors = sorted(sympy.Mul.make_args(node), key=self._rank)
        sign = "-" if factors[0] is S.NegativeOne and len(factors) > 1 else ""
        return sign + r"\,".join(self._factor(factor) for factor in (factors[1:] if sign else factors))

    def _rank(self, node: Any) -> tuple[int, int, str]:
        if node.is_number:
            return (-1, 0, "")
        name = "delta" if isinstance(node, sympy.KroneckerDelta) else getattr(node, "name", "")
        compound = int(not node.is_Symbol and not hasattr(node, "indices"))
        return (compound, _RANK.index(name) if name in _RANK else len(_RANK), str(node))

    def _print_MatMul(self, node: Any) -> str:
        factors = list(node.args)
        sign = ""
        while factors and factors[0] is S.NegativeOne:
            sign, factors = ("" if sign else "-"), factors[1:]
        numbers = [factor for factor in factors if not is_matrix(factor)]
        parts = [self._factor(number) for number in numbers]
        parts += [self._factor(factor) for factor in factors if is_matrix(factor)]
        return sign + r"\,".join(parts)

    def _terms(self, terms: list[Any]) -> list[str]:
        printed = [self._print(term) for term in terms]
        return [part if index == 0 or part.startswith("-") else f"+ {part}" for index, part in enumerate(printed)]

    def _print_MatAdd(self, node: Any) -> str:
        return " ".join(self._terms(list(node.args)))

    def _print_Add(self, node: Any, order: Any = None) -> str:
        def place(term: Any) -> tuple[bool, tuple[Any, ...]]:
            last = (99, "") if term.is_number else (-1, "") if isinstance(term, sympy.exp) else self._rank(term)[1:]
            return (bool(term.could_extract_minus_sign()), last)

        terms = sorted(node.args, key=place)
        ones = [term for term in terms if term is S.One]
        return " ".join(self._terms(ones + [term for term in terms if term is not S.One]))

    def _print_KroneckerDelta(self, node: Any, exp: Any = None) -> str:
        left, right = (self._print(index) for index in sorted(node.args, key=_index_order))
        return rf"\delta_{{{left}{right}}}"

    def _print_Identity(self, node: Any) -> str:
        return "I"

    def _print_ZeroMatrix(self, node: Any) -> str:
        return "0"

    def _print_exp(self, node: Any, exp: Any = None) -> str:
        return rf"e^{{{self._print(node.args[0])}}}"

    _print_ExpBase = _print_exp

    def _print_ScalarSum(self, node: Any) -> str:
        body, index, *skip = node.args
        below = self._print(index) + (rf"\ne {self._print(skip[0])}" if skip else "")
        loose = body.is_Add or body.is_MatAdd
        return rf"\sum_{{{below}}} {self._wrapped(body) if loose else self._print(body)}"

    _print_MatrixSum = _print_ScalarSum

    def _print_Partial(self, node: Any) -> str:
        function, variable = node.args
        below = rf"\partial {self._print(variable)}"
        if hasattr(function, "indices"):
            return rf"\frac{{\partial {self._print(function)}}}{{{below}}}"
        if function.is_Pow:
            return rf"\frac{{\partial\, {self._print(function)}}}{{{below}}}"
        return rf"\frac{{\partial}}{{{below}}}{self._wrapped(function)}"

    def _print_Slope(self, node: Any, exp: Any = None) -> str:
        return self._print_Partial(node)

    _print_MatrixSlope = _print_Slope

    def _print_Norm(self, node: Any, exp: Any = None) -> str:
        printed = rf"\lVert {self._print(node.args[0])} \rVert"
        return f"{printed}^{{{exp}}}" if exp else printed

    def _print_Inner(self, node: Any) -> str:
        return rf"\langle {self._print(node.args[0])},\, {self._print(node.args[1])} \rangle"

    def _print_Expectation(self, node: Any) -> str:
        return rf"\mathbb E\bigl[{self._print(node.args[0])}\bigr]"


def _index_order(index: Any) -> tuple[int, str]:
    """The summation index comes first: delta_lj, delta_mj, but delta_ij and delta_jk."""
    return (0 if str(index) in "lmn" else 1, str(index))


def latex(node: Basic) -> str:
    """The expression as LaTeX."""
    return Printer({"mul_symbol": None}).doprint(node)


def visible(formula: str) -> int:
    """About how many characters wide the formula is on the page."""
    bare = re.sub(r"\\(?:frac|bigl|bigr|Bigl|Bigr|bar|hat|mathrm|mathbb|,)", "", formula)
    return len(re.sub(r"[{}_^ ]", "", re.sub(r"\\[a-zA-Z]+", "x", bare)))


def broken(formula: str, width: int) -> list[str]:
    """A long formula as lines: broken before plus and minus signs, inside parentheses only where it must be."""
    pieces = _pieces(formula, width, 0)
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if visible(lines[-1]) + visible(piece) > width:
            lines.append(piece.strip())
        else:
            lines[-1] += piece
    return lines


def _pieces(formula: str, width: int, level: int) -> list[str]:
    """The formula cut before the signs that stand outside braces and inside at most ``level`` parentheses."""
    if visible(formula) <= width or level > 3:
        return [formula]
    pieces, braces, parentheses, start = [], 0, 0, 0
    for place, letter in enumerate(formula):
        braces += (letter == "{") - (letter == "}")
        parentheses += (letter == "(") - (letter == ")")
        sign = formula.startswith((" + ", " -"), place)
        if sign and place and braces == 0 and parentheses <= level:
            pieces.append(formula[start:place])
            start = place
    pieces.append(formula[start:])
    return [part for piece in pieces for part in _pieces(piece, width, level + 1)]
