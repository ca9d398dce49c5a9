"""All rules, sorted by code. A rule is a file of a theme, with the rule's name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Final

from fragdoctor.rules.rule import HEADINGS, Rule

_THEMES: Final = ("fragmentation", "capacity", "settings", "growth", "processes", "input_quality")


_FILES: Final = (f for theme in _THEMES for f in Path(__file__).with_name(theme).glob("[!_]*.py"))
RULES: Final[tuple[Rule, ...]] = tuple(
    sorted(
        (getattr(import_module(f"{__package__}.{f.parent.name}.{f.stem}"), f.stem) for f in _FILES),
        key=lambda rule: rule.code,
    )
)


def find_rule(code: str) -> Rule | None:
    """Return the rule with a code (upper or lower case) or a name, or None if there is none."""
    wanted = code.strip()
    for rule in RULES:
        if wanted.upper() == rule.code or wanted.lower() == rule.name:
            return rule
    return None


def explanation(text: str) -> tuple[tuple[str, str], ...]:
    """Return the documentation of a rule as (heading, text) pairs in order.

    Each text is one paragraph of the docstring, joined to one line.
    """
    parts = [" ".join(p.split()) for p in text.split("\n\n")]
    return tuple(
        (heading.removesuffix("."), part.removeprefix(heading).strip())
        for heading in HEADINGS
        for part in parts
        if part.startswith(heading)
    )
