"""The stock unpickler as an oracle: it turns a snapshot file into columns, slowly but obviously.

For trusted files only (tests unpickle only files that the project itself recorded or built).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import (
    Action,
    Annotation,
    BlockState,
    BlockTable,
    EventTable,
    FrameTable,
    HostSegment,
    Provenance,
    SegmentTable,
    SegmentType,
    Snapshot,
    StackTable,
)

STATES = {
    "inactive": BlockState.INACTIVE,
    "active_allocated": BlockState.ALLOCATED,
    "active_pending_free": BlockState.PENDING_FREE,
    "active_awaiting_free": BlockState.PENDING_FREE,
}
KINDS = {"small": SegmentType.SMALL, "large": SegmentType.LARGE}
U64 = 2**64


class Interner:
    def __init__(self) -> None:
        self.ids: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.ids.setdefault(value, len(self.ids))


class Tables:
    def __init__(self) -> None:
        self.strings, self.frames, self.stacks = Interner(), Interner(), Interner()
        self.streams, self.pools = Interner(), Interner()
        self._seen: dict[int, int] = {}  # most lists of frames occur many times in a file
        self.streams(0)
        self.pools((0, 0))

    def text(self, value: str | None) -> int:
        return -1 if value is None else self.strings(value)

    def stack(self, frames: list[dict[str, Any]] | None) -> int:
        if frames is None:
            return -1
        known = self._seen.get(id(frames))
        if known is None:
            ids = [
                self.frames((self.text(f["filename"]), f["line"] % U64, self.text(f["name"])))
                for f in frames
            ]
            known = self._seen[id(frames)] = self.stacks(tuple(ids))
        return known

    def pool(self, value: tuple[int, int] | None) -> int:
        return -1 if value is None else self.pools(tuple(value))


def load_stock(path: str | Path) -> Snapshot:
    """Read a trusted snapshot with the stock unpickler."""
    return from_python(pickle.loads(Path(path).read_bytes()))


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without lists and tuples, which the reader counts as unknown."""
    return {
        key: _plain(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if not isinstance(value, list | tuple)
    }


def from_python(data: Any, provenance: Provenance | None = None) -> Snapshot:  # noqa: PLR0915 - slow and obvious
    """Turn a snapshot's plain Python value into columns."""
    top = {"segments": data} if isinstance(data, list) else data
    t = Tables()
    seg: dict[str, list[Any]] = {k: [] for k in SegmentTable.__struct_fields__}
    blk: dict[str, list[Any]] = {k: [] for k in BlockTable.__struct_fields__}
    seg["block_offsets"].append(0)
    for i, s in enumerate(top.get("segments", [])):
        seg["device"].append(s.get("device", 0))
        seg["address"].append(s["address"] % U64)
        seg["total_bytes"].append(s["total_size"])
        seg["allocated_bytes"].append(s.get("allocated_size", 0))
        seg["active_bytes"].append(s.get("active_size", 0))
        seg["requested_bytes"].append(s.get("requested_size", 0))
        seg["stream"].append(t.streams(s.get("stream", 0) % U64))
        seg["kind"].append(KINDS.get(s.get("segment_type"), SegmentType.UNKNOWN))
        seg["pool"].append(t.pool(s.get("segment_pool_id")))
        seg["is_expandable"].append(s.get("is_expandable", False))
        seg["stack"].append(t.stack(s.get("frames")))
        address = s["address"] % U64
        for b in s["blocks"]:
            frames = b.get("frames")
            requested = b.get("requested_size")
            if b.get("history"):
                newest = b["history"][0]
                frames = newest.get("frames") if frames is None else frames
                requested = newest.get("real_size", 0) if requested is None else requested
            blk["segment"].append(i)
            blk["address"].append(b.get("address", address) % U64)
            blk["size_bytes"].append(b["size"])
            blk["requested_bytes"].append(requested or 0)
            blk["state"].append(STATES.get(b["state"], BlockState.OTHER))
            blk["stack"].append(t.stack(frames))
            address += b["size"]
        seg["block_offsets"].append(len(blk["address"]))
    ev: dict[str, list[Any]] = {k: [] for k in EventTable.__struct_fields__}
    ev["offsets"].append(0)
    oom_free: dict[int, int] = {}
    for trace in top.get("device_traces", []):
        for e in trace:
            # PyTorch writes actions in lower case; anything else is not a known action.
            name = e["action"].upper() if e["action"].islower() else ""
            action = Action[name] if name in Action.__members__ else Action.OTHER
            if "device_free" in e:
                oom_free[len(ev["action"])] = e["device_free"]
            ev["action"].append(action)
            ev["address"].append(e.get("addr", 0) % U64)
            ev["size_bytes"].append(e.get("size", 0))
            ev["stream"].append(t.streams(e.get("stream", 0) % U64))
            ev["time_us"].append(e.get("time_us", -1))
            ev["stack"].append(t.stack(e.get("frames")))
            ev["pool"].append(t.pool(e.get("pool_id")))
            ev["compile_context"].append(t.text(e.get("compile_context")))
            ev["user_metadata"].append(t.text(e.get("user_metadata")))
        ev["offsets"].append(len(ev["action"]))
    strings = tuple(t.strings.ids)
    frames = list(t.frames.ids)
    stacks = list(t.stacks.ids)
    return Snapshot(
        strings=strings,
        frames=FrameTable(
            np.array([f[0] for f in frames], np.int32),
            np.array([f[1] for f in frames], np.uint64),
            np.array([f[2] for f in frames], np.int32),
        ),
        stacks=StackTable(
            np.cumsum([0, *(len(s) for s in stacks)]).astype(np.int64),
            np.array([f for s in stacks for f in s], np.int32),
        ),
        streams=np.array(list(t.streams.ids), np.uint64),
        pools=np.array(list(t.pools.ids), np.int64).reshape(-1, 2),
        segments=SegmentTable(**_arrays(SegmentTable, seg)),
        blocks=BlockTable(**_arrays(BlockTable, blk)),
        events=EventTable(**_arrays(EventTable, ev)),
        oom_free_bytes=oom_free,
        settings=AllocatorSettings.from_recorded(_plain(top["allocator_settings"]))
        if "allocator_settings" in top
        else AllocatorSettings(),
        annotations=tuple(
            Annotation(a["device"], a["time_us"], a["name"], a["stage"])
            for a in top.get("external_annotations", [])
        ),
        host_segments=tuple(
            HostSegment(
                h.get("address", -1), h.get("total_size", h.get("size", -1)), h.get("allocated")
            )
            for h in top.get("host_segments", [])
        ),
        provenance=provenance or Provenance(is_list=isinstance(data, list)),
    )


DTYPES = {
    "device": np.int32,
    "segment": np.int32,
    "stream": np.int32,
    "pool": np.int32,
    "stack": np.int32,
    "compile_context": np.int32,
    "user_metadata": np.int32,
    "kind": np.uint8,
    "state": np.uint8,
    "action": np.uint8,
    "is_expandable": np.bool_,
    "block_offsets": np.int64,
    "offsets": np.int64,
    "time_us": np.int64,
}


def _arrays(table: Any, columns: dict[str, list[Any]]) -> dict[str, Any]:
    return {
        name: np.array(columns[name], DTYPES.get(name, np.uint64))
        for name in table.__struct_fields__
    }


def resolved(snapshot: Snapshot) -> dict[str, Any]:
    """Return all tables with ids replaced by their values, so that two readers can be compared."""
    strings = np.array([*snapshot.strings, None], object)
    stacks = np.empty(len(snapshot.stacks) + 1, object)
    frames = [snapshot.frame(i) for i in range(len(snapshot.frames))]
    for i in range(len(snapshot.stacks)):
        low, high = snapshot.stacks.offsets[i : i + 2]
        stacks[i] = tuple(frames[j] for j in snapshot.stacks.frames[low:high])
    stacks[-1] = None
    pools = np.empty(len(snapshot.pools) + 1, object)
    pools[:-1] = [tuple(p) for p in snapshot.pools.tolist()]
    pools[-1] = None
    lookups = {
        "stack": stacks,
        "pool": pools,
        "stream": snapshot.streams,
        "compile_context": strings,
        "user_metadata": strings,
    }
    out: dict[str, Any] = {}
    for table in ("segments", "blocks", "events"):
        for name, column in column_dict(getattr(snapshot, table)).items():
            value = lookups[name][column] if name in lookups else column
            assert column.dtype == DTYPES.get(name, np.uint64), f"{table}.{name}"
            out[f"{table}.{name}"] = value.tolist()
    out["oom_free_bytes"] = dict(snapshot.oom_free_bytes)
    out["settings"] = snapshot.settings
    out["annotations"] = snapshot.annotations
    out["host_segments"] = snapshot.host_segments
    out["frames"] = set(frames)
    out["stacks"] = {s for s in stacks if s is not None}
    assert len(set(snapshot.strings)) == len(snapshot.strings)
    return out


def assert_same(expected: Snapshot, actual: Snapshot) -> None:
    """Fail with the name of the first column that differs."""
    left, right = resolved(expected), resolved(actual)
    for name, column in left.items():
        if name in {"frames", "stacks"}:  # a reader may keep more, from parts outside the columns
            assert column <= right[name], name
        else:
            assert column == right[name], name


def column_dict(table: object) -> dict[str, Any]:
    """Return the columns of a snapshot's table by name."""
    return {name: getattr(table, name) for name in table.__struct_fields__}  # type: ignore[attr-defined]
