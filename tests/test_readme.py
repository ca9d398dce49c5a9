"""README and docs say the truth: their screens, commands, options, Python and exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import docs_pages
import pytest
from cli_fixtures import _plain_environment as _plain_environment  # noqa: PLC0414 - a fixture
from cli_fixtures import run as run  # noqa: PLC0414 - a fixture
from command_line import Run

from fragdoctor.cli.app import with_command
from fragdoctor.cli.commands import whole_group
from fragdoctor.model.diagnosis import Cause
from fragdoctor.rehearsal.programs import LAUNCHERS
from fragdoctor.report.views.explain import find, terms
from fragdoctor.rules.registry import RULES

COMMANDS = list(whole_group().commands)

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
TEXT = "\n".join(PAGES.values())
SCREENS = re.findall(r"<!-- run: (fragdoctor [^\n]+) -->\n```text\n(.*?)```", TEXT, re.DOTALL)
REHEARSED = re.findall(
    r"<!-- rehearsed: (fragdoctor [^\n]+) -->\n```text\n(.*?)```", TEXT, re.DOTALL
)
PROGRAMS = re.findall(
    r"<!-- python -->\n```python\n(.*?)```\n<!-- prints -->\n```text\n(.*?)```", TEXT, re.DOTALL
)
QUESTIONS = re.findall(
    r"^\| [^|]+\? \| `(fragdoctor [^`]+)` \| `([^`]+)` \| [^|]+ \|$",
    (ROOT / "docs" / "questions.md").read_text("utf-8"),
    re.MULTILINE,
)
COMMAND_LINES = sorted(set(re.findall(r"^ {4}(?:.*\| )?(fragdoctor [^#|\n]*)", TEXT, re.MULTILINE)))


@pytest.fixture
def said(run: Run, monkeypatch: pytest.MonkeyPatch, _plain_environment: None) -> Callable[..., str]:
    """Return a function that returns what a command prints in a folder, if it ends well."""

    def call(words: list[str], folder: Path) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "80")
        outcome = run(*words)
        assert outcome.code == 0, outcome.err
        return outcome.out

    return call


def holds(printed: str, screen: str) -> bool:
    parts = [part.strip("\n") for part in re.split(r"^\[\.\.\.\]$", screen, flags=re.MULTILINE)]
    return bool(screen.strip()) and all(part in printed for part in parts)


@pytest.mark.parametrize(("command", "screen"), SCREENS, ids=[c for c, _ in SCREENS])
def test_readme_screen_is_what_the_program_prints(command, screen, root, said):
    printed = said(shlex.split(command)[1:], root)

    assert holds(printed, screen), printed


def test_first_screen_is_what_a_new_process_prints(root):
    command, screen = SCREENS[0]
    environment = {k: v for k, v in os.environ.items() if k not in {"FORCE_COLOR", "NO_COLOR"}}

    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=root,
        env={**environment, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert holds(done.stdout, screen), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("command", "screen"), REHEARSED)
def test_prescription_of_the_readme_is_what_the_program_prints(command, screen, root):
    pytest.importorskip("torch")
    words = [sys.executable, "-m", *shlex.split(command), "--python", sys.executable]

    done = subprocess.run(
        words, cwd=root, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip

    assert done.returncode == 1, done.stderr
    assert holds(done.stdout, screen), done.stdout


@pytest.mark.parametrize(("command", "answer"), QUESTIONS)
def test_each_of_the_ten_questions_is_answered_by_its_command(command, answer, root, said):
    printed = said(shlex.split(command)[1:], root / "sample_snapshots")

    assert re.search(re.escape(answer).replace(r"\ ", r"\s+"), printed), printed


def test_there_are_ten_questions():
    assert len(QUESTIONS) == 10


@pytest.mark.parametrize(("program", "printed"), PROGRAMS)
def test_readme_python_prints_what_it_says(program, printed):
    out = io.StringIO()

    with contextlib.redirect_stdout(out):
        exec(compile(program, "README.md", "exec"), {})

    assert printed == out.getvalue()


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_readme_command_exists_with_its_options(line, root, said):
    name, *rest = with_command(shlex.split(line)[1:], COMMANDS)
    end = next((i for i, word in enumerate(rest) if word in {"--", *LAUNCHERS}), None)
    options = {word for word in rest[:end] if word.startswith("--")}

    shown = said([name, "--help"], root)

    assert not {option for option in options if option not in shown}


def test_readme_lists_each_cause():
    assert not [cause.value for cause in Cause if f"`{cause.value}`" not in README]


def test_readme_names_each_exit_code():
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}

    assert {0, 1, 2, 3, 70, 130, 141} == codes


@pytest.mark.parametrize(("page", "text"), PAGES.items(), ids=[str(p) for p in PAGES])
def test_links_lead_somewhere(page, text):
    targets = re.findall(r"\]\(([^)#\s]+)", text)

    local = [t for t in targets if "://" not in t]
    assert [t for t in local if not (ROOT / page.parent / t).exists()] == []


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_contributing_names_only_what_exists():
    names = re.findall(r"`((?:fragdoctor|tests|tools|docs|\.ci)/[\w./]*)`", CONTRIBUTING)
    short = set(re.findall(r"`(\w+/\w+\.py)`", CONTRIBUTING)) - set(names)

    found = [n for n in names if not (ROOT / n).exists()]
    found += [
        n for n in short if not (ROOT / n).exists() and not (ROOT / "fragdoctor" / n).exists()
    ]
    assert found == []


def test_map_of_contributing_has_each_folder_of_the_package():
    table = "\n".join(line for line in CONTRIBUTING.splitlines() if line.startswith("| `"))
    folders = [p.name for p in (ROOT / "fragdoctor").iterdir() if list(p.glob("*.py"))]

    assert [name for name in folders if f"{name}`" not in table] == []


def test_readme_is_short():
    assert len(README.splitlines()) <= 160


def test_glossary_is_the_one_that_explain_prints():
    assert (ROOT / "docs/glossary.md").read_text(encoding="utf-8") == docs_pages.glossary()


@pytest.mark.parametrize("term", terms(), ids=lambda term: term.name)
def test_explain_knows_each_word_of_the_glossary(term):
    for word in (term.name, *term.also, *term.see):
        assert find(word).terms, word
    assert find(term.name).terms == [term]


def test_documentation_has_a_page_for_each_command_and_rule():
    commands, rules = docs_pages.command_pages(), docs_pages.rule_pages()

    assert {f"commands/{name}.md" for name in COMMANDS} < set(commands)
    assert {f"rules/{rule.code}.md" for rule in RULES} < set(rules)
    assert "--sweep" in commands["commands/simulate.md"]
    assert "What to do" in rules["rules/FD101.md"]
    listed = commands["commands/index.md"] + rules["rules/index.md"]
    assert all(
        f"({Path(page).name})" in listed for page in (*commands, *rules) if "index" not in page
    )


def test_documentation_has_a_page_for_each_term():
    pages = docs_pages.term_pages()

    assert len(pages) == len(terms()) + 1
    for path, text in pages.items():
        for link in re.findall(r"\]\(([\w-]+\.md)\)", text):
            assert f"terms/{link}" in pages, (path, link)
    page = pages["terms/hole.md"]
    assert page.startswith("# hole\n\n**Free space in a segment")
    assert "[fragmentation](fragmentation.md)" in page


def test_notebook_is_a_page_with_what_its_cells_show():
    notebook = json.loads((ROOT / "docs/notebook.ipynb").read_text(encoding="utf-8"))
    n_code = sum(cell["cell_type"] == "code" for cell in notebook["cells"])
    page = docs_pages.notebook_page()

    assert page.count("```python\n") == n_code
    assert all("\n" not in one for one in re.findall(r'<div class="output">(.*?)\n\n', page))
    assert page.count('<div class="output">') >= 2


def test_versions_link_to_the_releases_where_these_are_known():
    assert "/releases" not in docs_pages.versions_page("")
    page = docs_pages.versions_page("https://host/owner/fragdoctor/")
    assert "(https://host/owner/fragdoctor/releases)" in page
    assert "## [0.2.0]" in page


def test_readme_has_screens_programs_and_commands():
    assert len(SCREENS) >= 2
    assert len(PROGRAMS) >= 1
    assert len(COMMAND_LINES) >= 8
