from __future__ import annotations

import json
import re
from collections.abc import Callable

import checks
import pytest
from attacks_on_text import HOSTILE
from schemas import must_fit

from fragdoctor.errors import ConfigError
from fragdoctor.report.base import VIEWS, RenderOptions, Verbosity, check_format, render

LOOK = RenderOptions(source_root="/home/user/project")
SUFFIXES = {
    "text": "txt",
    "json": "json",
    "markdown": "md",
    "html": "html",
    "github": "github.txt",
    "sarif": "sarif",
    "junit": "xml",
}


def test_each_format_has_a_golden() -> None:
    assert set(VIEWS["check"]) == set(SUFFIXES)


@pytest.mark.parametrize("name", SUFFIXES)
def test_report_of_a_mixed_check(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"check_mixed.{SUFFIXES[name]}", render("check", name, checks.mixed(), LOOK))


@pytest.mark.parametrize("name", checks.ALL)
def test_json_of_a_check_fits_its_schema(name: str) -> None:
    must_fit(json.loads(render("check", "json", checks.ALL[name](), LOOK)), "check")


def test_text_has_the_totals_then_a_line_a_file_and_the_reasons_below() -> None:
    lines = render("check", "text", checks.mixed(), LOOK).splitlines()

    total = "3 files: 1 failed, 1 passed, 1 could not be read."
    assert lines[0] == f"GPU memory check failed  {total}"
    files = [line for line in lines if line.startswith(("  FAILED", "  ERROR", "  ok"))]
    assert files[0].startswith("  FAILED  runs/a.pickle: Fragmentation (proven); peak allocated ")
    assert files[1].startswith("  ERROR   c.pickle is empty.")
    assert files[2].startswith("  ok      runs/b.pickle: Healthy ")
    assert "Reserved memory is reported but not judged" in " ".join(lines).replace("  ", "")


def test_quiet_text_is_one_line_a_file_and_the_total() -> None:
    quiet = RenderOptions(verbosity=Verbosity.QUIET)

    assert len(render("check", "text", checks.mixed(), quiet).splitlines()) == 4


@pytest.mark.parametrize("attack", HOSTILE)
def test_text_with_hostile_names_stays_inert_and_short(attack: str) -> None:
    hostile = render("check", "text", checks.planted(attack), LOOK)

    assert "\x1b" not in hostile
    assert "\u202e" not in hostile
    assert len(hostile) < 50_000


@pytest.mark.parametrize("attack", HOSTILE)
def test_markdown_with_hostile_names_keeps_its_list(attack: str) -> None:
    hostile = render("check", "markdown", checks.planted(attack), LOOK)
    plain = render("check", "markdown", checks.planted("x"), LOOK)

    assert abs(hostile.count("\n") - plain.count("\n")) <= 1  # an empty hint has no line
    assert "<script>" not in re.sub(r"`+.*?`+", "", hostile)


def test_markdown_of_many_files_fits_a_step_summary() -> None:
    from fragdoctor.gate.judgement import report

    one = checks.failing()
    text = render("check", "markdown", report([one] * 5000, checks.GATE), LOOK)

    assert len(text.encode()) < 1024 * 1024
    assert "left out" in text


def test_unknown_format_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        check_format("check", "sarf")

    assert "sarif" in caught.value.hint
