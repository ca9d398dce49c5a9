"""Workers that die, hang or take too much: what each costs, and that nothing else is lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import fleets
import pytest
import slow_ranks
from builders import MIB
from slow_ranks import Held, kill_reader, sending

from fragdoctor.errors import ConfigError
from fragdoctor.fleet.engine import may_hang, summarise_all
from fragdoctor.fleet.workers import WorkerLostError, WorkerPool, process_pool
from fragdoctor.inputs.discovery import inputs_of
from fragdoctor.model.fleet import FleetSummary, RankInput, SummaryOptions

N_RANKS = 6
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not slow_ranks.HAS_PROC, reason="asks /proc who reads a pipe"),
]


@pytest.fixture
def ranks(tmp_path: Path) -> list[str]:
    fleets.write_job(tmp_path, N_RANKS, {2: {"held": {10: 900}}})
    return [str(tmp_path / f"rank{i}.pickle") for i in range(N_RANKS)]


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as executor:
        yield executor
        executor.shutdown(cancel_futures=True)


def held_rank(ranks: Sequence[str], i: int, *answers: Any) -> Held:
    """Put a pipe in the place of a rank; ``sending(bytes)`` gives what stood there."""
    path = Path(ranks[i])
    path.unlink()
    return Held(path, *answers)


def test_pool_runs_tasks_and_hands_on_what_they_raise(pool: WorkerPool) -> None:
    assert [f.result(30) for f in [pool.submit(divmod, i, 3) for i in range(5)]] == [
        divmod(i, 3) for i in range(5)
    ]
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(30)
    assert pool.submit(divmod, 7, 2).result(30) == (3, 1)


def test_lost_worker_costs_its_task_only(pool: WorkerPool) -> None:
    lost = pool.submit(time.sleep, 60)
    while not (workers := active_children()):
        time.sleep(0.01)
    other = pool.submit(time.sleep, 0.5)
    time.sleep(0.3)
    workers[0].kill()

    with pytest.raises(WorkerLostError):
        lost.result(30)
    assert other.result(30) is None
    assert pool.submit(divmod, 7, 2).result(30) == (3, 1)


def test_task_over_its_time_is_killed(pool: WorkerPool) -> None:
    task = pool.submit_within(0.5, time.sleep, 60)

    with pytest.raises(WorkerLostError, match=r"longer than 0\.5 s"):
        task.result(30)


def test_pool_left_by_an_error_ends_at_once() -> None:
    start = time.monotonic()

    def work() -> None:
        with WorkerPool(2) as executor:
            tasks = [executor.submit(time.sleep, 60) for _ in range(4)]
            while not tasks[0].running():
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()

    assert time.monotonic() - start < 15


def test_closed_pool_takes_nothing() -> None:
    executor = WorkerPool(1)
    executor.shutdown()

    with pytest.raises(RuntimeError, match="shutdown"):
        executor.submit(divmod, 1, 1)


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_worker_killed_half_way_does_not_change_the_fleet(
    ranks: list[str], pool: WorkerPool, chunk_size: int
) -> None:
    data = Path(ranks[1]).read_bytes()
    expected = summarise_all(inputs_of(ranks))
    held = held_rank(ranks, 1, kill_reader, sending(data))

    fleet = summarise_all(inputs_of(ranks), executor=pool, chunk_size=chunk_size)

    held.join()
    assert held.n_opened == 2
    assert fleet == expected


def test_broken_process_pool_of_the_caller_does_not_change_the_fleet(ranks: list[str]) -> None:
    data = Path(ranks[1]).read_bytes()
    expected = summarise_all(inputs_of(ranks))
    held = held_rank(ranks, 1, kill_reader, sending(data))

    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        fleet = summarise_all(inputs_of(ranks), executor=executor, chunk_size=2)

    held.join()
    assert fleet == expected


@pytest.mark.parametrize("chunk_size", [1, 6])
def test_rank_that_kills_each_worker_is_a_row_and_ends(
    ranks: list[str], pool: WorkerPool, chunk_size: int
) -> None:
    expected = summarise_all(inputs_of(ranks))
    n_deaths = 2 if chunk_size == 1 else 3
    held = held_rank(ranks, 4, *[kill_reader] * n_deaths)

    fleet = summarise_all(inputs_of(ranks), executor=pool, chunk_size=chunk_size)

    held.join()
    assert held.n_opened == n_deaths
    assert [r for r in fleet.ranks if r.is_read] == [
        r for r in expected.ranks if r.path != ranks[4]
    ]
    (row,) = (r for r in fleet.ranks if not r.is_read)
    assert (row.path, row.error_code, row.rank) == (ranks[4], "worker_lost", 4)
    assert row.error.startswith("The worker died twice")


def test_rank_that_hangs_runs_into_its_timeout_the_same_everywhere(
    ranks: list[str], pool: WorkerPool
) -> None:
    options = SummaryOptions(timeout_s=15.0)  # a busy machine reads the other ranks within it
    expected = summarise_all(inputs_of(ranks))
    path = Path(ranks[3])
    path.unlink()
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # who never writes

    def summarised(engine: Executor | None) -> FleetSummary:
        return summarise_all(inputs_of(ranks), executor=engine, chunk_size=3, options=options)

    with ThreadPoolExecutor(2) as threads, ThreadPoolExecutor(3) as at_once:
        found = list(at_once.map(summarised, [None, pool, threads]))
    os.close(writer)  # lets the threads left behind go

    assert found[0] == found[1] == found[2]
    assert [r for r in found[0].ranks if r.is_read] == [
        r for r in expected.ranks if r.path != ranks[3]
    ]
    (row,) = (r for r in found[0].ranks if not r.is_read)
    assert (row.rank, row.error_code, row.error) == (
        3,
        "timed_out",
        "It did not finish within 15 s.",
    )


def test_rank_over_the_memory_of_a_worker_is_a_row(ranks: list[str], tmp_path: Path) -> None:
    expected = summarise_all(inputs_of(ranks))
    large = tmp_path / "rank6.log"
    with large.open("wb") as file:
        for _ in range(20):
            file.write(b"step 1 loss 0.5\n" * MIB)
    options = SummaryOptions(memory_bytes=300 * MIB)

    with process_pool(1, memory_bytes=300 * MIB) as executor:
        fleet = summarise_all(
            [RankInput(str(large)), *inputs_of(ranks)],
            executor=executor,
            chunk_size=7,
            options=options,
        )

    (row,) = (r for r in fleet.ranks if not r.is_read)
    assert (row.path, row.error_code) == (str(large), "out_of_host_memory")
    assert row.error == "It takes more memory than a worker may have, 300.00 MiB."
    assert [r for r in fleet.ranks if r.is_read] == list(expected.ranks)


def test_memory_too_small_to_start_with_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"cannot start within 1\.00 MiB"),
        process_pool(2, memory_bytes=MIB),
    ):
        pass


def test_only_pipes_may_hang(ranks: list[str], tmp_path: Path) -> None:
    assert not may_hang([*inputs_of(ranks), RankInput("missing"), RankInput(str(tmp_path))])
    os.mkfifo(tmp_path / "pipe")
    assert may_hang([*inputs_of(ranks), RankInput(str(tmp_path / "pipe"))])


def test_names_are_found_from_the_folder_of_the_one_who_asks(
    ranks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [Path(r).name for r in ranks] + ["missing.pickle"]
    expected = summarise_all(inputs_of(names))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    fleet = summarise_all(inputs_of(names), options=SummaryOptions(folder=str(tmp_path)))

    assert fleet == expected
    assert [r.error for r in fleet.ranks if not r.is_read] == ["missing.pickle does not exist."]


def test_threads_do_not_outlive_a_finished_pool() -> None:
    before = threading.active_count()

    with process_pool(2) as executor:
        assert executor is not None
        assert executor.submit(divmod, 7, 2).result(30) == (3, 1)

    assert threading.active_count() == before
