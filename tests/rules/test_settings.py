"""Rules of settings, each on an input with its pattern and one without."""

from __future__ import annotations

import pytest
from builders import MIB
from oom_messages import case_of, new_style
from oom_snapshots import full
from rule_inputs import FULL, assert_finds, settings_snapshot

from fragdoctor.model.case import Case
from fragdoctor.rules.registry import find_rule

LIMITED = new_style(
    "384.00 MiB", "16.00 GiB", "13.07 GiB", "2.91 GiB", "17.46 MiB", allowed="3.20 GiB"
)


CASES = [
    ("FD301", case_of(LIMITED), case_of(FULL)),
    ("FD301", Case(snapshot=full(free_mib=4000)), Case(snapshot=full())),
    ("FD303", Case(snapshot=settings_snapshot(max_split_size=128 * MIB,
                                              expandable_segments=True)),
     Case(snapshot=settings_snapshot(expandable_segments=True))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "shows", "shows_not"), CASES, ids=[find_rule(code).name for code, *_ in CASES]
)
def test_rule_finds_its_pattern_and_nothing_else(code, shows, shows_not):
    assert_finds(code, shows, shows_not)
