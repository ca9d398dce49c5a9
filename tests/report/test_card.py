"""Cards for Jupyter: they say what matters, and nothing of a file gets out of its place."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import diagnoses
import numpy as np
import pytest
from msgspec.structs import replace
from stock import from_python

import fragdoctor
from fragdoctor.model import hooks
from fragdoctor.model.diagnosis import Cause, Diagnosis
from fragdoctor.model.finding import Confidence
from fragdoctor.report.card import diagnosis_card, snapshot_card

HOSTILE = "</div><script>alert(1)</script><img src=x onerror=y>\"' \x1b[31m\u202e"
ALLOWED = {"pre", "span"}


class Elements(HTMLParser):
    """Collects the elements, their attributes and the text of a card."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(html: str) -> Elements:
    found = Elements(html)
    found.text = " ".join(found.text.split())
    assert found.open == []
    assert found.tags <= ALLOWED
    assert found.attributes <= {"style"}
    assert "url(" not in html
    return found


def test_diagnosis_card_is_the_short_report() -> None:
    diagnosis = diagnoses.fragmentation()

    text = checked(diagnosis_card(diagnosis)).text

    assert "Fragmentation" in text
    assert diagnosis.verdict.summary in text
    assert f"export {diagnosis.recommendations[0].setting}" in text
    assert diagnosis.recommendations[1].title in text
    assert "gpt_cache.py:88" in text
    assert "checklist_frame()" in text


@pytest.mark.parametrize("cause", list(Cause))
def test_diagnosis_card_of_any_cause_without_anything_else(cause: Cause) -> None:
    whole = diagnoses.fragmentation()
    verdict = replace(whole.verdict, cause=cause, device=None)

    text = checked(diagnosis_card(Diagnosis(whole.case, verdict, ()))).text

    assert whole.verdict.summary in text
    assert "Other options" not in text
    assert "Who holds it" not in text


def test_diagnosis_card_escapes_what_comes_from_a_file() -> None:
    whole = diagnoses.fragmentation()
    advice = replace(whole.recommendations[0], title=HOSTILE, setting=HOSTILE)
    item = replace(whole.checklist[0], value=HOSTILE, detail=HOSTILE)
    hostile = replace(
        whole,
        verdict=replace(
            whole.verdict, confidence=Confidence.LIKELY, summary=HOSTILE, settled_by=HOSTILE
        ),
        recommendations=(advice,),
        checklist=(item,),
    )

    html = diagnosis_card(hostile)

    found = checked(html)
    assert found.text.count("<script>") >= 3  # as text
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", html)


def test_card_cuts_endless_text() -> None:
    whole = diagnoses.fragmentation()
    verdict = replace(whole.verdict, summary="x" * 10**6)

    html = diagnosis_card(Diagnosis(whole.case, verdict, ()))

    assert len(html) < 10_000
    assert " ... " in checked(html).text


def snapshot() -> fragdoctor.Snapshot:
    block = {"size": 2**21, "requested_size": 5, "state": "active_allocated"}
    segment = {"device": 1, "address": 2**30, "total_size": 2**22, "stream": 0}
    free = {"size": 2**21, "requested_size": 0, "state": "inactive"}
    segments = [{**segment, "blocks": [block, free]}]
    return from_python({"segments": segments, "device_traces": []})


def test_snapshot_card_sums_up_each_device() -> None:
    text = checked(snapshot_card(snapshot())).text

    assert "GPU 1" in text
    assert "4.00 MiB" in text
    assert "2.00 MiB" in text


def test_snapshot_card_of_an_empty_snapshot_says_so() -> None:
    empty = from_python({"segments": [], "device_traces": []})

    assert "no device memory" in checked(snapshot_card(empty)).text


def test_snapshot_card_survives_sizes_that_no_sum_can_hold() -> None:
    whole = snapshot()
    huge = np.full(1, 2**64 - 1, np.uint64)
    two = replace(
        whole, segments=replace(whole.segments, total_bytes=huge),
        provenance=replace(whole.provenance, source=HOSTILE),
    )  # fmt: skip

    checked(snapshot_card(two))


def test_values_of_the_api_show_themselves() -> None:
    diagnosis = fragdoctor.diagnose("CUDA out of memory. Tried to allocate 2.00 GiB.")

    assert diagnosis._repr_html_() == diagnosis_card(diagnosis)
    assert snapshot()._repr_html_() == snapshot_card(snapshot())
    assert len(repr(diagnosis)) < 400
    assert "events" in repr(snapshot())


def test_value_that_nobody_draws_shows_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_DRAWN_BY", {})

    assert snapshot()._repr_html_() is None


def test_repr_of_hostile_text_stays_on_its_line() -> None:
    whole = diagnoses.fragmentation()
    hostile = replace(whole, verdict=replace(whole.verdict, summary=HOSTILE + "\n"))

    assert repr(hostile).isprintable()
