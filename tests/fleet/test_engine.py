from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fleets
import pytest

from fragdoctor.fleet.engine import chunk_size_for, chunked, default_workers, summarise_all
from fragdoctor.fleet.examine import Replays, examine
from fragdoctor.fleet.workers import WorkerPool, process_pool
from fragdoctor.inputs.discovery import discover
from fragdoctor.model.fleet import RankInput, SummaryOptions
from fragdoctor.report.json import document_of


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a job of nine ranks: one holds more and fails, one cannot be read."""
    folder = fleets.write_job(
        tmp_path_factory.mktemp("job"), 9, {5: {"held": {10: 900}, "refused_mib": 512}}
    )
    (folder / "rank7.pickle").write_bytes(b"\x80\x04")
    return folder


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with process_pool(2) as executor:
        assert isinstance(executor, WorkerPool)
        yield executor


class Backwards(Executor):
    """Runs everything at once, the last first: an executor of somebody else's."""

    def __init__(self) -> None:
        self.n_tasks = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.n_tasks += 1
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def report_of(folder: Path, order: int, **how: Any) -> dict[str, Any]:
    ranks = list(discover([str(folder)]).ranks)
    random.Random(order).shuffle(ranks)
    return document_of("fleet", examine(ranks, **how))


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 4, 100])
@pytest.mark.parametrize("replays", list(Replays))
def test_report_is_the_same_for_each_engine_chunk_size_and_order(
    job: Path, pool: Executor, chunk_size: int | None, replays: Replays
) -> None:
    expected = report_of(job, 0, replays=replays)

    with ThreadPoolExecutor(3) as threads:
        for order, executor in enumerate((pool, threads, Backwards())):
            how = {"executor": executor, "chunk_size": chunk_size, "replays": replays}
            assert report_of(job, order, **how) == expected


def test_replays_change_the_advice_only(job: Path) -> None:
    documents = [report_of(job, 0, replays=replays) for replays in Replays]

    for document in documents:
        for entry in (*document["ranks"], *document["groups"]):
            entry.pop("advice")
            entry.pop("is_replayed", None)
    assert documents[0] == documents[1] == documents[2]


def test_groups_are_tested_by_their_representatives(job: Path) -> None:
    report = examine(discover([str(job)]).ranks, replays=Replays.GROUPS)

    tested = {row.rank.path for row in report.rows if row.rank.is_replayed}
    assert tested == {g.representative for g in report.groups}
    assert len(tested) == 2


def test_progress_ends_with_all_ranks(job: Path, pool: Executor) -> None:
    for executor in (None, pool):
        seen: list[tuple[int, int]] = []
        summarise_all(
            discover([str(job)]).ranks,
            executor=executor,
            chunk_size=2,
            progress=lambda done, total, seen=seen: seen.append((done, total)),  # type: ignore[misc]
        )
        assert seen[-1] == (9, 9)
        assert seen == sorted(seen)


def test_lost_worker_is_a_row_for_each_of_its_ranks(job: Path) -> None:
    class Losing(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            if any(what.rank == 3 for what in args[0]):
                future.set_exception(RuntimeError("gone"))
            else:
                future.set_result(fn(*args, **kwargs))
            return future

    fleet = summarise_all(discover([str(job)]).ranks, executor=Losing(), chunk_size=1)

    lost = [r for r in fleet.ranks if r.error_code == "worker_lost"]
    assert [r.rank for r in lost] == [3]
    assert len(fleet.ranks) == 9


def test_one_file_given_twice_is_one_rank(job: Path) -> None:
    path = str(job / "rank0.pickle")

    assert len(summarise_all([path, RankInput(path)], options=SummaryOptions()).ranks) == 1


@pytest.mark.parametrize("size", [1, 3, 50])
def test_chunks_hold_every_input_once(size: int) -> None:
    inputs = [RankInput(str(i)) for i in range(10)]

    chunks = list(chunked(inputs, size))

    assert [what for chunk in chunks for what in chunk] == inputs
    assert max(len(c) for c in chunks) <= size


def test_chunk_size_leaves_each_worker_something() -> None:
    assert chunk_size_for(1000, 2) == 16
    assert chunk_size_for(8, 8) == 1
    assert 1 <= chunk_size_for(64, 4) <= 4


def test_small_job_is_read_in_one_process(job: Path) -> None:
    assert default_workers(discover([str(job)]).ranks) == 1
