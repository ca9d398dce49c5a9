"""Read one job's many snapshots in one process, in a pool, and on a dask cluster, in one run.

    python benchmarks/bench_fleet.py               # 1,000 files, 1, 2 .. N processes
    python benchmarks/bench_fleet.py --files 200 --no-dask
    python benchmarks/bench_fleet.py --large       # 10,000 ranks, workers killed, object storage
    python benchmarks/bench_fleet.py --large --docs    # ... and the table into docs/fleet.md

The files are hard links to the sample snapshots in rotation, so that the disk holds little and the
page cache is warm: this measures reading and diagnosing, not a disk. Seconds are wall-clock time,
the best of several rounds in which the engines take turns; the start of the workers, with their
imports, is shown separately. All engines must find the same.

``--large`` uses the smallest samples, so that 10,000 ranks test files, names, tasks and summaries
instead of bytes; one in a hundred is cut in the middle. It runs a pool, a dask cluster, the same
cluster with a process killed at each quarter of the chunks, and 1,000 of the ranks from an object
storage server on this machine (moto, read by s3fs).
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
from pathlib import Path

from fragdoctor.fleet.conclusions import conclude
from fragdoctor.fleet.engine import MAX_CHUNK, n_cores, summarise_all, summarise_chunk
from fragdoctor.fleet.workers import WorkerPool
from fragdoctor.inputs.discovery import discover
from fragdoctor.model.fleet import FleetSummary, RankInput, SummaryOptions

SMALL = 48 * 2**10
CUT_EVERY = 100
N_STORED = 1000
N_KILLED = 3
DOCS = Path(__file__).resolve().parents[1] / "docs" / "fleet.md"
MARKS = "<!-- bench_fleet.py --large --docs writes this table -->", "<!-- end of the table -->"
SAMPLES = Path(__file__).resolve().parents[1] / "sample_snapshots"
Engine = Callable[[], contextlib.AbstractContextManager[Executor | None]]


def make_job(folder: Path, n: int, *, largest: float = float("inf")) -> tuple[int, int]:
    """Link ``n`` ranks to the samples; return their total bytes and the number of samples."""
    samples = sorted(p for p in SAMPLES.iterdir() if ".pickle" in p.name)
    samples = [p for p in samples if p.stat().st_size <= largest]
    n_bytes = 0
    for i in range(n):
        sample = samples[i % len(samples)]
        rank = folder / f"rank{i}{''.join(sample.suffixes)}"
        try:
            os.link(sample, rank)
        except OSError:  # the samples are on another file system
            shutil.copyfile(sample, rank)
        n_bytes += sample.stat().st_size
    return n_bytes, len(samples)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Provide no executor, so that this process does the work."""
    yield None


def pool(workers: int) -> Engine:
    """Return an engine that uses a pool of our processes."""
    return lambda: WorkerPool(workers)


def dask(workers: int) -> Engine:
    """Return an engine that uses a dask cluster on this machine."""

    @contextlib.contextmanager
    def engine() -> Iterator[Executor]:
        from distributed import LocalCluster

        from fragdoctor.fleet.workers import dask_cluster

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
    """Let every worker start and load its modules."""
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
    """Return the seconds with and without the start of the workers, and what was found."""
    start = time.perf_counter()
    with engine() as executor:
        warm(executor, workers, ranks[0])
        ready = time.perf_counter()
        fleet = summarise_all(ranks, executor=executor)
        done = time.perf_counter()
    return done - start, done - ready, fleet


class Killing(Executor):
    """Passes tasks on, and kills a worker each time another quarter of them has come back."""

    def __init__(self, executor: Executor, n_tasks: int, kill: Callable[[], None]) -> None:
        self._executor, self._n_tasks, self._kill = executor, n_tasks, kill
        self._n_back = 0
        self._lock = threading.Lock()

    def submit(self, fn, /, *args, **kwargs):  # noqa: ANN001, ANN002, ANN003, ANN201
        """Pass a task on."""
        future = self._executor.submit(fn, *args, **kwargs)
        future.add_done_callback(self._count)
        return future

    def _count(self, _: object) -> None:
        with self._lock:
            self._n_back += 1
            quarters = [self._n_tasks * i // (N_KILLED + 1) for i in range(1, N_KILLED + 1)]
            is_due = self._n_back in quarters
        if is_due:
            self._kill()


@contextlib.contextmanager
def object_storage(files: Sequence[Path]) -> Iterator[str]:
    """Serve files as ``s3://job/...`` on this machine, and yield the folder's address."""
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


def cut(ranks: Sequence[Path]) -> int:
    """Cut every hundredth file in the middle, and return how many were cut."""
    doomed = [path for path in ranks[CUT_EVERY // 2 :: CUT_EVERY] if path.stat().st_size > 1000]
    for path in doomed:
        raw = path.read_bytes()
        path.unlink()  # the file is a link to a sample
        path.write_bytes(raw[: len(raw) // 2])
    return len(doomed)


def cost_of_a_rank(ranks: Sequence[RankInput]) -> str:
    """Return what each part of a rank's work costs on one core, in a process with all loaded."""
    from fragdoctor.diagnosis.pipeline import diagnose
    from fragdoctor.fleet.summary import summarise
    from fragdoctor.inputs.cases import read_case
    from fragdoctor.model.case import Overrides

    def seconds(work: Callable[[RankInput], object]) -> float:
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            for rank in ranks:
                work(rank)
            best = min(best, time.process_time() - began)
        return best / len(ranks) * 1000

    seconds(lambda r: summarise(r, SummaryOptions()))
    cases = {r.path: read_case([r.path], Overrides()) for r in ranks}
    read = seconds(lambda r: read_case([r.path], Overrides()))
    diagnosed = seconds(lambda r: diagnose(cases[r.path], replays=False))
    whole = seconds(lambda r: summarise(r, SummaryOptions()))
    tested = seconds(lambda r: summarise(r, SummaryOptions(replays=True)))
    return (
        f"A rank takes {whole:.1f} ms of a core: {read:.1f} ms to read, {diagnosed:.1f} ms to "
        f"diagnose, the rest to summarise; with its advice tested {tested:.0f} ms."
    )


class Table:
    """Lines for the documentation, also printed as they are added."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)
        print(line, flush=True)

    def row(self, name: str, n: int, began: float, found: str) -> None:
        """Add a row on the time that an engine took for ``n`` ranks."""
        seconds = time.perf_counter() - began
        self.say(f"| {name} | {n:,} | {seconds:.1f} | {n / seconds:.0f} | {found} |")


def counted(fleet: FleetSummary) -> str:
    """Return how many ranks were read, in words."""
    n_read = sum(r.is_read for r in fleet.ranks)
    return f"{n_read:,} read, {len(fleet.ranks) - n_read:,} with a reason"


def on_dask(
    table: Table, ranks: tuple[RankInput, ...], n_workers: int, expected: FleetSummary
) -> None:
    """Read the ranks on a cluster of processes, then again while some of them are killed."""
    from distributed import LocalCluster

    from fragdoctor.fleet.workers import dask_cluster

    killed: list[int] = []
    with LocalCluster(
        n_workers=n_workers, threads_per_worker=1, processes=True, dashboard_address=None,
        silence_logs=50,
    ) as local:  # fmt: skip

        def kill() -> None:
            pid = next(w.pid for w in local.workers.values() if w.pid not in (None, *killed))
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

        for kills in (False, True):
            with dask_cluster(local.scheduler_address) as executor:
                used = Killing(executor, len(ranks) // MAX_CHUNK, kill) if kills else executor
                began = time.perf_counter()
                fleet = summarise_all(ranks, executor=used)
            same = "the same" if fleet == expected else "SOMETHING ELSE"
            died = f", {len(killed)} killed on the way" if kills else ""
            table.row(f"dask, {n_workers} workers{died}", len(ranks), began, same)


def large(n_files: int, n_workers: int) -> list[str]:
    """Return the table of a large job with failures, and print it as it grows."""
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        n_bytes, n_kinds = make_job(Path(folder), n_files, largest=SMALL)
        files = sorted(Path(folder).iterdir())
        n_cut = cut(files)
        began = time.perf_counter()
        ranks = discover([folder]).ranks
        found_s = time.perf_counter() - began
        table.say(
            f"{len(ranks):,} ranks of {n_kinds} kinds, {n_bytes / 2**20:.0f} MiB, {n_cut} of them "
            f"cut in the middle, found in {found_s:.1f} s; {n_cores()} cores, load "
            f"{os.getloadavg()[0]:.1f} before. {cost_of_a_rank(ranks[:40])}"
        )
        heads = ("Engine", "Ranks", "Seconds", "Ranks/s", "Found")
        table.say(f"\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
        began = time.perf_counter()
        with WorkerPool(2) as executor:
            expected = summarise_all(ranks, executor=executor)
        table.row("pool of 2", len(ranks), began, counted(expected))
        on_dask(table, ranks, n_workers, expected)
        with object_storage(files[:N_STORED]) as address:
            began = time.perf_counter()
            stored = discover([address]).ranks
            with WorkerPool(2) as executor:
                fleet = summarise_all(stored, executor=executor)
            table.row("object storage, pool of 2", len(stored), began, counted(fleet))
        began = time.perf_counter()
        conclude(expected)
        size = sum(len(pickle.dumps(r)) for r in expected.ranks)
        table.say(
            f"\nGroups and verdict of all take {time.perf_counter() - began:.1f} s; the summaries "
            f"are {size / 2**20:.1f} MiB."
        )
    return table.lines


def write_docs(lines: Sequence[str]) -> None:
    """Write the table to its place in the documentation."""
    before, rest = DOCS.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    table = "\n".join(lines)
    DOCS.write_text(f"{before}{MARKS[0]}\n\n{table}\n\n{MARKS[1]}{after}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-dask", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--large-files", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--docs", action="store_true", help="with --large: write docs/fleet.md")
    arguments = parser.parse_args()
    if arguments.large:
        lines = large(arguments.large_files, arguments.workers)
        if arguments.docs:
            write_docs(lines)
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
        for _ in range(arguments.rounds):  # taking turns: other load on the machine hits all alike
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
