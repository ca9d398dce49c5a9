from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import builders
import numpy as np
import pytest
from builders import BASE, MIB, alloc, block, frame, segment, segment_alloc, snapshot
from stock import column_dict

import fragdoctor
from fragdoctor.export.redact import Pseudonyms, redacted, redacted_file
from fragdoctor.export.snapshot_writer import write_snapshot
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.trace.stacks import classify_file

SECRET = "/home/alice/secret_project/models/secret_net.py"
PRIVATE = ("alice", "secret", "acme")
FILES = (
    SECRET,
    r"C:\Users\alice\secret\train.py",
    "<ipython-input-3-secret>",
    "/tmp/ipykernel_1234/secret.py",
    "/home/alice/env/lib/python3.11/site-packages/torch/nn/modules/linear.py",
    "/home/alice/env/lib/python3.11/site-packages/acme_private/core.py",
    "/home/alice/src/pytorch/torch/optim/adamw.py",
    "/home/alice/.pyenv/lib/python3.11/threading.py",
    "/home/alice/.pyenv/lib/python3.11/acme_tool.py",
    "<frozen importlib._bootstrap>",
    "<acme>",
    "/home/alice/acme/kernel.cu",
    "/home/alice/acme/libsecret.so.1",
    "/home/alice/pytorch/c10/cuda/CUDACachingAllocator.cpp",
    "/usr/lib/libtorch_cuda.so",
    "??",
    "",
)
PUBLIC = (4, 6, 7, 9, 13, 14)


def example() -> Snapshot:
    stacks = [
        [frame(name, i, "work" if i in PUBLIC else f"secret_{i}"), frame(SECRET, 7, "<module>")]
        for i, name in enumerate(FILES)
    ]
    events: list[dict[str, Any]] = [segment_alloc(BASE, 20 * MIB, frames=stacks[0], time_us=1)]
    for i, stack in enumerate(stacks):
        row = alloc(BASE + i * 512, 512, frames=stack, time_us=2 + i)
        row["user_metadata"] = "acme customer"
        row["compile_context"] = "N/A" if i else "secret/1"
        events.append(row)
    blocks = [block(512, "active_allocated", frames=s) for s in stacks]
    data = snapshot(
        segment(BASE, *blocks, block(20 * MIB - 512 * len(blocks)), frames=stacks[0]),
        events=events,
    )
    data["external_annotations"] = [
        {"device": 0, "time_us": 3, "name": "acme phase", "stage": "START"}
    ]
    return builders.columns(data)


SAMPLES = Path(__file__).parents[2] / "sample_snapshots"


def written(snap: Snapshot) -> bytes:
    out = io.BytesIO()
    write_snapshot(snap, out)
    return out.getvalue()


def outcome(snap: Snapshot) -> dict[str, Any]:
    """Return what a diagnosis says, without the names in it."""
    d = fragdoctor.diagnose(snap)
    return {
        "verdict": (d.verdict.cause, d.verdict.confidence, d.verdict.device, d.verdict.also),
        "checklist": [(i.id, i.status, i.value) for i in d.checklist],
        "findings": [(f.code, f.severity, f.n_bytes, f.device) for f in d.findings],
        "recommendations": [(r.code, r.rank, r.setting, r.predicted) for r in d.recommendations],
        "rejected": [(r.code, r.setting, r.predicted) for r in d.rejected],
        "devices": d.devices,
        "stranders": [(p.n_blocks, p.stranded_bytes) for p in d.stranders],
        "holders": [(h.now_bytes, h.peak_bytes) for h in d.holders],
    }


@pytest.mark.parametrize("name", FILES)
def test_redacted_file_keeps_its_class_and_tells_nothing(name: str) -> None:
    new = redacted_file(name, Pseudonyms())

    assert classify_file(new) == classify_file(name)
    assert [word for word in PRIVATE if word in new] == []


def test_public_files_keep_their_names() -> None:
    names = Pseudonyms()

    assert redacted_file(FILES[4], names).endswith("/site-packages/torch/nn/modules/linear.py")
    assert redacted_file(FILES[6], names).endswith("/torch/optim/adamw.py")
    assert redacted_file(FILES[7], names).endswith("/lib/python3.11/threading.py")


def test_pseudonym_is_the_same_wherever_it_occurs() -> None:
    names = Pseudonyms()

    first, other = redacted_file(SECRET, names), redacted_file("/x/other.py", names)

    assert redacted_file(SECRET, names) == first
    assert first != other


def test_redacted_snapshot_holds_no_private_word() -> None:
    data = written(redacted(example()))

    assert [word for word in PRIVATE if word.encode() in data] == []


def test_redacted_snapshot_is_plain_and_readable_by_everyone() -> None:
    data = written(redacted(example()))

    plain = pickle.loads(data)
    ours = fragdoctor.load(data)

    assert len(plain["device_traces"][0]) == len(ours.events) == len(FILES) + 1
    assert plain["segments"][0]["blocks"][0]["frames"][1]["name"] == "<module>"


def test_snapshot_written_and_read_has_the_same_columns() -> None:
    before = example()

    after = fragdoctor.load(written(before))

    for name in ("segments", "blocks", "events", "stacks"):
        old, new = column_dict(getattr(before, name)), column_dict(getattr(after, name))
        for column, values in old.items():
            if column not in {"stack", "compile_context", "user_metadata", "frames"}:
                assert np.array_equal(values, new[column]), (name, column)
    assert [before.stack(i) for i in before.events.stack] == [
        after.stack(i) for i in after.events.stack
    ]
    assert before.settings == after.settings
    assert before.annotations == after.annotations


def test_stack_that_events_share_is_written_once() -> None:
    value = pickle.loads(written(example()))

    stacks = [row["frames"] for row in value["device_traces"][0]]
    assert len({id(stack) for stack in stacks}) == len({repr(stack) for stack in stacks})
    assert len({repr(stack) for stack in stacks}) < len(stacks)


def test_recording_diagnoses_the_same_after_redaction() -> None:
    before = fragdoctor.load(SAMPLES / "capacity_oom.pickle")

    expected = outcome(before)

    assert all(expected[part] for part in ("findings", "recommendations", "rejected", "holders"))
    assert outcome(fragdoctor.load(written(redacted(before)))) == expected


@pytest.mark.shared
@pytest.mark.slow
def test_each_recording_diagnoses_the_same_after_redaction(shared: Path) -> None:
    different = []
    for path in sorted((shared / "snapshots").glob("*/snapshot.pickle")):
        before = fragdoctor.load(path)
        after = fragdoctor.load(written(redacted(before)))
        if outcome(before) != outcome(after):
            different.append(path.parent.name)

    assert different == []


def test_redacted_marks_keep_what_they_are_of() -> None:
    data = builders.snapshot(segment(BASE, block(20 * MIB)), events=[alloc(BASE, 512, time_us=1)])
    names = ("Optimizer.step#Acme.step", "fragdoctor.backward", "fragdoctor.no_grad#Acme", "acme")
    data["external_annotations"] = [
        {"device": 0, "time_us": 3, "name": name, "stage": "START"} for name in names
    ]

    assert [a.name for a in redacted(builders.columns(data)).annotations] == [
        "Optimizer.step#optimizer_1",
        "fragdoctor.backward",
        "fragdoctor.no_grad#model_1",
        "annotation_1",
    ]
