"""What ``fragdoctor explain`` says: all rules and terms, or one of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from fragdoctor.errors import ConfigError
from fragdoctor.report import document as doc
from fragdoctor.report.document import Span, Style, code, dim, strong
from fragdoctor.report.words import SEVERITY_STYLES
from fragdoctor.rules.registry import RULES, explanation
from fragdoctor.rules.rule import Rule

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
_LIST: Final = re.compile(r"^(Also|See): (.*)\.$", re.DOTALL)


class GlossaryTerm(Struct, frozen=True):
    """A word and what it means.

    Attributes:
        name: the word.
        short: what it means, in one sentence.
        text: more, in paragraphs of Markdown; "".
        also: other forms under which it is found.
        see: related terms.
    """

    name: str
    short: str
    text: str = ""
    also: tuple[str, ...] = ()
    see: tuple[str, ...] = ()


class Explanation(Struct, frozen=True):
    """What is explained: one rule, one term, or all of them."""

    rules: Sequence[Rule] = ()
    terms: Sequence[GlossaryTerm] = ()


@cache
def terms() -> tuple[GlossaryTerm, ...]:
    """Return all terms of ``glossary.md``, one per heading, in its order."""
    text = files("fragdoctor.report").joinpath("glossary.md").read_text("utf-8")
    return tuple(_read_term(part) for part in text.split("\n## ")[1:])


def _read_term(entry: str) -> GlossaryTerm:
    name, *paragraphs = (" ".join(p.split()) for p in entry.strip().split("\n\n"))
    listed = {m.group(1): m.group(2) for p in paragraphs if (m := _LIST.match(p))}
    prose = [p for p in paragraphs if not _LIST.match(p)]
    also, see = (tuple(filter(None, listed.get(k, "").split(", "))) for k in ("Also", "See"))
    return GlossaryTerm(name, prose[0], "\n\n".join(prose[1:]), also, see)


def find(word: str | None) -> Explanation:
    """Return the explanation of a code, a rule's name or a term, or of everything for None.

    Raises:
        ConfigError: the word is none of these.
    """
    if word is None:
        return Explanation(RULES, terms())
    known: dict[str, Explanation] = {}
    for rule in RULES:
        known |= dict.fromkeys((rule.code.lower(), rule.name), Explanation(rules=[rule]))
    for term in terms():
        for name in (term.name, *term.also):
            known.setdefault(name.lower(), Explanation(terms=[term]))
    spelled = {name.replace("-", " "): found for name, found in known.items()}
    asked = " ".join(word.split()).lower()
    if found := known.get(asked) or spelled.get(asked):
        return found
    near = difflib.get_close_matches(asked, known, n=1, cutoff=0.5)
    hint = (
        f"Did you mean {near[0].upper() if near[0][-1:].isdigit() else near[0]}? " if near else ""
    )
    raise ConfigError(
        f"There is no rule or term {word}.",
        hint=f"{hint}The list of both: fragdoctor explain",
    )


def document(explanation: Explanation) -> doc.ReportDocument:
    """Return the text of one rule or term, or the list of all of them."""
    if len(explanation.rules) + len(explanation.terms) > 1:
        return _everything(explanation)
    if explanation.rules:
        return _rule(explanation.rules[0])
    return _term(explanation.terms[0])


def _everything(explanation: Explanation) -> doc.ReportDocument:
    listed = sorted(explanation.rules, key=lambda rule: rule.code)
    sections = []
    for prefix in sorted({rule.code[:3] for rule in listed}):
        title = THEMES.get(prefix, prefix)
        table = doc.tabled(
            [rule for rule in listed if rule.code.startswith(prefix)],
            doc.Column("", lambda r: Span(r.code, SEVERITY_STYLES[r.severity])),
            doc.Column("", "name", max_width=32),
            doc.Column("", "summary", "wrap", style=Style.DIM),
        )
        sections.append(doc.Section(title, [table], f"{prefix}xx", prefix))
    glossary = doc.tabled(
        sorted(explanation.terms, key=lambda t: t.name.lower()),
        doc.Column("", "name", max_width=28),
        doc.Column("", "short", "wrap", style=Style.DIM),
    )
    return doc.ReportDocument(
        title="Rules and terms",
        headline=[strong("Rules and terms"), dim("  fragdoctor explain CODE or TERM says more")],
        brief=[*(rule.code for rule in listed), *(term.name for term in explanation.terms)],
        sections=[*sections, doc.Section("Terms", [glossary], id="terms")],
    )


def _term(term: GlossaryTerm) -> doc.ReportDocument:
    also = f"  also {', '.join(term.also)}" if term.also else ""
    see = f"See also: {', '.join(term.see)}." if term.see else ""
    blocks = [doc.Paragraph(_inline(text)) for text in term.text.split("\n\n")]
    return doc.ReportDocument(
        title=term.name,
        headline=[strong(term.name), dim(also)],
        brief=[f"{term.name}: {term.short}"],
        lead=[doc.Paragraph(_inline(term.short))],
        sections=[doc.Section("", [*blocks, doc.Paragraph(dim(see))])],
    )


def _rule(rule: Rule) -> doc.ReportDocument:
    severity = doc.Paragraph(dim(f"severity {rule.severity.name.lower()}"))
    lead = [severity, doc.Paragraph(_inline(f"{rule.summary}."))]
    sections = [
        doc.Section(heading, [doc.Paragraph(_inline(text))])
        for heading, text in explanation(rule.text)
    ]
    title = f"{rule.code} {rule.name}"
    brief = [f"{title}: {rule.summary}"]
    return doc.ReportDocument(title, strong(title), brief, sections, lead)


def _inline(text: str) -> doc.Content:
    """Return prose with text in backticks as code, without the asterisks of emphasis."""
    parts = re.split(r"`+", re.sub(r"(?<!\w)\*(\w[^*]*)\*", r"\1", text))
    return [code(part) if i % 2 else part for i, part in enumerate(parts) if part]
