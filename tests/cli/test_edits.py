from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import Run

from fragdoctor.cli.simulate import EDITS


@pytest.fixture
def fragmented(samples: Path) -> str:
    return str(samples / "fragmentation_oom.pickle")


def result_of(run: Run, *args: str) -> dict[str, object]:
    document = json.loads(run("simulate", *args, "--format", "json").out)
    found: dict[str, object] = document["results"][0]
    return found


@pytest.mark.parametrize(
    "edit",
    ["empty-cache", "empty-cache:10,20", "pad:2MiB", "batch:0.5", "no-stranders", "no-stranders:3"],
)
def test_edit_is_replayed_and_named(edit: str, run: Run, fragmented: str) -> None:
    result = result_of(run, fragmented, "--edit", edit)

    assert result["edit"]
    assert result["conf"] == ""


def test_edit_smaller_batch_lowers_the_peak(run: Run, fragmented: str) -> None:
    whole = result_of(run, fragmented, "--conf", "expandable_segments:True")
    half = result_of(run, fragmented, "--conf", "expandable_segments:True", "--edit", "batch:0.5")

    assert whole["edit"] == ""
    document = json.loads(
        run(
            "simulate", fragmented, "--conf", "expandable_segments:True", "--edit", "batch:0.5",
            "--format", "json",
        ).out
    )  # fmt: skip
    edited = next(r for r in document["results"] if r["edit"])
    assert edited["peak_allocated_bytes"] < whole["peak_allocated_bytes"]
    assert half["conf"] == "expandable_segments:True"


def test_edit_without_leak_fits(run: Run, samples: Path) -> None:
    result = result_of(run, str(samples / "leak_oom.pickle.gz"), "--edit", "no-leak")

    assert result["fits"] is True


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ("nonsense", "There is no change"),
        ("pad", "needs a size"),
        ("pad:lots", "is not a size"),
        ("batch", "needs a factor"),
        ("batch:0", "factor"),
        ("batch:nan", "factor"),
        ("no-leak:2", "takes no value"),
        ("empty-cache:x", "whole number"),
        ("no-stranders:-1", "whole number"),
    ],
)
def test_edit_that_is_none_is_a_sentence(
    edit: str, sentence: str, run: Run, fragmented: str
) -> None:
    done = run("simulate", fragmented, "--edit", edit)

    assert done.code == 2
    assert sentence in done.err
    assert "Traceback" not in done.err


def test_edit_without_a_leak_says_so(run: Run, fragmented: str) -> None:
    done = run("simulate", fragmented, "--edit", "no-leak")

    assert done.code == 2
    assert "keeps more memory with each step" in done.err


def test_edit_names_are_in_the_help(run: Run) -> None:
    text = re.sub(r"-\n\s+", "-", run("simulate", "--help").out)

    for name in EDITS:
        assert name in text


def test_sweep_finds_the_cheapest_and_a_front(run: Run, fragmented: str) -> None:
    document = json.loads(run("simulate", fragmented, "--sweep", "--format", "json").out)

    peaks = [r["peak_reserved_bytes"] for r in document["pareto"]]
    calls = [r["driver_calls"] for r in document["pareto"]]
    assert document["best"]["fits"] is True
    assert len(document["results"]) > 20
    assert sorted(peaks) == peaks
    assert sorted(calls, reverse=True) == calls


def test_sweep_under_another_capacity_says_that_it_was_asked_for(run: Run, fragmented: str) -> None:
    shown = run("simulate", fragmented, "--sweep", "--capacity", "4GiB").out

    # Some of the settings tried take a fraction of it.
    assert "3.81 GiB as recorded, 4.00 GiB asked for" in " ".join(shown.split())
    assert "within 4.00 GiB" not in shown


def test_sweep_without_a_capacity_asks_for_no_fraction(run: Run, samples: Path) -> None:
    path = str(samples / "healthy_training.pickle.gz")

    document = json.loads(run("simulate", path, "--sweep", "--format", "json").out)

    assert all("memory_fraction" not in r["conf"] for r in document["results"])


def test_sweep_and_edit_exclude_each_other(run: Run, fragmented: str) -> None:
    done = run("simulate", fragmented, "--sweep", "--edit", "empty-cache")

    assert done.code == 2
    assert "exclude each other" in done.err


def test_smallest_capacity_lies_between_the_bound_and_what_was_needed(
    run: Run, fragmented: str
) -> None:
    conf = "expandable_segments:True"

    result = result_of(run, fragmented, "--conf", conf, "--smallest-capacity")

    smallest = result["smallest_capacity_bytes"]
    assert isinstance(smallest, int)
    assert result["peak_active_bytes"] <= smallest  # type: ignore[operator]
    again = result_of(run, fragmented, "--conf", conf, "--capacity", f"{smallest}B")
    assert again["fits"] is True
