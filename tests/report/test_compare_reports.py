from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from attacks_on_text import HOSTILE
from msgspec.structs import replace
from runs import Ask, case
from schemas import must_fit_exactly, schema

from fragdoctor.comparison.compare_cases import compare_cases
from fragdoctor.errors import ConfigError
from fragdoctor.gate.judgement import judge_growth
from fragdoctor.model import comparison as model
from fragdoctor.model.comparison import Comparison
from fragdoctor.report.base import VIEWS, RenderOptions, Verbosity, check_format, render
from fragdoctor.units import parse_amount

LOOK = RenderOptions()
BEFORE = (Ask(10, 40, "build"), Ask(50, 30, calls=("linear",)), Ask(52, 60, kept=False))
AFTER = (Ask(10, 40, "build"), Ask(57, 45, calls=("linear",)), Ask(70, 60, "evaluate"))


def pair(name: str = "run.pickle") -> Comparison:
    return compare_cases([("before.pickle", case(*BEFORE)), (name, case(*AFTER))])


def series() -> Comparison:
    runs = [(f"{n}.pickle", case(*BEFORE, *[Ask(80, 20)] * n)) for n in range(1, 6)]
    return compare_cases(runs, capacity_bytes=2**30)


def hostile(text: str) -> Comparison:
    bad = Ask(9, 30, function=text or "f", file=f"/w/{text}.py", calls=(text,))
    return compare_cases([(text, case(*BEFORE)), (text, case(*BEFORE, bad))])


def rendered(name: str, comparison: Comparison, look: RenderOptions = LOOK) -> str:
    judged = judge_growth(comparison, parse_amount("2%"))
    return render("compare", name, comparison, look, judged=judged)


@pytest.mark.parametrize("make", [pair, series, lambda: hostile("a\x1b[31mb")])
def test_document_fits_its_schema_exactly(make: Any) -> None:
    document = json.loads(rendered("json", make()))

    must_fit_exactly(document, "compare")


@pytest.mark.parametrize(
    ("enum", "name", "path"),
    [
        (model.Basis, "compare", ("properties", "basis")),
        (model.LineKind, "types", ("$defs", "line_change", "properties", "kind")),
        (model.CauseKind, "types", ("$defs", "likely_cause", "properties", "kind")),
    ],
)
def test_schema_lists_each_value(enum: Any, name: str, path: tuple[str, ...]) -> None:
    found: Any = schema(name)
    for key in path:
        found = found[key]

    assert found["enum"] == [member.value for member in enum]


def test_text_says_the_answer_first_and_both_lines_of_a_moved_line() -> None:
    text = rendered("text", pair(), RenderOptions(width=120))

    assert text.startswith("B peaks 15.00 MiB (+12%) higher")
    assert re.search(r"train\.py:50 -> :57 in step", text)
    assert "asks 1.5x: 30.00 MiB -> 45.00 MiB" in text
    assert "Peak allocated memory of GPU 0 grew by 15.00 MiB, more than" in text


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("make", [pair, series])
def test_text_keeps_its_width(make: Any, width: int) -> None:
    for verbosity in (Verbosity.NORMAL, Verbosity.FULL):
        text = rendered("text", make(), RenderOptions(width=width, verbosity=verbosity))

        assert max(map(len, text.splitlines())) <= width


def test_quiet_text_is_the_answer_and_the_gate() -> None:
    text = rendered("text", pair(), RenderOptions(verbosity=Verbosity.QUIET))

    assert text.splitlines()[0] == pair().summary
    assert len(text.splitlines()) == 3


def test_series_tells_slope_and_lines() -> None:
    text = rendered("text", series(), RenderOptions(width=120))

    assert text.startswith("Peak allocated memory grows by 20.00 MiB per snapshot")
    assert re.search(r"\+20\.00 MiB .* train\.py:80 in step|\+20\.00 MiB.*train\.py:80", text)


class Page(HTMLParser):
    """Collects the tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def _policy(page: Page) -> str:
    return next(v for k, v in page.attributes if k == "content" and v and "default-src" in v)


def test_run_between_two_of_the_same_settings_may_have_others() -> None:
    same = series()
    odd = replace(same.runs[1], conf="expandable_segments:True")
    mixed = replace(same, settings=(), runs=(same.runs[0], odd, *same.runs[2:]))

    text = rendered("text", mixed)

    assert "the settings of B differ or are not recorded" in " ".join(text.split())


@pytest.mark.parametrize("make", [pair, series])
def test_page_needs_nothing_and_runs_our_script_alone(make: Any) -> None:
    text = rendered("html", make())

    page = Page(text)
    assert page.tags.count("script") == 1
    assert not {name for name, _ in page.attributes if name.startswith("on") or name == "src"}
    links = {value for name, value in page.attributes if name == "href"}
    assert all(link and link.startswith(("#", "data:,")) for link in links)
    policy = _policy(page)
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[^' ]+'; ", policy)
    assert "connect-src" not in policy
    assert "http" not in re.sub(r'http-equiv="[^"]*"|"http://www.w3.org/2000/svg"', "", text)


def test_page_of_two_runs_with_their_analyses_has_one_explorer_for_both() -> None:
    runs = [("before.pickle", case(*BEFORE)), ("run.pickle", case(*AFTER))]

    text = rendered("html", compare_cases(runs, explores=True))
    page = Page(text)

    assert re.findall(r'data-show="(\w+)"', text) == ["A", "B"]
    assert 'id="timeline-graphic"' in text
    assert "What if" not in text
    assert page.tags.count("script") == 2


def test_analyses_are_kept_for_a_page_of_two_runs_alone() -> None:
    runs = [(f"{n}.pickle", case(*BEFORE, *[Ask(80, 20)] * n)) for n in range(1, 4)]

    assert all(r.analysis is None for r in pair().runs)
    assert all(r.analysis is None for r in compare_cases(runs, explores=True).runs)
    assert all(r.analysis is not None for r in compare_cases(runs[:2], explores=True).runs)


def test_page_draws_the_value_of_each_run_and_the_line_through_them() -> None:
    text = rendered("html", series())

    assert text.count("<circle") == 5
    assert (
        len(re.findall(r'<path class="fit r1" d="M[\d.]+ [\d.]+L[\d.]+ [\d.]+"></path>', text)) == 1
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_stay_text(text: str) -> None:
    comparison = hostile(text)

    page = Page(rendered("html", comparison))
    assert set(page.tags) <= set(Page(rendered("html", pair())).tags) | {"details", "summary"}
    for name in ("text", "markdown"):
        shown = rendered(name, comparison)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    markdown = rendered("markdown", comparison)
    assert "<script" not in re.sub(r"`+.*?`+", "", markdown)
    json.loads(rendered("json", comparison))


def test_markdown_is_compact_with_the_rest_folded() -> None:
    text = rendered("markdown", pair())

    assert text.startswith("## B peaks 15.00 MiB (+12%) higher")
    assert "**Peak allocated memory of GPU 0 grew by 15.00 MiB, more than" in text
    assert text.count("<details>") == text.count("</details>") == 1
    folded = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert len(folded.splitlines()) < 60


def test_unknown_format_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        check_format("compare", "htm")

    assert "html" in caught.value.hint
    assert set(VIEWS["compare"]) == {"text", "json", "markdown", "html"}


def test_runs_of_one_name_are_told_apart_by_the_folder_that_differs():
    folder = "/srv/experiments/2026/a-rather-long-name-of-a-project/checkpoints"
    names = [f"{folder}/{run}/memory/snapshot.pickle" for run in ("old", "new")]
    comparison = compare_cases(zip(names, [case(*BEFORE), case(*AFTER)], strict=True))

    shown = render("compare", "text", comparison, RenderOptions(80))

    assert "old/memory/snapshot.pickle" in shown
    assert "new/memory/snapshot.pickle" in shown
    assert [run.name for run in comparison.runs] == names


def test_cause_that_the_answer_tells_is_told_once() -> None:
    cause = pair().causes[0]
    cause = replace(cause, text="Settings did it. All is served under them.")
    comparison = replace(pair(), summary=cause.text, causes=[cause])

    text = " ".join(rendered("text", comparison).split())

    assert text.count("All is served under them.") == 1
    assert text.count("Settings did it.") == 2
