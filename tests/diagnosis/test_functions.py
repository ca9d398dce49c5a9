"""Lines of one function are one holder; functions of one name are told apart."""

from __future__ import annotations

import pytest
from builders import BASE, MIB, alloc, block, columns, frame, oom, segment, segment_alloc, snapshot

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.report.base import RenderOptions, render

MAIN = frame("train.py", 90, "main")
OTHER_CALL = frame("train.py", 91, "main")


def told(*made: tuple[int, int, str, dict[str, object]], file: str = "net.py") -> Diagnosis:
    """Return a failure while blocks of (MiB, line, function, caller) are live."""
    events, blocks, at = [], [], BASE
    total = sum(size for size, *_ in made) * MIB
    for size, line, name, caller in made:
        stack = [frame(file, line, name), caller]
        events.append(alloc(at, size * MIB, frames=stack))
        blocks.append(block(size * MIB, "active_allocated", frames=stack))
        at += size * MIB
    events = [segment_alloc(BASE, total), *events, oom(64 * MIB, MIB, frames=[MAIN])]
    return diagnose(
        Case(snapshot=columns(snapshot(segment(BASE, *blocks), events=events))), replays=False
    )


def first_holder(diagnosis: Diagnosis) -> str:
    lines = render("analyze", "text", diagnosis, RenderOptions(100)).splitlines()
    return lines[lines.index("Who holds it  live when it failed") + 1].strip()


def test_lines_of_a_script_outside_any_function_are_none():
    one = told((30, 4, "<module>", MAIN), (30, 6, "<module>", MAIN), file="train.py")

    assert not one.functions
    assert "train.py:4" in first_holder(one)


def test_lines_of_a_function_that_hold_most_together_are_one_holder():
    one = told(
        (30, 174, "update", MAIN), (30, 177, "update", MAIN), (20, 181, "update", MAIN),
        (40, 12, "load", MAIN),
    )  # fmt: skip

    (f,) = one.functions
    assert (f.function, f.first_line, f.last_line) == ("update", 174, 181)
    assert f.held_bytes == 80 * MIB
    assert first_holder(one) == "80.00 MiB  update (net.py:174-181)"


@pytest.mark.parametrize(
    "made",
    [
        [(30, 10, "forward", MAIN), (30, 40, "forward", OTHER_CALL)],
        [(30, 10, "forward", MAIN), (2, 20, "__init__", MAIN), (30, 40, "forward", MAIN)],
        [(30, 10, "forward", MAIN), (2, 20, "forward", OTHER_CALL), (30, 40, "forward", MAIN)],
        [(30, 10, "forward", MAIN), (30, 40, "backward", MAIN)],
    ],
    ids=["callers", "another-between", "caller-between", "names"],
)
def test_functions_that_may_differ_stay_lines(made):
    one = told(*made)

    assert one.functions == ()
    assert first_holder(one) == f"30.00 MiB  net.py:10 in {made[0][2]}"


def test_lines_that_hold_less_than_the_rest_stay_lines():
    one = told((20, 1, "f", MAIN), (20, 2, "f", MAIN), (60, 30, "g", MAIN))

    assert len(one.functions) == 1
    assert first_holder(one) == "60.00 MiB  net.py:30 in g"


def devices(held: list[int], failed: int, *, file: str) -> Diagnosis:
    """Return devices that hold so many MiB when one of them fails."""
    traces, segments = [], []
    for d, size in enumerate(held):
        at, stack = (d + 1) * BASE, [frame(file, 5, "replica"), MAIN]
        rows = [
            segment_alloc(at, size * MIB, time_us=10),
            alloc(at, size * MIB, frames=stack, time_us=20),
        ]
        if d == failed:
            rows.append(oom(64 * MIB, MIB, frames=stack, time_us=30))
        traces.append(rows)
        segments.append(segment(at, block(size * MIB, "active_allocated"), device=d))
    return diagnose(Case(snapshot=columns(snapshot(*segments, traces=traces))), replays=False)


@pytest.mark.parametrize(
    ("held", "failed", "file", "said"),
    [
        ([8, 78, 20], 1, "net.py", "they held GPU 0 8.00 MiB, GPU 1 78.00 MiB, GPU 2 20.00 MiB."),
        ([8, 78, 20], 1, "/x/torch/nn/parallel/parallel_apply.py", "GPU 1 had the largest samples"),
        ([78, 8, 20], 0, "/x/torch/nn/parallel/parallel_apply.py", "gathers outputs on GPU 0"),
    ],
)
def test_device_that_holds_far_more_than_the_others_is_named(held, failed, file, said):
    one = devices(held, failed, file=file)

    assert said in one.notes[0]
    assert "  Note  The GPUs differ" in render("analyze", "text", one, RenderOptions(120))


@pytest.mark.parametrize("held", [[40, 42, 38], [100, 80], [400, 1]])
def test_devices_that_are_alike_or_idle_are_not_called_unlike(held):
    one = devices(held, 0, file="net.py")

    assert not any("unlike" in note for note in one.notes)
