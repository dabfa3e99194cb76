"""Pages of derivations: complete, well-formed, readable; and the command that prints them."""

from __future__ import annotations

import re

import click
import pytest
import sympy
from click.testing import CliRunner

import theory
from sensitivity.cli.theory import command
from sensitivity.errors import InputError, RunError
from theory import attention, render, rules
from theory.derivation import Step
from theory.expressions import Expectation, Inner, Partial, add, delta, mul, norm, sub, total, transpose
from theory.printer import broken, latex, visible
from theory.symbols import W_K, W_O, W_V, T, a, beta, c, cov_rest, h, i, j, l, out, q, s, v, vbar, vrest, x

PAGE = render.markdown()
DOCUMENT = render.latex()


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (x(i), "x_{i}"),
        (vbar(i, h), r"\bar v_{i}^{h}"),
        (W_K(h), "W_{K}^{h}"),
        (transpose(W_K(h)), r"W_{K}^{h \top}"),
        (transpose(mul(W_O(), W_V())), r"\bigl(W_{O}\,W_{V}\bigr)^{\top}"),
        (vrest(i), r"\bar v_{i}^{\setminus i}"),
        (cov_rest(i, h), r"\mathrm{Cov}_{i}^{\setminus i, h}"),
        (a(1, 2), "a_{12}"),
        (c * a(i, j) * delta(i, j), r"c\,\delta_{ij}\,a_{ij}"),
        (mul(-1, c, W_O(), v(j)), r"-c\,W_{O}\,v_{j}"),
        (sub(v(j), vbar(i)), r"v_{j} -\bar v_{i}"),
        (1 - a(i, i), "1 -a_{ii}"),
        (delta(l, j), r"\delta_{lj}"),
        (total(a(i, l), l, i), r"\sum_{l\ne i} a_{il}"),
        (total(sympy.exp(s(i, l)), l) ** 2, r"\Bigl(\sum_{l} e^{s_{il}}\Bigr)^{2}"),
        (sympy.exp(beta) / (sympy.exp(beta) + T - 1), r"\frac{e^{\beta}}{e^{\beta} + T -1}"),
        (Partial(out(i), x(j)), r"\frac{\partial h_{i}}{\partial x_{j}}"),
        (norm(x(i)) ** 2, r"\lVert x_{i} \rVert^{2}"),
        (Inner(q(i), v(j)), r"\langle q_{i},\, v_{j} \rangle"),
        (Expectation(a(i, j)), r"\mathbb E\bigl[a_{ij}\bigr]"),
    ],
)
def test_latex_of_expressions(expression, expected):
    assert latex(expression) == expected


def test_step():
    step = Step(total(a(i, l), l), "<=", T, rules.NONNEGATIVE)
    assert step.latex() == r"\sum_{l} a_{il} \le T"
    assert step.markdown() == r"$`\sum_{l} a_{il} \le T`$ (dropping)"


def test_page_holds_every_derivation_rule_and_assumption():
    for found in theory.derivations():
        assert f"### {found.title}\n" in PAGE
        assert found.prose in PAGE
        assert found.latex() in DOCUMENT
        for step in found.steps:
            assert f"**{step.rule.name}**: {step.rule.statement}" in found.markdown()
        for assumption in found.assumptions:
            assert assumption in found.markdown()


def test_page_states_what_a_mask_keeps():
    page = render.markdown(["mask"])
    assert "The query path does **not**" in page
    assert "contradicts the paper" in page
    assert page.startswith("### A hard diagonal mask keeps the query path")


def _formulas(text: str) -> list[str]:
    return re.findall(r"\$\$(.+?)\$\$", text, flags=re.DOTALL)


def test_formulas_are_well_formed():
    """Braces, brackets and environments close; nothing of the inner names shows."""
    formulas = _formulas(PAGE)
    assert len(formulas) > 60
    for formula in formulas:
        assert formula.count("{") == formula.count("}")
        assert formula.count("(") == formula.count(")")
        assert formula.count(r"\begin{aligned}") == formula.count(r"\end{aligned}") <= 1
        assert formula.count("bigl(") == formula.count("bigr)")
        assert formula.count("Bigl(") == formula.count("Bigr)")
        assert not re.search(r"Block|Entry|MatrixSum|ScalarSum|Norm|Partial|Slope|Transpose|\\operatorname", formula)
        assert not re.search(r"\^\{[^{}]*\}\^", formula), "double superscript"
        for line in formula.split(r"\\"):
            assert line.count("&") <= 3


def test_lines_are_short_enough_to_read():
    derivations, _, bounds = PAGE.partition("## Bounds")
    assert bounds
    for formula in _formulas(derivations):
        for line in formula.split("\\\\\n"):
            text = re.sub(r"\\text\{.*\}|&|\\quad|\\begin\{aligned\}|\\end\{aligned\}", "", line)
            assert visible(text) < 90, line


def test_long_formulas_are_broken_outside_parentheses_first():
    lines = broken(latex(attention.whole()), 40)
    assert len(lines) > 1
    assert "".join(lines).replace(" ", "") == latex(attention.whole()).replace(" ", "")
    assert all(line.count(r"\bigl(v_{j}^{h}") == line.count(r"-\bar v_{i}^{h}\bigr)") for line in lines)
    assert broken("a + b", 40) == ["a + b"]
    assert broken(r"\frac{a + b}{c + d}", 3) == [r"\frac{a + b}{c + d}"]


def test_document_is_a_latex_document():
    assert DOCUMENT.startswith(r"\documentclass{article}")
    assert DOCUMENT.rstrip().endswith(r"\end{document}")
    for name in ("align*", "itemize", "document"):
        assert DOCUMENT.count(rf"\begin{{{name}}}") == DOCUMENT.count(rf"\end{{{name}}}")
    assert "**" not in DOCUMENT


def test_bounds_are_on_the_page():
    for bound in render.bounds():
        assert bound.latex() in PAGE
        assert bound.latex() in DOCUMENT
        assert bound.proof in PAGE
        assert all(assumption in PAGE for assumption in bound.assumptions)


def test_symbols_of_bounds_are_explained():
    from theory.bounds import MEANING

    assert r"- $\sigma_{\min}$: " in PAGE
    assert all(meaning in PAGE for meaning in MEANING.values())


# -- the command -------------------------------------------------------------------------------------------------------


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_command_lists_derivations():
    lines = _run().splitlines()
    assert lines[0].split()[0] == "softmax"
    assert any(line.startswith("mask ") and "keeps the query path (7 steps)" in line for line in lines)


def test_command_prints_markdown_and_latex():
    assert _run("--markdown") == PAGE
    assert _run("--latex") == DOCUMENT
    assert _run("value") == _run("value", "--markdown") == render.markdown(["value"])
    assert r"\subsection{Value path}" in _run("--latex", "value")


def test_command_checks():
    assert _run("--check", "value", "residual") == "value: 2 steps hold\nresidual: 1 steps hold\n"


def test_command_refuses_an_unknown_name():
    with pytest.raises(InputError, match="no derivation or bound is called 'nope'; choose from: softmax, shift"):
        CliRunner().invoke(command, ["nope"], catch_exceptions=False)


def test_command_says_which_step_failed(monkeypatch):
    wrong = Step(Partial(x(i), x(j)), "=", add(mul(2, delta(i, j), attention.eye)), rules.LINEAR, label="residual")
    planted = type(theory.find("value"))("planted", "Planted", (wrong,))
    monkeypatch.setattr(theory, "derivations", lambda: (planted,))
    with pytest.raises(RunError, match=r"derivation 'planted', step 1 \(linearity\): the sides differ"):
        CliRunner().invoke(command, ["planted", "--check"], catch_exceptions=False)


def test_command_is_a_command():
    assert isinstance(command, click.Command)
    assert command.name == "theory"
