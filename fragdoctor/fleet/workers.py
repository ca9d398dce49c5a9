"""Where ranks are examined: processes of this machine, or the workers of a Dask cluster.

The processes of this machine are an executor whose workers may die, hang or take too much memory: a
lost worker costs the task it had, and is replaced. ``ProcessPoolExecutor`` and loky break as a
whole when one process dies, and know no time limits; pebble's workers share one pipe under a lock
that a killed worker may hold, and cannot be replaced after a task that exhausted them. So each
process here has its own pipe and thread. A ``dask.distributed`` scheduler belongs to the user, and
so do its workers on many machines: none of them is started or ended here.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, cast

from fragdoctor.errors import ConfigError
from fragdoctor.installed import requirement
from fragdoctor.units import MIB, format_size

CONNECT_S: Final = 10.0
WORKERS_S: Final = 30.0
"""How long to wait for the first worker: a cluster that grows on demand starts with none."""

LOST_S: Final = 60.0
"""How long a cluster may have no scheduler or no worker before it is given up."""

LOOK_S: Final = 5.0
"""How often to check while nothing comes back."""

SCHEDULER_LOST: Final = "The dask scheduler was lost."
WORKERS_LOST: Final = "All dask workers were lost."

_ASK_S: Final = 30.0


@contextlib.contextmanager
def dask_cluster(where: str) -> Iterator[Executor]:
    """Provide the workers of a scheduler.

    Args:
        where: address such as ``tcp://host:8786``, or the name of a scheduler file.

    Raises:
        ConfigError: if Dask is not installed, the scheduler cannot be reached, or it has no worker
            that can run fragdoctor.
    """
    try:
        from distributed import Client
    except ImportError as e:
        raise ConfigError(
            "--dask needs dask.distributed.", hint="Run: pip install 'fragdoctor[dask]'"
        ) from e
    log = logging.getLogger("distributed")
    level, log.level = log.level, logging.CRITICAL  # its tracebacks are not sentences
    try:
        client = _connected(Client, where)
        try:
            _check_workers(client, where)
            # Not pure: a file may have changed, and a lost task must run again, not be recalled.
            yield cast("Executor", client.get_executor(pure=False))
        finally:
            with contextlib.suppress(Exception):
                client.close(timeout=5)
    finally:
        log.setLevel(level)


def _connected(kind: Any, where: str) -> Any:
    is_file = where.endswith(".json")
    if is_file and not Path(where).is_file():
        raise ConfigError(
            f"The scheduler file {where} does not exist.",
            hint="dask scheduler --scheduler-file writes one.",
        )
    options = {"scheduler_file": where} if is_file else {"address": where}
    try:
        return kind(timeout=CONNECT_S, set_as_default=False, **options)
    except Exception as e:  # addresses, files and networks fail in many ways
        raise ConfigError(
            f"The dask scheduler at {where} cannot be reached.",
            hint="Give the address that it prints when it starts, such as tcp://host:8786.",
        ) from e


def _check_workers(client: Any, where: str) -> None:
    """Ask one worker whether it can run this version of fragdoctor."""
    try:
        client.wait_for_workers(1, timeout=WORKERS_S)
    except Exception as e:
        raise ConfigError(
            f"The dask scheduler at {where} has no workers.", hint=f"Run: dask worker {where}"
        ) from e
    ours = version_here()
    hint = f"On each worker: pip install '{requirement() or f'fragdoctor=={ours}'}'"
    try:
        theirs = client.submit(version_here, pure=False).result(timeout=_ASK_S)
    except Exception as e:
        raise ConfigError(
            f"The dask workers cannot run fragdoctor: {type(e).__name__}.", hint=hint
        ) from e
    if theirs != ours:
        raise ConfigError(
            f"The dask workers have fragdoctor {theirs}, but this is {ours}.", hint=hint
        )


def version_here() -> str:
    """Return the version of fragdoctor running here."""
    return version("fragdoctor")


def n_threads(executor: Executor) -> int | None:
    """Return the threads of all workers of a Dask executor, or None for any other executor."""
    client = getattr(executor, "_client", None)
    try:
        return sum(client.nthreads().values()) if client is not None else None
    except Exception:  # noqa: BLE001 - a guess about a foreign executor
        return None


class Watch:
    """Watches the cluster behind an executor: tasks of a lost cluster never come back."""

    def __init__(self, executor: Executor) -> None:
        self._client = getattr(executor, "_client", None)
        self._since: float | None = None

    def trouble(self) -> str:
        """Return what is wrong now, as a sentence, or "" if nothing is."""
        if self._client is None:
            return ""
        try:
            if self._client.status != "running":
                return SCHEDULER_LOST
            known = self._client.sync(self._client.scheduler.identity, callback_timeout=LOOK_S)
        except Exception:  # noqa: BLE001 - networks fail in many ways
            return SCHEDULER_LOST
        return "" if known["workers"] else WORKERS_LOST

    def lost(self) -> str:
        """Return what is wrong once it has lasted ``LOST_S``: others may appear meanwhile."""
        trouble = self.trouble()
        if not trouble:
            self._since = None
            return ""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return trouble if now - self._since >= LOST_S else ""


MIN_MEMORY_BYTES: Final = 256 * MIB
"""Python, numpy and fragdoctor alone take about half of this."""

SPENT_CODES: Final = frozenset({"timed_out", "out_of_host_memory"})
"""Rows after which a worker is replaced: one of its threads still runs, or its heap is full."""

_JOIN_S: Final = 5.0


_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class WorkerLostError(BrokenExecutor):
    """The process that worked on a task died, or was killed because it took too long."""


class WorkerPool(Executor):
    """Runs tasks in processes that start fresh, so that no lock or thread is copied.

    Each process has a thread here that sends it tasks and starts another one if it is lost.

    Args:
        workers: number of processes; each starts when there is a task for it.
        memory_bytes: what one process may take (``RLIMIT_DATA``); Linux only.

    Raises:
        ConfigError: if the limit is too small to work with, or cannot be set on this system.
    """

    def __init__(self, workers: int, *, memory_bytes: int | None = None) -> None:
        check_memory(memory_bytes)
        self._max_workers = max(1, workers)
        self._memory_bytes = memory_bytes
        self._threads = ThreadPoolExecutor(self._max_workers, "fragdoctor-worker")
        self._of_thread = threading.local()
        self._workers: set[_Worker] = set()
        self._end, self._is_over = multiprocessing.Pipe(duplex=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn(*args, **kwargs)`` on a worker."""
        return self.submit_within(None, fn, *args, **kwargs)

    def submit_within(
        self, seconds: float | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Run a task on a worker that is killed if it takes longer than ``seconds``."""
        return self._threads.submit(self._ask, seconds, (fn, args, kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers: after their tasks, or at once with ``cancel_futures``."""
        self._threads.shutdown(wait=wait and not cancel_futures, cancel_futures=cancel_futures)
        if wait or cancel_futures:
            self._is_over.close()  # from here on, no thread waits for a worker
        if wait:
            self._threads.shutdown()
            for worker in list(self._workers):
                self._lose(worker)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait for the tasks; if an error or Ctrl-C ends the block, end them at once."""
        self.shutdown(cancel_futures=kind is not None)

    def _ask(self, seconds: float | None, call: _Call) -> Any:
        """Return the answer of this thread's worker.

        Raises:
            WorkerLostError: if it died or took too long, or the pool is closed.
            Exception: whatever the task raised.
        """
        worker: _Worker | None = getattr(self._of_thread, "worker", None)
        if worker not in self._workers or not worker.process.is_alive():
            worker = self._of_thread.worker = _Worker(self._memory_bytes)
            self._workers.add(worker)
        is_spent = True
        try:
            worker.pipe.send(call)
            ready = wait([worker.pipe, worker.process.sentinel, self._end], seconds)
            if not ready:
                raise WorkerLostError(f"The worker took longer than {seconds} s.")
            if ready == [self._end]:
                raise WorkerLostError("The pool of workers is closed.")
            is_result, value, is_spent = worker.pipe.recv()
        except (EOFError, OSError) as e:
            raise WorkerLostError("The worker died.") from e
        finally:
            if is_spent:
                self._lose(worker)
        if not is_result:
            raise value
        return value

    def _lose(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        worker.end()


def check_memory(memory_bytes: int | None) -> None:
    """Refuse a limit that cannot be enforced.

    Raises:
        ConfigError: if it is too small, or this system cannot limit the memory of a process.
    """
    if memory_bytes is None:
        return
    if sys.platform != "linux":
        raise ConfigError(
            "This system cannot limit the memory of a process.", hint="Use fewer workers instead."
        )
    if memory_bytes < MIN_MEMORY_BYTES:
        raise ConfigError(
            f"A worker cannot start within {format_size(memory_bytes)}.",
            hint=f"Give it at least {format_size(MIN_MEMORY_BYTES)}.",
        )


class _Worker:
    """A process that runs tasks, and the pipe to it."""

    def __init__(self, memory_bytes: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=serve, args=(there, memory_bytes), daemon=True)
        self.process.start()
        there.close()  # otherwise the worker's death would go unnoticed

    def end(self) -> None:
        """End the process: it holds nothing that would have to be cleaned up."""
        self.pipe.close()
        self.process.kill()
        self.process.join(_JOIN_S)
        with contextlib.suppress(ValueError):  # not even SIGKILL ends a read from a lost disk
            self.process.close()


def serve(pipe: Connection[Any, Any], memory_bytes: int | None) -> None:
    """Run the tasks that come through a pipe until it closes: the main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if memory_bytes is not None:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    gc.set_threshold(100_000, 50, 50)  # columns are not garbage: collect rarely
    with contextlib.suppress(EOFError, OSError):
        while True:
            fn, args, kwargs = pipe.recv()
            try:
                value = fn(*args, **kwargs)
            except Exception as e:  # noqa: BLE001 - the parent decides what it means
                pipe.send((False, e, True))
            else:
                rows = value if isinstance(value, tuple) else ()
                is_spent = any(getattr(row, "error_code", "") in SPENT_CODES for row in rows)
                pipe.send((True, value, is_spent))


def _end_with_parent() -> None:
    """End this process when its parent is gone, even if it hangs in a read."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def process_pool(
    workers: int, *, memory_bytes: int | None = None, is_needed: bool = False
) -> Iterator[Executor | None]:
    """Provide processes, or None (this process) if one worker is enough and not ``is_needed``.

    Raises:
        ConfigError: if the memory limit cannot be enforced.
    """
    if workers <= 1 and not is_needed and memory_bytes is None:
        yield None
        return
    with WorkerPool(workers, memory_bytes=memory_bytes) as pool:
        yield pool
