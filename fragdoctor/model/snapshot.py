"""A memory snapshot as columns (numpy arrays), with interned strings, frames and stacks.

Conventions that hold for every table:

- sizes and addresses are ``uint64`` bytes, ids are ``int32`` indices into another table of the
  same snapshot, and -1 stands for "the file does not say" (key absent, or None);
- ``*_offsets`` are ``int64`` of length n + 1: row i has ``offsets[i]:offsets[i+1]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from fragdoctor.model.arrays import distinct
from fragdoctor.model.finding import Location
from fragdoctor.model.hooks import drawn
from fragdoctor.model.settings import AllocatorSettings

if TYPE_CHECKING:
    import pandas as pd

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Action(IntEnum):
    """What a trace event says; files spell it in lower case. OTHER comes from a newer PyTorch."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    SNAPSHOT = 7
    OOM = 8
    ANNOTATE = 9
    OTHER = 10


class BlockState(IntEnum):
    """State of a block. The documented ``active_awaiting_free`` is read as PENDING_FREE."""

    INACTIVE = 0
    ALLOCATED = 1
    PENDING_FREE = 2
    OTHER = 3


class SegmentType(IntEnum):
    """Pool class of a segment; UNKNOWN if the file does not say."""

    SMALL = 0
    LARGE = 1
    UNKNOWN = 2


class FrameTable(Struct, frozen=True):
    """Distinct frames: ``filename`` and ``name`` are string ids, ``line`` is ``uint64``."""

    filename: I32
    line: U64
    name: I32

    def __len__(self) -> int:
        return len(self.line)


class StackTable(Struct, frozen=True):
    """Distinct stacks, innermost frame first. ``frames[offsets[i]:offsets[i+1]]`` are frame ids.

    An empty stack (the file has ``frames: []``) is a row of length 0; a missing key is id -1.
    """

    offsets: I64
    frames: I32

    def __len__(self) -> int:
        return len(self.offsets) - 1


class SegmentTable(Struct, frozen=True):
    """Segments in file order. Under expandable segments a row is a contiguous mapped range.

    ``stream`` indexes ``Snapshot.streams``, ``pool`` indexes ``Snapshot.pools`` (-1: not recorded,
    which means the default pool). ``requested_bytes`` is 0 if the file has none (before 2.0).
    """

    device: I32
    address: U64
    total_bytes: U64
    allocated_bytes: U64
    active_bytes: U64
    requested_bytes: U64
    stream: I32
    kind: U8
    pool: I32
    is_expandable: Bools
    stack: I32
    block_offsets: I64

    def __len__(self) -> int:
        return len(self.address)


class BlockTable(Struct, frozen=True):
    """Blocks in file order, grouped by segment (``SegmentTable.block_offsets``).

    If the file has no ``address``, it is derived from the segment's address and the preceding
    sizes. ``requested_bytes`` is stale for inactive blocks. ``stack`` falls back to the newest
    entry of ``history`` in files of 1.12 to 2.0.
    """

    segment: I32
    address: U64
    size_bytes: U64
    requested_bytes: U64
    state: U8
    stack: I32

    def __len__(self) -> int:
        return len(self.address)


class EventTable(Struct, frozen=True):
    """Trace events, oldest first, grouped by device.

    Device d has rows ``offsets[d]:offsets[d+1]``. ``address`` is 0 for ``oom`` rows; their
    ``device_free_bytes`` is in ``oom_free_bytes`` of the snapshot (row -> bytes). ``time_us`` is
    -1 if absent. ``compile_context`` and ``user_metadata`` are string ids.
    """

    action: U8
    address: U64
    size_bytes: U64
    stream: I32
    time_us: I64
    stack: I32
    pool: I32
    compile_context: I32
    user_metadata: I32
    offsets: I64

    def __len__(self) -> int:
        return len(self.action)

    def device_slice(self, device: int) -> slice:
        """Return the rows of one device; empty for a device without history."""
        if not 0 <= device < len(self.offsets) - 1:
            return slice(0, 0)
        return slice(int(self.offsets[device]), int(self.offsets[device + 1]))


class Annotation(Struct, frozen=True):
    """A start or end of a user's ``record_function`` range (``external_annotations``)."""

    device: int
    time_us: int
    name: str
    stage: str


class HostSegment(Struct, frozen=True):
    """A pinned host segment (2.15); -1 / None if the file does not say. Not device memory."""

    address: int
    size_bytes: int
    allocated: bool | None


class Provenance(Struct, frozen=True):
    """How the file was written and what the reader noticed on the way.

    Attributes:
        source: name shown to people (a path, ``-``, or a name inside a page); hostile text.
        container: ``pickle``, ``torch.save``, ``json`` or ``html``.
        compression: ``gzip``, ``zstd`` or ``""``.
        protocol: pickle protocol, -1 for JSON.
        writer: ``python`` or ``c++``, by the order of memoizing and filling; ``""`` for JSON.
        is_list: whether the top level is the segment list of ``memory_snapshot()``.
        n_bytes: decompressed bytes read.
        version_low, version_high: PyTorch versions whose writer fits the keys ("" is an open end).
        unknown_keys: key path (``events.foo``) -> how often it occurred.
        unknown_values: unknown value, such as a newer version's action -> how often it occurred.
        n_replaced_strings: strings with lone surrogates, which were replaced by U+FFFD.
        has_trailing_bytes: whether anything follows the end of the pickle (ignored).
    """

    source: str = ""
    container: str = "pickle"
    compression: str = ""
    protocol: int = -1
    writer: str = ""
    is_list: bool = False
    n_bytes: int = 0
    version_low: str = ""
    version_high: str = ""
    unknown_keys: Mapping[str, int] = field(default_factory=dict)
    unknown_values: Mapping[str, int] = field(default_factory=dict)
    n_replaced_strings: int = 0
    has_trailing_bytes: bool = False


class Snapshot(Struct, frozen=True, dict=True):
    """Everything that a snapshot file says, as columns.

    Attributes:
        strings: distinct strings; hostile text.
        streams: ``uint64`` stream handles; 0 is the default stream.
        pools: ``int64`` of shape (n, 2), the two halves of a pool id; (0, 0) is the default pool.
        oom_free_bytes: event row -> the driver's free bytes at that ``oom``, if recorded.
        host_events: the ``host_traces`` as the events of a device 0; None if there are none.
        settings: the ``allocator_settings``, or defaults with ``is_recorded`` False.
        limits: device -> what a memory fraction allows, if the snapshot's bundle says it.
    """

    strings: Sequence[str]
    frames: FrameTable
    stacks: StackTable
    streams: U64
    pools: I64
    segments: SegmentTable
    blocks: BlockTable
    events: EventTable
    oom_free_bytes: Mapping[int, int]
    settings: AllocatorSettings
    annotations: Sequence[Annotation] = ()
    host_segments: Sequence[HostSegment] = ()
    host_events: EventTable | None = None
    provenance: Provenance = field(default_factory=Provenance)
    limits: Mapping[int, int] = {}

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Devices that have a segment or an event, ascending."""
        with_events = np.nonzero(np.diff(self.events.offsets))[0]
        return tuple(distinct(np.append(self.segments.device, with_events)).tolist())

    def frame(self, frame_id: int) -> Location:
        """Return one frame; its line is any value in the file, 0 to 2**64 - 1."""
        found = self._locations.get(frame_id)
        if found is None:
            table, text = self.frames, self.strings
            file, name = text[int(table.filename[frame_id])], text[int(table.name[frame_id])]
            found = self._locations[frame_id] = Location(file, int(table.line[frame_id]), name)
        return found

    @cached_property
    def _locations(self) -> dict[int, Location]:
        return {}

    def location(self, frame_id: int) -> Location | None:
        """Return one frame; None for id -1."""
        return None if frame_id < 0 else self.frame(frame_id)

    def stack(self, stack_id: int) -> tuple[Location, ...]:
        """Return a stack, innermost frame first; empty for id -1."""
        if stack_id < 0:
            return ()
        low, high = int(self.stacks.offsets[stack_id]), int(self.stacks.offsets[stack_id + 1])
        return tuple(map(self.frame, self.stacks.frames[low:high].tolist()))

    def __repr__(self) -> str:
        """Return one short line: the columns may hold millions of rows."""
        n = f"{len(self.events)} events, {len(self.segments)} segments, {len(self.blocks)} blocks"
        return f"<Snapshot {self.provenance.source!r}: {n}, devices {list(self.devices)}>"

    def _repr_html_(self) -> str | None:
        """Return what Jupyter shows."""
        return drawn(self)

    def events_frame(self, device: int | None = None) -> pd.DataFrame:
        """Return the trace as a DataFrame, one row per event, oldest first within a device.

        Columns: ``device``, ``action``, ``address``, ``size_bytes``, ``stream``, ``time_us``
        (missing if the file has none), ``pool``, ``compile_context``, ``user_metadata``,
        ``oom_free_bytes`` (``oom`` rows only), ``location`` (innermost frame), ``stack`` (its id).

        The events are those of one device, or of all devices if ``device`` is None.
        """
        events = self.events
        rows = slice(0, len(events)) if device is None else events.device_slice(device)
        n_per_device = np.diff(events.offsets)
        devices = np.repeat(np.arange(len(n_per_device), dtype=np.int32), n_per_device)
        from fragdoctor.model.frames import sparse  # noqa: PLC0415 - loads pandas

        return self._frame(
            events,
            "device action address size_bytes stream time_us pool compile_context user_metadata "
            "oom_free_bytes location stack",
            rows,
            device=devices[rows],
            oom_free_bytes=sparse(self.oom_free_bytes, rows),
        )

    def segments_frame(self) -> pd.DataFrame:
        """Return the segments as a DataFrame, one row per segment, in the order of the file."""
        return self._frame(
            self.segments,
            "device address total_bytes allocated_bytes active_bytes requested_bytes stream kind "
            "pool is_expandable n_blocks location stack",
            n_blocks=np.diff(self.segments.block_offsets),
        )

    def blocks_frame(self) -> pd.DataFrame:
        """Return the blocks as a DataFrame; ``segment`` is the row of ``segments_frame``."""
        return self._frame(
            self.blocks,
            "device segment address size_bytes requested_bytes state location stack",
            device=self.segments.device[self.blocks.segment],
        )

    def _frame(
        self, table: Struct, columns: str, rows: slice = slice(None), **given: Any
    ) -> pd.DataFrame:
        """Return rows of a table as a DataFrame, with what its ids stand for."""
        import pandas as pd  # noqa: PLC0415 - heavy

        from fragdoctor.model.frames import members, nullable, texts_of  # noqa: PLC0415

        pools = [f"({a}, {b})" for a, b in self.pools.tolist()]
        shown: dict[str, Callable[[Any], Any]] = {
            "action": lambda codes: members(codes, Action),
            "kind": lambda codes: members(codes, SegmentType),
            "state": lambda codes: members(codes, BlockState),
            "stream": lambda ids: self.streams[ids],
            "time_us": nullable,
            "pool": lambda ids: texts_of(ids, pools),
            "compile_context": lambda ids: texts_of(ids, self.strings),
            "user_metadata": lambda ids: texts_of(ids, self.strings),
            "location": lambda ids: texts_of(ids, self.innermost_frames()),
        }

        def column(name: str) -> Any:
            values = getattr(table, "stack" if name == "location" else name)[rows]
            return shown[name](values) if name in shown else values

        names = columns.split()
        return pd.DataFrame({n: given[n] if n in given else column(n) for n in names})

    def innermost_frames(self) -> list[str]:
        """Return the innermost frame of each stack; "" for an empty stack."""
        s = self.stacks
        starts, ends = s.offsets[:-1].tolist(), s.offsets[1:].tolist()
        return [
            str(self.location(int(s.frames[a]))) if a < b else ""
            for a, b in zip(starts, ends, strict=True)
        ]
