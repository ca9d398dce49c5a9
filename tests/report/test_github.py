from __future__ import annotations

import re

import checks
import diagnoses
import pytest
from attacks_on_text import HOSTILE

from fragdoctor.report import github
from fragdoctor.report.base import RenderOptions

LOOK = RenderOptions(source_root="/home/user/project")
COMMAND = re.compile(r"::(error|warning|notice) file=[^,:]+(,line=\d+)?,title=[^,:]+::.+")


def commands(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.lstrip().startswith(("::", "##["))]


def test_annotation_points_at_the_users_line() -> None:
    lines = commands(github.render(checks.mixed(), LOOK))

    assert any(
        line.startswith("::error file=experiments/models/gpt_cache.py,line=88,title=FD102 ")
        for line in lines
    )
    assert any(line.startswith("::error file=c.pickle,title=unreadable ") for line in lines)


@pytest.mark.parametrize("name", checks.ALL)
def test_each_command_is_well_formed(name: str) -> None:
    lines = commands(github.render(checks.ALL[name](), LOOK))

    assert [line for line in lines if not COMMAND.fullmatch(line)] == []


def test_passing_check_has_no_annotation() -> None:
    assert commands(github.render(checks.passing(), LOOK)) == []


def test_diagnosis_annotates_warnings() -> None:
    lines = commands(github.render(diagnoses.fragmentation(), LOOK))

    assert any(line.startswith("::warning ") and "FD101" in line for line in lines)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_starts_no_command_of_its_own(text: str) -> None:
    hostile = commands(github.render(checks.planted(text), LOOK))
    plain = commands(github.render(checks.planted("x"), LOOK))

    assert len(plain) == len(hostile)
    assert [line for line in hostile if not line.startswith("::error file=")] == []
