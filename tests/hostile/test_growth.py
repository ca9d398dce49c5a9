"""Work grows in proportion to the input, whichever way the input grows.

What is counted is work, not time: lines of Python that run and calls into C. An input is doubled
twice; the second doubling may add twice the work of the first, which leaves out what is done once
whatever the input. What C does within one call is not seen here: patterns are checked by
``test_patterns``, and the replay has bounds of its own.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import fleets
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from dimensions import Entry, entries, events, holes_and_flushes

from fragdoctor.cli import exit as exit_codes
from fragdoctor.cli.app import invoke
from fragdoctor.fleet.conclusions import conclude
from fragdoctor.fleet.engine import fleet_of
from fragdoctor.model.fleet import RankSummary

pytestmark = pytest.mark.slow

_COMMANDS = {
    "analyze": ("analyze", "{path}"),
    "simulate": ("simulate", "{path}", "--sweep"),
    "export": ("export", "{path}", "--format", "snapshot", "--redact", "--force", "-o", "{out}"),
    "moment": ("analyze", "{path}", "--at", "end"),
    "continue": ("analyze", "{path}", "--continue-with", "{path}"),
}
_MOST_GROWTH = 2.4
"""2 is linear, n log n is below 2.3 here, n squared is 4."""
_NOTHING = 20_000
"""Lines and calls that are no growth to speak of: limits are reached, tables are filled."""


class _Counter:
    """Counts lines of Python and calls into C."""

    def __init__(self) -> None:
        self.n = 0

    def line(self, _frame: FrameType, event: str, _argument: Any) -> Any:
        self.n += event == "line"
        return self.line

    def call(self, _frame: FrameType, event: str, _argument: Any) -> None:
        self.n += event == "c_call"


@contextlib.contextmanager
def _counted() -> Iterator[_Counter]:
    counter = _Counter()
    before = sys.gettrace(), sys.getprofile()
    gc.disable()
    sys.setprofile(counter.call)
    sys.settrace(counter.line)
    try:
        yield counter
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        gc.enable()


def _work(*arguments: str) -> tuple[int, int]:
    """Return the work of a command line, and its exit code."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _counted() as counter:
        code = exit_codes.run(invoke, list(arguments))
    return counter.n, code


def _assert_linear(work: list[int]) -> None:
    """Compare what two doublings of an input added."""
    first, second = work[1] - work[0], work[2] - work[1]
    assert second <= max(_MOST_GROWTH * first, _NOTHING), work


_ALWAYS = ("live_blocks", "devices", "messages", "stats_of_devices", "summaries", "page of b' '")
ENTRIES = [
    pytest.param(e, id=f"{e[0]} {e[1]}", marks=() if e[1] in _ALWAYS else pytest.mark.slow)
    for e in entries()
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_work_doubles_at_most_where_the_input_doubles(entry: Entry, tmp_path: Path) -> None:
    command, _, n, make = entry
    path = tmp_path / "input"
    words = [w.format(path=path, out=tmp_path / "out") for w in _COMMANDS[command]]
    path.write_bytes(make(n))
    _work(*words)  # loads what is loaded once
    work: list[int] = []
    for size in (n, 2 * n, 4 * n):
        path.write_bytes(make(size))
        done, code = _work(*words)
        assert code in {0, 2, 3}
        work.append(done)

    _assert_linear(work)


def test_flushes_do_not_visit_every_hole(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(holes_and_flushes(40_000))
    before = time.process_time()
    done = exit_codes.run(invoke, [str(path), "-o", str(tmp_path / "report.txt")])

    assert done == 0
    assert time.process_time() - before < 25, "it takes 3 s; 100 s if each flush visits every hole"


@pytest.mark.slow
def test_work_doubles_at_most_where_the_ranks_double(tmp_path: Path) -> None:
    work: list[int] = []
    for n in (2, 4, 8, 16):
        job = fleets.write_job(tmp_path / f"job{n}", n, {1: {"held": {10: 600}}})
        page = str(tmp_path / f"{n}.html")
        done, code = _work("analyze", str(job), "--workers", "1", "-o", page)
        assert code == 0
        work.append(done)

    _assert_linear(work[1:])  # the first loads what is loaded once


@pytest.mark.parametrize("kind", ["alike", "all odd", "unread", "groups"])
def test_conclusions_double_at_most_where_the_ranks_double(kind: str) -> None:
    def ranks(n: int) -> Iterator[RankSummary]:
        for i in range(n):
            if kind == "unread":
                yield fleets.unread(i)
            else:
                of = {"alike": 0, "all odd": i, "groups": i % 7}[kind]
                yield fleets.summary(i, {10: 64 + 40 * of, 20 + of: 32})

    work: list[int] = []
    for n in (200, 200, 400, 800):  # of fewer ranks, more differ from what is typical of them
        fleet = fleet_of(ranks(n))
        with _counted() as counter:
            conclude(fleet)
        work.append(counter.n)

    _assert_linear(work[1:])


def test_work_doubles_at_most_where_the_runs_of_a_series_double(tmp_path: Path) -> None:
    names = []
    for i in range(12):
        path = tmp_path / f"{i}.pickle"
        path.write_bytes(events(20 + i))
        names.append(str(path))
    work: list[int] = []
    for n in (3, 3, 6, 12):
        done, code = _work("compare", *names[:n])
        assert code == 0
        work.append(done)

    _assert_linear(work[1:])
