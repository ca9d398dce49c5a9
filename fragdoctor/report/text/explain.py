"""The rules for people: a list, or the documentation of one rule."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

from fragdoctor.errors import ConfigError
from fragdoctor.model.finding import Severity
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.text.page import Column, Page

THEMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "FD1": "Fragmentation",
        "FD2": "Capacity and peaks",
        "FD3": "Settings",
        "FD4": "Leaks and growth",
        "FD5": "Ranks and processes",
        "FD9": "Quality of the input",
    }
)
_SEVERITY_STYLES: Final = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "yellow",
    Severity.INFO: "dim",
}


class RuleText(Protocol):
    """What a rule says about itself."""

    @property
    def code(self) -> str:
        """``FD101``."""

    @property
    def name(self) -> str:
        """What it finds, in kebab-case."""

    @property
    def summary(self) -> str:
        """One line."""

    @property
    def severity(self) -> Severity:
        """Severity of its findings."""

    @property
    def since(self) -> str:
        """First version with it."""

    @property
    def status(self) -> str:
        """``preview`` or ``stable``."""


def render_rules(rules: Iterable[RuleText], options: RenderOptions) -> str:
    """Return the list of rules by theme."""
    page = Page(options)
    listed = sorted(rules, key=lambda rule: rule.code)
    for prefix in sorted({rule.code[:3] for rule in listed}):
        page.heading(THEMES.get(prefix, prefix), f"{prefix}xx")
        page.table(
            [Column(), Column(max_width=32), Column("wrap")],
            [
                [(rule.code, _SEVERITY_STYLES[rule.severity]), rule.name, (rule.summary, "dim")]
                for rule in listed
                if rule.code.startswith(prefix)
            ],
        )
    page.blank()
    page.paragraph(("fragdoctor explain CODE tells more about one.", "dim"), indent=0)
    return page.render()


def render_rule(
    rules: Iterable[RuleText], code: str, headings: Iterable[str], options: RenderOptions
) -> str:
    """Return the documentation of one rule, found by its code or its name.

    Raises:
        ConfigError: there is no such rule.
    """
    rule = _found(list(rules), code)
    page = Page(options)
    page.paragraph([(f"{rule.code} {rule.name}", "bold")], indent=0)
    facts = f"severity {rule.severity.name.lower()}, {rule.status}, since {rule.since}"
    page.paragraph((facts, "dim"), indent=0)
    _write_docstring(page, inspect.getdoc(rule) or "", tuple(headings))
    return page.render()


def _found(rules: list[RuleText], code: str) -> RuleText:
    wanted = code.strip()
    for rule in rules:
        if wanted.upper() == rule.code or wanted.lower() == rule.name:
            return rule
    known = [name for rule in rules for name in (rule.code, rule.name)]
    near = difflib.get_close_matches(wanted.upper(), known, n=1, cutoff=0.6)
    near = near or difflib.get_close_matches(wanted.lower(), known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"There is no rule {wanted}.", hint=f"{hint}The list of rules: fragdoctor explain"
    )


def _write_docstring(page: Page, text: str, headings: tuple[str, ...]) -> None:
    """Write a docstring: its headings as headings, indented blocks as they stand."""
    for block in text.strip().split("\n\n"):
        heading = next((h for h in headings if block.startswith(h)), "")
        body = block[len(heading) :]
        if heading:
            page.heading(heading.rstrip("."))
        else:
            page.blank()
        _write_block(page, body)


def _write_block(page: Page, body: str) -> None:
    lines = [line for line in body.splitlines() if line.strip()]
    folded: list[str] = []
    for line in lines:
        if line.startswith("    "):
            _flush(page, folded)
            page.verbatim((line.strip("\n"), "cyan"), indent=0)
        elif line.lstrip().startswith(("- ", "* ")):
            _flush(page, folded)
            folded.append(line.strip())
        else:
            folded.append(line.strip())
    _flush(page, folded)


def _flush(page: Page, folded: list[str]) -> None:
    text = " ".join(folded).replace("``", "")
    folded.clear()
    if text.startswith(("- ", "* ")):
        page.labelled("-", text[2:], indent=2, label_width=2)
    elif text:
        page.paragraph(text)
