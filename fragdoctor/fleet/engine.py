"""Summarizes ranks on any ``concurrent.futures.Executor``, and merges summaries into a fleet."""

from __future__ import annotations

import json
import os
import queue
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from concurrent.futures.process import BrokenProcessPool
from typing import Final

from msgspec import to_builtins

from fragdoctor.fleet.summary import failed, summarise_within
from fragdoctor.fleet.workers import LOOK_S, SCHEDULER_LOST, Watch, WorkerPool, n_threads
from fragdoctor.inputs.remote import is_remote, scheme_of
from fragdoctor.model.fleet import FleetSummary, RankInput, RankSummary, SummaryOptions


def fleet_of(ranks: Iterable[RankSummary]) -> FleetSummary:
    """Return the fleet of some ranks; if a path has several summaries, the best one is kept."""
    best: dict[str, RankSummary] = {}
    for summary in ranks:
        known = best.get(summary.path)
        best[summary.path] = summary if known is None else better(known, summary)
    return FleetSummary(tuple(best[path] for path in sorted(best)))


def merge(a: FleetSummary, b: FleetSummary) -> FleetSummary:
    """Return the ranks of both fleets."""
    return fleet_of((*a.ranks, *b.ranks))


def better(a: RankSummary, b: RankSummary) -> RankSummary:
    """Return the summary that says more; the order of the arguments does not matter."""
    return a if a == b or _order(a) > _order(b) else b


def _order(summary: RankSummary) -> tuple[bool, bool, str]:
    text = json.dumps(to_builtins(summary), sort_keys=True)
    return summary.is_read, summary.is_replayed, text


Progress = Callable[[int, int], None]

MAX_WORKERS: Final = 32
"""A pool's default number stops here: with more workers, the machine's disk is the bottleneck."""

MAX_CHUNK: Final = 16
CHUNKS_PER_WORKER: Final = 4
MAX_LOSSES: Final = 2
"""A rank is given up once it was lost this often while its worker was reading nothing else."""

_ALONE_BYTES: Final = 64 * 1024 * 1024  # this is read faster than a pool starts
_GRACE_S: Final = 30.0
"""How much longer than its ranks a task may take before its worker is killed from outside."""


def summarise_chunk(paths: Sequence[RankInput], options: SummaryOptions) -> tuple[RankSummary, ...]:
    """Return the summaries of some ranks, one after the other: the function that workers run."""
    return tuple(summarise_within(path, options) for path in paths)


def summarise_all(
    paths: Sequence[RankInput | str],
    *,
    executor: Executor | None = None,
    chunk_size: int | None = None,
    progress: Progress | None = None,
    options: SummaryOptions | None = None,
) -> FleetSummary:
    """Return the summaries of all ranks.

    A plain path is a rank without a known number. Chunks run on the executor; if it is None, they
    run in this process, one after the other. ``chunk_size`` is the number of ranks per task; if
    None, it depends on how many there are. ``progress`` is called with ranks done and ranks in all.
    """
    options = options or SummaryOptions()
    inputs = [RankInput(p) if isinstance(p, str) else p for p in paths]
    if executor is None:
        return _in_process(inputs, options, progress)
    size = chunk_size or chunk_size_for(len(inputs), _width(executor))
    return _Run(executor, options, progress, len(inputs)).finish(list(chunked(inputs, size)))


def _in_process(
    inputs: Sequence[RankInput], options: SummaryOptions, progress: Progress | None
) -> FleetSummary:
    found: list[RankSummary] = []
    for i, what in enumerate(inputs):
        if progress is not None:
            progress(i, len(inputs))
        found.extend(summarise_chunk([what], options))
    if progress is not None:
        progress(len(inputs), len(inputs))
    return fleet_of(found)


_Chunk = Sequence[RankInput]
_Task = Future[tuple[RankSummary, ...]]


class _Run:
    """All tasks of one run: which are still out, which came back, which were lost."""

    def __init__(
        self, executor: Executor, options: SummaryOptions, progress: Progress | None, n_inputs: int
    ) -> None:
        self._executor = executor
        self._spare: WorkerPool | None = None
        self._options = options
        self._progress = progress
        self._n_inputs = n_inputs
        self._out: dict[_Task, _Chunk] = {}
        self._back: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._found: list[RankSummary] = []
        self._losses: Counter[str] = Counter()
        self._watch = Watch(executor)
        self._lost = ""

    def finish(self, chunks: Sequence[_Chunk]) -> FleetSummary:
        """Return the fleet once every rank has a row; on Ctrl-C, end the tasks at once."""
        try:
            for chunk in chunks:
                self._submit(chunk)
            while self._out and (task := self._next()) is not None:
                self._take(task, self._out.pop(task))
            for chunk in self._out.values():
                self._add(_never_read(what, self._lost) for what in chunk)
        finally:
            for task in list(self._out):
                task.cancel()
            if self._spare is not None:
                self._spare.shutdown(cancel_futures=True)
        return fleet_of(self._found)

    def _next(self) -> _Task | None:
        """Return the next task that came back, or None if the cluster is gone and none will."""
        while not self._lost:
            try:
                return self._back.get(timeout=LOOK_S)
            except queue.Empty:
                self._lost = self._watch.lost()
        return None

    def _submit(self, chunk: _Chunk) -> None:
        try:
            task = self._submitted(chunk)
        except BrokenProcessPool:
            self._replace_pool()
            task = self._submitted(chunk)
        except Exception as e:  # noqa: BLE001 - a foreign executor may raise anything
            self._add(failed(w, f"No worker took it: {_named(e)}.", "worker_lost") for w in chunk)
            return
        self._out[task] = chunk
        task.add_done_callback(self._back.put)

    def _submitted(self, chunk: _Chunk) -> _Task:
        seconds = self._options.timeout_s
        if isinstance(self._executor, WorkerPool):
            limit = None if seconds is None else seconds * len(chunk) + _GRACE_S
            return self._executor.submit_within(limit, summarise_chunk, chunk, self._options)
        return self._executor.submit(summarise_chunk, chunk, self._options)

    def _take(self, task: _Task, chunk: _Chunk) -> None:
        """Keep what a task found, or read its ranks again if its worker was lost."""
        try:
            self._add(task.result())
        except BrokenProcessPool:  # all of its tasks failed; which one broke it is unknown
            self._replace_pool()
            for what in chunk:
                self._submit([what])
        except (Exception, CancelledError) as e:  # noqa: BLE001 - same as above
            if len(chunk) == 1:
                self._losses[chunk[0].path] += 1
            for what in chunk:
                if self._losses[what.path] < MAX_LOSSES:
                    self._submit([what])
                elif self._watch.trouble() == SCHEDULER_LOST:  # not the fault of this rank
                    self._add([_never_read(what, SCHEDULER_LOST)])
                else:
                    self._add([_given_up(what, e)])

    def _replace_pool(self) -> None:
        """Continue with processes of our own if a process pool broke."""
        if self._spare is None:
            self._spare = WorkerPool(_width(self._executor))
            self._executor = self._spare

    def _add(self, rows: Iterator[RankSummary] | Sequence[RankSummary]) -> None:
        self._found.extend(rows)
        if self._progress is not None:
            self._progress(len(self._found), self._n_inputs)


def _never_read(what: RankInput, reason: str) -> RankSummary:
    """Return the row of a rank that no worker is left for."""
    hint = "Restart the scheduler and its workers, or leave out --dask."
    return failed(what, reason, "worker_lost", hint=hint)


def _given_up(what: RankInput, error: BaseException) -> RankSummary:
    """Return the row of a rank whose workers were lost; it is the same for every engine."""
    is_death = isinstance(error, BrokenExecutor | CancelledError)
    if is_death or type(error).__name__ == "KilledWorker":  # of dask, which is not loaded here
        return failed(
            what,
            "The worker died twice while reading this, perhaps out of host memory.",
            "worker_lost",
            hint="Try it alone, on a machine with more memory, or with fewer workers.",
        )
    return failed(what, f"The worker failed twice on this: {_named(error)}.", "worker_lost")


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")


def chunked(inputs: Sequence[RankInput], size: int) -> Iterator[Sequence[RankInput]]:
    """Yield the inputs in chunks of at most ``size``."""
    for start in range(0, len(inputs), max(1, size)):
        yield inputs[start : start + max(1, size)]


def chunk_size_for(n_inputs: int, n_workers: int) -> int:
    """Return how many ranks one task takes: few tasks, but enough to keep all workers busy."""
    return max(1, min(MAX_CHUNK, n_inputs // (CHUNKS_PER_WORKER * max(1, n_workers))))


def default_workers(inputs: Sequence[RankInput]) -> int:
    """Return the number of processes for these ranks, or 1 if a pool would not pay."""
    many = max(1, min(n_cores(), len(inputs), MAX_WORKERS))
    if in_this_process_only(inputs):
        return 1
    if any(is_remote(what.path) for what in inputs):
        return many
    n_bytes = sum(found.st_size for what in inputs if (found := stat_of(what.path)))
    return 1 if n_bytes <= _ALONE_BYTES else many


def in_this_process_only(inputs: Sequence[RankInput]) -> bool:
    """Return whether one of the ranks is stored where no other process can see it."""
    return any(is_remote(w.path) and scheme_of(w.path) == "memory" for w in inputs)


def may_hang(inputs: Sequence[RankInput]) -> bool:
    """Return whether one of the ranks is not a plain file or folder: reading it may never end."""
    modes = (found.st_mode for what in inputs if (found := stat_of(what.path)))
    return not all(stat.S_ISREG(mode) or stat.S_ISDIR(mode) for mode in modes)


def stat_of(path: str) -> os.stat_result | None:
    """Return the status of a file, or None if there is none of that name."""
    try:
        return os.stat(path)  # noqa: PTH116 - a path of any spelling
    except (OSError, ValueError):
        return None


def n_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _width(executor: Executor) -> int:
    """Return the number of workers of an executor, or of cores if it does not say."""
    n = getattr(executor, "_max_workers", None) or n_threads(executor)
    return n if isinstance(n, int) and n > 0 else n_cores()
