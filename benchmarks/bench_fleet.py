"""One job of many snapshots read in one process, in a pool, and on a cluster of dask, in one run.

    python benchmarks/bench_fleet.py               # 1,000 files, 1, 2 .. N processes
    python benchmarks/bench_fleet.py --files 200 --no-dask

The files are hard links to the sample snapshots in turn, so that the disk holds little and the page
cache is warm: what is measured is reading and diagnosing, not a disk. Seconds are
wall clock, the best of some rounds in turn; the start of the workers, with their imports, stands
beside them. What the engines find is compared: it must be the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path

from fragdoctor.fleet.conclusions import conclude
from fragdoctor.fleet.engine import n_cores, summarise_all, summarise_chunk
from fragdoctor.fleet.workers import WorkerPool
from fragdoctor.inputs.discovery import discover
from fragdoctor.model.fleet import FleetSummary, RankInput, SummaryOptions

SAMPLES = Path(__file__).resolve().parents[1] / "sample_snapshots"
Engine = Callable[[], contextlib.AbstractContextManager[Executor | None]]


def make_job(folder: Path, n: int) -> tuple[int, int]:
    """Link ``n`` ranks to the samples; return their bytes and the number of different ones."""
    samples = sorted(p for p in SAMPLES.iterdir() if ".pickle" in p.name)
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-dask", action="store_true")
    arguments = parser.parse_args()
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
