"""What docs/ci.md and action.yml show is run as it stands."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from builders import BASE, MIB, alloc, block, oom, pickled, segment, segment_alloc, snapshot

from fragdoctor.cli.commands import whole_group
from fragdoctor.cli.configuration import NOT_CONFIGURED, configure
from fragdoctor.report.base import ReportFormat
from fragdoctor.rules.registry import RULES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
BASH = shutil.which("bash")

needs_bash = pytest.mark.skipif(BASH is None, reason="the examples are for bash")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def recorded(*, fails: bool = False) -> bytes:
    events = [segment_alloc(BASE, 20 * MIB), alloc(BASE, 20 * MIB)]
    return pickled(
        snapshot(
            segment(BASE, block(20 * MIB, "active_allocated")),
            events=[*events, oom(64 * MIB, 1 * MIB)] if fails else events,
        )
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a project with a snapshot and the commands that the examples call."""
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots/train.pickle").write_bytes(recorded())
    (tmp_path / "train.py").write_text("print('step 1 loss 0.5')\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, rest in (("fragdoctor", ["-m", "fragdoctor"]), ("python", [])):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec {" ".join([sys.executable, *rest])} "$@"\n')
        tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    return tmp_path


def shell(script: str, place: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FRAGDOCTOR_", "GITHUB_"))}
    return subprocess.run(
        [str(BASH), "-euo", "pipefail", "-c", script],
        cwd=place,
        env={**kept, "PATH": f"{place / 'tools'}{os.pathsep}{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@needs_bash
@pytest.mark.parametrize("script", blocks("sh"))
def test_shell_example_runs(script: str, place: Path) -> None:
    done = shell(script, place)

    assert done.returncode == 0, done.stdout + done.stderr


@needs_bash
def test_shell_example_fails_when_the_run_fails(place: Path) -> None:
    (place / "snapshots/train.pickle").write_bytes(recorded(fails=True))
    (script,) = (s for s in blocks("sh") if "GPU memory is fine" in s)

    done = shell(script, place)

    assert done.returncode == 1
    assert "GPU memory got worse" in done.stdout
    assert "FD201" in (place / "report.txt").read_text()


@needs_bash
def test_gitlab_example_runs_and_leaves_its_report(place: Path) -> None:
    (job,) = (d["gpu-memory"] for d in map(yaml.safe_load, blocks("yaml")) if "gpu-memory" in d)

    for line in job["script"]:
        if not line.startswith("pip install"):
            done = shell(line, place)
            assert done.returncode == 0, done.stderr

    assert ET.parse(place / job["artifacts"]["reports"]["junit"]).getroot().tag == "testsuites"


def action() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def run_action(place: Path, given: dict[str, str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run the last step of the action as GitHub does, with inputs in its variables."""
    described = action()
    assert set(given) <= set(described["inputs"])
    step = described["runs"]["steps"][-1]
    variables = {}
    for name, value in step["env"].items():
        found = re.fullmatch(r"\$\{\{ inputs\.([a-z-]+) \}\}", value)
        assert found, value
        key = found.group(1)
        variables[name] = given.get(key, described["inputs"][key].get("default", ""))
    return shell(step["run"], place, **variables, **more)


def documented_inputs() -> dict[str, str]:
    (workflow,) = (d for d in map(yaml.safe_load, blocks("yaml")) if "jobs" in d)
    (step,) = (s for s in workflow["jobs"]["check"]["steps"] if "fragdoctor" in s.get("uses", ""))
    return step["with"]  # type: ignore[no-any-return]


@needs_bash
def test_documented_workflow_passes_and_leaves_its_reports(place: Path) -> None:
    summary = place / "step.md"
    summary.write_text("before\n")

    done = run_action(place, documented_inputs(), GITHUB_STEP_SUMMARY=str(summary))

    assert done.returncode == 0, done.stderr
    assert (place / "gpu-memory.sarif").is_file()
    assert (place / "gpu-memory.xml").is_file()
    assert summary.read_text().startswith("before\n## GPU memory check passed")


@needs_bash
def test_documented_workflow_fails_with_annotations(place: Path) -> None:
    (place / "snapshots/train.pickle").write_bytes(recorded(fails=True))

    done = run_action(place, documented_inputs())

    assert done.returncode == 1
    assert "::error file=" in done.stdout


@needs_bash
def test_action_does_not_run_what_an_input_says(place: Path) -> None:
    attack = '"; touch owned; $(touch owned) `touch owned`'

    done = run_action(place, {"paths": attack, "baseline": attack})

    assert done.returncode == 2
    assert not (place / "owned").exists()


def test_action_puts_no_input_into_a_script() -> None:
    for step in action()["runs"]["steps"]:
        assert "${{" not in step.get("run", "")


@needs_bash
@pytest.mark.slow
@pytest.mark.parametrize("start", ["train.py", "-m\ntrain"])
def test_action_rehearses_a_program(place: Path, start: str) -> None:
    pytest.importorskip("torch")
    (place / "train.py").write_text(
        "import sys, torch\ntorch.ones(int(sys.argv[1]) << 20, device='cuda')\n"
    )
    given = {"rehearse": f"{start}\n64\n", "options": "--fits-on=100MiB"}
    summary = place / "step.md"

    done = run_action(place, given, GITHUB_STEP_SUMMARY=str(summary))

    assert done.returncode == 1, done.stderr
    assert "::error file=train.py,line=2" in done.stdout
    assert summary.read_text().startswith("## Does not fit in 100.00 MiB")


@needs_bash
def test_action_says_what_it_is_for(place: Path) -> None:
    done = run_action(place, {})

    assert done.returncode == 2
    assert "Set the input paths, or rehearse." in done.stderr


def test_documented_configuration_is_valid() -> None:
    group = configure(whole_group())
    known = {
        o.removeprefix("--") for c in group.commands.values() for p in c.params for o in p.opts
    }
    (text,) = blocks("toml")

    assert set(tomllib.loads(text)["tool"]["fragdoctor"]) <= known - NOT_CONFIGURED


def test_page_names_each_option_of_the_gate_each_format_and_true_codes() -> None:
    group = configure(whole_group())
    options = {o for c in group.commands.values() for p in c.params for o in p.opts}
    codes = [rule.code for rule in RULES]

    for option in re.findall(r"--[a-z][a-z-]+", PAGE):
        assert option in options, option
    for name in ("max-peak", "max-stranded", "max-retries", "min-headroom", "fits-on", "no-growth"):
        assert f"`--{name}" in PAGE
    assert [f for f in get_args(ReportFormat) if f"`{f}`" not in PAGE] == []
    for code in re.findall(r"\bFD\d+", PAGE):
        assert any(c.startswith(code) for c in codes), code
