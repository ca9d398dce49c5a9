from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import fleets
import pytest
from msgspec.structs import replace
from schemas import must_fit_exactly, schema

from fragdoctor.fleet.conclusions import conclude
from fragdoctor.fleet.engine import fleet_of
from fragdoctor.model.diagnosis import Cause, Predicted, Recommendation
from fragdoctor.model.finding import Confidence
from fragdoctor.model.fleet import DifferenceKind, FleetReport, SourceLine, members, ranks_text
from fragdoctor.report.base import VIEWS, RenderOptions, Verbosity, render
from fragdoctor.report.views.job import advice_of

HOSTILE = "\x1b[31m<script>alert(1)</script>\u202e|`x`{{7*7}}\n## head"


def job(text: str = "train.py", n: int = 8) -> FleetReport:
    """Return a job with an odd rank and an unread one; ``text`` stands wherever input may."""
    lines = (SourceLine(text, 88, text, 900 << 20, 3),)
    predicted = Predicted(fits=True, method="replay")
    advice = Recommendation(1, "code", text, Confidence.LIKELY, text, text, predicted=predicted)
    odd = fleets.summary(
        5,
        path=f"{text}/5",
        rank=None,
        holders=lines,
        cause=Cause.CAPACITY,
        has_failed=True,
        summary=text,
        settings=((text, text),),
        advice=advice,
        host=text,
    )
    bad = replace(fleets.unread(7, error=text), path=f"{text}/7", rank=None, hint=text)
    usual = [fleets.summary(i) for i in range(n) if i not in (5, 7)]
    return conclude(fleet_of([*usual, odd, bad]), notes=[text])


def rendered(name: str, report: FleetReport, **look: object) -> str:
    return render("fleet", name, report, RenderOptions(**look))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["train.py", HOSTILE, "\udc80"])
def test_document_fits_its_schema_exactly(text: str) -> None:
    document = json.loads(rendered("json", job(text)))

    must_fit_exactly(document, "fleet")


@pytest.mark.parametrize("name", VIEWS["fleet"])
@pytest.mark.parametrize("verbosity", list(Verbosity))
def test_hostile_text_stays_text(name: str, verbosity: Verbosity) -> None:
    out = rendered(name, job(HOSTILE), verbosity=verbosity)

    assert "\x1b" not in out
    assert "\u202e" not in out
    outside_code = re.sub(r"(`+).*?\1(?!`)", "", out)
    if name == "html":  # its own, as with plain names
        assert out.count("<script") == rendered(name, job()).count("<script")
    else:
        assert "<script" not in outside_code or name in ("text", "json")
    assert not any(line.startswith("## head") for line in out.splitlines())


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_page_has_our_script_alone_no_handler_and_loads_nothing() -> None:
    page = _Page()
    page.feed(out := rendered("html", job(HOSTILE)))

    assert page.tags & {"img", "iframe", "object", "form"} == set()
    assert re.search("script-src &#39;sha256-[^& ]+&#39;; ", out)
    assert not any(a.startswith("on") or a in ("src", "style") for a in page.attributes)
    assert re.findall(r'href="(?!#|data:,)', out) == []
    assert "default-src &#39;none&#39;" in out


def test_page_of_a_thousand_ranks_is_small() -> None:
    assert len(rendered("html", job(n=1000)).encode()) < 1_000_000


def test_text_of_a_thousand_ranks_is_short() -> None:
    assert rendered("text", job(n=1000)).count("\n") < 60


@pytest.mark.parametrize("name", VIEWS["fleet"])
def test_each_format_tells_the_verdict_the_odd_rank_and_the_unread_one(name: str) -> None:
    report = job("x_y.py")

    out = " ".join(rendered(name, report, width=120).split())

    plain = out.replace("\\", "")
    assert report.verdict.summary.split(";")[0] in plain
    assert "x_y.py:88" in plain
    assert "x_y.py/7" in plain


def test_schema_lists_each_cause_and_kind_of_difference() -> None:
    definitions = schema("types")["$defs"]

    causes = definitions["rank_group"]["properties"]["cause"]["enum"]
    assert set(causes) == {c.value for c in Cause}
    kinds = definitions["difference"]["properties"]["kind"]["enum"]
    assert set(kinds) == {k.value for k in DifferenceKind}


def test_members_are_joined_in_runs() -> None:
    assert ranks_text([f"rank {i}" for i in (0, 1, 2, 5, 7)]) == "ranks 0-2, 5 and 7"
    assert ranks_text(["host a rank 0"]) == "host a rank 0"
    assert members([f"rank {2 * i}" for i in range(20)], 2) == ["0", "2", "18 more"]


def test_advice_of_alike_failures_is_given_once() -> None:
    advice = Recommendation(1, "code", "Do it", Confidence.LIKELY)
    ranks = [
        fleets.summary(i, {10: 100 + 400 * (i % 2)}, has_failed=True, advice=advice)
        for i in range(6)
    ]

    told = advice_of(conclude(fleet_of(ranks)))

    assert [(advice.title, len(labels)) for advice, labels in told] == [("Do it", 6)]
