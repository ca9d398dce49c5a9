"""Changes written into a user's file: where it is certain where they go, and nowhere else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fragdoctor.model.prescription import Numerics, Place, Treatment
from fragdoctor.rehearsal.prescription.patch import diff, patched

FUSED = Treatment("f", "f", Numerics.EXACT, lines=["f"], place=Place.OPTIMIZER)
BEFORE = Treatment("b", "b", Numerics.EXACT, lines=["a()"], place=Place.BEFORE_OPTIMIZER)
AFTER = Treatment("a", "a", Numerics.EXACT, lines=["z()"], place=Place.AFTER_OPTIMIZER)
OPEN = Treatment("o", "o", Numerics.EXACT, lines=["?"])


def written(source: str, *treatments: Treatment, line: int = 1) -> str | None:
    traits = {"place": {"line": line}, "optimizers": ["AdamW"]}
    return patched(source, traits, treatments)


def test_lines_go_around_the_statement_and_are_indented_as_it_is() -> None:
    source = "def f():\n    if x:\n        optimizer = AdamW(\n            p\n        )\n"

    after = written(source, BEFORE, AFTER, line=4)

    assert after is not None
    assert after.splitlines()[2] == "        a()"
    assert after.splitlines()[-1] == "        z()"


def test_changes_at_one_optimizer_are_written_together_with_each_import_once() -> None:
    one, two = (replace(BEFORE, lines=["import a", f"a.{name}()"]) for name in "pq")

    after = written("optimizer = AdamW(p)\n", one, two, AFTER)

    assert after == "import a\na.p()\na.q()\noptimizer = AdamW(p)\nz()\n"


@pytest.mark.parametrize(
    ("source", "treatment"),
    [
        ("optimizer = AdamW(p)\n", OPEN),
        ("optimizer = AdamW(p)\n", FUSED),
        ("x = 1; optimizer = AdamW(p)\n", BEFORE),
        ("optimizer = AdamW(p); x = 1\n", AFTER),
        ("optimizer, x = AdamW(p), 1\n", AFTER),
        ("optimizer = AdamW(p)", AFTER),
        ("optimizer = (\n", AFTER),
        ("if x: optimizer = AdamW(p)\n", BEFORE),
    ],
)
def test_nothing_is_written_where_the_place_is_not_certain(
    source: str, treatment: Treatment
) -> None:
    assert written(source, treatment) is None


def test_diff_is_one_that_patch_takes() -> None:
    assert diff("t.py", "a\nb\n", "a\nx\nb\n") == [
        "--- a/t.py", "+++ b/t.py", "@@ -1,2 +1,3 @@", " a", "+x", " b",
    ]  # fmt: skip
