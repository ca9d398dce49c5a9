"""Who holds the memory by name, from the bundle to the report."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from builders import BASE, MIB, alloc, block, frame, oom, segment, segment_alloc, snapshot
from msgspec.structs import replace
from toy_allocator import ToyAllocator

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.cases import read_bundle, read_snapshot
from fragdoctor.model.census import HoldingKind
from fragdoctor.model.diagnosis import Cause, Diagnosis
from fragdoctor.report.base import RenderOptions, Verbosity, render

STORE = [frame("/work/rl.py", 25, "store"), frame("/work/rl.py", 90, "main")]
OTHER = [frame("/work/rl.py", 30, "step"), frame("/work/rl.py", 91, "main")]
MANIFEST = {"format": "fragdoctor-bundle", "version": 1, "reason": "oom"}


def owner(name: str, kind: str = "container", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "n_items": 4, "class_name": "list", **more}


def bundle(place: Path, *owners: dict[str, Any]) -> Path:
    """Return a bundle: each owner holds a block of 10 MiB, and 5 MiB have no name."""
    stacks = [*(STORE for _ in owners), OTHER]
    sizes = [*(10 * MIB for _ in owners), 5 * MIB]
    starts = [BASE + sum(sizes[:i]) for i in range(len(sizes))]
    data = snapshot(
        segment(BASE, *(block(n, "active_allocated", frames=s)
                        for n, s in zip(sizes, stacks, strict=True))),
        events=[
            segment_alloc(BASE, sum(sizes)),
            *(alloc(a, n, frames=s) for a, n, s in zip(starts, sizes, stacks, strict=True)),
            oom(64 * MIB, MIB, frames=STORE),
        ],
    )  # fmt: skip
    held = {
        "time_us": 1, "step": 0, "is_complete": True, "owners": list(owners),
        "devices": [0] * len(owners), "addresses": starts[: len(owners)],
        "sizes": sizes[: len(owners)], "holders": list(range(len(owners))),
    }  # fmt: skip
    sources = {"/work/rl.py": {"25": "self.buffer.append(x)"}}
    place.mkdir()
    (place / "snapshot.pickle").write_bytes(pickle.dumps(data))
    for name, value in (
        ("bundle.json", MANIFEST),
        ("census.json", {"format": "fragdoctor-census", "version": 1, "censuses": [held]}),
        ("sources.json", {"format": "fragdoctor-sources", "version": 1, "files": sources}),
    ):
        (place / name).write_text(json.dumps(value), encoding="utf-8")
    return place


def told(place: Path, *owners: dict[str, Any]) -> Diagnosis:
    return diagnose(read_bundle(bundle(place / "oom1", *owners)), replays=False)


def holders(diagnosis: Diagnosis) -> list[str]:
    lines = render("analyze", "text", diagnosis, RenderOptions(100)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Who holds it"))
    return [line.strip() for line in lines[at + 1 : lines.index("", at)]]


def test_name_stands_first_with_the_line_that_made_it(tmp_path: Path):
    found = told(tmp_path, owner("agent.buffer"))

    assert holders(found) == [
        "10.00 MiB  agent.buffer (list of 4), made at rl.py:25",
        "5.00 MiB  rl.py:30 in step",
    ]
    first, second = found.owners
    assert (first.held_bytes, first.n_blocks, str(first.location)) == (
        10 * MIB, 1, "/work/rl.py:25 in store",
    )  # fmt: skip
    assert second.owner.kind is HoldingKind.UNNAMED


def test_lines_that_strand_memory_say_which_name_holds_theirs(tmp_path: Path):
    found = told(tmp_path, owner("agent.buffer"))
    torn = replace(found, verdict=replace(found.verdict, cause=Cause.FRAGMENTATION))

    assert holders(torn) == [
        "10.00 MiB  /work/rl.py:25 in store",
        "held by agent.buffer (list of 4)",
        "5.00 MiB  /work/rl.py:30 in step",
    ]


@pytest.mark.parametrize(("kind", "is_advised"), [("container", True), ("parameters", False)])
def test_list_filled_before_a_model_runs_is_kept_on_the_host(
    tmp_path: Path, kind: str, is_advised: bool
):
    advice = told(tmp_path, owner("queue", kind)).recommendations

    assert ("keep-on-host" in [r.code for r in advice]) is is_advised


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (owner("net", "parameters", class_name="Net"), "net (Net): parameters"),
        (owner("net", "gradients", class_name="Net"), "net (Net): gradients"),
        (owner("", "parameters", class_name="Net"), "a Net: parameters"),
        (owner("optimizer.state", "optimizer", class_name="Adam"), "optimizer.state (Adam)"),
        (owner("x", "tensor", scope="forward()"), "x in forward()"),
        (owner("losses", "graph"), "autograd graph kept by losses (4 tensors)"),
        (owner("A -> B -> A", "cycle"), "reference cycle A -> B -> A"),
    ],
)
def test_each_way_to_hold_has_its_words(tmp_path: Path, given: dict[str, Any], said: str):
    assert holders(told(tmp_path, given))[0] == f"10.00 MiB  {said}, made at rl.py:25"


def test_what_an_exception_keeps_is_said_below_its_list(tmp_path: Path):
    through = " -> traceback -> frame attempt() -> scratch"

    assert holders(told(tmp_path, owner("errors", through=through)))[1] == (
        "through traceback, frame attempt(), scratch"
    )


def test_weights_held_twice_are_noted(tmp_path: Path):
    names = [owner(n, "parameters", class_name="Net") for n in ("model", "ema")]

    assert (
        told(tmp_path, *names).notes[0].startswith("model and ema hold tensors of the same sizes")
    )


def test_cycles_are_noted_with_what_frees_them(tmp_path: Path):
    assert "gc.collect()" in told(tmp_path, owner("A -> A", "cycle")).notes[0]


def test_json_has_all_names_and_the_full_report_and_page_too(tmp_path: Path):
    found = told(tmp_path, owner("agent.buffer"))

    document = json.loads(render("analyze", "json", found, RenderOptions()))
    full = render("analyze", "text", found, RenderOptions(100, verbosity=Verbosity.FULL))
    page = render("analyze", "html", found, RenderOptions())

    assert [o["name"] for o in document["owners"]] == ["agent.buffer", None]
    assert "Held by name" in full
    assert "agent.buffer" in page


def test_line_that_asked_is_shown_from_the_bundle_where_no_file_is_at_hand(tmp_path: Path):
    text = render("analyze", "text", told(tmp_path, owner("agent.buffer")), RenderOptions(100))

    assert "25 | self.buffer.append(x)" in text


def test_redacted_snapshot_of_a_bundle_has_neither_names_nor_source(tmp_path: Path):
    from fragdoctor.export.redact import redacted
    from fragdoctor.export.snapshot_writer import write_snapshot

    place = bundle(tmp_path / "oom1", owner("secret.buffer"))
    written = io.BytesIO()
    write_snapshot(redacted(read_snapshot(str(place))), written)

    assert b"segments" in written.getvalue()
    assert b"buffer" not in written.getvalue()


def filling(place: Path, max_items: int, *, graph_bytes: int = 0) -> Path:
    """Return a bundle in which ``replay`` gained 10 MiB in each of eight steps.

    When the next request of the same line fails, a graph holds what that line has just made.
    """
    toy = ToyAllocator()
    for _ in range(8):
        batch = toy.malloc(4 * MIB, line=30)
        toy.malloc(10 * MIB, line=25)
        toy.free(batch)
    if graph_bytes:
        toy.malloc(graph_bytes, line=25)
    data = toy.data()
    blocks = [b for s in data["segments"] for b in s["blocks"] if b["size"] > 4 * MIB]
    sizes = [b["size"] for b in blocks]
    data["device_traces"][0].append(oom(64 * MIB, MIB))
    replay = owner("replay", class_name="deque", n_items=8, max_items=max_items)
    held = {
        "time_us": 1, "step": 0, "is_complete": True,
        "owners": [replay, owner("loss", "graph")],
        "devices": [0] * len(sizes), "addresses": [b["address"] for b in blocks], "sizes": sizes,
        "holders": [int(size == graph_bytes) for size in sizes],
    }  # fmt: skip
    bundle(place)
    (place / "snapshot.pickle").write_bytes(pickle.dumps(data))
    (place / "census.json").write_text(
        json.dumps({"format": "fragdoctor-census", "version": 1, "censuses": [held]}), "utf-8"
    )
    return place


@pytest.mark.parametrize("graph_bytes", [0, 200 * MIB])
@pytest.mark.parametrize(
    ("max_items", "cause", "decider"),
    [(0, Cause.LEAK, "growth"), (12, Cause.CAPACITY, "container-fills")],
)
def test_container_with_a_limit_fills_up_and_leaks_nothing(
    tmp_path: Path, max_items: int, cause: Cause, decider: str, graph_bytes: int
):
    place = filling(tmp_path / "oom1", max_items, graph_bytes=graph_bytes)

    found = diagnose(read_bundle(place), replays=False)

    assert (found.verdict.cause, found.verdict.decider) == (cause, decider)
    assert found.recommendations[0].title.startswith("Bound replay")
    if max_items:
        assert "may have 12 items, which take about 35.00 MiB more" in found.verdict.summary


def test_damaged_census_leaves_the_bundle_readable(tmp_path: Path):
    place = bundle(tmp_path / "oom1", owner("agent.buffer"))
    (place / "census.json").write_text("{", encoding="utf-8")

    found = diagnose(read_bundle(place), replays=False)

    assert found.owners == ()
    assert any("census.json" in note for note in found.notes)
