"""Every option that takes a size refuses a number without a unit, and says what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Run

from fragdoctor.cli.commands import whole_group
from fragdoctor.cli.options import amount, size, size_or_factor


def size_options() -> list[tuple[str, str]]:
    """Return (command, option) of each option that is read as a size."""
    group = whole_group()
    return [
        (name, parameter.opts[0])
        for name, command in group.commands.items()
        for parameter in command.params
        if getattr(parameter.type, "func", None) in (size, amount, size_or_factor)
    ]


def test_options_with_sizes_are_found() -> None:
    found = size_options()

    assert {("analyze", "--capacity"), ("check", "--fits-on"), ("check", "--max-peak")} <= {*found}
    assert {("compare", "--fail-on-growth"), ("simulate", "--capacity")} <= {*found}


@pytest.mark.parametrize(("command", "option"), size_options())
@pytest.mark.parametrize("text", ["24", "25769803776"])
def test_number_without_a_unit_is_refused(command: str, option: str, text: str, run: Run) -> None:
    done = run(command, "nothing.pickle", "other.pickle", option, text)

    assert done.code == 2
    assert f"{text} has no unit. Write {text}GiB" in done.err.replace("\n", " ")
    assert "does not exist" not in done.err


@pytest.mark.parametrize(("command", "option"), size_options())
@pytest.mark.parametrize("text", ["24GiB", "24gb", "24G", "24 GiB"])
def test_size_in_any_usual_spelling_is_taken(
    command: str, option: str, text: str, run: Run
) -> None:
    done = run(command, "nothing.pickle", "other.pickle", option, text)

    assert "has no unit" not in done.err
    assert "not a size" not in done.err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["pack", "--gpu", "24"], "or write a size such as 24GiB."),
    ],
)
def test_sizes_inside_other_values_need_a_unit_too(
    words: list[str], answer: str, run: Run, samples: Path
) -> None:
    done = run(*words, str(samples / "fragmentation_oom.pickle"))

    assert done.code == 2
    assert answer in done.err


def test_sizes_in_a_configuration_need_a_unit_too(run: Run, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "fragdoctor.toml").write_text("max-peak = 24\n")
    monkeypatch.chdir(tmp_path)

    done = run("check", "a.pickle")

    assert done.code == 2
    assert "24 has no unit. Write 24GiB" in done.err
