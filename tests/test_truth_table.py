"""The table of truth does not fall, and a fall names its rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture(scope="module")
def truth_table() -> Iterator[ModuleType]:
    sys.path.insert(0, str(TOOLS))
    try:
        import truth_table

        yield truth_table
    finally:
        sys.path.remove(str(TOOLS))


def test_a_row_that_falls_is_named(truth_table: ModuleType) -> None:
    before = {"a": "looked will right", "b": "looked open", "c": "held-out likely wrong"}

    worse = truth_table.fall(before, {**before, "a": "looked likely wrong"})

    assert worse == [
        "looked likely wrong: 0 before, 1 now",
        "  a: looked will right -> looked likely wrong",
        "looked will right: 1 before, 0 now",
        "  a: looked will right -> looked likely wrong",
    ]


def test_rows_that_rise_are_no_fall(truth_table: ModuleType) -> None:
    before = {"a": "looked open", "b": "looked likely wrong", "c": "looked curable unpromised"}
    now = {"a": "looked will right", "b": "looked open", "c": "looked curable promised"}

    assert truth_table.fall(before, now) == []


def test_the_docs_print_the_committed_table(truth_table: ModuleType) -> None:
    proof = (TOOLS.parent / "docs" / "proof.md").read_text(encoding="utf-8")

    assert "\n".join(truth_table.table(truth_table.committed())) in proof


@pytest.mark.slow
def test_the_committed_table_holds(truth_table: ModuleType) -> None:
    said = truth_table.answers(n_jobs=2)

    assert truth_table.fall(truth_table.committed(), said) == []
    assert set(said) == set(truth_table.committed())
