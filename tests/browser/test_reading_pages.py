"""The pages of compare and of a job in a real browser: tables sort, links lead."""

from __future__ import annotations

from pathlib import Path

import fleets
import pytest
from runs import Ask, case

from fragdoctor.comparison.compare_cases import compare_cases
from fragdoctor.fleet.conclusions import conclude
from fragdoctor.fleet.engine import fleet_of
from fragdoctor.inputs.cases import read_case
from fragdoctor.model.case import Overrides
from fragdoctor.report.base import RenderOptions, render

pytestmark = pytest.mark.slow

SAMPLES = Path(__file__).resolve().parents[2] / "sample_snapshots"
HOSTILE = "<img src=x onerror=window.pwned=1>"


@pytest.fixture
def open_report(chromium, tmp_path):
    opened = []

    def open_(view, result, **options):
        path = tmp_path / f"{view}.html"
        path.write_text(render(view, "html", result, RenderOptions()), "utf-8")
        opened.append(chromium.page(path, **options))
        return opened[-1]

    yield open_
    for page in opened:
        page.evaluate("localStorage.clear()")
        page.close()


def comparison(name="b.pickle", *, explores=False):
    before = (Ask(10, 40, "build"), Ask(50, 30, calls=("linear",)), Ask(52, 60, kept=False))
    after = (*before, Ask(70, 60, name), Ask(71, 20))
    runs = [("a.pickle", case(*before)), (name, case(*after))]
    return compare_cases(runs, explores=explores)


def samples():
    names = ("fragmentation_oom.pickle", "fragmentation_cured.pickle.gz")
    runs = [(n, read_case([str(SAMPLES / n)], Overrides())) for n in names]
    return compare_cases(runs, explores=True)


def job(text="train.py"):
    odd = fleets.summary(5, held={**fleets.USUAL, 99: 500})
    return conclude(fleet_of([*(fleets.summary(i) for i in range(5)), odd]), notes=[text])


@pytest.mark.parametrize("explores", [False, True])
@pytest.mark.parametrize("width", [390, 1280, 1920])
@pytest.mark.parametrize("dark", [False, True])
def test_comparison_fits_the_window_and_runs_clean(open_report, width, dark, explores):
    found = comparison(HOSTILE, explores=explores)
    page = open_report("compare", found, width=width, dark=dark)

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.complaints() == []
    assert page.requests() == []


def test_no_table_scrolls_sideways_on_a_small_screen(open_report):
    page = open_report("fleet", job(), width=390)

    wide = "[...document.querySelectorAll('.scroll')].filter(t => t.scrollWidth > t.clientWidth)"
    named = "[...document.querySelectorAll('td.row-head')].length"
    assert page.evaluate(f"{wide}.length") == 0
    assert page.evaluate(named) > 0


def test_explorer_shows_what_the_other_run_held_at_the_same_place(open_report):
    page = open_report("compare", samples())
    page.until("window.fragdoctor.ready")
    twin = "window.fragdoctor.explorer.twin"

    steps = page.evaluate(
        f"{twin}.here.map((state, i) => [state, {twin}.stateAt(state), {twin}.there[i]])"
    )
    # Both ask for the same until run A fails; only what blocks are rounded up to differs.
    shares = page.evaluate("""(() => {
      const { timeline, twin } = window.fragdoctor.explorer;
      return twin.here.slice(1).map((k) => twin.allocatedAt(k) / timeline.valueAt("allocated", k));
    })()""")
    page.evaluate("window.fragdoctor.explorer.goTo(4000)")
    panel = "document.getElementById('explorer-panel').innerText"
    page.until(f"{panel}.includes('After event 4,000')")
    said = page.evaluate(panel)
    bytes_there = page.evaluate(f"formatSize({twin}.allocatedAt(4000))")

    assert len(steps) == 8  # the beginning, and the seven steps that both runs have
    assert all(found == there for _, found, there in steps)
    assert all(0.98 < share < 1.02 for share in shares)
    assert f"Allocated in run B\n{bytes_there}" in said.replace("\t", "\n")
    assert page.complaints() == []


def test_other_run_is_shown_at_the_place_that_was_chosen(open_report):
    page = open_report("compare", samples())
    page.until("window.fragdoctor.ready")
    page.evaluate("window.fragdoctor.explorer.goTo(4000)")
    page.until("window.fragdoctor.explorer.moment === 4000")
    place = page.evaluate("window.fragdoctor.explorer.placeInTwin()")

    page.evaluate("document.querySelector('#devices button[data-show=B]').click()")
    page.until(f"window.fragdoctor.explorer.moment === {place}")

    assert page.evaluate("window.fragdoctor.device") == "B"
    assert page.evaluate("window.fragdoctor.explorer.twin.name") == "run A"
    page.until("location.hash.includes('show=B')")


def test_after_its_end_the_other_run_has_no_memory(open_report):
    page = open_report("compare", samples())
    page.until("window.fragdoctor.ready")
    page.evaluate("document.querySelector('#devices button[data-show=B]').click()")
    page.evaluate("window.fragdoctor.explorer.goTo(17000)")
    page.until("window.fragdoctor.explorer.moment === 17000")

    assert "it has ended" in page.evaluate("document.getElementById('explorer-panel').innerText")
    assert page.complaints() == []


def test_theme_and_sorting_work_without_a_recording(open_report):
    page = open_report("compare", comparison(), dark=True)
    page.evaluate("document.getElementById('theme').click()")
    column = "[...document.querySelectorAll('#lines tbody tr')].map((r) => r.cells[1].textContent)"
    head = "document.querySelectorAll('#lines thead button')[0]"
    before = page.evaluate(column)
    page.evaluate(f"{head}.click()")
    page.evaluate(f"{head}.click()")

    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert sorted(page.evaluate(column)) == sorted(before)
    assert page.evaluate(f"{head}.closest('th').ariaSort") == "ascending"


@pytest.mark.parametrize("width", [390, 1280])
def test_job_sorts_its_ranks_and_links_the_odd_one_to_its_row(open_report, width):
    page = open_report("fleet", job(), width=width)
    links = "[...document.querySelectorAll('#odd a')]"

    n_links = page.evaluate(f"{links}.length")
    leads = page.evaluate(
        f"{links}.map((a) => [a.textContent, "
        "document.querySelector(a.getAttribute('href')).cells[0].textContent.trim()])"
    )
    page.evaluate("document.querySelectorAll('#ranks thead button')[2].click()")

    assert n_links > 0
    assert all(name == row for name, row in leads)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.complaints() == []
