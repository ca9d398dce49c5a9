"""The story of a log in every format, and what it does to verdict and advice."""

from __future__ import annotations

import json

import pytest
import story_logs
from schemas import must_fit

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.messages import find_messages
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Cause, Status
from fragdoctor.report.base import RenderOptions, Verbosity, render

LOGS = {
    "optuna": story_logs.optuna(),
    "holes": story_logs.holes(),
    "assert-first": story_logs.assert_first(),
    "ranks": story_logs.ranks(),
    "torchrun": story_logs.torchrun(),
    "bars": story_logs.bars(),
}


def diagnosis_of(text):
    return diagnose(Case(oom=find_messages(text), sources=("sweep.log",)))


@pytest.fixture(scope="module", params=LOGS)
def diagnosis(request):
    return diagnosis_of(LOGS[request.param])


def text_of(diagnosis, **options):
    return render("analyze", "text", diagnosis, RenderOptions(**options))


@pytest.mark.parametrize("width", [80, 120])
def test_text_keeps_to_its_width_and_tells_the_story(diagnosis, width):
    text = text_of(diagnosis, width=width)

    assert "\nWhat happened  " in text
    assert max(len(line) for line in text.splitlines() if "export" not in line) <= width


def test_story_has_few_rows_and_more_in_full():
    found = diagnosis_of(story_logs.optuna(n=40, n_failing=30))

    short, long = (text_of(found, verbosity=v) for v in (Verbosity.NORMAL, Verbosity.FULL))

    story = short.split("\nWhat happened")[1]
    assert story.count("OOM: requested") <= 10
    assert "more failures in trials" in story
    assert "left out; --full has more" in story
    assert long.split("\nWhat happened")[1].count("OOM: requested") == 30


def story_text(text):
    return " ".join(text_of(diagnosis_of(text), width=100).split("\nWhat happened")[1].split())


OUT = story_logs.traceback(story_logs.message(20, 1))


def test_retries_of_a_counter_are_as_many_as_it_says():
    told = story_text("step 1\n" * 6 + "num_alloc_retries: 3\nnum_alloc_retries: 5\n" + OUT)

    assert told.startswith("by line, 1 OOM, 5 retries ")
    assert "retry, 5 so far" in told


def test_retries_in_a_row_are_one_row():
    tries = "".join(f"CUDA OOM, retrying with batch size {n}\n" for n in (8, 4))

    told = story_text("step 1\n" * 6 + tries + OUT)

    assert told.startswith("by line, 1 OOM, 2 retries ")
    assert "retry, 2 times CUDA OOM, retrying with batch size 8" in told


def test_long_run_is_told_in_days():
    days = "".join(f"2024-06-0{d} 10:00:0{s} step {d}{s}\n" for d in range(1, 5) for s in range(5))

    assert story_text(days + OUT).startswith("by time, over 3 days, 1 OOM ")


def test_two_failures_are_no_trend():
    told = story_text("step 1\n" * 6 + OUT + "step 2\n" * 300 + OUT.replace("20.00", "20.50"))

    assert "A trend needs three points; there are 2." in told


@pytest.mark.parametrize("schema", ["oom", "diagnosis"])
def test_json_fits_its_schema(diagnosis, schema):
    view = "oom" if schema == "oom" else "analyze"
    document = json.loads(render(view, "json", diagnosis, RenderOptions()))

    must_fit(document, schema)
    events = document["story"]["events"]
    for place, event in enumerate(events):
        cause = event["caused_by"]
        assert cause is None or 0 <= cause < len(events)
        assert cause != place


@pytest.mark.parametrize("name", ["markdown", "html"])
def test_other_formats_hold_the_story(diagnosis, name):
    text = render("analyze", name, diagnosis, RenderOptions())

    assert "What happened" in text
    assert "OOM: requested" in text


@pytest.mark.parametrize("name", ["text", "markdown", "html", "json"])
def test_hostile_trial_name_and_text_cannot_reach_the_terminal(name):
    text = story_logs.holes().replace("=== Trial 0 ===", "trial: 0\u202e\x07<script>")

    report = render("analyze", name, diagnosis_of(text), RenderOptions())

    assert "\x07" not in report
    assert "<script>alert" not in report
    assert name == "json" or "\u202e" not in report


def test_growth_from_trial_to_trial_becomes_the_verdict():
    found = diagnosis_of(story_logs.optuna(n=12, growth=1.65, n_failing=1))

    assert found.verdict.cause is Cause.LEAK
    growth = next(item for item in found.checklist if item.id == "growth")
    assert (growth.status, growth.source) == (Status.FAIL, "log")
    advice = {r.code: r for r in found.recommendations}
    assert "empty_cache() gives" in " ".join(advice["free-between-trials"].caveats)


def test_level_sweep_keeps_its_verdict_and_says_that_nothing_piles_up():
    found = diagnosis_of(story_logs.optuna(growth=0.0, n_failing=4))

    assert found.verdict.cause is not Cause.LEAK
    assert Cause.LEAK not in found.verdict.also


def test_growing_holes_are_found():
    found = diagnosis_of(story_logs.holes())

    assert found.verdict.cause is Cause.FRAGMENTATION


def test_story_tells_consequences_from_separate_failures():
    told = text_of(diagnosis_of(story_logs.ranks()))

    assert "rank 1  device-side assert  not a consequence" in told
    assert "rank 2  > device-side assert  the same process went on" in told


def test_single_message_has_no_story():
    found = diagnosis_of(story_logs.message(20, 1))

    assert found.story is None
    assert "What happened" not in text_of(found)
