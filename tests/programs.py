"""Programs for the allocator model, and their recordings: genuine traces without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec.structs
import numpy as np
from hypothesis import strategies as st
from stock import from_python

from fragdoctor._native import _ext
from fragdoctor.future.simulator import trace_of
from fragdoctor.model.settings import AllocatorSettings, Era, parse_conf
from fragdoctor.model.snapshot import EventTable, Snapshot
from fragdoctor.trace.allocator import native_config
from fragdoctor.trace.operations import Operations
from fragdoctor.trace.replay import Reproduction
from fragdoctor.trace.reproduction import reproduce
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB

STREAMS = (0, 0x5555_0000_0000)


@dataclass(frozen=True)
class Program:
    """Requests ("alloc", bytes, stream) and frees ("free", index of the request, 0), in order."""

    operations: tuple[tuple[str, int, int], ...]


def program(*operations: int) -> Program:
    """Return a program on one stream: n > 0 requests n bytes, -k frees the k-th request."""
    return Program(tuple(("alloc", n, 0) if n > 0 else ("free", -n - 1, 0) for n in operations))


def _fake_trace(made: Program) -> list[dict[str, Any]]:
    """Return a trace with made-up addresses: only its requests are meaningful."""
    events = []
    n_made = 0
    sizes: list[tuple[int, int]] = []
    for name, number, stream in made.operations:
        if name == "alloc":
            n_made += 1
            sizes.append((number, stream))
            addr = n_made << 40
            events.append(_event("alloc", addr, number, stream))
        else:
            size, of_stream = sizes[number]
            addr = (number + 1) << 40
            events.append(_event("free_requested", addr, size, of_stream))
            events.append(_event("free_completed", addr, size, of_stream))
    return events


def _event(action: str, addr: int, size: int, stream: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "stream": STREAMS[stream],
        "pool_id": (0, 0),
    }


def operations_of(made: Program) -> _ext.NativeOps:
    """Return a program as the native core's operations."""
    snapshot = from_python({"segments": [], "device_traces": [_fake_trace(made)]})
    return _ext.NativeOps(Trace.of(snapshot, 0).native)


def record(
    made: Program,
    conf: str = "",
    *,
    era: Era = Era.BLOCK_COUNTER,
    capacity_bytes: int | None = None,
    allowed_fraction: float | None = None,
) -> Snapshot:
    """Run a program on the model and return the snapshot that PyTorch would have dumped."""
    return recorded(
        operations_of(made),
        conf,
        era=era,
        capacity_bytes=capacity_bytes,
        allowed_fraction=allowed_fraction,
    )


def recorded(
    operations: _ext.NativeOps,
    conf: str = "",
    *,
    era: Era = Era.BLOCK_COUNTER,
    capacity_bytes: int | None = None,
    allowed_fraction: float | None = None,
) -> Snapshot:
    """Replay operations and return the snapshot that PyTorch would have dumped."""
    settings = parse_conf(conf)
    config = native_config(
        settings, era=era, capacity_bytes=capacity_bytes, memory_fraction=allowed_fraction
    )
    raw = operations.record(config)
    return from_python(
        {
            "segments": [_segment(s) for s in raw["segments"]],
            "device_traces": [[_recorded_event(e) for e in raw["events"]]],
            "allocator_settings": _recorded_settings(settings),
        }
    )


def _segment(raw: tuple[Any, ...]) -> dict[str, Any]:
    address, size, stream, pool, is_small, is_expandable, blocks = raw
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "stream": STREAMS[stream],
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": (0, pool),
        "is_expandable": is_expandable,
        "blocks": [{"size": s, "requested_size": r, "state": state} for s, r, state in blocks],
    }


def _recorded_event(raw: tuple[Any, ...]) -> dict[str, Any]:
    action, address, size, stream, pool = raw
    event = {"action": action, "size": size, "stream": STREAMS[stream], "pool_id": (0, pool)}
    event["device_free" if action == "oom" else "addr"] = address
    return event


def _recorded_settings(settings: AllocatorSettings) -> dict[str, Any]:
    split = settings.max_split_bytes
    return {
        "PYTORCH_CUDA_ALLOC_CONF": settings.conf,
        "max_split_size": -1 if split is None else split,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {
            str(1 << i): d for i, d in enumerate(settings.roundup_power2_divisions)
        },
    }


SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(10 * MIB, 60 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB]),
)


@st.composite
def programs(draw: st.DrawFn, *, max_requests: int = 60, n_streams: int = 2) -> Program:
    """Draw a program that requests and frees memory in any order."""
    operations: list[tuple[str, int, int]] = []
    live: list[int] = []
    for n_made in range(draw(st.integers(1, max_requests))):
        operations.append(("alloc", draw(SIZES), draw(st.integers(0, n_streams - 1))))
        live.append(n_made)
        for _ in range(min(draw(st.integers(0, 2)), len(live))):
            freed = live.pop(draw(st.integers(0, len(live) - 1)))
            operations += [("free", freed, 0)]
    return Program(tuple(operations))


CONFS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:32",
        "roundup_power2_divisions:4",
        "large_segment_size_mb:32",
        "max_split_size_mb:64,roundup_power2_divisions:2",
        "expandable_segments:True,roundup_power2_divisions:8",
    ]
)
ERAS = st.sampled_from(list(Era))


def reproduced(snapshot: Snapshot, **facts: Any) -> Reproduction:
    """Return the reproduction of a snapshot's recorded run."""
    return reproduce(trace_of(snapshot), **facts)


def rows_of_requests(reproduction: Reproduction) -> list[int]:
    """Return the event rows of a run's requests."""
    ops = Operations.of(reproduction.operations)
    return [int(row) for row in ops.row[ops.is_request]]


def without_oldest(whole: Snapshot, device: int, n_lost: int) -> Snapshot:
    """Return the snapshot that a ring buffer leaves after losing its first ``n_lost`` events."""
    events = whole.events
    first = events.device_slice(device).start
    kept = np.ones(len(events), bool)
    kept[first : first + n_lost] = False
    offsets = events.offsets.copy()
    offsets[device + 1 :] -= n_lost
    columns = {
        name: getattr(events, name)[kept]
        for name in EventTable.__struct_fields__
        if name != "offsets"
    }
    return msgspec.structs.replace(whole, events=EventTable(**columns, offsets=offsets))
