"""Tables, traces and stacks of a small snapshot, read back by what reads them elsewhere."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import builders
import jsonschema
import numpy as np
import pandas as pd
import pytest
from builders import BASE, MIB, alloc, block, frame, free, oom, segment, segment_alloc, snapshot

import fragdoctor
from fragdoctor.analysis.device import analyze_device
from fragdoctor.export import snapshot_tables, trace_events
from fragdoctor.export.speedscope import speedscope_text
from fragdoctor.export.trace_events import DeviceLife
from fragdoctor.model.snapshot import Snapshot

A, B = [frame("/p/a.py", 1, "f"), frame("/p/m.py", 9, "<module>")], [frame("/p/b.py", 2, "g")]


def example(**names: str) -> Snapshot:
    """Return one live block of 4 MiB, and one of 8 MiB that was freed; the peak is 12 MiB."""
    data = snapshot(
        segment(BASE, block(4 * MIB, "active_allocated", frames=A), block(16 * MIB)),
        events=[
            segment_alloc(BASE, 20 * MIB, time_us=1000),
            alloc(BASE, 4 * MIB, frames=A, time_us=1010),
            alloc(BASE + 4 * MIB, 8 * MIB, frames=B, time_us=1020),
            oom(64 * MIB, 1 * MIB, frames=B, time_us=1025),
            *free(BASE + 4 * MIB, 8 * MIB, time_us=1030),
        ],
    )
    data["external_annotations"] = [
        {"device": 0, "time_us": 1005, "name": names.get("phase", "warm up"), "stage": "START"},
        {"device": 0, "time_us": 1030, "name": names.get("phase", "warm up"), "stage": "END"},
    ]
    return builders.columns(data)


def csv_rows(frame_: pd.DataFrame) -> list[dict[str, str]]:
    out = io.StringIO()
    snapshot_tables.write_csv(frame_, out.write)
    return list(csv.DictReader(io.StringIO(out.getvalue())))


@pytest.mark.parametrize(("name", "n"), [("events", 6), ("blocks", 2), ("segments", 1)])
def test_csv_has_a_row_for_each(name: str, n: int) -> None:
    assert len(csv_rows(snapshot_tables.table(example(), name))) == n


def test_allocations_have_their_whole_life() -> None:
    rows = {
        int(r["size_bytes"]): r for r in csv_rows(snapshot_tables.table(example(), "allocations"))
    }

    assert set(rows) == {4 * MIB, 8 * MIB}
    assert (rows[4 * MIB]["start_event"], rows[4 * MIB]["free_event"]) == ("1", "")
    assert (rows[8 * MIB]["start_event"], rows[8 * MIB]["free_event"]) == ("2", "4")
    assert rows[8 * MIB]["location"] == "/p/b.py:2 in g"


def test_csv_in_parts_equals_csv_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = csv_rows(snapshot_tables.table(example(), "events"))
    monkeypatch.setattr(snapshot_tables, "_CHUNK", 2)

    assert csv_rows(snapshot_tables.table(example(), "events")) == whole


def test_csv_starts_no_formula() -> None:
    data = snapshot(
        segment(BASE, block(2 * MIB, "active_allocated", frames=[frame("=cmd|' /c'!A1", 1, "f")]))
    )

    (row,) = csv_rows(snapshot_tables.table(builders.columns(data), "blocks"))

    assert row["location"].startswith("'=")


def traced(snap: Snapshot) -> list[dict[str, Any]]:
    return json.loads("".join(trace_events.trace_parts(snap)))["traceEvents"]  # type: ignore[no-any-return]


def check_trace_events(events: list[dict[str, Any]]) -> None:
    """Hold events to the Trace Event Format: phases, their required fields, pairs."""
    balance: Counter[tuple[Any, ...]] = Counter()
    for event in events:
        assert event["ph"] in {"M", "C", "b", "e", "i"}
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert event["pid"] > 0
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(v, int) for v in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in {"g", "p", "t"}
        if event["ph"] in {"b", "e"}:
            key = (event["pid"], event["cat"], event["id2"]["local"])
            balance[key] += 1 if event["ph"] == "b" else -1
            assert balance[key] >= 0
    assert all(n == 0 for n in balance.values())


def test_trace_is_of_the_trace_event_format() -> None:
    check_trace_events(traced(example()))


def test_trace_counters_reach_the_peak() -> None:
    peaks: Counter[str] = Counter()
    for event in traced(example()):
        if event["ph"] == "C":
            for name, value in event["args"].items():
                peaks[name] = max(peaks[name], value)

    assert peaks == {"allocated": 12 * MIB, "active": 12 * MIB, "reserved": 20 * MIB}


def test_trace_has_slices_marks_and_annotations_at_their_times() -> None:
    events = traced(example())
    slices = [(e["ph"], e["ts"]) for e in events if e.get("args", {}).get("size_bytes") == 8 * MIB]
    (mark,) = (e for e in events if e["ph"] == "i")
    phases = [(e["ph"], e["ts"]) for e in events if e.get("cat") == "annotation"]

    assert slices == [("b", 20)]
    assert mark["name"] == "out of memory: 64.00 MiB refused"
    assert (mark["ts"], mark["args"]["device_free_bytes"]) == (25, 1 * MIB)
    assert phases == [("b", 5), ("e", 30)]


def test_trace_thinned_out_keeps_the_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events, "MAX_POINTS", 50)
    rng = np.random.default_rng(1)
    columns = tuple(rng.integers(0, 10**9, 10_000) for _ in range(3))

    kept = trace_events._thinned(columns)

    assert len(kept) < 100
    assert kept[0] == 0
    assert kept[-1] == 9_999
    for column in columns:
        assert column[kept].max() == column.max()
        assert column[kept].min() == column.min()


def test_trace_of_hostile_names_is_plain() -> None:
    text = "".join(trace_events.trace_parts(example(phase="\x1b[2J\u202e</script>\ud800")))

    assert text.isascii()
    assert "\\u001b" not in text
    check_trace_events(json.loads(text)["traceEvents"])


SPEEDSCOPE: dict[str, Any] = {
    "type": "object",
    "required": ["$schema", "profiles", "shared"],
    "properties": {
        "$schema": {"const": "https://www.speedscope.app/file-format-schema.json"},
        "name": {"type": "string"},
        "exporter": {"type": "string"},
        "activeProfileIndex": {"type": "number"},
        "shared": {
            "type": "object",
            "required": ["frames"],
            "properties": {
                "frames": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string"},
                            "file": {"type": "string"},
                            "line": {"type": "number"},
                            "col": {"type": "number"},
                        },
                    },
                }
            },
        },
        "profiles": {
            "type": "array",
            "items": {
                "type": "object",
                "required": [
                    "type", "name", "unit", "startValue", "endValue", "samples", "weights",
                ],
                "additionalProperties": False,
                "properties": {
                    "type": {"const": "sampled"},
                    "name": {"type": "string"},
                    "unit": {
                        "enum": [
                            "bytes", "microseconds", "milliseconds", "nanoseconds", "none",
                            "seconds",
                        ]
                    },
                    "startValue": {"type": "number"},
                    "endValue": {"type": "number"},
                    "samples": {
                        "type": "array",
                        "items": {"type": "array", "items": {"type": "number"}},
                    },
                    "weights": {"type": "array", "items": {"type": "number"}},
                },
            },
        },
    },
}  # fmt: skip
"""What speedscope's own schema asks of a file of sampled profiles."""


def stacks_of(snap: Snapshot) -> dict[str, dict[tuple[str, ...], int]]:
    document = json.loads(speedscope_text(snap))
    jsonschema.validate(document, SPEEDSCOPE)
    frames = document["shared"]["frames"]
    found = {}
    for profile in document["profiles"]:
        assert profile["endValue"] == sum(profile["weights"])
        stacks: Counter[tuple[str, ...]] = Counter()
        for sample, weight in zip(profile["samples"], profile["weights"], strict=True):
            stacks[tuple(frames[i]["name"] for i in sample)] += weight
        found[profile["name"]] = dict(stacks)
    return found


def test_speedscope_has_outermost_frames_first() -> None:
    found = stacks_of(example())

    assert found["GPU 0: live at the peak"] == {("g",): 8 * MIB, ("<module>", "f"): 4 * MIB}
    assert found["GPU 0: live at the end"] == {("<module>", "f"): 4 * MIB}
    assert sum(found["GPU 0: all allocations"].values()) == 12 * MIB


def test_speedscope_of_an_empty_snapshot_is_still_a_file() -> None:
    assert stacks_of(builders.columns(snapshot())) == {"empty": {}}


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("name", ["frag_gpt_varlen", "two_devices", "no_context", "empty"])
def test_recording_exports_with_the_figures_of_the_analysis(shared: Path, name: str) -> None:
    snap = fragdoctor.load(shared / "snapshots" / name / "snapshot.pickle")
    events = traced(snap)
    stacks = stacks_of(snap)

    check_trace_events(events)
    for device in snap.devices:
        analysis = analyze_device(snap, device)
        if analysis.timeline is not None:
            life = DeviceLife.of(analysis.trace)
            top = max(
                (
                    e["args"]["allocated"]
                    for e in events
                    if e["ph"] == "C" and e["pid"] == device + 1 and "allocated" in e["args"]
                ),
                default=0,
            )
            assert top == analysis.timeline.peak_allocated_bytes
            peak = sum(stacks[f"GPU {device}: live at the peak"].values())
            assert peak == analysis.timeline.peak_allocated_bytes
            assert life.clock_us.min() >= 0
