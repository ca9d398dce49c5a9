from __future__ import annotations

import xml.etree.ElementTree as ET

import checks
import diagnoses
import pytest
from attacks_on_text import HOSTILE
from junitparser import Error, Failure, JUnitXml, Skipped

from fragdoctor.report import junit
from fragdoctor.report.base import RenderOptions

LOOK = RenderOptions()


def read(text: str) -> JUnitXml:
    return JUnitXml.fromstring(text.encode())


def kinds(xml: JUnitXml, suite: int) -> dict[str, list[type]]:
    return {case.name: [type(r) for r in case.result] for case in list(xml)[suite]}


def test_junit_of_a_check_is_read_back_with_a_suite_for_each_file() -> None:
    xml = read(junit.render(checks.mixed(), LOOK))

    assert [s.name for s in xml] == ["runs/a.pickle", "runs/b.pickle", "c.pickle"]
    assert {"read": [Error]} == kinds(xml, 2)
    failed = kinds(xml, 0)
    assert [Failure] == failed["max-stranded"]
    assert [Failure] == failed["findings"]
    assert failed["read"] == []
    assert kinds(xml, 1)["findings"] == []


def test_junit_counts_agree_with_its_cases() -> None:
    text = junit.render(checks.mixed(), LOOK)
    xml = read(text)
    counted = (xml.tests, xml.failures, xml.errors, xml.skipped)
    xml.update_statistics()

    assert counted == (xml.tests, xml.failures, xml.errors, xml.skipped)
    assert xml.failures > 0


def test_budget_that_an_input_cannot_answer_is_skipped_with_its_reason() -> None:
    from msgspec.structs import replace

    from fragdoctor.gate.judgement import judge, report

    case = diagnoses.healthy()
    blind = replace(case, devices=(replace(case.devices[0], capacity_bytes=None),))
    judged = judge("a", blind, checks.GATE)

    xml = read(junit.render(report([judged], checks.GATE), LOOK))

    assert [Skipped] == kinds(xml, 0)["min-headroom"]
    assert [Error] == kinds(xml, 1)["min-headroom"]


@pytest.mark.parametrize("name", diagnoses.ALL)
def test_junit_of_a_diagnosis_has_a_case_for_each_item_of_the_checklist(name: str) -> None:
    diagnosis = diagnoses.ALL[name]()

    xml = read(junit.render(diagnosis, LOOK))

    assert [*(i.id for i in diagnosis.checklist), "findings"] == [c.name for c in next(iter(xml))]


@pytest.mark.parametrize("text", [t for t in HOSTILE if t])
def test_junit_with_hostile_text_is_still_the_same_document(text: str) -> None:
    rendered = junit.render(checks.planted(text), LOOK)
    plain = junit.render(checks.planted("x"), LOOK)

    tags = [e.tag for e in ET.fromstring(rendered).iter()]

    assert [e.tag for e in ET.fromstring(plain).iter()] == tags
    assert "\x1b" not in rendered
