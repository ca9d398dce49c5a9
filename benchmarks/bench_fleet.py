"""One job of many snapshots read in one process, in a pool, and on a cluster of dask, in one run.

    python benchmarks/bench_fleet.py               # 1,000 files, 1, 2 .. N processes
    python benchmarks/bench_fleet.py --files 200 --no-dask
    python benchmarks/bench_fleet.py --large       # 10,000 ranks, a worker killed, object storage

The files are hard links to the sample snapshots in turn, so that the disk holds little and the page
cache is warm: what is measured is reading and diagnosing, not a disk. Seconds are
wall clock, the best of some rounds in turn; the start of the workers, with their imports, stands
beside them. What the engines find is compared: it must be the same.

``--large`` takes the smallest samples, so that 10,000 ranks are about files, names, tasks and
summaries and not about bytes: a pool, a cluster of dask, the same with one of its processes killed
when half of the chunks are back, and 200 of the ranks from a server of object storage on this
machine (moto, read by s3fs).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from fragdoctor.fleet.conclusions import conclude
from fragdoctor.fleet.engine import MAX_CHUNK, n_cores, summarise_all, summarise_chunk
from fragdoctor.fleet.workers import WorkerPool
from fragdoctor.inputs.discovery import discover
from fragdoctor.model.fleet import FleetSummary, RankInput, SummaryOptions

SMALL = 48 * 2**10
N_STORED = 200
SAMPLES = Path(__file__).resolve().parents[1] / "sample_snapshots"
Engine = Callable[[], contextlib.AbstractContextManager[Executor | None]]


def make_job(folder: Path, n: int, *, largest: float = float("inf")) -> tuple[int, int]:
    """Link ``n`` ranks to the samples; return their bytes and the number of different ones."""
    samples = sorted(p for p in SAMPLES.iterdir() if ".pickle" in p.name)
    samples = [p for p in samples if p.stat().st_size <= largest]
    n_bytes = 0
    for i in range(n):
        sample = samples[i % len(samples)]
        rank = folder / f"rank{i}{''.join(sample.suffixes)}"
        try:
            os.link(sample, rank)
        except OSError:  # another file system
            shutil.copyfile(sample, rank)
        n_bytes += sample.stat().st_size
    return n_bytes, len(samples)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Provide no executor: this process."""
    yield None


def pool(workers: int) -> Engine:
    """Return a pool of our processes."""
    return lambda: WorkerPool(workers)


def dask(workers: int) -> Engine:
    """Return a cluster on this machine."""

    @contextlib.contextmanager
    def engine() -> Iterator[Executor]:
        from distributed import LocalCluster

        from fragdoctor.fleet.cluster import dask_cluster

        with (
            LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=True,
                dashboard_address=None,
                silence_logs=50,
            ) as local,
            dask_cluster(local.scheduler_address) as executor,
        ):
            yield executor

    return engine


def warm(executor: Executor | None, workers: int, rank: RankInput) -> None:
    """Let every worker start and load what it needs."""
    if executor is None:
        summarise_chunk([rank], SummaryOptions())
        return
    tasks = [
        executor.submit(summarise_chunk, [rank] * 4, SummaryOptions(timeout_s=600 + i))
        for i in range(4 * workers)
    ]
    for task in tasks:
        task.result()


def measure(
    engine: Engine, workers: int, ranks: tuple[RankInput, ...]
) -> tuple[float, float, FleetSummary]:
    """Return seconds with the start of the workers, seconds without it, and what was found."""
    start = time.perf_counter()
    with engine() as executor:
        warm(executor, workers, ranks[0])
        ready = time.perf_counter()
        fleet = summarise_all(ranks, executor=executor)
        done = time.perf_counter()
    return done - start, done - ready, fleet


class Killing(Executor):
    """Hands tasks on, and kills a worker when half of them have come back."""

    def __init__(self, executor: Executor, n_tasks: int, kill: Callable[[], None]) -> None:
        self._executor, self._left, self._kill = executor, n_tasks // 2, kill
        self._lock = threading.Lock()

    def submit(self, fn, /, *args, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN201
        """Hand a task on."""
        future = self._executor.submit(fn, *args, **kwargs)
        future.add_done_callback(self._count)
        return future

    def _count(self, _: object) -> None:
        with self._lock:
            self._left -= 1
            is_half = self._left == 0
        if is_half:
            self._kill()


@contextlib.contextmanager
def object_storage(files: Sequence[Path]) -> Iterator[str]:
    """Serve files as ``s3://job/...`` on this machine; give the address of the folder."""
    import logging

    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://{host}:{port}", AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x",
        AWS_DEFAULT_REGION="us-east-1",
    )  # fmt: skip
    try:
        storage = s3fs.S3FileSystem()
        storage.mkdir("job")
        for file in files:
            storage.put_file(str(file), f"job/run/{file.name}")
        yield "s3://job/run/"
    finally:
        server.stop()


def print_row(name: str, ranks: int, seconds: float, found: str) -> None:
    """Print a row of the table of the large job."""
    print(f"| {name} | {ranks:,} | {seconds:.1f} | {ranks / seconds:.0f} | {found} |", flush=True)


def large(n_files: int, n_workers: int) -> None:
    """Print the table of a large job, and of what goes wrong in one."""
    from distributed import LocalCluster

    from fragdoctor.fleet.cluster import dask_cluster

    with tempfile.TemporaryDirectory() as folder:
        n_bytes, n_kinds = make_job(Path(folder), n_files, largest=SMALL)
        began = time.perf_counter()
        ranks = discover([folder]).ranks
        print(
            f"{len(ranks):,} ranks of {n_kinds} kinds, {n_bytes / 2**20:.0f} MiB, found in "
            f"{time.perf_counter() - began:.1f} s; {n_cores()} cores, load {os.getloadavg()[0]:.1f}"
        )
        print("| Engine | Ranks | Seconds | Ranks/s | Found |\n| --- | --- | --- | --- | --- |")
        with WorkerPool(2) as executor:
            began = time.perf_counter()
            expected = summarise_all(ranks, executor=executor)
            seconds = time.perf_counter() - began
        n_read = sum(r.is_read for r in expected.ranks)
        print_row("pool of 2", len(ranks), seconds, f"{n_read:,} read")
        with LocalCluster(
            n_workers=n_workers, threads_per_worker=1, processes=True, dashboard_address=None,
            silence_logs=50,
        ) as local:  # fmt: skip
            for kills in (False, True):
                with dask_cluster(local.scheduler_address) as executor:
                    doomed = next(iter(local.workers.values())).pid
                    used = executor
                    if kills:
                        n_tasks = len(ranks) // MAX_CHUNK
                        used = Killing(executor, n_tasks, partial(os.kill, doomed, signal.SIGKILL))
                    began = time.perf_counter()
                    fleet = summarise_all(ranks, executor=used)
                    seconds = time.perf_counter() - began
                pids = {w.pid for w in local.workers.values()}
                what = "the same" if fleet == expected else "SOMETHING ELSE"
                died = f", process {'gone' if doomed not in pids else 'STILL THERE'}"
                name = f"dask, {n_workers} workers" + (", one killed half-way" if kills else "")
                print_row(name, len(ranks), seconds, what + (died if kills else ""))
        began = time.perf_counter()
        conclude(expected)
        size = sum(len(pickle.dumps(r)) for r in expected.ranks)
        print(f"groups and verdict {time.perf_counter() - began:.1f} s; summaries "
              f"{size / 2**20:.1f} MiB")  # fmt: skip
        files = sorted(Path(folder).iterdir())[:N_STORED]
        with object_storage(files) as address, WorkerPool(2) as executor:
            began = time.perf_counter()
            stored = discover([address]).ranks
            fleet = summarise_all(stored, executor=executor)
            seconds = time.perf_counter() - began
        n_read = sum(r.is_read for r in fleet.ranks)
        print_row("object storage, pool of 2", len(stored), seconds, f"{n_read} read")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-dask", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--large-files", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.large:
        large(arguments.large_files, arguments.workers)
        return
    counts = sorted({1, 2, n_cores()} | {2**k for k in range(1, 6) if 2**k <= n_cores()})
    engines = [("this process", 1, alone), *((f"pool of {n}", n, pool(n)) for n in counts)]
    if not arguments.no_dask:
        engines += [(f"dask, {n} workers", n, dask(n)) for n in counts]

    with tempfile.TemporaryDirectory() as folder:
        n_bytes, n_kinds = make_job(Path(folder), arguments.files)
        ranks = discover([folder]).ranks
        print(
            f"{len(ranks)} files of {n_kinds} kinds, {n_bytes / 2**20:.0f} MiB; {n_cores()} cores, "
            f"load {os.getloadavg()[0]:.1f} before"
        )
        print(f"{'engine':18}{'s':>8}{'+ start':>9}{'files/s':>9}{'speed-up':>10}{'per core':>10}")
        best: dict[str, tuple[float, float]] = {}
        expected: FleetSummary | None = None
        for _ in range(arguments.rounds):  # in turn: what else the machine does hits all alike
            for name, workers, engine in engines:
                whole, seconds, fleet = measure(engine, workers, ranks)
                expected = expected or fleet
                if fleet != expected:
                    raise SystemExit(f"{name} found something else")
                known = best.get(name, (seconds, whole - seconds))
                best[name] = min(known[0], seconds), min(known[1], whole - seconds)
        for name, workers, _ in engines:
            seconds, start = best[name]
            gain = best["this process"][0] / seconds
            print(
                f"{name:18}{seconds:8.2f}{start:9.2f}{len(ranks) / seconds:9.0f}"
                f"{gain:10.2f}{gain / workers:10.0%}"
            )
        moved = [len(pickle.dumps(r)) for r in fleet.ranks]
        began = time.perf_counter()
        conclude(fleet)
        print(
            f"summaries {sum(moved) / 2**20:.1f} MiB in all, {max(moved)} bytes at most; "
            f"groups and verdict {time.perf_counter() - began:.2f} s, in this process"
        )


if __name__ == "__main__":
    main()
