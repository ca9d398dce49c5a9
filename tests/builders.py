"""Builders of small, readable snapshots: plain Python values like those of ``_snapshot()``.

data = snapshot(
    segment(0x1000000, block(512, "active_allocated"), block(2 * MIB - 512)),
    events=[alloc(0x1000000, 512)],
)
columns(data)         # -> Snapshot, through the reader
pickled(data)         # -> bytes of Python's pickle
cpp_pickled(data)     # -> bytes of PyTorch's C++ pickler
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

from fragdoctor.model.snapshot import Snapshot

MIB = 1 << 20
BASE = 0x7F0000000000
N_A = "N/A"
DEFAULT_POOL = (0, 0)


def frame(filename: str = "train.py", line: int = 1, name: str = "step") -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


def block(
    size: int,
    state: str = "inactive",
    *,
    address: int | None = None,
    requested: int | None = None,
    frames: list[Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a block; if its address is None, ``segment`` fills it in."""
    is_live = state != "inactive"
    return {
        "address": address,
        "size": size,
        "requested_size": requested if requested is not None else size if is_live else 0,
        "state": state,
        "frames": [] if frames is None else frames,
        **more,
    }


def segment(
    address: int,
    *blocks: dict[str, Any],
    device: int = 0,
    stream: int = 0,
    kind: str | None = None,
    pool: tuple[int, int] = DEFAULT_POOL,
    is_expandable: bool = False,
    frames: list[Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return a segment that is tiled by its blocks; its sums are computed from the blocks."""
    at = address
    for b in blocks:
        b["address"] = at if b["address"] is None else b["address"]
        at += b["size"]
    total = sum(b["size"] for b in blocks)
    live = [b for b in blocks if b["state"] == "active_allocated"]
    active = [b for b in blocks if b["state"] != "inactive"]
    return {
        "device": device,
        "address": address,
        "total_size": total,
        "allocated_size": sum(b["size"] for b in live),
        "active_size": sum(b["size"] for b in active),
        "requested_size": sum(b["requested_size"] for b in active),
        "stream": stream,
        "segment_type": kind or ("small" if total <= 2 * MIB else "large"),
        "segment_pool_id": pool,
        "is_expandable": is_expandable,
        "frames": [] if frames is None else frames,
        "blocks": list(blocks),
        **more,
    }


def event(
    action: str,
    address: int,
    size: int,
    *,
    stream: int = 0,
    frames: list[Any] | None = None,
    time_us: int = 0,
    pool: tuple[int, int] = DEFAULT_POOL,
    **more: Any,
) -> dict[str, Any]:
    row: dict[str, Any] = {"action": action, "addr": address, "size": size, "stream": stream}
    if frames is not None:
        row["frames"] = frames
    return row | {
        "time_us": time_us,
        "compile_context": N_A,
        "user_metadata": "",
        "pool_id": pool,
        **more,
    }


def alloc(address: int, size: int, **more: Any) -> dict[str, Any]:
    return event("alloc", address, size, **more)


def free(address: int, size: int, **more: Any) -> list[dict[str, Any]]:
    """Return the two events of a free without cross-stream use."""
    return [
        event("free_requested", address, size, **more),
        event("free_completed", address, size, **more),
    ]


def segment_alloc(address: int, size: int, **more: Any) -> dict[str, Any]:
    return event("segment_alloc", address, size, **more)


def segment_free(address: int, size: int, **more: Any) -> dict[str, Any]:
    return event("segment_free", address, size, **more)


def oom(size: int, device_free: int, **more: Any) -> dict[str, Any]:
    row = event("oom", 0, size, **more)
    del row["addr"]
    return {"device_free": device_free, **row}


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
        **changes,
    }


def snapshot(
    *segments: dict[str, Any],
    events: list[dict[str, Any]] | None = None,
    traces: list[list[dict[str, Any]]] | None = None,
    conf: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the dict of ``_snapshot()``: ``events`` are of device 0, ``traces`` of all devices."""
    return {
        "segments": list(segments),
        "device_traces": traces if traces is not None else [events or []],
        "allocator_settings": settings() if conf is None else conf,
        "external_annotations": [],
        **more,
    }


def small() -> dict[str, Any]:
    """Return a small complete snapshot: two segments, a short trace, shared stacks, an OOM."""
    stack = [frame("train.py", 10, "forward"), frame("train.py", 99, "<module>")]
    other = [frame("eval.py", 5, "evaluate"), stack[1]]
    return snapshot(
        segment(BASE, block(512, "active_allocated", frames=stack), block(2 * MIB - 512)),
        segment(
            BASE + 32 * MIB,
            block(12 * MIB, "active_pending_free", frames=other),
            block(8 * MIB, frames=stack),
            frames=stack,
        ),
        events=[
            segment_alloc(BASE, 2 * MIB, frames=stack, time_us=1),
            alloc(BASE, 500, frames=stack, time_us=2),
            segment_alloc(BASE + 32 * MIB, 20 * MIB, frames=other, time_us=3),
            alloc(BASE + 32 * MIB, 12 * MIB, frames=other, time_us=4),
            event("free_requested", BASE + 32 * MIB, 12 * MIB, time_us=5),
            oom(64 * MIB, 1 * MIB, frames=stack, time_us=6),
        ],
    )


def pickled(data: Any, protocol: int = 4) -> bytes:
    return pickle.dumps(data, protocol=protocol)


def columns(data: Any) -> Snapshot:
    """Return the snapshot that the reader makes from the value."""
    from fragdoctor.inputs.snapshot_reader import read_snapshot

    return read_snapshot(pickled(data))


def cpp_pickled(data: Any) -> bytes:
    """Return the bytes of PyTorch's C++ pickler: protocol 2, memo after filling, no batches.

    As in that pickler, strings always go into the memo, containers only if they are shared.
    """
    return b"\x80\x02" + _CppPickler(data).run() + b"."


class _CppPickler:
    def __init__(self, data: Any) -> None:
        self.data = data
        self.out = bytearray()
        self.memo: dict[Any, int] = {}
        self.uses: dict[int, int] = {}

    def run(self) -> bytes:
        self._count(self.data)
        self._put(self.data)
        return bytes(self.out)

    def _count(self, value: Any) -> None:
        if not isinstance(value, dict | list | tuple):
            return
        self.uses[id(value)] = self.uses.get(id(value), 0) + 1
        if self.uses[id(value)] == 1:
            items = [*value, *value.values()] if isinstance(value, dict) else value
            for item in items:
                self._count(item)

    def _put(self, value: Any) -> None:
        key = ("str", value) if isinstance(value, str) else id(value)
        if key in self.memo and isinstance(value, str | dict | list | tuple):
            index = self.memo[key]
            self.out += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)
            return
        self._body(value)
        shared = isinstance(value, dict | list | tuple) and self.uses[id(value)] > 1
        if isinstance(value, str) or shared:
            index = self.memo[key] = len(self.memo)
            self.out += b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)

    def _body(self, value: Any) -> None:  # noqa: C901 - one branch per type
        if isinstance(value, bool):
            self.out += b"\x88" if value else b"\x89"
        elif value is None:
            self.out += b"N"
        elif isinstance(value, int):
            self._int(value)
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            text = value.encode("utf-8", "surrogatepass")
            self.out += b"X" + struct.pack("<I", len(text)) + text
        elif isinstance(value, tuple):
            for item in value:
                self._put(item)
            self.out += {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}[len(value)]
        elif isinstance(value, list):
            self.out += b"]("
            for item in value:
                self._put(item)
            self.out += b"e"
        else:
            self.out += b"}("
            for key, item in value.items():
                self._put(key)
                self._put(item)
            self.out += b"u"

    def _int(self, value: int) -> None:
        value = (value + (1 << 63)) % (1 << 64) - (1 << 63)  # cast to signed 64 bits, like PyTorch
        if 0 <= value < 256:
            self.out += b"K" + bytes([value])
        elif 0 <= value < 65536:
            self.out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            self.out += b"\x8a\x08" + struct.pack("<q", value)
