"""Changes written into a user's file: where it is certain where they go, and nowhere else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fragdoctor.model.prescription import Numerics, Place, Treatment
from fragdoctor.rehearsal.prescription.patch import diff, patched

FUSED = Treatment("f", "f", Numerics.EXACT, place=Place.OPTIMIZER, arguments=["fused=True"])
BEFORE = Treatment("b", "b", Numerics.EXACT, lines=["a()"], place=Place.BEFORE_OPTIMIZER)
AFTER = Treatment("a", "a", Numerics.EXACT, lines=["z()"], place=Place.AFTER_OPTIMIZER)
OPEN = Treatment("o", "o", Numerics.EXACT, lines=["?"])


def written(source: str, *treatments: Treatment, line: int = 1) -> str | None:
    traits = {"place": {"line": line}, "optimizers": ["AdamW"]}
    return patched(source, traits, treatments)


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("AdamW(p)", "AdamW(p, fused=True)"),
        ("optim.AdamW(p, lr=1e-3,)", "optim.AdamW(p, lr=1e-3, fused=True)"),
        ("AdamW(\n    p,\n    lr=1e-3,\n)", "AdamW(\n    p,\n    lr=1e-3, fused=True,\n)"),
        ("wrap('ä', AdamW(p))", "wrap('ä', AdamW(p, fused=True))"),
    ],
)
def test_arguments_are_added_to_the_call(call: str, after: str) -> None:
    assert written(f"optimizer = {call}\n", FUSED) == f"optimizer = {after}\n"


def test_lines_go_around_the_statement_and_are_indented_as_it_is() -> None:
    source = "def f():\n    if x:\n        optimizer = AdamW(\n            p\n        )\n"

    after = written(source, BEFORE, AFTER, line=4)

    assert after is not None
    assert after.splitlines()[2] == "        a()"
    assert after.splitlines()[-1] == "        z()"


def test_changes_at_one_optimizer_are_written_together_with_each_import_once() -> None:
    one, two = (replace(BEFORE, lines=["import a", f"a.{name}()"]) for name in "pq")

    after = written("optimizer = AdamW(p)\n", one, two, AFTER, FUSED)

    assert after == "import a\na.p()\na.q()\noptimizer = AdamW(p, fused=True)\nz()\n"


@pytest.mark.parametrize(
    ("source", "treatment"),
    [
        ("optimizer = AdamW(p)\n", OPEN),
        ("optimizer = AdamW(p, fused=False)\n", FUSED),
        ("optimizer = AdamW(p, **more)\n", FUSED),
        ("optimizer = make(p)\n", FUSED),
        ("x = 1; optimizer = AdamW(p)\n", BEFORE),
        ("optimizer = AdamW(p); x = 1\n", AFTER),
        ("optimizer, x = AdamW(p), 1\n", AFTER),
        ("optimizer = AdamW(p)", AFTER),
        ("optimizer = (\n", FUSED),
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
