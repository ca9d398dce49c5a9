from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files

import checks
import jsonschema
import pytest
from attacks_on_text import HOSTILE

from fragdoctor.errors import ConfigError
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.check import CHECK_FORMATS, check_renderer

LOOK = RenderOptions(source_root="/home/user/project")
SUFFIXES = {
    "text": "txt",
    "json": "json",
    "markdown": "md",
    "github": "github.txt",
    "sarif": "sarif",
    "junit": "xml",
}


def test_each_format_has_a_golden() -> None:
    assert set(CHECK_FORMATS) == set(SUFFIXES)


@pytest.mark.parametrize("name", SUFFIXES)
def test_report_of_a_mixed_check(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"check_mixed.{SUFFIXES[name]}", check_renderer(name)(checks.mixed(), LOOK))


@pytest.mark.parametrize("name", checks.ALL)
def test_json_of_a_check_fits_its_schema(name: str) -> None:
    text = files("fragdoctor.report").joinpath("schema/check-1.0.schema.json").read_text("utf-8")

    jsonschema.validate(
        json.loads(check_renderer("json")(checks.ALL[name](), LOOK)), json.loads(text)
    )


def test_text_has_one_line_a_file_and_the_reasons_below() -> None:
    lines = check_renderer("text")(checks.mixed(), LOOK).splitlines()

    heads = [line for line in lines if not line.startswith(" ")]
    assert heads[0].startswith("FAILED  runs/a.pickle: Fragmentation (proven); peak allocated ")
    assert heads[1].startswith("ok      runs/b.pickle: Healthy ")
    assert heads[2].startswith("ERROR   c.pickle: c.pickle is empty.")
    assert heads[3] == "3 files: 1 failed, 1 passed, 1 could not be read."
    assert "Reserved memory is reported but not judged" in heads[-1]


def test_quiet_text_is_one_line_a_file_and_the_total() -> None:
    quiet = RenderOptions(verbosity=Verbosity.QUIET)

    assert len(check_renderer("text")(checks.mixed(), quiet).splitlines()) == 4


@pytest.mark.parametrize("attack", HOSTILE)
def test_text_with_hostile_names_keeps_its_lines(attack: str) -> None:
    hostile = check_renderer("text")(checks.planted(attack), LOOK)
    plain = check_renderer("text")(checks.planted("x"), LOOK)

    assert abs(hostile.count("\n") - plain.count("\n")) <= 1  # an empty hint has no line
    assert "\x1b" not in hostile
    assert "\u202e" not in hostile
    assert len(hostile) < 50_000


@pytest.mark.parametrize("attack", HOSTILE)
def test_markdown_with_hostile_names_keeps_its_table(attack: str) -> None:
    text = check_renderer("markdown")(checks.planted(attack), LOOK)

    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert "<script>" not in text.replace("`", "") or "`" in text


def test_markdown_of_many_files_fits_a_step_summary() -> None:
    from fragdoctor.gate.judgement import report

    one = checks.failing()
    text = check_renderer("markdown")(report([one] * 5000, checks.GATE), LOOK)

    assert len(text.encode()) < 1024 * 1024
    assert "left out" in text


def test_unknown_format_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        check_renderer("sarf")

    assert "sarif" in caught.value.hint
