"""The list of requests and frees that a traced program makes, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fragdoctor.frozen import frozen

ROUND: Final = 512  # the allocator hands out multiples of this


@frozen
class Place:
    """A line of the user's code."""

    filename: str
    line: int
    function: str


def shown(filename: str) -> str:
    """Return a path as people write it: relative to the current directory where it lies below."""
    path = Path(filename)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else filename


@dataclass(slots=True)
class RequestLog:
    """Requests by number, and the order of requests and frees.

    Attributes:
        sizes: bytes asked for, by request.
        operations: what asked, by request: an operator's name, or why a kernel needs it.
        place_of: the number of the place in the user's code, by request; -1 = none.
        copied_from: the request whose storage a cast copies, by request.
        events: ``n`` for request n, ``~n`` for its free, in order.
        places: by number.
        marks: (position in ``events``, name) where each phase begins.
        labels: what a request is, where that is known: ``parameters``, ``gradients``, ...
    """

    sizes: list[int] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    place_of: list[int] = field(default_factory=list)
    copied_from: list[int | None] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)

    def request(self, n_bytes: int, place: int, operation: str, copied_from: int | None) -> int:
        """Note a request and return its number."""
        number = len(self.sizes)
        self.sizes.append(n_bytes)
        self.operations.append(operation)
        self.place_of.append(place)
        self.copied_from.append(copied_from)
        self.events.append(number)
        return number

    def free(self, number: int) -> None:
        """Note that a request's memory was given back."""
        self.events.append(~number)

    def add_place(self, filename: str, line: int, function: str) -> int:
        """Return the number of a new place."""
        self.places.append(Place(filename, line, function))
        return len(self.places) - 1

    def mark(self, phase: str) -> None:
        """Begin a phase."""
        self.marks.append((len(self.events), phase))

    def spans(self) -> list[tuple[str, int, int]]:
        """Return (phase, first event, one past the last event) in order."""
        ends = [*self.marks, (len(self.events), "")]
        return [(name, start, end) for (start, name), (end, _) in pairwise(ends)]

    def rounded(self) -> NDArray[np.int64]:
        """Return what the allocator counts for each request, in bytes."""
        sizes = np.asarray(self.sizes, dtype=np.int64)
        return (sizes + ROUND - 1) // ROUND * ROUND

    def curve(self) -> NDArray[np.int64]:
        """Return the bytes allocated after each event."""
        events = np.asarray(self.events, dtype=np.int64)
        births = events >= 0
        sizes = self.rounded()[np.where(births, events, ~events)]
        changes: NDArray[np.int64] = np.cumsum(np.where(births, sizes, -sizes))
        return changes

    def alive_after(self, event: int) -> NDArray[np.int64]:
        """Return the numbers of the requests alive after an event."""
        events = np.asarray(self.events[: event + 1], dtype=np.int64)
        alive = np.zeros(len(self.sizes), dtype=np.bool_)
        alive[events[events >= 0]] = True
        alive[~events[events < 0]] = False
        return np.flatnonzero(alive)
