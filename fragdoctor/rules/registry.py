"""All rules, one line each, sorted by code."""

from __future__ import annotations

from typing import Final

from fragdoctor.rules.base import Rule

RULES: Final[tuple[Rule, ...]] = ()
