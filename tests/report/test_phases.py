"""Training phases in every format, from a program whose truth is known."""

from __future__ import annotations

import json
from functools import cache

import pytest
from analysis.training_loop import PARAMETERS, TrainingLoop
from page_blob import decode, decode_array
from schemas import must_fit_exactly

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Confidence
from fragdoctor.model.phases import Category, TrainingPhase
from fragdoctor.report.base import RenderOptions, Verbosity, render
from fragdoctor.report.page.page import encode_payload

MODEL = sum(PARAMETERS)


@cache
def training(n_steps: int = 3, context: str = "all") -> Diagnosis:
    loop = TrainingLoop(context=context)
    loop.build()
    for _ in range(n_steps):
        loop.step()
    return diagnose(Case(snapshot=loop.snapshot(), sources=("run.pickle",)))


def full_text(diagnosis: Diagnosis, width: int = 80) -> str:
    return render("analyze", "text", diagnosis, RenderOptions(width, verbosity=Verbosity.FULL))


def test_diagnose_training_reports_its_phases_and_categories():
    (report,) = training().phases

    assert [(p.phase, p.n_passes) for p in report.phases] == [
        (TrainingPhase.SETUP, 1),
        (TrainingPhase.FORWARD, 3),
        (TrainingPhase.BACKWARD, 3),
        (TrainingPhase.OPTIMIZER, 3),
    ]
    assert report.peak_phase is TrainingPhase.BACKWARD
    rest = {s.category: s for s in report.at_rest}
    assert rest[Category.PARAMETERS].n_bytes == MODEL
    assert rest[Category.PARAMETERS].confidence is Confidence.LIKELY
    assert rest[Category.PARAMETERS].lines[0].location.filename == "train.py"


def test_json_phases_fit_the_schema_exactly():
    document = json.loads(render("analyze", "json", training(), RenderOptions()))

    must_fit_exactly(document, "diagnosis")
    (report,) = document["phases"]
    assert report["method"] == "stacks"
    held = {s["category"]: s["n_bytes"] for s in report["at_rest"]}
    assert held == {"parameters": MODEL, "optimizer_state": 2 * MODEL}


@pytest.mark.parametrize("width", [80, 120])
def test_text_phases_fit_the_width_and_name_the_phase_of_the_peak(width):
    said = full_text(training(), width)

    assert all(len(line) <= width for line in said.splitlines())
    assert "is in the backward pass." in said
    block = said.split("\nPhases")[1]
    for word in ("setup", "forward", "backward", "optimizer", "parameters", "between steps"):
        assert word in block


def test_text_without_phases_has_no_block_of_them():
    said = full_text(training(context="none"))

    assert training(context="none").phases[0].reason
    assert "\nPhases" not in said


def test_markdown_phases_are_tables():
    said = render("analyze", "markdown", training(), RenderOptions())

    assert "### Phases: GPU 0, allocated memory by phase of a training step" in said
    assert "| optimizer state | **20.00 MiB** | 20.00 MiB | likely |" in said


def test_html_phases_are_in_the_page_and_in_its_data():
    diagnosis = training()
    analysis = diagnosis.analyses[0]

    page = render("analyze", "html", diagnosis, RenderOptions())
    head, body = decode(encode_payload(diagnosis))

    assert 'aria-label="Phases"' in page
    assert "is in the backward pass." in page
    band = head["devices"]["0"]["timeline"]["training"]
    assert decode_array(body, band["label"]).tolist() == [0] + [1, 2, 3] * 3
    assert decode_array(body, band["first"]).tolist() == analysis.phases.first.tolist()
