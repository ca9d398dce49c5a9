"""The trace as JSON in the Trace Event Format, which Perfetto (ui.perfetto.dev) and Chrome open.

Each device is a process with counters of allocated, active and reserved bytes, a slice from malloc
to free for each of the largest allocations, a mark for each out-of-memory, and the annotations.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, Final

import numpy as np
from msgspec import Struct

from fragdoctor.model.snapshot import I32, I64, Action, Snapshot
from fragdoctor.report import escape
from fragdoctor.trace.lives import BEFORE, NEVER
from fragdoctor.trace.trace import Trace
from fragdoctor.units import format_size

MAX_SLICES: Final = 50_000
"""The most allocations to draw per device, largest first; browsers draw no more smoothly."""

MAX_POINTS: Final = 100_000
"""The most points per device's counter; more are thinned without losing a peak."""

_MAX_TEXT: Final = 300
_STACK_FRAMES: Final = 12

Json = dict[str, Any]


class DeviceLife(Struct, frozen=True):
    """What happened on one device, with a clock.

    Attributes:
        clock_us: the time of each of the n_events + 1 states, never decreasing: the recorded time
            since the first event, or the event's number if the file has no times.
        has_times: whether the clock shows recorded times.
    """

    trace: Trace
    clock_us: I64
    has_times: bool

    @classmethod
    def of(cls, trace: Trace) -> DeviceLife:
        """Return the clock of a device."""
        times = trace.events.time_us
        if len(times) and 0 <= int(times.min()) < int(times.max()):
            elapsed = np.maximum.accumulate(times) - int(times[0])
            return cls(trace, np.append(0, elapsed), has_times=True)
        return cls(trace, np.arange(trace.n_events + 1), has_times=False)

    def time_of(self, rows: I32 | I64) -> I64:
        """Return the time of each event; the first time for ``BEFORE``, the last for ``NEVER``."""
        n_events = self.trace.n_events
        if not n_events:
            return np.zeros(len(rows), np.int64)
        state = np.where(rows == BEFORE, 0, np.minimum(rows, n_events - 1) + 1)
        result: I64 = self.clock_us[np.where(rows == NEVER, n_events, state)]
        return result


def trace_parts(snapshot: Snapshot, device: int | None = None) -> Iterator[str]:
    """Yield the document in pieces."""
    devices = [d for d in snapshot.devices if device is None or d == device]
    yield '{"displayTimeUnit":"ms","otherData":{"producer":"fragdoctor"},"traceEvents":['
    separator = "\n"
    for event in _events(snapshot, devices):
        yield separator + json.dumps(event, ensure_ascii=True, separators=(",", ":"))
        separator = ",\n"
    yield "\n]}\n"


def _events(snapshot: Snapshot, devices: list[int]) -> Iterator[Json]:
    for device in devices:
        life = DeviceLife.of(Trace.of(snapshot, device))
        yield from _names(life)
        yield from _counters(life)
        yield from _slices(snapshot, life)
        yield from _ooms(snapshot, life)
    yield from _annotations(snapshot, devices)


def _event(phase: str, device: int, name: str, **more: Any) -> Json:
    """Return an event of a device; viewers take process 0 for the idle process."""
    return {"ph": phase, "pid": device + 1, "tid": 1, "name": name, **more}


def _names(life: DeviceLife) -> Iterator[Json]:
    clock = "" if life.has_times else " (no times recorded: 1 us is one event)"
    facts = {"process_name": f"GPU {life.trace.device}{clock}", "thread_name": "memory"}
    for name, text in facts.items():
        yield _event("M", life.trace.device, name, args={"name": text})


def _counters(life: DeviceLife) -> Iterator[Json]:
    line = life.trace.totals
    columns = (line.allocated_bytes, line.active_bytes, line.reserved_bytes)
    kept = _thinned(columns)
    values = zip(life.clock_us[kept].tolist(), *(c[kept].tolist() for c in columns), strict=True)
    for time, allocated, active, reserved in values:
        # One counter for each: viewers stack the series of a counter, but these overlap.
        for name, value in (("allocated", allocated), ("active", active), ("reserved", reserved)):
            yield _event("C", life.trace.device, f"{name} bytes", ts=time, args={name: value})


def _thinned(columns: tuple[I64, ...]) -> I64:
    """Return the states to draw: all, or the first, lowest and highest of each stretch."""
    n = len(columns[0])
    per_stretch = 1 + 2 * len(columns)
    if n <= MAX_POINTS:
        return np.arange(n)
    length = -(-n * per_stretch // MAX_POINTS)
    starts = np.arange(0, n, length)
    kept = [starts, np.array([n - 1])]
    for column in columns:
        whole = np.append(column, np.full(len(starts) * length - n, column[-1]))
        stretches = whole.reshape(-1, length)
        kept += [starts + stretches.argmin(axis=1), starts + stretches.argmax(axis=1)]
    result: I64 = np.unique(np.minimum(np.concatenate(kept), n - 1))
    return result


def _slices(snapshot: Snapshot, life: DeviceLife) -> Iterator[Json]:
    """Yield a begin and an end for each of the largest allocations.

    The slices are asynchronous because they overlap; their ids are local to the device. Viewers
    draw slices with the same name together, so the name is the line that allocates.
    """
    lives = life.trace.lives
    rows = np.argsort(-lives.size_bytes, kind="stable")[:MAX_SLICES]
    begin, end = life.time_of(lives.start[rows]), life.time_of(lives.free[rows])
    label = cache(partial(_label, snapshot))
    for i, row in enumerate(rows.tolist()):
        place, facts = label(int(lives.stack[row]))
        size = int(lives.size_bytes[row])
        common = {"cat": "allocation", "id2": {"local": hex(i)}}
        args = {
            "size": format_size(size),
            "size_bytes": size,
            "requested_bytes": int(lives.requested_bytes[row]),
            "address": hex(int(lives.address[row])),
            "freed": bool(lives.free[row] != NEVER),
            **facts,
        }
        device, start = life.trace.device, int(begin[i])
        yield _event("b", device, place, ts=start, **common, args=args)
        yield _event("e", device, place, ts=max(start, int(end[i])), **common)


def _label(snapshot: Snapshot, stack: int) -> tuple[str, Json]:
    frames = snapshot.stack(stack)
    if not frames:
        return "(no stack recorded)", {}
    lines = [_cut(f"{f.filename}:{f.line} {f.function}") for f in frames[:_STACK_FRAMES]]
    return _cut(frames[0].at), {"stack": lines}


def _ooms(snapshot: Snapshot, life: DeviceLife) -> Iterator[Json]:
    events = snapshot.events
    rows = events.device_slice(life.trace.device)
    found = np.flatnonzero(events.action[rows] == Action.OOM)
    for row, time in zip(found.tolist(), life.time_of(found).tolist(), strict=True):
        size = int(events.size_bytes[rows][row])
        facts = {
            "refused_bytes": size,
            "device_free_bytes": snapshot.oom_free_bytes.get(rows.start + row),
            **_label(snapshot, int(events.stack[rows][row]))[1],
        }
        name = f"out of memory: {format_size(size)} refused"
        yield _event("i", life.trace.device, name, s="p", cat="oom", ts=time, args=facts)


def _annotations(snapshot: Snapshot, devices: list[int]) -> Iterator[Json]:
    """Yield the user's ranges; devices without recorded times are left out."""
    first = {d: _first_time(snapshot, d) for d in devices}
    for i, a in enumerate(snapshot.annotations):
        start = first.get(a.device)
        if start is None or a.stage not in ("START", "END"):
            continue
        phase, name = "b" if a.stage == "START" else "e", _cut(a.name)
        yield _event(
            phase, a.device, name, cat="annotation", id2={"local": f"annotation {name}"},
            ts=max(0, a.time_us - start), args={"index": i},
        )  # fmt: skip


def _first_time(snapshot: Snapshot, device: int) -> int | None:
    times = snapshot.events.time_us[snapshot.events.device_slice(device)]
    return int(times[0]) if len(times) and int(times[0]) >= 0 else None


def _cut(text: str) -> str:
    return escape.visible(text[:_MAX_TEXT])
