"""Where options come from: command line, environment, configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import BASE, MIB, alloc, block, pickled, segment, segment_alloc, snapshot
from command_line import Run

from fragdoctor.cli.commands import whole_group
from fragdoctor.cli.configuration import configure


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a snapshot whose peak of active memory is 12 MiB."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pickle").write_bytes(
        pickled(
            snapshot(
                segment(BASE, block(12 * MIB, "active_allocated"), block(8 * MIB)),
                events=[segment_alloc(BASE, 20 * MIB), alloc(BASE, 12 * MIB)],
            )
        )
    )
    return tmp_path


def configured(here: Path, text: str) -> None:
    (here / "pyproject.toml").write_text(f"[tool.fragdoctor]\n{text}\n")


def test_file_sets_a_budget(run: Run, here: Path) -> None:
    configured(here, 'max-peak = "11MiB"')

    assert run("check", "a.pickle").code == 1
    assert run("check", "a.pickle", "--no-config").code == 0


def test_environment_wins_over_the_file(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(here, 'max-peak = "11MiB"')
    monkeypatch.setenv("FRAGDOCTOR_MAX_PEAK", "13MiB")

    assert run("check", "a.pickle").code == 0


def test_command_line_wins_over_the_environment(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRAGDOCTOR_MAX_PEAK", "11MiB")

    assert run("check", "a.pickle").code == 1
    assert run("check", "a.pickle", "--max-peak", "13MiB").code == 0


def test_environment_alone_sets_flags_and_lists(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRAGDOCTOR_MAX_RETRIES", "0")
    monkeypatch.setenv("FRAGDOCTOR_NO_GROWTH", "1")
    monkeypatch.setenv("FRAGDOCTOR_SELECT", "FD1,FD2")
    monkeypatch.setenv("FRAGDOCTOR_FORMAT", "json")

    outcome = run("check", "a.pickle")

    assert outcome.code == 0
    assert '"max-retries",\n    "no-growth"' in outcome.out


def test_named_file_is_read_instead_of_the_nearest(run: Run, here: Path) -> None:
    configured(here, 'max-peak = "11MiB"')
    (here / "ci").mkdir()
    (here / "ci/gate.toml").write_text('max-peak = "13MiB"\n')

    assert run("check", "a.pickle", "--config", "ci/gate.toml").code == 0
    assert run("check", "a.pickle", "--config", "ci/none.toml").code == 2


def test_baseline_of_the_file_is_found_beside_it(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(here, 'baseline = "memory.json"')
    (here / "deep").mkdir()
    assert run("check", "a.pickle", "--write-baseline", "memory.json", "--no-config").code == 0

    monkeypatch.chdir(here / "deep")

    assert run("check", "../a.pickle").code == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('max-peek = "1GiB"', "Did you mean 'max-peak'?"),
        ('max-peak = "much"', "pyproject.toml: max-peak: "),
        ("max-peak = true", "max-peak must be text or a number"),
        ('no-growth = "yes"', "no-growth must be true or false"),
        ("max-retries = -1", "max-retries: "),
        ('fail-on = "panic"', "fail-on: "),
        ('max-peak = ["1GiB"]', "takes one value"),
        ('output = "x"', "there is no setting 'output'"),
        ("max-peak = [", "not valid TOML"),
    ],
)
def test_wrong_setting_is_an_error_that_names_file_and_key(
    run: Run, here: Path, text: str, said: str
) -> None:
    configured(here, text)

    outcome = run("check", "a.pickle")

    assert outcome.code == 2
    assert said in outcome.err


def test_setting_of_another_command_does_not_disturb(run: Run, here: Path) -> None:
    configured(here, 'max-peak = "11MiB"\nformat = "sarif"\nconf = ["expandable_segments:True"]')

    assert run("simulate", "a.pickle", "--format", "text").code == 0
    assert '"version": "2.1.0"' in run("check", "a.pickle").out


def test_one_text_stands_for_a_list_of_one(run: Run, here: Path) -> None:
    configured(here, 'select = "FD2"')

    assert run("check", "a.pickle").code == 0


def test_help_is_printed_whatever_the_file_says(run: Run, here: Path) -> None:
    configured(here, "nonsense = 1")

    outcome = run("check", "--help")

    assert outcome.code == 0
    assert "--config FILE" in outcome.out
    assert "--no-config" in outcome.out


def test_each_option_has_its_own_variable() -> None:
    group = configure(whole_group())
    check = group.commands["check"]
    variables = [p.envvar for p in check.params if p.envvar]

    assert "FRAGDOCTOR_MAX_PEAK" in variables
    assert "FRAGDOCTOR_CONFIG" in variables
    assert len(variables) == len(set(variables))


@pytest.mark.parametrize("line", ['root = "/"', "allow-rehearse = true"])
def test_project_gives_itself_no_permissions(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    (tmp_path / "fragdoctor.toml").write_text(line)
    monkeypatch.chdir(tmp_path)

    done = run("mcp")

    assert done.code == 2
    assert "there is no setting" in done.err
