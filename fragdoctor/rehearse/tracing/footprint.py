"""From the list of requests to peaks, who holds them, and what the allocator reserves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fragdoctor.errors import OutOfMemory
from fragdoctor.frozen import frozen
from fragdoctor.model.estimate import (
    CodeLine,
    Footprint,
    Item,
    PhaseName,
    PhasePeak,
    Share,
    Sureness,
)
from fragdoctor.rehearse.tracing.request_log import RequestLog
from fragdoctor.trace.allocator import Allocator

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
