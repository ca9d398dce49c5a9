"""The verdicts on the recordings and messages beside the project."""

from __future__ import annotations

import json
import re

import pytest

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.messages import find_messages
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.inputs.stats_reader import read_stats
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.report.base import RenderOptions, Verbosity, render

pytestmark = [pytest.mark.slow, pytest.mark.shared]

# A snapshot does not record the size of the device: without the message nobody can know that
# another process holds the rest. The verdict says so instead.
NEEDS_MESSAGE = {"non_pytorch_memory": Cause.OTHER_PROCESS}

# First cause of each note on the allocator's messages; what the note names besides. The note on
# 036 leaves open whether Intel's driver limits single allocations or states too much free memory.
MESSAGES = {
    "004": "fragmentation", "007": "capacity", "009": "other_process", "012": "capacity",
    "015": "fragmentation", "016": "capacity", "020": "capacity", "028": "other_process",
    "029": "capacity", "030": "capacity", "033": "non_pytorch_memory", "034": "capacity",
    "035": "unknown", "036": "memory_limit", "038": "capacity", "040": "fragmentation",
    "042": "capacity", "044": "fragmentation", "045": "capacity", "046": "memory_limit",
    "047": "capacity", "048": "capacity", "049": "capacity", "050": "capacity",
    "052": "fragmentation", "054": "memory_limit", "055": "other_process", "058": "capacity",
    "060": "capacity", "064": "capacity", "068": "capacity", "069": "capacity", "071": "capacity",
    "072": "capacity", "073": "capacity", "075": "unknown",
}  # fmt: skip
ALSO = {"015": {"other_process"}, "034": {"fragmentation", "non_pytorch_memory", "other_process"},
        "048": {"fragmentation"}, "058": {"fragmentation"},  # holes of 4% are no cause
        "049": {"fragmentation", "non_pytorch_memory"}}  # fmt: skip


def expected(shared):
    return json.loads((shared / "snapshots" / "expected.json").read_text())


def judge(verdict, want):
    allowed = {want["cause"], *want.get("also", ())}
    return verdict.cause in allowed and verdict.device == want.get("device", verdict.device)


def test_verdict_on_every_recording_alone(shared):
    wrong = {}
    for name, want in expected(shared).items():
        case = Case(snapshot=read_snapshot(shared / "snapshots" / name / "snapshot.pickle"))
        verdict = diagnose(case).verdict
        is_right = judge(verdict, want)
        if name in NEEDS_MESSAGE:
            is_right = NEEDS_MESSAGE[name] in verdict.also and "GPU" in verdict.settled_by
        if not is_right:
            wrong[name] = verdict.cause

    assert wrong == {}


def test_verdict_on_every_recording_with_message_and_statistics(shared):
    wrong = {}
    for name, want in expected(shared).items():
        folder = shared / "snapshots" / name
        text = folder / "oom.txt"
        case = Case(
            snapshot=read_snapshot(folder / "snapshot.pickle"),
            oom=find_messages(text.read_text()) if text.exists() else None,
            stats=read_stats((folder / "stats.json").read_text()),
        )
        verdict = diagnose(case).verdict
        if not judge(verdict, want):
            wrong[name] = verdict.cause

    assert wrong == {}


def test_verdict_on_truncated_recording_says_that_history_is_missing(shared):
    path = shared / "snapshots" / "frag_gpt_long_truncated" / "snapshot.pickle"

    diagnosis = diagnose(Case(snapshot=read_snapshot(path)))

    assert any("cut" in note for note in diagnosis.notes)
    assert "FD901" in [f.code for f in diagnosis.findings]


@pytest.mark.parametrize("number", MESSAGES)
def test_verdict_on_every_allocator_message_agrees_with_its_note(shared, number):
    text = (shared / "oom_messages" / f"{number}.txt").read_bytes().decode()

    verdict = diagnose(Case(oom=find_messages(text))).verdict

    assert MESSAGES[number] == verdict.cause
    assert ALSO.get(number, set()) <= {str(cause) for cause in verdict.also}


def test_verdict_on_every_other_message_is_honest(shared):
    folder = shared / "oom_messages"
    for path in sorted(folder.glob("*.json")):
        truth = json.loads(path.read_text())
        text = path.with_suffix(".txt").read_bytes().decode()

        verdict = diagnose(Case(oom=find_messages(text))).verdict

        if truth["kind"] in ("negative", "shared-memory"):
            assert Cause.NOT_MEMORY is verdict.cause, path.name
        if truth["kind"] == "host-ram":
            assert Cause.HOST_MEMORY is verdict.cause, path.name
        if truth["kind"] == "driver-no-figures":  # at most the traceback says what it was
            assert verdict.cause in (Cause.UNKNOWN, Cause.CAPACITY), path.name
            assert Confidence.POSSIBLE is verdict.confidence, path.name
        assert verdict.cause is not Cause.HEALTHY, path.name


def test_advice_on_the_twins_agrees_with_what_they_showed(shared):
    def advice(name):
        path = shared / "snapshots" / name / "snapshot.pickle"
        diagnosis = diagnose(Case(snapshot=read_snapshot(path)))
        return (
            {r.code for r in diagnosis.recommendations},
            {r.code for r in diagnosis.rejected},
        )

    helps, does_not = advice("frag_gpt_varlen")
    assert {"expandable-segments", "max-split-size", "roundup-divisions"} <= helps
    assert "garbage-collection-threshold" in does_not
    assert "expandable-segments" in advice("microbench_40mb")[0]
    assert "expandable-segments" in advice("microbench_alternate")[1]
    assert "expandable-segments" in advice("kvcache_cat_expandable")[1]


def test_texts_of_recordings_agree_in_number(shared):
    for name in ("microbench_alternate", "kvcache_cat_expandable", "empty_cache_calls"):
        case = Case(snapshot=read_snapshot(shared / "snapshots" / name / "snapshot.pickle"))
        diagnosis = diagnose(case)

        text = render("analyze", "text", diagnosis, RenderOptions(120, verbosity=Verbosity.FULL))

        assert not re.search(r"(?<![\d.,])1 [a-z ]*(blocks|segments|sizes|calls|steps)\b", text)
        assert not re.search(r"\d{7,}", text)


def test_evaluation_after_training_is_told_from_losses_that_wait(shared):
    folder = shared / "snapshots" / "eval_without_no_grad"
    diagnosis = diagnose(Case(snapshot=read_snapshot(folder / "snapshot.pickle")))

    assert diagnosis.recommendations[0].code == "no-grad"
