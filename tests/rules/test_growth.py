"""Rules about memory that grows: each on its pattern, and on what looks like it."""

from __future__ import annotations

from analysis.training_loop import ACTIVATION, TrainingLoop
from builders import MIB, frame
from rule_inputs import assert_finds, found

from fragdoctor.model.case import Case, MemoryStats, StatsSeries
from fragdoctor.model.finding import Confidence, Severity
from fragdoctor.model.snapshot import Snapshot

KEEP = (frame("train.py", 40, "remember"), frame("train.py", 4, "main"))


def training(n_steps: int, keep_bytes: int, window: int = 1000) -> Snapshot:
    """Return a run that keeps something of each step; of the last ``window`` steps only."""
    loop = TrainingLoop()
    loop.build()
    kept = []
    for _ in range(n_steps):
        kept.append(loop.new(keep_bytes, KEEP))
        if len(kept) > window:
            loop.free(kept.pop(0), KEEP)
        loop.step()
    return loop.snapshot()


def series(key: str, *values: int) -> Case:
    """Return a series of statistics with one figure."""
    return Case(stats=StatsSeries(tuple(MemoryStats({key: v}) for v in values), is_series=True))


def test_growing_line_is_found_and_a_full_window_is_not() -> None:
    leak, window = training(10, ACTIVATION), training(10, ACTIVATION, window=3)

    assert_finds("FD401", Case(snapshot=leak), Case(snapshot=window))
    finding = found("FD401", Case(snapshot=leak))[0]
    assert finding.severity is Severity.ERROR
    assert (finding.locations[0].filename, finding.locations[0].line) == ("train.py", 40)
    assert {e.name: e.value for e in finding.evidence}["growth per step"] == ACTIVATION


def test_growing_line_that_is_little_of_all_memory_is_told_as_possible() -> None:
    finding = found("FD401", Case(snapshot=training(10, 128 * 1024)))[0]

    assert finding.severity is Severity.INFO
    assert finding.confidence is Confidence.POSSIBLE


def test_growing_statistics_climb_steadily_and_by_much() -> None:
    key = "allocated_bytes.all.current"
    climbing = series(key, *(i * 100 * MIB for i in (5, 6, 7, 8, 9)))

    assert_finds("FD402", climbing, series(key, *(i * 100 * MIB for i in (5, 9, 4, 8, 5))))
    assert found("FD402", climbing)[0].n_bytes == 400 * MIB
    assert found("FD402", series(key, 500 * MIB, 510 * MIB, 520 * MIB, 530 * MIB)) == []
    assert found("FD402", series(key, 500 * MIB, 600 * MIB, 700 * MIB)) == []
    let_go = (i * 100 * MIB for i in (5, 6, 7, 8, 9, 6))
    assert found("FD402", series(key, *let_go)) == []
