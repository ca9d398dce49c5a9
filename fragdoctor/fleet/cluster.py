"""A cluster of ``dask.distributed`` as an executor: workers on many machines.

The scheduler is the user's, and so are its workers: nothing of them is started or ended here.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, cast

from fragdoctor.errors import ConfigError

CONNECT_S: Final = 10.0
WORKERS_S: Final = 30.0
"""How long one waits for the first worker: a cluster that grows on demand starts with none."""

LOST_S: Final = 60.0
"""How long a cluster may have no scheduler or no worker before one gives it up."""

LOOK_S: Final = 5.0
"""How often one looks while nothing comes back."""

SCHEDULER_LOST: Final = "The dask scheduler was lost."
WORKERS_LOST: Final = "All dask workers were lost."

_ASK_S: Final = 30.0


@contextlib.contextmanager
def dask_cluster(where: str) -> Iterator[Executor]:
    """Provide the workers of a scheduler.

    Args:
        where: address such as ``tcp://host:8786``, or the name of a scheduler file.

    Raises:
        ConfigError: dask is not installed, the scheduler cannot be reached, or it has no worker
            that can run fragdoctor.
    """
    try:
        from distributed import Client
    except ImportError as e:
        raise ConfigError(
            "--dask needs dask.distributed.", hint="Run: pip install 'fragdoctor[dask]'"
        ) from e
    log = logging.getLogger("distributed")
    level, log.level = log.level, logging.CRITICAL  # its tracebacks are no sentences
    try:
        client = _connected(Client, where)
        try:
            _check_workers(client, where)
            # Not pure: a file may have changed, and a lost task is to run again, not be recalled.
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
            hint="Give the address that it prints at its start, such as tcp://host:8786.",
        ) from e


def _check_workers(client: Any, where: str) -> None:
    """Ask one worker whether it can run this fragdoctor."""
    try:
        client.wait_for_workers(1, timeout=WORKERS_S)
    except Exception as e:
        raise ConfigError(
            f"The dask scheduler at {where} has no workers.", hint=f"Run: dask worker {where}"
        ) from e
    ours = version_here()
    hint = f"On each worker: pip install fragdoctor=={ours}"
    try:
        theirs = client.submit(version_here, pure=False).result(timeout=_ASK_S)
    except Exception as e:
        raise ConfigError(
            f"The dask workers cannot run fragdoctor: {type(e).__name__}.", hint=hint
        ) from e
    if theirs != ours:
        raise ConfigError(
            f"The dask workers have fragdoctor {theirs}, and this is {ours}.", hint=hint
        )


def version_here() -> str:
    """Return the version of fragdoctor where this runs."""
    return version("fragdoctor")


def n_threads(executor: Executor) -> int | None:
    """Return the threads of all workers of a dask executor, None for any other."""
    client = getattr(executor, "_client", None)
    try:
        return sum(client.nthreads().values()) if client is not None else None
    except Exception:  # noqa: BLE001 - a guess about a foreign executor
        return None


class Watch:
    """Looks after the cluster behind an executor: tasks of one that is gone never come back."""

    def __init__(self, executor: Executor) -> None:
        self._client = getattr(executor, "_client", None)
        self._since: float | None = None

    @property
    def is_cluster(self) -> bool:
        """Whether there is anything to look after."""
        return self._client is not None

    def trouble(self) -> str:
        """Return what is wrong now, as a sentence; "" for nothing."""
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
        """Return what is wrong once it has lasted ``LOST_S``: others may come in between."""
        trouble = self.trouble()
        if not trouble:
            self._since = None
            return ""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return trouble if now - self._since >= LOST_S else ""
