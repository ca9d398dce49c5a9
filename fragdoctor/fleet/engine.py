"""Ranks to summaries, on any ``concurrent.futures.Executor``.

Paths travel, bytes do not: a task is a chunk of ``RankInput``, its result a few kilobytes a rank.
Results are merged as they come; order, chunks and the number of workers do not change the fleet.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from typing import Final

from fragdoctor.fleet.merge import EMPTY, fleet_of, merge
from fragdoctor.fleet.summary import failed, summarise
from fragdoctor.model.fleet import FleetSummary, RankInput, RankSummary, SummaryOptions

Progress = Callable[[int, int], None]

MAX_WORKERS: Final = 32
"""A pool's default stops here: beyond it one machine's disk is what one waits for."""

MAX_CHUNK: Final = 16
CHUNKS_PER_WORKER: Final = 4
_ALONE_BYTES: Final = 64 * 1024 * 1024  # read faster than a pool starts


def summarise_chunk(paths: Sequence[RankInput], options: SummaryOptions) -> tuple[RankSummary, ...]:
    """Return the summaries of some ranks, one after the other: the function that workers run."""
    return tuple(summarise(path, options) for path in paths)


def summarise_all(
    paths: Sequence[RankInput | str],
    *,
    executor: Executor | None = None,
    chunk_size: int | None = None,
    progress: Progress | None = None,
    options: SummaryOptions | None = None,
) -> FleetSummary:
    """Return the summaries of all ranks.

    Args:
        paths: the ranks; a plain path is one without a known rank.
        executor: where the chunks run; None is this process, one after the other.
        chunk_size: ranks of one task; chosen by their number where None.
        progress: called with the ranks done and the ranks in all.
        options: how each rank is looked at.
    """
    options = options or SummaryOptions()
    inputs = [RankInput(p) if isinstance(p, str) else p for p in paths]
    if executor is None:
        return _in_process(inputs, options, progress)
    chunks = list(chunked(inputs, chunk_size or chunk_size_for(len(inputs), _width(executor))))
    tasks = {executor.submit(summarise_chunk, chunk, options): chunk for chunk in chunks}
    fleet, n_done = EMPTY, 0
    try:
        for task in as_completed(tasks):
            fleet = merge(fleet, fleet_of(_result(task, tasks[task])))
            n_done += len(tasks[task])
            if progress is not None:
                progress(n_done, len(inputs))
    finally:
        for task in tasks:
            task.cancel()
    return fleet


def _in_process(
    inputs: Sequence[RankInput], options: SummaryOptions, progress: Progress | None
) -> FleetSummary:
    found: list[RankSummary] = []
    for i, what in enumerate(inputs):
        if progress is not None:
            progress(i, len(inputs))
        found.append(summarise(what, options))
    if progress is not None:
        progress(len(inputs), len(inputs))
    return fleet_of(found)


def _result(
    task: Future[tuple[RankSummary, ...]], chunk: Sequence[RankInput]
) -> tuple[RankSummary, ...]:
    """Return what a task found; where its worker was lost, a row that says so for each rank."""
    try:
        return task.result()
    except Exception as e:  # noqa: BLE001 - an executor of anybody's may raise anything
        reason = f"The worker that read it was lost: {type(e).__name__}."
        return tuple(failed(what, reason, "worker_lost") for what in chunk)


def chunked(inputs: Sequence[RankInput], size: int) -> Iterator[Sequence[RankInput]]:
    """Yield the inputs in chunks of at most ``size``."""
    for start in range(0, len(inputs), max(1, size)):
        yield inputs[start : start + max(1, size)]


def chunk_size_for(n_inputs: int, n_workers: int) -> int:
    """Return how many ranks one task takes: few tasks, but enough to keep all workers busy."""
    return max(1, min(MAX_CHUNK, n_inputs // (CHUNKS_PER_WORKER * max(1, n_workers))))


def default_workers(inputs: Sequence[RankInput]) -> int:
    """Return the number of processes for these ranks: 1 where a pool would not pay."""
    n_bytes = 0
    for what in inputs:
        with contextlib.suppress(OSError, ValueError):
            n_bytes += os.stat(what.path).st_size  # noqa: PTH116 - a path of any spelling
    if n_bytes <= _ALONE_BYTES:
        return 1
    return max(1, min(n_cores(), len(inputs), MAX_WORKERS))


def n_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def process_pool(workers: int) -> Iterator[Executor | None]:
    """Provide a pool of processes, or None (this process) for one worker.

    The processes start anew instead of as copies: threads and locks of a copy would be undefined.
    """
    if workers <= 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield pool


def _width(executor: Executor) -> int:
    """Return the number of workers of an executor, as far as it says."""
    n = getattr(executor, "_max_workers", None)
    return n if isinstance(n, int) and n > 0 else n_cores()
