from __future__ import annotations

from pathlib import Path

import pytest

from fragdoctor.cli.configuration import find_config, read_config
from fragdoctor.errors import ConfigError, InputError

KNOWN = {"max-peak", "max-retries", "no-growth", "select", "tolerance"}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_nearest_file_upwards_is_found(tmp_path: Path) -> None:
    outer = write(tmp_path / "pyproject.toml", "[tool.fragdoctor]\n")
    write(tmp_path / "a/pyproject.toml", "[project]\nname = 'x'\n")
    (tmp_path / "a/b").mkdir()

    assert outer == find_config(tmp_path / "a/b")

    inner = write(tmp_path / "a/fragdoctor.toml", "")

    assert inner == find_config(tmp_path / "a/b")


def test_own_file_wins_over_the_project_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml", "[tool.fragdoctor]\n")
    own = write(tmp_path / "fragdoctor.toml", "")

    assert own == find_config(tmp_path)


def test_values_become_what_the_command_line_would_say(tmp_path: Path) -> None:
    path = write(
        tmp_path / "pyproject.toml",
        "[tool.fragdoctor]\nmax-peak = '70GiB'\nmax_retries = 0\nno-growth = true\n"
        "select = ['FD1', 'FD2']\ntolerance = 0.5\n",
    )

    values = read_config(path, KNOWN)

    assert values == {
        "max-peak": "70GiB",
        "max-retries": "0",
        "no-growth": True,
        "select": ["FD1", "FD2"],
        "tolerance": "0.5",
    }


@pytest.mark.parametrize("key", ["max-peek", "max_peek", "maxpeak", "Max-Peak"])
def test_unknown_key_is_an_error_with_a_suggestion(tmp_path: Path, key: str) -> None:
    path = write(tmp_path / "fragdoctor.toml", f"{key} = '1GiB'\n")

    with pytest.raises(ConfigError) as caught:
        read_config(path, KNOWN)

    assert repr(key) in caught.value.message
    assert "'max-peak'" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "max-peak = ",
        "max-peak = {a = 1}",
        "max-peak = 2020-01-01",
        "select = [true]",
        "select = [['FD1']]",
        "max-peak = '1GiB'\nmax_peak = '2GiB'",
        "tool = 5",
        "[tool]\nfragdoctor = 'x'",
        "[tool.ruff]\n",
        "x = " + "[" * 5000,
        "\udcff",
    ],
)
def test_wrong_file_is_a_sentence_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fragdoctor.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(ConfigError) as caught:
        read_config(path, KNOWN)

    assert "fragdoctor.toml" in caught.value.message


def test_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.toml", KNOWN)
