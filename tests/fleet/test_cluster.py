"""A real cluster of two processes: the same report, also when one of them is killed."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fleets
import pytest
import slow_ranks
from cli_fixtures import run as run  # noqa: PLC0414 - a fixture
from command_line import Run
from slow_ranks import Held, kill_reader, sending

from fragdoctor.errors import ConfigError
from fragdoctor.fleet import workers
from fragdoctor.fleet.engine import summarise_all
from fragdoctor.fleet.examine import Replays, examine
from fragdoctor.fleet.workers import dask_cluster
from fragdoctor.inputs.discovery import discover, inputs_of
from fragdoctor.model.fleet import SummaryOptions
from fragdoctor.report.json import document_of

distributed = pytest.importorskip("distributed")
# What a client of dask leaves behind when it ends; nothing of ours opens sockets or loops.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        r"ignore:unclosed (<socket\.socket|event loop|transport)\b:ResourceWarning"
    ),
]


@contextlib.contextmanager
def distributed_cluster(**settings: Any) -> Iterator[Any]:
    """Provide a cluster of two workers, each a process of its own."""
    import dask

    with warnings.catch_warnings(), dask.config.set(settings):
        warnings.simplefilter("ignore")
        with distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            silence_logs=50,
        ) as local:
            yield local
        gc.collect()  # what it leaves unclosed is to be found here, where that is ignored


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Return the address of a scheduler with two workers."""
    with distributed_cluster() as local:
        yield local.scheduler_address


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = fleets.write_job(tmp_path / "job", 9, {5: {"held": {10: 900}, "refused_mib": 512}})
    (folder / "rank7.pickle").write_bytes(b"\x80\x04")
    return folder


def report_of(job: Path, **how: Any) -> dict[str, Any]:
    return document_of("fleet", examine(discover([str(job)]).ranks, **how))


@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_report_of_a_cluster_is_that_of_this_process(
    address: str, job: Path, chunk_size: int | None
) -> None:
    expected = report_of(job, replays=Replays.GROUPS)

    with dask_cluster(address) as executor:
        found = report_of(job, executor=executor, chunk_size=chunk_size)

    assert found == expected


@pytest.mark.skipif(not slow_ranks.HAS_PROC, reason="asks /proc who reads a pipe")
@pytest.mark.parametrize("chunk_size", [1, 3])
def test_killed_worker_does_not_change_the_fleet(
    address: str, tmp_path: Path, chunk_size: int
) -> None:
    fleets.write_job(tmp_path, 6)
    paths = [str(tmp_path / f"rank{i}.pickle") for i in range(6)]
    expected = summarise_all(inputs_of(paths))
    data = Path(paths[2]).read_bytes()
    Path(paths[2]).unlink()
    held = Held(Path(paths[2]), kill_reader, sending(data))

    with dask_cluster(address) as executor:
        fleet = summarise_all(inputs_of(paths), executor=executor, chunk_size=chunk_size)

    held.join()
    assert held.n_opened == 2
    assert fleet == expected


@pytest.mark.skipif(not slow_ranks.HAS_PROC, reason="asks /proc who reads a pipe")
def test_rank_that_always_kills_its_worker_is_a_row(tmp_path: Path) -> None:
    # Alone: dask would count the worker's death against whatever else waits for that worker.
    path = tmp_path / "rank1.pickle"
    held = Held(path, kill_reader, kill_reader)  # once for each MAX_LOSSES

    with (
        distributed_cluster(**{"distributed.scheduler.allowed-failures": 0}) as local,
        dask_cluster(local.scheduler_address) as executor,
    ):
        fleet = summarise_all(inputs_of([str(path)]), executor=executor, chunk_size=1)

    held.join()
    (row,) = fleet.ranks
    assert row.error.startswith("The worker died twice while reading this")


@pytest.mark.skipif(not slow_ranks.HAS_PROC, reason="asks /proc who reads a pipe")
def test_rank_that_hangs_is_a_row(address: str, tmp_path: Path) -> None:
    fleets.write_job(tmp_path, 4)
    path = tmp_path / "rank2.pickle"
    data = path.read_bytes()
    path.unlink()
    paths = [str(tmp_path / f"rank{i}.pickle") for i in range(4)]
    os.mkfifo(path)

    with dask_cluster(address) as executor:
        fleet = summarise_all(
            inputs_of(paths), executor=executor, options=SummaryOptions(timeout_s=5.0)
        )
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # lets the thread left behind go
    os.write(writer, data[:1000])
    os.close(writer)

    assert [(r.rank, r.error_code) for r in fleet.ranks if not r.is_read] == [(2, "timed_out")]


def test_command_gives_the_same_report(address: str, run: Run, job: Path, tmp_path: Path) -> None:
    scheduler = tmp_path / "scheduler.json"
    scheduler.write_text(json.dumps({"type": "Scheduler", "id": "s", "address": address}))
    expected = run("analyze", str(job), "--format", "json")

    for where in (address, str(scheduler)):
        found = run("analyze", str(job), "--dask", where, "--format", "json")

        assert (found.code, found.out) == (expected.code, expected.out)


def test_relative_names_are_found_by_workers_elsewhere(
    address: str, run: Run, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.parent)
    expected = run("analyze", "job", "--format", "json")

    assert run("analyze", "job", "--dask", address, "--format", "json").out == expected.out


def test_options_that_exclude_each_other_are_refused(run: Run, job: Path) -> None:
    for option in (("--workers", "2"), ("--worker-memory", "4GiB")):
        outcome = run("analyze", str(job), "--dask", "tcp://127.0.0.1:1", *option)

        assert outcome.code == 2
        assert "--dask excludes --workers and --worker-memory." in outcome.err


def test_unreachable_scheduler_is_a_sentence(
    run: Run, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "CONNECT_S", 0.5)

    outcome = run("analyze", str(job), "--dask", "tcp://127.0.0.1:1")

    assert outcome.code == 2
    assert "The dask scheduler at tcp://127.0.0.1:1 cannot be reached." in outcome.err


def test_missing_scheduler_file_is_a_sentence(run: Run, job: Path) -> None:
    outcome = run("analyze", str(job), "--dask", "none.json")

    assert (outcome.code, outcome.out) == (2, "")
    assert "The scheduler file none.json does not exist." in outcome.err


def test_without_dask_the_sentence_names_the_extra(
    run: Run, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)

    outcome = run("analyze", str(job), "--dask", "tcp://127.0.0.1:1")

    assert outcome.code == 2
    assert "pip install 'fragdoctor[dask]'" in outcome.err


def test_cluster_without_workers_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WORKERS_S", 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            distributed.LocalCluster(
                n_workers=0, dashboard_address=None, processes=True, silence_logs=50
            ) as empty,
            pytest.raises(ConfigError, match="has no workers"),
            dask_cluster(empty.scheduler_address),
        ):
            pass
        gc.collect()
