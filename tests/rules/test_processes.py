"""Rules of processes and ranks, each on an input with its pattern and one without."""

from __future__ import annotations

import pytest
from oom_messages import case_of, new_style
from rule_inputs import (
    FULL,
    SHARED_DEVICE,
    assert_finds,
)

from fragdoctor.rules.registry import find_rule

CROWDED = new_style("1.00 GiB", "24.00 GiB", "0.20 GiB", "18.00 GiB", "0.30 GiB", own="23.50 GiB")


CASES = [
    ("FD501", case_of(SHARED_DEVICE), case_of(FULL)),
    ("FD502", case_of(CROWDED), case_of(SHARED_DEVICE)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "shows", "shows_not"), CASES, ids=[find_rule(code).name for code, *_ in CASES]
)
def test_rule_finds_its_pattern_and_nothing_else(code, shows, shows_not):
    assert_finds(code, shows, shows_not)
