"""A snapshot written anew, as PyTorch writes it: pickle protocol 4, plain values.

Keys that the recording PyTorch did not write yet are left out, so that the estimate of its version
stays the same. Keys that fragdoctor does not know, and host segments, are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np

from fragdoctor.export.pickle_writer import PickledColumn, PickleWriter, Records, Shared
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
_OOM: Final = int(Action.OOM)


def write_snapshot(snapshot: Snapshot, sink: Callable[[bytes], object]) -> None:
    """Write a snapshot as a pickle that fragdoctor, PyTorch's viewer and Python can read.

    The sink is called with pieces of bytes, for example ``file.write``.
    """
    PickleWriter(sink).write(_Document(snapshot).top())


class _Document:
    """The plain value of a snapshot, with events and segments as iterators."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._s = snapshot
        self._high = snapshot.provenance.version_high
        frames = snapshot.frames
        self._frames = [
            Shared({"name": self._text(name), "filename": self._text(file), "line": line})
            for name, file, line in zip(
                frames.name.tolist(), frames.filename.tolist(), frames.line.tolist(), strict=True
            )
        ]
        offsets, ids = snapshot.stacks.offsets.tolist(), snapshot.stacks.frames.tolist()
        self._stacks = [
            Shared([self._frames[i] for i in ids[low:high]]) for low, high in pairwise(offsets)
        ]
        self._pools = [(a, b) for a, b in snapshot.pools.tolist()]
        self._streams = snapshot.streams.tolist()
        free = sorted(snapshot.oom_free_bytes.items())
        self._free = (
            np.array([row for row, _ in free], np.int64),
            np.array([*(n_bytes for _, n_bytes in free), 0], np.uint64),
        )

    def top(self) -> Any:
        if self._s.provenance.is_list:
            return self._segments()
        document: dict[str, Any] = {
            "segments": self._segments(),
            "device_traces": self._traces(),
        }
        if self._s.settings.is_recorded:
            document["allocator_settings"] = self._settings()
        if self._s.annotations or self._knows("2.7"):
            document["external_annotations"] = self._annotations()
        return document

    def _knows(self, version: str) -> bool:
        """Return whether the recording PyTorch may have been this version or a newer one."""
        return not self._high or parse_version(self._high) >= parse_version(version)

    def _text(self, string: int) -> str:
        return self._s.strings[string] if string >= 0 else ""

    def _stack(self, stack: int) -> Shared | list[Any]:
        return self._stacks[stack] if stack >= 0 else []

    def _segments(self) -> Iterator[dict[str, Any]]:
        s = self._s.segments
        has_requested, is_new = self._knows("2.0"), self._knows("2.1")
        offsets = s.block_offsets.tolist()
        for i in range(len(s)):
            segment: dict[str, Any] = {
                "device": int(s.device[i]),
                "address": int(s.address[i]),
                "total_size": int(s.total_bytes[i]),
                "allocated_size": int(s.allocated_bytes[i]),
                "active_size": int(s.active_bytes[i]),
            }
            if has_requested:
                segment["requested_size"] = int(s.requested_bytes[i])
            segment["stream"] = self._streams[int(s.stream[i])]
            kind = _KINDS.get(SegmentType(int(s.kind[i])))
            if kind is not None:
                segment["segment_type"] = kind
            if s.pool[i] >= 0:
                segment["segment_pool_id"] = self._pools[int(s.pool[i])]
            if is_new:
                segment["is_expandable"] = bool(s.is_expandable[i])
            if s.stack[i] >= 0 or is_new:
                segment["frames"] = self._stack(int(s.stack[i]))
            segment["blocks"] = self._blocks(offsets[i], offsets[i + 1])
            yield segment

    def _blocks(self, low: int, high: int) -> Iterator[dict[str, Any]]:
        b = self._s.blocks
        has_requested, is_new = self._knows("2.0"), self._knows("2.1")
        for i in range(low, high):
            block: dict[str, Any] = {}
            if is_new:
                block["address"] = int(b.address[i])
            block["size"] = int(b.size_bytes[i])
            if has_requested:
                block["requested_size"] = int(b.requested_bytes[i])
            block["state"] = _STATES[BlockState(int(b.state[i]))]
            if b.stack[i] >= 0:
                block["frames"] = self._stack(int(b.stack[i]))
            yield block

    def _traces(self) -> list[Records]:
        return [
            Records(high - low, partial(self._events, low))
            for low, high in pairwise(self._s.events.offsets.tolist())
        ]

    def _events(self, first: int, low: int, high: int) -> list[PickledColumn]:
        """Return the columns of some events of a device, whose rows begin at ``first``."""
        e, s = self._s.events, self._s
        report_progress("Writing events", first + low, len(e))
        rows = slice(first + low, first + high)
        stream, stack, time, pool = e.stream[rows], e.stack[rows], e.time_us[rows], e.pool[rows]
        context, note = e.compile_context[rows], e.user_metadata[rows]
        number = np.append(s.streams, np.zeros(1, s.streams.dtype))[
            np.where(stream < 0, -1, stream)
        ]
        has_failed = e.action[rows] == _OOM
        free = self._free[1][np.searchsorted(self._free[0], np.arange(rows.start, rows.stop))]
        has_free = has_failed & np.isin(np.arange(rows.start, rows.stop), self._free[0])
        return [
            PickledColumn("action", e.action[rows], _ACTION_NAMES),
            PickledColumn("addr", e.address[rows], None, ~has_failed),
            PickledColumn("device_free", free, None, has_free),
            PickledColumn("size", e.size_bytes[rows]),
            PickledColumn("stream", number),
            PickledColumn("frames", stack, self._stacks, stack >= 0),
            PickledColumn("time_us", time, None, time >= 0),
            PickledColumn("compile_context", context, s.strings, context >= 0),
            PickledColumn("user_metadata", note, s.strings, note >= 0),
            PickledColumn("pool_id", pool, self._pools, pool >= 0),
        ]

    def _settings(self) -> dict[str, Any]:
        settings = self._s.settings
        limit = settings.max_split_bytes
        divisions = enumerate(settings.roundup_power2_divisions)
        return {
            "PYTORCH_CUDA_ALLOC_CONF": settings.conf,
            "max_split_size": -1 if limit is None else limit,
            "garbage_collection_threshold": float(settings.garbage_collection_threshold),
            "expandable_segments": settings.expandable_segments,
            "roundup_power2_divisions": {str(1 << i): d for i, d in divisions},
            **{
                key: value
                for key, value in settings.other.items()
                if isinstance(value, bool | int | float)
            },
        }

    def _annotations(self) -> Iterator[dict[str, Any]]:
        for a in self._s.annotations:
            yield {"device": a.device, "time_us": a.time_us, "name": a.name, "stage": a.stage}
