"""Who holds the memory, by call stack: at the peak and at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.model.snapshot import Action, BlockState, Snapshot
from fragdoctor.report.page.blob import BlobWriter
from fragdoctor.report.page.text_tables import SnapshotStacks

I64 = npt.NDArray[np.int64]

MAX_STACKS: Final = 4000
"""Stacks in one picture; what the others hold is summed up and named as such."""


@dataclass(frozen=True, slots=True)
class HeldByStack:
    """Live bytes and blocks per stack id (-1: no stack recorded), largest first."""

    stack: I64
    n_bytes: I64
    n_blocks: I64

    @property
    def total_bytes(self) -> int:
        """All live bytes."""
        return int(self.n_bytes.sum())


def held_at_end(snapshot: Snapshot, device: int) -> HeldByStack:
    """Return what the allocated blocks of the final layout hold."""
    blocks = snapshot.blocks
    on_device = snapshot.segments.device[blocks.segment] == device
    rows = on_device & (blocks.state == BlockState.ALLOCATED)
    return _by_stack(blocks.stack[rows], blocks.size_bytes[rows].astype(np.int64))


def _by_stack(stack: npt.NDArray[np.int32], size: I64) -> HeldByStack:
    used, inverse = np.unique(stack, return_inverse=True)
    held = np.zeros(len(used), np.int64)
    np.add.at(held, inverse, size)
    count = np.bincount(inverse, minlength=len(used))
    order = np.argsort(-held, kind="stable")
    return HeldByStack(used[order].astype(np.int64), held[order], count[order].astype(np.int64))


def held_at_state(snapshot: Snapshot, device: int, state: int) -> HeldByStack | None:
    """Return what was allocated after the first ``state`` events; None without a trace.

    A block is live then if the last event of its address up to there allocated it, or, with no
    event up to there, if the next one frees it or none ever comes and the final layout holds it.
    Sizes are the final block's where it still lives, else the request rounded to 512 bytes, so
    the total can differ from the timeline by unsplit remainders.
    """
    rows = snapshot.events.device_slice(device)
    action = snapshot.events.action[rows]
    has_requests = bool(np.any(action == Action.FREE_REQUESTED))
    freeing = Action.FREE_REQUESTED if has_requests else Action.FREE_COMPLETED
    at = np.nonzero((action == Action.ALLOC) | (action == freeing))[0]
    if len(at) == 0:
        return None
    address = snapshot.events.address[rows][at]
    is_alloc = action[at] == Action.ALLOC
    stack = np.where(is_alloc, snapshot.events.stack[rows][at], -1)
    size = _rounded(snapshot.events.size_bytes[rows][at])

    before = at < state
    _, newest = np.unique(address[before][::-1], return_index=True)
    newest = np.nonzero(before)[0][::-1][newest]
    live = newest[is_alloc[newest]]
    _, oldest = np.unique(address, return_index=True)
    older = oldest[~is_alloc[oldest] & ~before[oldest]]

    live_size = size[live]
    last_event = _last_event_of(address)
    still = last_event[live] == live
    live_size[still] = _final_sizes(snapshot, device, address[live[still]], live_size[still])
    untouched = _untouched(snapshot, device, address)
    stacks = np.concatenate((stack[live], stack[older], snapshot.blocks.stack[untouched]))
    sizes = np.concatenate(
        (live_size, size[older], snapshot.blocks.size_bytes[untouched].astype(np.int64))
    )
    return _by_stack(stacks.astype(np.int32), sizes)


def _rounded(size: npt.NDArray[np.uint64]) -> I64:
    wide = np.minimum(size, np.uint64(2**52)).astype(np.int64)
    return np.maximum(-(-wide // 512) * 512, 512)


def _last_event_of(address: npt.NDArray[np.uint64]) -> I64:
    """Return for each event the index of the last event with the same address."""
    _, first_reversed, inverse = np.unique(address[::-1], return_index=True, return_inverse=True)
    last = len(address) - 1 - first_reversed
    return last[inverse[::-1]]


def _final_sizes(
    snapshot: Snapshot, device: int, address: npt.NDArray[np.uint64], otherwise: I64
) -> I64:
    blocks = snapshot.blocks
    rows = np.nonzero(snapshot.segments.device[blocks.segment] == device)[0]
    if len(rows) == 0:
        return otherwise
    rows = rows[np.argsort(blocks.address[rows], kind="stable")]
    known = blocks.address[rows]
    place = np.minimum(np.searchsorted(known, address), len(known) - 1)
    is_there = (known[place] == address) & (blocks.state[rows[place]] == BlockState.ALLOCATED)
    return np.where(is_there, blocks.size_bytes[rows[place]].astype(np.int64), otherwise)


def _untouched(snapshot: Snapshot, device: int, address: npt.NDArray[np.uint64]) -> I64:
    """Return rows of final allocated blocks whose address no event mentions."""
    blocks = snapshot.blocks
    on_device = snapshot.segments.device[blocks.segment] == device
    rows = np.nonzero(on_device & (blocks.state == BlockState.ALLOCATED))[0]
    return rows[~np.isin(blocks.address[rows], address)]


def icicle_data(
    snapshot: Snapshot, analysis: DeviceAnalysis, blob: BlobWriter, stacks: SnapshotStacks
) -> dict[str, Any] | None:
    """Return the JSON part of one device's icicles; None where nothing was ever live."""
    moments: dict[str, Any] = {}
    if analysis.timeline is not None:
        state = int(np.argmax(analysis.timeline.allocated_bytes))
        at_peak = held_at_state(snapshot, analysis.device, state)
        if at_peak is not None and at_peak.total_bytes:
            moments["peak"] = {"state": state, **_encode(at_peak, blob, stacks)}
    at_end = held_at_end(snapshot, analysis.device)
    if at_end.total_bytes:
        moments["end"] = {"state": analysis.n_events, **_encode(at_end, blob, stacks)}
    return moments or None


def _encode(held: HeldByStack, blob: BlobWriter, stacks: SnapshotStacks) -> dict[str, Any]:
    rest = slice(MAX_STACKS, None)
    return {
        "total": held.total_bytes,
        "n_blocks": int(held.n_blocks.sum()),
        "rest_bytes": int(held.n_bytes[rest].sum()),
        "rest_stacks": len(held.stack[rest]),
        "stack": blob.add([stacks.page_stack(int(s)) for s in held.stack[:MAX_STACKS]]),
        "bytes": blob.add(held.n_bytes[:MAX_STACKS]),
        "blocks": blob.add(held.n_blocks[:MAX_STACKS]),
    }
