"""Rules of what the input lacks, each on an input with its pattern and one without."""

from __future__ import annotations

import pytest
from oom_snapshots import full
from rule_inputs import (
    assert_finds,
    settings_snapshot,
    untiled_snapshot,
)

from fragdoctor.model.case import Case
from fragdoctor.rules.registry import find_rule

CASES = [
    ("FD902", Case(snapshot=untiled_snapshot()), Case(snapshot=full())),
    ("FD903", Case(snapshot=settings_snapshot()), Case(snapshot=full())),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "shows", "shows_not"), CASES, ids=[find_rule(code).name for code, *_ in CASES]
)
def test_rule_finds_its_pattern_and_nothing_else(code, shows, shows_not):
    assert_finds(code, shows, shows_not)
