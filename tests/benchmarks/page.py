"""The page of the documentation, from the numbers that were kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.figures import FIGURES
from benchmarks.sections import SECTIONS
from benchmarks.tables import Findings, size

HEAD = """# Benchmarks

What measuring and training cost, beside the alternatives, on one machine. Written from `benchmarks.json` by

```sh
python tests/benchmarks/run.py                      # everything; minutes
python tests/benchmarks/run.py --only growth        # some sections, the others stay as they are
```

Jobs that are compared take turns in one process, and a ratio is the median over rounds of the quotients within a
round, so that a machine whose speed drifts does not decide it; this is why the harness is a plain one, and not one
that runs each benchmark to its end before the next. A reading repeats what takes less than a quarter of a second, so
that it is not that of caches which another job has emptied. All is float32 on random weights and tokens, which change
none of the costs but that of spectral norms, whose iteration is longer where values lie close together. Peak memory
is that of a process that does nothing else.
"""


def render(sections: Mapping[str, Any]) -> str:
    """The whole page."""
    done = {name: sections[name] for name in SECTIONS if name in sections}
    parts = [HEAD, circumstances(done), targets(done)]
    for name, kept in done.items():
        section, findings = SECTIONS[name], Findings.of(kept)
        parts += [f"## {section.title}", section.about.replace("\n", " ").strip()]
        parts += [table.markdown() for table in findings.tables]
        if section.more is not None:
            parts.append(section.more(findings.data))
        if name in FIGURES:
            parts += [f"![{alt}](images/{file})" for file, alt, _ in FIGURES[name]]
        parts.append(measured(kept))
    missing = [section.title for name, section in SECTIONS.items() if name not in done]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def circumstances(done: Mapping[str, Any]) -> str:
    """Machine and versions, and whether all sections measured the same."""
    if not done:
        return ""
    newest = max(done.values(), key=lambda kept: kept["date"])
    lines = [f"Machine: {machine(newest)}. Versions: {versions(newest)}."]
    same = all((kept["code"], kept["changed"]) == (newest["code"], False) for kept in done.values())
    if same:
        lines.append("All sections measured the same state of the package.")
    else:
        lines.append("**The sections measured different states of the package**; each one says which.")
    for kept, title in ((kept, SECTIONS[name].title) for name, kept in done.items()):
        if (kept["machine"], kept["versions"]) != (newest["machine"], newest["versions"]):
            lines.append(f"*{title}* was measured elsewhere: {machine(kept)}; {versions(kept)}.")
    return "\n".join(lines)


def machine(kept: Mapping[str, Any]) -> str:
    """The machine of a section in words."""
    found = kept["machine"]
    cores = f"{found['cores']} cores, {found['threads']} threads"
    return f"{found['processor']}, {cores}, {size(found['memory'])} of memory, {found['system']}"


def versions(kept: Mapping[str, Any]) -> str:
    """The versions of a section in words."""
    return ", ".join(f"{name} {version}" for name, version in kept["versions"].items())


def measured(kept: Mapping[str, Any]) -> str:
    """When, at which commit, and how long it took."""
    changed = ", with changes that were not committed" if kept["changed"] else ""
    where = f" at commit {kept['commit']} (package {kept['code']}{changed})" if kept["commit"] else ""
    return f"Measured on {kept['date']}{where}, in {kept['took']:.0f} s."


def targets(done: Mapping[str, Any]) -> str:
    """All targets in one table."""
    rows = [target.row() for kept in done.values() for target in Findings.of(kept).targets]
    if not rows:
        return ""
    return "\n".join(["## Targets", "", "| what | wanted | measured | met |", "|---|---|---|---|", *rows])
