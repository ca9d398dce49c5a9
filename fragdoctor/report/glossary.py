"""The words of the reports, from ``glossary.md`` beside this file: one entry a heading."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

_LIST: Final = re.compile(r"^(Also|See): (.*)\.$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Term:
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


@cache
def terms() -> tuple[Term, ...]:
    """Return all terms, in the order of the file."""
    text = files("fragdoctor.report").joinpath("glossary.md").read_text("utf-8")
    return tuple(_term(part) for part in text.split("\n## ")[1:])


def _term(entry: str) -> Term:
    name, *paragraphs = (" ".join(p.split()) for p in entry.strip().split("\n\n"))
    listed = {m.group(1): m.group(2) for p in paragraphs if (m := _LIST.match(p))}
    prose = [p for p in paragraphs if not _LIST.match(p)]
    also, see = (tuple(filter(None, listed.get(k, "").split(", "))) for k in ("Also", "See"))
    return Term(name, prose[0], "\n\n".join(prose[1:]), also, see)
