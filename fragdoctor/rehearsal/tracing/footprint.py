"""The requests of a traced model and what they come to: peaks, holders, what is reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fragdoctor.errors import OutOfMemory
from fragdoctor.frozen import frozen
from fragdoctor.model.memory_estimate import (
    CodeLine,
    Footprint,
    Item,
    PhaseName,
    PhasePeak,
    Share,
    Sureness,
)
from fragdoctor.trace.allocator import Allocator

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


TITLES: Final = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer_state": "optimizer states",
    "inputs": "inputs",
    "activations": "activations",
    "recomputed": "recomputed activations",
    "weight_copies": "autocast copies of weights",
    "workspaces": "cuBLAS workspaces",
    "temporaries": "temporaries",
}
N_LINES: Final = 8
SOURCE: Final = "traced: one request for each storage that an operation makes"


@frozen
class Served:
    """The requests of a trace, served by the allocator model.

    Attributes:
        peak_reserved_bytes: most held from the driver.
        retries: how often the cache had to be flushed.
        fits: whether every request was served.
        failed_bytes: the request that was not, or 0.
        curve: bytes of the blocks handed out, after each event served.
        blocks: bytes of each request's block.
    """

    peak_reserved_bytes: int
    retries: int
    fits: bool
    failed_bytes: int
    curve: NDArray[np.int64]
    blocks: NDArray[np.int64]


def serve(log: RequestLog, *, capacity_bytes: int | None = None, conf: str = "") -> Served:
    """Serve the requests with the allocator model, under any capacity and settings."""
    allocator = Allocator(conf, capacity_bytes)
    curve = np.zeros(len(log.events), dtype=np.int64)
    blocks = np.zeros(len(log.sizes), dtype=np.int64)
    addresses: dict[int, int] = {}
    before = failed = n_served = 0
    for event in log.events:
        if event < 0:
            allocator.free(addresses.pop(~event))
        else:
            try:
                addresses[event] = allocator.malloc(log.sizes[event])
            except OutOfMemory:
                failed = log.sizes[event]
                break
        now = allocator.allocated_bytes
        if event >= 0:
            blocks[event] = now - before
        curve[n_served] = before = now
        n_served += 1
    return Served(
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        retries=allocator.alloc_retries,
        fits=not failed,
        failed_bytes=failed,
        curve=curve[:n_served],
        blocks=blocks,
    )


def footprint_of(
    log: RequestLog, *, n_parameters: int, n_trainable: int, notes: Sequence[str]
) -> Footprint:
    """Return the peak of each phase, its shares, and the lines that hold most."""
    run = serve(log)
    kinds = kinds_of(log)
    phases = []
    for name, start, end in _highest_spans(log, run.curve):
        peak = start + int(run.curve[start:end].argmax())
        phases.append((name, peak, _shares(log, run.blocks, kinds, peak)))
    most: dict[str, int] = {}
    for _, _, shares in phases:
        for share in shares:
            most[share.item] = max(most.get(share.item, 0), share.n_bytes)
    highest = max(phases, key=lambda phase: int(run.curve[phase[1]]))[1]
    return Footprint(
        items=tuple(_item(kind, most[kind]) for kind in TITLES if kind in most),
        phases=tuple(
            PhasePeak(
                name=PhaseName(name),
                n_bytes=int(run.curve[peak]),
                shares=shares,
                moment=_moment(log, peak),
            )
            for name, peak, shares in phases
        ),
        reserved_bytes=run.peak_reserved_bytes,
        n_parameters=n_parameters,
        n_trainable=n_trainable,
        notes=(*notes, *_notes(log, run)),
        route="model",
        lines=_lines(log, run.blocks, kinds, highest),
    )


def kinds_of(log: RequestLog) -> list[str]:
    """Return what each request is for, a key of :data:`TITLES`."""
    births = np.zeros(len(log.sizes), dtype=np.int64)
    deaths = np.full(len(log.sizes), len(log.events), dtype=np.int64)
    events = np.asarray(log.events, dtype=np.int64)
    births[events[events >= 0]] = np.flatnonzero(events >= 0)
    deaths[~events[events < 0]] = np.flatnonzero(events < 0)
    starts = np.asarray([start for start, _ in log.marks], dtype=np.int64)
    spans = log.spans()
    born_in = np.searchsorted(starts, births, side="right") - 1
    kinds = []
    for number, span in enumerate(born_in):
        name, _, end = spans[span]
        kinds.append(_kind(log, number, name, outlives=bool(deaths[number] > end)))
    return kinds


def _kind(log: RequestLog, number: int, phase: str, *, outlives: bool) -> str:
    label = log.labels.get(number)
    if label is not None:
        return label
    source = log.copied_from[number]
    if source is not None and log.labels.get(source) == "parameters" and phase != "build":
        return "weight_copies"
    if phase == PhaseName.FORWARD and outlives:
        return "activations"
    return "temporaries"


def _highest_spans(log: RequestLog, curve: NDArray[np.int64]) -> list[tuple[str, int, int]]:
    """Of each phase the occurrence with the highest peak, in the order of first occurrence."""
    best: dict[str, tuple[int, int, int]] = {}
    for name, start, end in log.spans():
        if name not in set(PhaseName) or start == end:
            continue
        peak = int(curve[start:end].max())
        if name not in best or peak > best[name][0]:
            best[name] = (peak, start, end)
    return [(name, start, end) for name, (_, start, end) in best.items()]


def _shares(
    log: RequestLog, blocks: NDArray[np.int64], kinds: Sequence[str], event: int
) -> tuple[Share, ...]:
    sums: dict[str, int] = {}
    for number in log.alive_after(event).tolist():
        sums[kinds[number]] = sums.get(kinds[number], 0) + int(blocks[number])
    return tuple(Share(kind, sums[kind]) for kind in TITLES if sums.get(kind))


def _lines(
    log: RequestLog, blocks: NDArray[np.int64], kinds: Sequence[str], event: int
) -> tuple[CodeLine, ...]:
    """The lines of the user's code whose allocations hold most at an event."""
    sums: dict[tuple[int, str], int] = {}
    for number in log.alive_after(event).tolist():
        kind = kinds[number]
        if log.place_of[number] >= 0 and kind in {"activations", "recomputed", "temporaries"}:
            key = (log.place_of[number], kind)
            sums[key] = sums.get(key, 0) + int(blocks[number])
    ranked = sorted(sums.items(), key=lambda pair: -pair[1])[:N_LINES]
    return tuple(
        CodeLine(
            filename=log.places[place].filename,
            line=log.places[place].line,
            function=log.places[place].function,
            n_bytes=n_bytes,
            item=kind,
        )
        for (place, kind), n_bytes in ranked
    )


def _item(kind: str, n_bytes: int) -> Item:
    sureness = Sureness.ESTIMATE if kind == "workspaces" else Sureness.DERIVED
    return Item(id=kind, title=TITLES[kind], n_bytes=n_bytes, source=SOURCE, sureness=sureness)


def _moment(log: RequestLog, event: int) -> str:
    number = log.events[event]
    number = number if number >= 0 else ~number
    operation = log.operations[number]
    place = log.place_of[number]
    if place < 0:
        return f"at {operation}"
    return f"at {operation}, {log.places[place].filename}:{log.places[place].line}"


def _notes(log: RequestLog, run: Served) -> list[str]:
    built = [(start, end) for name, start, end in log.spans() if name == "build" and end > start]
    if built and int(run.curve[slice(*built[0])].max()) >= int(run.curve.max()):
        return ["The peak lies in the building of the model, before any step."]
    return []
