"""docs/editor.md: its problem matcher reads what the program prints, and its hook is one."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from cli_fixtures import _plain_environment as _plain_environment  # noqa: PLC0414 - a fixture
from cli_fixtures import run as run  # noqa: PLC0414 - a fixture
from command_line import Run

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "editor.md").read_text("utf-8")
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


(TASK,) = json.loads(block("json"))["tasks"]


def problems(text: str) -> list[dict[str, str]]:
    """Return what the matcher of the page finds, by its own names of the groups."""
    pattern = TASK["problemMatcher"]["pattern"]
    names = {name: group for name, group in pattern.items() if name != "regexp"}
    matches = [re.search(pattern["regexp"], line) for line in text.splitlines()]
    return [{k: m[group] or "" for k, group in names.items()} for m in matches if m]


def test_matcher_reads_every_finding_of_an_analysis(run: Run, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    out = run("analyze", "sample_snapshots/fragmentation_oom.pickle", "--format", "github").out

    found = problems(out)

    assert len(found) == out.count("::error ") + out.count("::warning ") + out.count("::notice ")
    assert found[1]["severity"] == "warning"
    assert (found[1]["file"], found[1]["line"]) == ("/workspace/scenarios.py", "68")
    assert found[1]["code"].startswith("FD101 ")
    assert found[1]["message"].startswith("3 live blocks")


@pytest.mark.slow
def test_task_of_the_page_finds_the_line_that_fails(run: Run, monkeypatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(ROOT / "docs")
    words = shlex.split(TASK["command"].replace("train.py", "train_gpt.py").replace("24", "1"))

    (found,) = problems(run(*words[1:]).out)

    assert (found["file"], found["line"]) == ("train_gpt.py", "20")
    assert found["message"].startswith("Does not fit")


def test_hook_of_the_page_is_the_one_of_the_repository(run: Run, tmp_path, monkeypatch) -> None:
    (example,) = yaml.safe_load(block("yaml"))["repos"][0]["hooks"]
    monkeypatch.chdir(tmp_path)
    words = [*shlex.split(HOOK["entry"]), *example["args"]]

    done = run(*words[1:])

    assert example["id"] == HOOK["id"]
    assert done.code == 2
    assert "train.py does not exist" in done.err


def test_hook_follows_the_schema_of_pre_commit() -> None:
    clientlib = pytest.importorskip("pre_commit.clientlib")

    clientlib.load_manifest(ROOT / ".pre-commit-hooks.yaml")
