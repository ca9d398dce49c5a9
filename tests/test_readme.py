"""README says the truth: its screens, commands, options, Python and exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fragdoctor.model.diagnosis import Cause

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
SCREENS = re.findall(r"<!-- run: (fragdoctor [^\n]+) -->\n```text\n(.*?)```", README, re.DOTALL)
PROGRAMS = re.findall(
    r"<!-- python -->\n```python\n(.*?)```\n<!-- prints -->\n```text\n(.*?)```", README, re.DOTALL
)
COMMAND_LINES = re.findall(r"^ {4}(?:.*\| )?(fragdoctor [^#\n]*)", README, re.MULTILINE)


def run(arguments: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in {"FORCE_COLOR", "NO_COLOR"}}
    return subprocess.run(
        [sys.executable, "-m", "fragdoctor", *arguments],
        cwd=root,
        env={**environment, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(("command", "screen"), SCREENS, ids=[c for c, _ in SCREENS])
def test_readme_screen_is_what_the_program_prints(command, screen, root):
    done = run(shlex.split(command)[1:], root)

    assert done.returncode == 0
    assert screen.strip()
    parts = [part.strip("\n") for part in re.split(r"^\[\.\.\.\]$", screen, flags=re.MULTILINE)]
    assert all(part in done.stdout for part in parts), done.stdout


@pytest.mark.parametrize(("program", "printed"), PROGRAMS)
def test_readme_python_prints_what_it_says(program, printed):
    out = io.StringIO()

    with contextlib.redirect_stdout(out):
        exec(compile(program, "README.md", "exec"), {})

    assert printed == out.getvalue()


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_readme_command_exists_with_its_options(line, root):
    name, *rest = shlex.split(line)[1:]
    options = {word for word in rest if word.startswith("--")}

    shown = run([name, "--help"], root)

    assert shown.returncode == 0
    assert not {option for option in options if option not in shown.stdout}


def test_readme_lists_each_cause():
    assert not [cause.value for cause in Cause if f"`{cause.value}`" not in README]


def test_readme_names_each_exit_code():
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}

    assert {0, 1, 2, 3, 70} == codes


def test_readme_has_screens_programs_and_commands():
    assert len(SCREENS) >= 2
    assert len(PROGRAMS) >= 1
    assert len(COMMAND_LINES) >= 8
