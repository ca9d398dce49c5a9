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
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from dimensions import Entry, entries

from fragdoctor.cli import exit as exit_codes
from fragdoctor.cli.app import invoke

_ARGUMENTS = {
    "analyze": (),
    "simulate": ("--sweep",),
    "export": ("--format", "snapshot", "--redact", "--force", "-o"),
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


def _work(command: str, path: Path) -> tuple[int, int]:
    """Return the work of a command line, and its exit code."""
    more = _ARGUMENTS[command]
    target = [str(path.with_suffix(".out"))] if command == "export" else []
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _counted() as counter:
        code = exit_codes.run(invoke, [command, str(path), *more, *target])
    return counter.n, code


_ALWAYS = ("live_blocks", "devices", "messages", "stats_of_devices", "summaries", "page of b' '")
ENTRIES = [
    pytest.param(e, id=f"{e[0]} {e[1]}", marks=() if e[1] in _ALWAYS else pytest.mark.slow)
    for e in entries()
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_work_doubles_at_most_where_the_input_doubles(entry: Entry, tmp_path: Path) -> None:
    command, _, n, make = entry
    path = tmp_path / "input"
    path.write_bytes(make(n))
    _work(command, path)  # loads what is loaded once
    work: list[int] = []
    for size in (n, 2 * n, 4 * n):
        path.write_bytes(make(size))
        done, code = _work(command, path)
        assert code in {0, 2, 3}
        work.append(done)

    first, second = work[1] - work[0], work[2] - work[1]
    assert second <= max(_MOST_GROWTH * first, _NOTHING), work
