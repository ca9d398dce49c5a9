"""Write a snapshot as PyTorch writes it: pickle protocol 4, plain values.

Keys that the recording version of PyTorch did not yet write are left out, so that the estimate of
its version stays the same. Keys that fragdoctor does not know, and host segments, are not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pickle import dump
from typing import Any, BinaryIO, Final

import numpy.typing as npt

from fragdoctor.model.conf_keys import parse_version
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.snapshot import Action, BlockState, SegmentType, Snapshot

_STATES: Final = {
    BlockState.INACTIVE: "inactive",
    BlockState.ALLOCATED: "active_allocated",
    BlockState.PENDING_FREE: "active_pending_free",
    BlockState.OTHER: "unknown",
}
_KINDS: Final = {SegmentType.SMALL: "small", SegmentType.LARGE: "large"}
_ACTION_NAMES: Final = [a.name.lower() for a in Action]

Mappings = list[dict[str, Any]]


def write_snapshot(snapshot: Snapshot, file: BinaryIO) -> None:
    """Write a snapshot as a pickle that fragdoctor, PyTorch's viewer and Python can read."""
    dump(_Document(snapshot).top(), file, protocol=4)


def _mappings(**columns: Sequence[Any] | None) -> Mappings:
    """Return a mapping for each row; a key is left out if its value or its column is None."""
    kept = {key: values for key, values in columns.items() if values is not None}
    rows = zip(*kept.values(), strict=True)
    return [{k: v for k, v in zip(kept, row, strict=True) if v is not None} for row in rows]


def _chosen(ids: npt.NDArray[Any], choices: Sequence[Any], missing: Any = None) -> list[Any]:
    """Return the choice for each id, and ``missing`` for -1."""
    return [missing if i < 0 else choices[i] for i in ids.tolist()]


class _Document:
    """The plain values of a snapshot; equal frames and stacks are the same object."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._s = snapshot
        self._high = snapshot.provenance.version_high
        frames = snapshot.frames
        shared = _mappings(
            name=_chosen(frames.name, snapshot.strings, ""),
            filename=_chosen(frames.filename, snapshot.strings, ""),
            line=frames.line.tolist(),
        )
        offsets, ids = snapshot.stacks.offsets.tolist(), snapshot.stacks.frames.tolist()
        self._stacks = [[shared[i] for i in ids[low:high]] for low, high in pairwise(offsets)]
        self._pools = [(a, b) for a, b in snapshot.pools.tolist()]
        self._streams = snapshot.streams.tolist()

    def top(self) -> Any:
        if self._s.provenance.is_list:
            return self._segments()
        document: dict[str, Any] = {
            "segments": self._segments(),
            "device_traces": [
                self._events(slice(low, high))
                for low, high in pairwise(self._s.events.offsets.tolist())
            ],
        }
        if self._s.settings.is_recorded:
            document["allocator_settings"] = self._settings()
        if self._s.annotations or self._knows("2.7"):
            document["external_annotations"] = [
                {"device": a.device, "time_us": a.time_us, "name": a.name, "stage": a.stage}
                for a in self._s.annotations
            ]
        return document

    def _knows(self, version: str) -> bool:
        """Return whether the recording PyTorch may have been this version or newer."""
        return not self._high or parse_version(self._high) >= parse_version(version)

    def _segments(self) -> Mappings:
        s, is_new = self._s.segments, self._knows("2.1")
        blocks = self._blocks()
        return _mappings(
            device=s.device.tolist(),
            address=s.address.tolist(),
            total_size=s.total_bytes.tolist(),
            allocated_size=s.allocated_bytes.tolist(),
            active_size=s.active_bytes.tolist(),
            requested_size=s.requested_bytes.tolist() if self._knows("2.0") else None,
            stream=_chosen(s.stream, self._streams),
            segment_type=[_KINDS.get(SegmentType(kind)) for kind in s.kind.tolist()],
            segment_pool_id=_chosen(s.pool, self._pools),
            is_expandable=s.is_expandable.tolist() if is_new else None,
            frames=_chosen(s.stack, self._stacks, [] if is_new else None),
            blocks=[blocks[low:high] for low, high in pairwise(s.block_offsets.tolist())],
        )

    def _blocks(self) -> Mappings:
        b = self._s.blocks
        return _mappings(
            address=b.address.tolist() if self._knows("2.1") else None,
            size=b.size_bytes.tolist(),
            requested_size=b.requested_bytes.tolist() if self._knows("2.0") else None,
            state=[_STATES[BlockState(state)] for state in b.state.tolist()],
            frames=_chosen(b.stack, self._stacks),
        )

    def _events(self, rows: slice) -> Mappings:
        e, s = self._s.events, self._s
        report_progress("Writing events", rows.start, len(e))
        has_failed = (e.action[rows] == Action.OOM).tolist()
        return _mappings(
            action=_chosen(e.action[rows], _ACTION_NAMES),
            addr=[
                None if failed else address
                for failed, address in zip(has_failed, e.address[rows].tolist(), strict=True)
            ],
            device_free=[
                s.oom_free_bytes.get(row) if failed else None
                for row, failed in enumerate(has_failed, rows.start)
            ],
            size=e.size_bytes[rows].tolist(),
            stream=_chosen(e.stream[rows], self._streams, 0),
            frames=_chosen(e.stack[rows], self._stacks),
            time_us=[None if time < 0 else time for time in e.time_us[rows].tolist()],
            compile_context=_chosen(e.compile_context[rows], s.strings),
            user_metadata=_chosen(e.user_metadata[rows], s.strings),
            pool_id=_chosen(e.pool[rows], self._pools),
        )

    def _settings(self) -> dict[str, Any]:
        settings = self._s.settings
        others = settings.other.items()
        return settings.recorded() | {k: v for k, v in others if isinstance(v, bool | int | float)}
