"""Pages for readers: derivations and bounds as Markdown with LaTeX formulas, or as a LaTeX document."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any

from sympy import Symbol

from theory.derivation import Derivation, Step
from theory.printer import broken, visible
from theory.printer import latex as expression_latex

#: Longest formula, in characters on the page, that stays on one line where it can be broken.
LINE = 58

INTRODUCTION = r"""Tokens $x_1,\dots,x_T\in\mathbb R^D$ are the states of one series at T time steps. One layer of
multi-head attention turns them into states

$$
\begin{aligned}
q_i &= W_Q x_i + b_Q, \qquad k_j = W_K x_j + b_K, \qquad v_j = W_V x_j + b_V, \\
s_{ij} &= c\,\langle q_i, k_j\rangle + B_{ij}, \qquad a_{ij} = \frac{e^{s_{ij}}}{\sum_l e^{s_{il}}}, \\
h_i &= x_i + \sum_h W_O^h \sum_j a_{ij}^h v_j^h + b_O .
\end{aligned}
$$

Here i is the **query** time (output), j the **key** time (input), h a head, and $B$ an additive bias or mask. A formula
without a head index is about one head. The subject is the block Jacobian $J_{ij} = \partial h_i/\partial x_j$, a D by D
matrix. Bars are means under the weights of row i, $\bar v_i=\sum_l a_{il}v_l$;
$\mathrm{Cov}_i=\sum_l a_{il}(v_l-\bar v_i)(k_l-\bar k_i)^\top$ is the covariance of values and keys under them;
$X_i=\sum_l a_{il}(x_l-\bar x_i)(x_l-\bar x_i)^\top$ is that of the tokens. Derivatives have one row per output, so
that the derivative of a number is a row. A sum without limits runs over all times, or all heads.
$\lVert\cdot\rVert$ is the spectral norm, and the Euclidean norm of a vector.

**Every step below was checked by machine.** Equalities hold exactly, in rational arithmetic without rounding, on small
layers whose exponentials are free unknowns, and against SymPy's own differentiation of the layer's forward map.
Inequalities must have the form of the rule that they name, and no layer in a search through extreme ones breaks them.
"""


# -- one step, one derivation ------------------------------------------------------------------------------------------


def step_latex(step: Step) -> str:
    """One step as a formula."""
    relation = r"\le" if step.relation == "<=" else "="
    return f"{expression_latex(step.lhs)} {relation} {expression_latex(step.rhs)}"


def _lines(formula: str) -> str:
    """A formula for an aligned environment, on as many lines as it needs."""
    return " \\\\\n&\\quad {}".join(broken(formula, LINE))


def _side(step: Step) -> str:
    """The right side of a step, a long one broken over lines."""
    return _lines(expression_latex(step.rhs))


def _chains(derivation: Derivation) -> list[list[tuple[int, Step]]]:
    chains: list[list[tuple[int, Step]]] = []
    for number, step in enumerate(derivation.steps, start=1):
        if step.label or not chains:
            chains.append([])
        chains[-1].append((number, step))
    return chains


def _formula(chain: list[tuple[int, Step]]) -> str:
    """One chain as the body of an aligned environment, a number behind every step."""
    start = expression_latex(chain[0][1].lhs)
    lines = []
    if visible(start) > LINE // 3:
        lines, start = [f"& {_lines(start)}"], ""
    for position, (number, step) in enumerate(chain):
        relation = r"\le" if step.relation == "<=" else "="
        left = start if position == 0 else ""
        lines.append(f"{left} &{relation} {_side(step)} && \\text{{({number})}}")
    return " \\\\\n".join(lines)


def _condition(chain: list[tuple[int, Step]]) -> str:
    conditions = ", ".join(expression_latex(condition) for condition in chain[0][1].where)
    return f"for ${conditions}$" if conditions else ""


def _reasons(derivation: Derivation) -> Iterable[tuple[str, str, str]]:
    """Every rule with the steps that use it and what they cite."""
    found: dict[str, tuple[list[int], list[str], str]] = {}
    for number, step in enumerate(derivation.steps, start=1):
        numbers, cited, _ = found.setdefault(step.rule.name, ([], [], step.rule.statement))
        numbers.append(number)
        names = [use if isinstance(use, str) else use.name for use in step.uses]
        cited += [name for name in names if name not in cited]
    for name, (numbers, cited, statement) in found.items():
        source = f" [{'; '.join(cited)}]" if cited else ""
        yield ", ".join(map(str, numbers)), name, f"{statement}{source}"


def derivation_markdown(derivation: Derivation) -> str:
    """A derivation as a section: prose, assumptions, one display formula per chain, and the rules."""
    lines = [f"### {derivation.title}", "", derivation.prose, ""]
    if derivation.assumptions:
        lines += [f"*Assumes:* {'; '.join(derivation.assumptions)}.", ""]
    if derivation.length is not None:
        lines += [f"*For T = {derivation.length}.*", ""]
    for chain in _chains(derivation):
        label = chain[0][1].label
        condition = _condition(chain)
        lines += [f"*{label[:1].upper() + label[1:]}*{' ' + condition if condition else ''}:", ""]
        lines += ["$$", r"\begin{aligned}", _formula(chain), r"\end{aligned}", "$$", ""]
    lines += [f"- ({numbers}) **{name}**: {text}" for numbers, name, text in _reasons(derivation)]
    lines.append("")
    if derivation.reference:
        lines += [f"*Reference:* {derivation.reference}", ""]
    return "\n".join(lines)


def derivation_latex(derivation: Derivation) -> str:
    """A derivation as a LaTeX subsection."""
    lines = [rf"\subsection{{{derivation.title}}}", _tex(derivation.prose), ""]
    if derivation.assumptions:
        lines += [rf"\emph{{Assumes:}} {_tex('; '.join(derivation.assumptions))}.", ""]
    if derivation.length is not None:
        lines += [rf"\emph{{For $T = {derivation.length}$.}}", ""]
    for chain in _chains(derivation):
        label = chain[0][1].label
        lines += [rf"\emph{{{label[:1].upper() + label[1:]}}} {_condition(chain)}:".replace(" :", ":")]
        lines += [r"\begin{align*}", _formula(chain), r"\end{align*}"]
    lines.append(r"\begin{itemize}")
    lines += [rf"\item[({n})] \textbf{{{name}}}: {_tex(text)}" for n, name, text in _reasons(derivation)]
    lines += [r"\end{itemize}", ""]
    if derivation.reference:
        lines += [rf"\emph{{Reference:}} {_tex(derivation.reference)}", ""]
    return "\n".join(lines)


def _tex(text: str) -> str:
    """Markdown prose as LaTeX: bold, and the characters that LaTeX reads outside formulas."""
    pieces = re.split(r"(\$\$?.+?\$\$?)", text, flags=re.DOTALL)
    for place in range(0, len(pieces), 2):
        plain = pieces[place].replace("^", r"\^{}").replace("_", r"\_").replace("%", r"\%").replace("&", r"\&")
        pieces[place] = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", plain)
    return "".join(pieces)


# -- pages -------------------------------------------------------------------------------------------------------------


def _chosen(names: Iterable[str] | None) -> list[tuple[str, list[Derivation]]]:
    """The sections with the derivations that are asked for."""
    from theory import SECTIONS

    wanted = None if names is None else list(names)
    chosen = []
    for title, module in SECTIONS.items():
        found = [d for d in importlib.import_module(module).derivations() if wanted is None or d.name in wanted]
        if found:
            chosen.append((title, found))
    return chosen


def bounds(names: Iterable[str] | None = None) -> list[Any]:
    """The bounds, all or those asked for."""
    import theory

    known = list(theory.BOUNDS.values())
    return known if names is None else [bound for bound in known if bound.name in list(names)]


def _bound_lines(bound: Any, emphasis: str) -> list[str]:
    """What stands below a bound's formula: assumptions, proof, reference."""
    lines = [f"{emphasis % 'Assumes:'} {'; '.join(bound.assumptions) or 'nothing'}.", ""]
    if bound.proof:
        lines += [f"{emphasis % 'Why:'} {bound.proof}", ""]
    if bound.reference:
        lines += [f"{emphasis % 'Reference:'} {bound.reference}.", ""]
    return lines


def _meanings() -> list[tuple[str, str]]:
    """The symbols of the bounds as formulas, and what they mean."""
    from theory.bounds import MEANING

    found = []
    for name, meaning in MEANING.items():
        base, _, index = name.partition("_")
        letter = expression_latex(Symbol(base))
        index = rf"\{index}" if index == "min" else index
        found.append((f"{letter}_{{{index}}}" if index else letter, meaning))
    return found


def markdown(names: Iterable[str] | None = None) -> str:
    """The derivation page of the documentation, or the parts of it that are named."""
    chosen, limits = _chosen(names), bounds(names)
    lines = ["# Derivation", "", INTRODUCTION] if names is None else []
    for title, found in chosen:
        lines += [f"## {title}", ""] if names is None else []
        lines += [derivation.markdown() for derivation in found]
    if limits:
        if names is None:
            lines += ["## Bounds", ""]
            lines += [*(f"- ${symbol}$: {meaning}" for symbol, meaning in _meanings()), ""]
        for bound in limits:
            lines += [f"### Bound `{bound.name}`", "", "$$", bound.latex(), "$$", "", *_bound_lines(bound, "*%s*")]
    return "\n".join(lines).rstrip() + "\n"


def latex(names: Iterable[str] | None = None) -> str:
    """The same as a LaTeX document."""
    lines = [r"\documentclass{article}", r"\usepackage{amsmath,amssymb}", r"\allowdisplaybreaks", r"\begin{document}"]
    if names is None:
        lines += [r"\title{The block Jacobian of temporal attention}\author{}\date{}\maketitle", _tex(INTRODUCTION)]
    for title, found in _chosen(names):
        lines += [rf"\section{{{title}}}"] if names is None else []
        lines += [derivation.latex() for derivation in found]
    limits = bounds(names)
    if limits:
        if names is None:
            items = (rf"\item[${symbol}$] {_tex(meaning)}" for symbol, meaning in _meanings())
            lines += [r"\section{Bounds}", r"\begin{description}", *items, r"\end{description}"]
        for bound in limits:
            heading = rf"\subsection{{{_tex(bound.name)}}}"
            lines += [heading, rf"\[ {bound.latex()} \]", *map(_tex, _bound_lines(bound, "%s"))]
    return "\n".join([*lines, r"\end{document}", ""])
