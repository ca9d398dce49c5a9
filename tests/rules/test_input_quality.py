"""Rules of what the input lacks, each on an input with its pattern and one without."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from oom_snapshots import full
from rule_inputs import (
    assert_finds,
    settings_snapshot,
    untiled_snapshot,
)

from fragdoctor.model.case import Case
from fragdoctor.model.snapshot import Provenance
from fragdoctor.rules.registry import find_rule


def with_unknown_keys():
    snapshot = full()
    origin = Provenance(unknown_keys={"events.colour": 3, "blocks.mood": 1})
    return replace(snapshot, provenance=origin)


CASES = [
    ("FD902", Case(snapshot=untiled_snapshot()), Case(snapshot=full())),
    ("FD903", Case(snapshot=settings_snapshot()), Case(snapshot=full())),
    ("FD905", Case(snapshot=untiled_snapshot()), Case(snapshot=full())),
    ("FD906", Case(snapshot=with_unknown_keys()), Case(snapshot=full())),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "shows", "shows_not"), CASES, ids=[find_rule(code).name for code, *_ in CASES]
)
def test_rule_finds_its_pattern_and_nothing_else(code, shows, shows_not):
    assert_finds(code, shows, shows_not)
