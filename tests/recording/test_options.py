from __future__ import annotations

import pytest

from fragdoctor.recording.record_options import (
    VARIABLE,
    Options,
    Ranks,
    find_ranks,
    from_environment,
)


def test_options_travel_through_the_environment_unchanged() -> None:
    options = Options("/tmp/x y", 5, "all", "/s", ("python", "a'b"))

    assert options == from_environment({VARIABLE: options.to_environment()})


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"max_entries": 3}', "null"])
def test_options_that_are_damaged_or_missing_are_none(text) -> None:
    assert from_environment({VARIABLE: text}) is None


def test_options_of_a_later_version_are_read_as_far_as_they_are_known() -> None:
    found = from_environment({VARIABLE: '{"directory": "d", "later": 1}'})

    assert Options("d") == found


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, Ranks()),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, Ranks(3, 1, 8)),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            Ranks(2, 0, None),
        ),
        ({"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16"}, Ranks(5, 1, 16)),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}, Ranks()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Ranks(0, None, 1)),
        ({"RANK": "../../etc", "LOCAL_RANK": "-1"}, Ranks()),
    ],
)
def test_ranks_are_found_however_the_process_was_launched(environ, ranks) -> None:
    assert ranks == find_ranks(environ)


def test_options_of_a_very_long_command_stay_short_enough_to_start_a_program() -> None:
    options = Options("/tmp/x", command=("train.py", *(["--name=\u00e9"] * 40_000)))

    text = options.to_environment()

    assert len(text.encode()) < 64 * 1024
    back = from_environment({VARIABLE: text})
    assert back is not None
    assert back.command[:2] == ("train.py", "--name=\u00e9")
    assert back.command[-1] == "..."
