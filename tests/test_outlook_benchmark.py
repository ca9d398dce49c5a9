"""The benchmark of outlooks counts right, and its programs say what they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
GIB = 2**30


@pytest.fixture(scope="module")
def benchmark() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_outlook
        import outlook_table
        import record_outlooks

        yield SimpleNamespace(bench=bench_outlook, table=outlook_table, record=record_outlooks)
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def truth(benchmark: SimpleNamespace) -> Any:
    """A program of ten steps that fails in its fourth; one setting cures it, another does not."""
    table = benchmark.table
    recording = table.Recording(
        snapshot="model@75.pickle",
        share=0.75,
        run=table.Try("", 3 * GIB, 3 * GIB, passes=False, n_steps=3),
        tries=[
            table.Try("expandable_segments:True", 3 * GIB, 3 * GIB, passes=True, n_steps=10),
            table.Try("max_split_size_mb:64", 3 * GIB, 3 * GIB, passes=False, n_steps=5),
        ],
    )
    return table.ProgramTruth(
        name="model", kind="vision", leaks=False, split="looked", source="0", conf="", n_steps=10,
        peak_reserved_bytes=4 * GIB, peak_allocated_bytes=2 * GIB, reserved_bytes=[4 * GIB] * 10,
        recordings=[recording],
    )  # fmt: skip


def answer(state: str, after: int | None = None, *, fits: bool = True) -> dict[str, Any]:
    outlook = {"state": state, "basis": "repeated", "reason": "why", "fails_after_steps": after}
    return {"fits": fits, "outlook": outlook}


def test_answers_are_scored_against_what_the_program_did(
    benchmark: SimpleNamespace, truth: Any
) -> None:
    (recording,) = truth.recordings
    cured, failing = recording.tries

    def score(one: Any, given: dict[str, Any]) -> str:
        return str(benchmark.bench.what_if(truth, recording, one, given).score)

    assert "right" == score(cured, answer("holds"))
    assert "wrong" == score(failing, answer("holds"))
    assert "right" == score(failing, answer("fails", 2))
    assert "wrong" == score(cured, answer("fails", 2))
    assert "open" == score(cured, answer("open"))
    # Six whole steps follow the one that was under way: what fails in a seventh is not tested.
    assert "wrong" == score(cured, answer("fails", 6))
    assert "beyond" == score(cured, answer("fails", 7))


def test_tables_come_back_as_they_were_written(
    benchmark: SimpleNamespace, truth: Any, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"

    benchmark.table.write_truth(path, truth)

    assert truth == benchmark.table.read_truth(path)


def test_programs_say_what_they_are(benchmark: SimpleNamespace) -> None:
    paths = sorted(benchmark.record.PROGRAMS.glob("*.py"))
    programs = {path.stem: benchmark.record.read_program(path) for path in paths}
    held_out = benchmark.table.HELD_OUT_PROGRAMS

    assert 40 <= len(programs)
    assert held_out <= programs.keys()
    assert 0.35 <= len(held_out) / len(programs) <= 0.45
    assert 8 <= sum(program.leaks for program in programs.values())
    assert 600 == programs["second_process"].other_mib
    assert 0.8 == programs["memory_fraction"].fraction
    assert "expandable_segments:True" == programs["varlen_expandable"].conf
    assert "" == programs["resnet_sgd"].conf
