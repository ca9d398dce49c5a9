from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run


@pytest.fixture
def fragmented(samples: Path) -> str:
    return str(samples / "fragmentation_oom.pickle")


def result_of(run: Run, *args: str) -> dict[str, object]:
    document = json.loads(run("simulate", *args, "--format", "json").out)
    found: dict[str, object] = document["results"][0]
    return found


def test_sweep_finds_the_best_and_a_front(run: Run, fragmented: str) -> None:
    document = json.loads(run("simulate", fragmented, "--sweep", "--format", "json").out)

    peaks = [r["peak_reserved_bytes"] for r in document["pareto"]]
    calls = [r["driver_calls"] for r in document["pareto"]]
    assert document["best"]["fits"] is True
    assert len(document["results"]) > 20
    assert sorted(peaks) == peaks
    assert sorted(calls, reverse=True) == calls


def test_best_of_a_sweep_stands_in_its_table(run: Run, fragmented: str) -> None:
    best = json.loads(run("simulate", fragmented, "--sweep", "--format", "json").out)["best"]
    shown = run("simulate", fragmented, "--sweep").out
    table = "".join(shown.partition("Best trade-offs")[2].split())
    assert best["conf"] in table  # although another setting beats it in both peak and calls
    assert "likelyfinishes" in table.partition(best["conf"])[2]


def test_sweep_under_another_capacity_says_that_it_was_asked_for(run: Run, fragmented: str) -> None:
    shown = run("simulate", fragmented, "--sweep", "--capacity", "4GiB").out

    # Some of the settings tried take a fraction of it.
    assert "3.81 GiB as recorded, 4.00 GiB asked for" in " ".join(shown.split())
    assert "within 4.00 GiB" not in shown


def test_sweep_without_a_capacity_asks_for_no_fraction(run: Run, samples: Path) -> None:
    path = str(samples / "healthy_training.pickle.gz")

    document = json.loads(run("simulate", path, "--sweep", "--format", "json").out)

    assert all("memory_fraction" not in r["conf"] for r in document["results"])


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
