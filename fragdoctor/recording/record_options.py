"""How to record, passed from ``fragdoctor run`` to every child in one environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

VARIABLE = "FRAGDOCTOR_RUN_OPTIONS"
DEFAULT_MAX_ENTRIES = 100_000
"""Events kept per GPU: a few dozen steps of an ordinary training loop. An entry takes a few hundred
bytes of host memory besides its stack, which the entries of one line share."""

_MAX_COMMAND = 16 * 1024
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


class Options(NamedTuple):
    """How to record.

    Attributes:
        directory: where bundles go, as an absolute path; created when the first one is written.
        max_entries: events kept per GPU.
        stacks: ``python`` or ``all`` (including C++ frames).
        status: file to which each process appends its progress; "" means none.
        command: the command line as given to ``fragdoctor run``.
        module_paths: note the running module of the model with each allocation.
        census: find the names under which the program holds memory.
        sources: include the source around the user's lines in the bundle.
    """

    directory: str
    max_entries: int = DEFAULT_MAX_ENTRIES
    stacks: str = "python"
    status: str = ""
    command: tuple[str, ...] = ()
    module_paths: bool = False
    census: bool = True
    sources: bool = True

    def to_environment(self) -> str:
        """Return the value of ``VARIABLE``; a very long command is cut.

        Linux starts no program with a variable of more than 128 KiB, but does with longer commands.
        """
        return json.dumps({**self._asdict(), "command": _beginning(self.command)})


def _beginning(command: tuple[str, ...]) -> list[str]:
    """Return as many words of a command as there is room for, then an ellipsis."""
    kept: list[str] = []
    room = _MAX_COMMAND
    for word in command:
        room -= len(json.dumps(word)) + 2
        if room < 0:
            return [*kept, "..."]
        kept.append(word)
    return kept


def from_environment(environ: Mapping[str, str] = os.environ) -> Options | None:
    """Return the options that a parent passed on, or None if there are none or they are damaged."""
    try:
        values: Any = json.loads(environ.get(VARIABLE, ""))
        known = {k: v for k, v in values.items() if k in Options._fields}
        known["command"] = tuple(known.get("command", ()))
        return Options(**known)
    except (ValueError, TypeError, AttributeError):
        return None


class Ranks(NamedTuple):
    """Who this process is among many; None means not launched as one of many."""

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None


def find_ranks(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Return rank, local rank and world size as set by torchrun, MPI or SLURM.

    SLURM sets its variables for a single task too; a world of one has no ranks.
    """
    world = _first(environ, _WORLD_SIZES)
    rank, local = _first(environ, _RANKS), _first(environ, _LOCAL_RANKS)
    if world == 1 and "RANK" not in environ:
        return Ranks()
    return Ranks(rank, local, world)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = environ.get(name, "")
        if value.isascii() and value.isdigit() and len(value) < 10:
            return int(value)
    return None


class Pace:
    """Allows the first few at once, then at most one per interval, up to a total.

    Args:
        keep_first: number allowed without waiting.
        interval_s: seconds between the ones after these.
        keep_most: total allowed: a program that fails for days must not fill the disk.
    """

    def __init__(self, keep_first: int = 3, interval_s: float = 60.0, keep_most: int = 20) -> None:
        self._keep_first = keep_first
        self._interval_s = interval_s
        self._keep_most = keep_most
        self._allowed: list[float] = []

    def allows(self, now_s: float) -> bool:
        """Return whether one more is allowed at this time (monotonic seconds), and count it."""
        n, last = len(self._allowed), max(self._allowed, default=-self._interval_s)
        is_soon = n >= self._keep_first and now_s - last < self._interval_s
        if n >= self._keep_most or is_soon:
            return False
        self._allowed.append(now_s)
        return True
