"""Diagnoses for tests of the page, with real columns and a verdict written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import diagnoses
import numpy as np
from msgspec.structs import replace
from stock import from_python

from fragdoctor.analysis.attribution import find_holders
from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.model.case import Case
from fragdoctor.model.census import Census, HoldingKind, Owner
from fragdoctor.model.diagnosis import DeviceFigures, Diagnosis, HolderReport, StranderReport
from fragdoctor.model.finding import Location
from fragdoctor.model.marks import MODULE_MARK
from fragdoctor.model.snapshot import Snapshot

MIB = 2**20
BASE = 0x7F00_0000_0000


def of_snapshot(snapshot: Snapshot, like: Diagnosis | None = None) -> Diagnosis:
    """Return a diagnosis with the figures of a snapshot and the words of another diagnosis."""
    like = like or diagnoses.fragmentation()
    analyses = [analyze_device(snapshot, d) for d in snapshot.devices]
    return replace(
        like,
        case=Case(snapshot=snapshot, sources=("run.pickle",)),
        devices=tuple(figures(a) for a in analyses),
        stranders=tuple(
            _strander(snapshot, a, i) for a in analyses for i in range(len(a.stranders))
        ),
        holders=tuple(holder for a in analyses for holder in _holders(snapshot, a)),
        analyses={a.device: a for a in analyses},
    )


def figures(a: DeviceAnalysis) -> DeviceFigures:
    free = a.free_space
    line = a.timeline
    return DeviceFigures(
        device=a.device,
        reserved_bytes=a.reserved_bytes,
        allocated_bytes=a.allocated_bytes,
        active_bytes=a.active_bytes,
        free_cached_bytes=free.free_cached_bytes,
        releasable_bytes=free.releasable_bytes,
        stranded_free_bytes=free.stranded_free_bytes,
        largest_free_block_bytes=free.largest_free_block_bytes,
        peak_allocated_bytes=line.peak_allocated_bytes if line else None,
        peak_reserved_bytes=line.peak_reserved_bytes if line else None,
        alloc_retries=a.n_inferred_retries,
        ooms=len(a.ooms),
        capacity_bytes=a.capacity_estimate_bytes,
        n_events=a.n_events,
        private_pools_bytes=free.private_pools_free_bytes,
    )


def _locations(snapshot: Snapshot, stack: int) -> tuple[Location, ...]:
    return snapshot.stack(stack)


def _strander(snapshot: Snapshot, a: DeviceAnalysis, i: int) -> StranderReport:
    strander = a.stranders[i]
    stack = _locations(snapshot, strander.stack)
    return StranderReport(
        a.device, strander.n_blocks, strander.block_bytes, strander.stranded_bytes, stack,
        stack[0] if stack else None, strander.oldest_event,
    )  # fmt: skip


def _holders(snapshot: Snapshot, a: DeviceAnalysis) -> Iterator[HolderReport]:
    states = [] if a.timeline is None else [a.timeline.peak_allocated_state]
    for h in find_holders(a.trace, states, a.category):
        location, stack = snapshot.location(h.frame), _locations(snapshot, h.stack)
        peak = h.n_bytes[1] if states else None
        yield HolderReport(a.device, location, h.n_bytes[0], peak, h.n_blocks[0], stack)


def frames(line: int, text: str = "train.py") -> list[dict[str, Any]]:
    return [
        {"filename": f"/opt/site-packages/torch/nn/{text}", "line": 134, "name": f"forward{text}"},
        {"filename": f"/home/user/{text}", "line": line, "name": f"step {text}"},
        {"filename": f"/home/user/{text}", "line": 7, "name": "<module>"},
    ]


def tiny(text: str = "train.py", device: int = 0) -> dict[str, Any]:
    """Return a snapshot as plain values: two segments, a strander, a freed block, an OOM."""
    one, two = BASE, BASE + 64 * MIB
    events = [
        {"action": "segment_alloc", "addr": one, "size": 20 * MIB},
        {"action": "alloc", "addr": one, "size": 12 * MIB, "frames": frames(11, text)},
        {"action": "alloc", "addr": one + 12 * MIB, "size": 2 * MIB, "frames": frames(12, text)},
        {"action": "free_requested", "addr": one, "size": 12 * MIB},
        {"action": "free_completed", "addr": one, "size": 12 * MIB},
        {"action": "segment_alloc", "addr": two, "size": 20 * MIB},
        {"action": "alloc", "addr": two, "size": 4 * MIB, "frames": frames(13, text)},
        {"action": "oom", "size": 64 * MIB, "device_free": 24 * MIB},
    ]
    for i, event in enumerate(events):
        event |= {"stream": 0, "time_us": 1_700_000_000_000_000 + 1000 * i}
        event |= {"user_metadata": text, "compile_context": text}

    def segment(address: int, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        live = sum(b["size"] for b in blocks if b["state"] != "inactive")
        return {
            "device": device, "address": address, "total_size": 20 * MIB, "allocated_size": live,
            "active_size": live, "requested_size": live, "stream": 0, "segment_type": "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks,
        }  # fmt: skip

    def block(address: int, size: int, line: int = 0) -> dict[str, Any]:
        state = "active_allocated" if line else "inactive"
        return {
            "address": address, "size": size, "requested_size": size, "state": state,
            "frames": frames(line, text) if line else [],
        }  # fmt: skip

    return {
        "segments": [
            segment(one, [block(one, 12 * MIB), block(one + 12 * MIB, 2 * MIB, 12),
                          block(one + 14 * MIB, 6 * MIB)]),
            segment(two, [block(two, 4 * MIB, 13), block(two + 4 * MIB, 16 * MIB)]),
        ],
        "device_traces": [[] for _ in range(device)] + [events],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": text, "note": text},
        "external_annotations": [
            {"device": device, "time_us": 1_700_000_000_000_500, "name": text, "stage": "START"},
            {"device": device, "time_us": 1_700_000_000_006_500, "name": text, "stage": "END"},
        ],
    }  # fmt: skip


def tiny_diagnosis(text: str = "train.py") -> Diagnosis:
    return of_snapshot(from_python(tiny(text)))


def named(text: str = "") -> Diagnosis:
    """Return ``tiny`` with modules and owners: its 2 MiB block has both, its 4 MiB block neither.

    ``text`` is appended to the names, to make them hostile.
    """
    data = tiny()
    for event in data["device_traces"][0]:
        is_first = event["action"] == "alloc" and event["addr"] < BASE + 64 * MIB
        event["user_metadata"] = f"{MODULE_MARK}layers.{event['size'] >> 21}.mlp{text}" * is_first
    census = Census(
        time_us=data["device_traces"][0][-1]["time_us"],
        step=0,
        is_complete=True,
        owners=(Owner(f"agent.buffer{text}", HoldingKind.CONTAINER, 3, "list"),),
        device=np.array([0], np.int32),
        address=np.array([BASE + 12 * MIB], np.uint64),
        size_bytes=np.array([2 * MIB], np.int64),
        holder=np.array([0], np.int32),
    )
    found = of_snapshot(from_python(data))
    return replace(found, case=replace(found.case, censuses=(census,)))
