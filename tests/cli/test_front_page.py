from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fragdoctor.cli.commands import whole_group
from fragdoctor.cli.exit import FINDINGS, INTERNAL, OK, USAGE
from fragdoctor.cli.front_page import FRONT_PAGE

HEAVY = ("numpy", "pandas", "torch", "markupsafe", "rich", "typer", "fragdoctor._native._ext")


def commands() -> dict[str, object]:
    group = whole_group()
    return dict(group.commands)  # type: ignore[attr-defined]


def test_front_page_lists_each_command_with_its_line() -> None:
    listed = FRONT_PAGE.split("Commands:\n")[1].split("\n\n")[0].splitlines()

    assert list(commands()) == [line.split()[0] for line in listed]
    for line in listed:
        name, text = line.split(maxsplit=1)
        assert commands()[name].help.startswith(text)  # type: ignore[attr-defined]


def test_front_page_names_each_exit_code() -> None:
    for code in (OK, FINDINGS, USAGE, 3, INTERNAL):
        assert f"  {code} " in FRONT_PAGE


def test_front_page_fits_80_columns() -> None:
    assert [line for line in FRONT_PAGE.splitlines() if len(line) > 79] == []


@pytest.mark.parametrize("name", commands())
def test_command_help_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = commands()[name]
    context = command.make_context(  # type: ignore[attr-defined]
        f"fragdoctor {name}", [], resilient_parsing=True, terminal_width=80
    )

    text = command.get_help(context)  # type: ignore[attr-defined]

    assert [line for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    "name", ["analyze", "oom", "check", "simulate", "estimate", "export", "explain"]
)
def test_command_help_is_imperative_and_ends_with_two_examples(name: str) -> None:
    command = commands()[name]
    help_line, epilog = command.help, command.epilog  # type: ignore[attr-defined]

    assert "\n" not in help_line
    assert not help_line.endswith(".")
    assert help_line[0].isupper()
    assert sum("fragdoctor " in line for line in epilog.splitlines()) == 2


@pytest.mark.parametrize(
    "name", ["analyze", "oom", "check", "simulate", "estimate", "export", "explain"]
)
def test_option_help_has_no_full_stop(name: str) -> None:
    for parameter in commands()[name].params:  # type: ignore[attr-defined]
        text = getattr(parameter, "help", None)
        if text and parameter.name != "help":
            assert text[0].isupper()
            assert not text.endswith(".")


def python(script: str, root: Path) -> tuple[int, str]:
    """Run a script in a process of its own; return its exit code and what it said of errors."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("FRAGDOCTOR_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**own, "PYTHONPATH": str(root)},
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("flag", ["--help", "-h", "--version"])
def test_start_loads_nothing_heavy(flag: str, root: Path) -> None:
    script = (
        "import sys\n"
        "from fragdoctor.cli.app import main\n"
        "try:\n"
        f"    main([{flag!r}])\n"
        "except SystemExit as e:\n"
        "    assert not e.code\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )

    assert python(script, root) == (0, "")


def test_report_as_text_loads_nothing_that_only_others_use(root: Path) -> None:
    sample = root / "sample_snapshots" / "fragmentation_oom.pickle"
    script = (
        "import sys\n"
        "from fragdoctor.cli.app import main\n"
        "try:\n"
        f"    main([{str(sample)!r}])\n"
        "except SystemExit as e:\n"
        "    assert not e.code\n"
        "others = ('numpy.ma', 'pandas', 'markupsafe', 'json', 'typer', 'fragdoctor.gate')\n"
        "loaded = [m for m in others if m in sys.modules]\n"
        "assert not loaded, loaded\n"
    )

    assert python(script, root) == (0, "")


def test_command_modules_load_nothing_heavy(root: Path) -> None:
    script = (
        "import sys\n"
        "import fragdoctor, fragdoctor.cli.commands\n"
        "heavy = [m for m in ('numpy', 'pandas', 'torch', 'markupsafe') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )

    assert python(script, root) == (0, "")
