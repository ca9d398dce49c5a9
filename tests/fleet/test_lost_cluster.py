"""A cluster that goes away in the middle: rows or a sentence in a stated time, never a wait."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fleets
import pytest
import slow_ranks
from slow_ranks import Held

from fragdoctor.fleet import engine, workers
from fragdoctor.fleet.examine import examine
from fragdoctor.fleet.workers import dask_cluster
from fragdoctor.inputs.discovery import inputs_of

pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not slow_ranks.HAS_PROC, reason="asks /proc who reads a pipe"),
]

_QUIET: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


class Cluster:
    """A scheduler and one worker, each a process that a test may end."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "scheduler.json"
        self.scheduler = self._start("scheduler", "--port", "0", "--host", "127.0.0.1")
        until = time.monotonic() + 20
        while not self.file.exists() and time.monotonic() < until:
            time.sleep(0.05)
        # Without a nanny: nothing starts it again.
        self.worker = self._start("worker", "--nthreads", "1", "--no-nanny")

    def _start(self, what: str, *options: str) -> subprocess.Popen[bytes]:
        module = f"distributed.cli.dask_{what}"
        named = ("--scheduler-file", str(self.file), "--no-dashboard")
        return subprocess.Popen([sys.executable, "-m", module, *named, *options], **_QUIET)

    def end(self) -> None:
        for process in (self.worker, self.scheduler):
            process.kill()
            process.wait(10)


@pytest.fixture
def lone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(workers, "LOST_S", 0.5)
    monkeypatch.setattr(engine, "LOOK_S", 0.2)
    made = Cluster(tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize("gone", ["scheduler", "worker"])
def test_cluster_that_goes_away_leaves_rows_with_the_reason(
    lone: Cluster, tmp_path: Path, gone: str
) -> None:
    fleets.write_job(tmp_path, 3)
    paths = [str(tmp_path / f"rank{i}.pickle") for i in range(3)]
    Path(paths[2]).unlink()

    arrived = threading.Event()

    def note(done: int, _all: int) -> None:
        if done == 2:
            arrived.set()

    def end_it(_path: Path, fd: int, _pid: int) -> None:
        # What a lost scheduler has not handed over is lost too: that is not what is tested here.
        arrived.wait(10)
        getattr(lone, gone).kill()
        getattr(lone, gone).wait(10)
        os.close(fd)

    held = Held(Path(paths[2]), end_it)
    with dask_cluster(str(lone.file)) as executor:
        start = time.monotonic()
        report = examine(inputs_of(paths), executor=executor, chunk_size=1, progress=note)
        seconds = time.monotonic() - start

    held.join()
    ranks = [row.rank for row in report.rows]
    reason = (
        "The dask scheduler was lost." if gone == "scheduler" else "All dask workers were lost."
    )
    unread = {r.rank: r.error for r in ranks if not r.is_read}
    assert len(ranks) == 3
    assert unread[2] == reason
    assert set(unread.values()) == {reason}
    assert any(note == f"{reason} The advice was not replayed." for note in report.notes)
    assert seconds < 20
