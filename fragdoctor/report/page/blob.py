"""The data behind the page's graphics: arrays and text in one compressed blob.

A million events fit in a small file. The page's script does the reverse
(``assets/page/decode.js``). Integers are stored as differences, folded to unsigned (zigzag),
split into byte planes and deflated together with the JSON part; the result is base64. Hostile
text stays inside the blob, so it is never markup.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.model.snapshot import I64, Snapshot
from fragdoctor.report import escape
from fragdoctor.trace.stacks import USER, Stacks

LEVEL: Final = 1
"""For a million events, half of the time of zlib's own level, 6, and 8% more bytes."""

# JavaScript's numbers are exact up to this; every figure of a device is far below.
MAX_EXACT: Final = 2**53 - 1


def byte_planes(values: npt.ArrayLike) -> tuple[bytes, int, int]:
    """Return (planes, bytes per value, unit) of some integers.

    ``unit`` is the largest power of two that divides them all: sizes are multiples of 512.
    """
    numbers = np.asarray(values, np.int64)
    if len(numbers) == 0:
        return b"", 0, 1
    bits = int(np.bitwise_or.reduce(numbers))
    shift = (bits & -bits).bit_length() - 1 if bits else 0
    deltas = numbers >> shift
    deltas[1:] -= deltas[:-1].copy()
    folded = ((deltas << 1) ^ (deltas >> 63)).astype("<u8")
    width = (int(folded.max()).bit_length() + 7) // 8
    planes = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, 8)[:, :width].T)
    return planes.tobytes(), width, 1 << shift


class BlobWriter:
    """Collects arrays; ``add`` returns what the page's script needs to find an array."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._n_bytes = 0

    def add(self, values: npt.ArrayLike) -> list[int]:
        """Store integers below 2**53 and return ``[offset, count, width, unit]``."""
        planes, width, unit = byte_planes(values)
        offset = self._n_bytes
        self._parts.append(planes)
        self._n_bytes += len(planes)
        return [offset, len(np.asarray(values)), width, unit]

    def encode(self, head: dict[str, Any]) -> str:
        """Return base64 of the deflated blob: length of the JSON, the JSON, the arrays."""
        text = escape.json_text(json.dumps(head, ensure_ascii=False, separators=(",", ":")))
        packed = text.encode()
        whole = b"".join([len(packed).to_bytes(4, "little"), packed, *self._parts])
        return base64.b64encode(zlib.compress(whole, LEVEL)).decode("ascii")


def compressed_size(arrays: Sequence[npt.ArrayLike]) -> int:
    """Return roughly how many bytes the arrays will take in the blob."""
    return sum(len(zlib.compress(byte_planes(a)[0], LEVEL)) for a in arrays)


MAX_TEXT: Final = 240
"""The most characters of one string on the page; longer paths are cut at the start."""

MAX_FRAME_REFERENCES: Final = 250_000
"""The most frames in all stacks: 0.4 MB compressed. Later stacks keep only the user's line."""

MAX_STRINGS: Final = 30_000
"""The most distinct file and function names; beyond twice this, stacks are left out altogether."""

MAX_STACK_DEPTH: Final = 96

LEFT_OUT: Final = "(stack left out to keep this file small)"


class TextTables:
    """Interns visible, shortened text; ids are stable within one page.

    ``scale`` below 1 lowers the bounds above.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._max_references = int(MAX_FRAME_REFERENCES * scale)
        self._max_strings = int(MAX_STRINGS * scale)
        self._strings: dict[str, int] = {}
        self._frames: dict[tuple[int, int, int, bool], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._n_references = 0

    def string(self, text: str) -> int:
        """Return the id of a text, made visible and cut to ``MAX_TEXT`` characters."""
        # Cut twice: making characters visible can make a hostile string six times longer.
        shown = escape.shorten_left(
            escape.visible(escape.shorten_left(text, 4 * MAX_TEXT)), MAX_TEXT
        )
        return self._strings.setdefault(shown, len(self._strings))

    def frame(self, filename: str, line: int, function: str, *, is_library: bool) -> int:
        """Return the id of a frame."""
        key = (self.string(filename), min(line, MAX_EXACT), self.string(function), is_library)
        return self._frames.setdefault(key, len(self._frames))

    def has_room(self, n_frames: int) -> bool:
        """Return whether a whole stack of this many frames still fits."""
        fits = self._n_references + n_frames <= self._max_references
        return fits and len(self._strings) < self._max_strings

    @property
    def is_full(self) -> bool:
        """Whether there is no room even for single lines."""
        return len(self._strings) >= 2 * self._max_strings

    def stack(self, frames: list[int]) -> int:
        """Return the id of a stack, innermost frame first."""
        key = tuple(frames)
        if key not in self._stacks:
            self._n_references += len(key)
        return self._stacks.setdefault(key, len(self._stacks))

    def encode(self, blob: BlobWriter) -> dict[str, Any]:
        """Return the JSON part of the tables."""
        frames = list(self._frames)
        return {
            "strings": list(self._strings),
            "file": blob.add([f[0] for f in frames]),
            "line": blob.add([f[1] for f in frames]),
            "name": blob.add([f[2] for f in frames]),
            "is_library": blob.add([int(f[3]) for f in frames]),
            "stack_start": blob.add(np.cumsum([0, *(len(s) for s in self._stacks)])),
            "stack_frames": blob.add([f for s in self._stacks for f in s]),
        }


class PageStacks:
    """Maps stack ids of a snapshot to stacks of the page, translating each once."""

    def __init__(self, snapshot: Snapshot, stacks: Stacks, tables: TextTables) -> None:
        self._snapshot = snapshot
        self._stacks = stacks
        self._tables = tables
        self.page_stack = cache(self._translate)
        self._frame = cache(self._translate_frame)

    def page_stacks(self, stacks: npt.NDArray[Any], n_bytes: I64) -> I64:
        """Return the page's ids of the stacks of blocks.

        The stacks that hold the most are translated first, so they keep their frames if the
        tables fill up.
        """
        held = np.bincount(stacks + 1, n_bytes)  # -1: none recorded
        used = np.flatnonzero(np.bincount(stacks + 1))
        page_ids = np.full(len(held), -1, np.int64)
        for i in used[np.argsort(-held[used])]:
            page_ids[i] = self.page_stack(int(i) - 1)
        return page_ids.take(stacks + 1)

    def _translate(self, stack_id: int) -> int:
        """Return the page's id of a stack of the snapshot, or -1 if none was recorded.

        When the tables fill up, stacks keep only the user's line, then only a remark.
        """
        if stack_id < 0:
            return -1
        offsets = self._snapshot.stacks.offsets
        low, high = int(offsets[stack_id]), int(offsets[stack_id + 1])
        if low == high:
            return -1
        ids = self._snapshot.stacks.frames[low : min(high, low + MAX_STACK_DEPTH)].tolist()
        if not self._tables.has_room(len(ids)):
            if self._tables.is_full:
                return self._tables.stack([self._tables.frame(LEFT_OUT, 0, "", is_library=False)])
            user = int(self._stacks.lines[stack_id])
            ids = [user if user >= 0 else ids[0]]
        return self._tables.stack([self._frame(i) for i in ids])

    def _translate_frame(self, frame_id: int) -> int:
        table = self._snapshot.frames
        return self._tables.frame(
            self._text(int(table.filename[frame_id])),
            int(table.line[frame_id]),
            self._text(int(table.name[frame_id])),
            is_library=bool(self._stacks.classes[frame_id] != USER),
        )

    def _text(self, string_id: int) -> str:
        return "" if string_id < 0 else self._snapshot.strings[string_id]


class Sink(Struct, frozen=True):
    """The destination of all parts of one page: one blob of arrays, one set of text tables."""

    blob: BlobWriter
    tables: TextTables
    stacks: PageStacks

    @classmethod
    def of(cls, snapshot: Snapshot, stacks: Stacks, scale: float = 1.0) -> Sink:
        """Return an empty sink for the stacks of one snapshot; for ``scale`` see ``TextTables``."""
        tables = TextTables(scale)
        return cls(BlobWriter(), tables, PageStacks(snapshot, stacks, tables))

    def beside(self, snapshot: Snapshot, stacks: Stacks) -> Sink:
        """Return a sink for another snapshot that writes to the same blob and tables."""
        return replace(self, stacks=PageStacks(snapshot, stacks, self.tables))
