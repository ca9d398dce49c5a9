"""The page's own tables of strings, frames and stacks: only what its graphics refer to."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fragdoctor.analysis.attribution import USER, frame_classes, user_frames
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.report import escape
from fragdoctor.report.page.blob import MAX_EXACT, BlobWriter

MAX_TEXT: Final = 240
"""Characters of one string on the page; the rest of a path is cut at its start."""

MAX_FRAME_REFERENCES: Final = 250_000
"""Frames over all stacks: about 0.4 MB compressed. Later stacks keep their user's line only."""

MAX_STACK_DEPTH: Final = 96

MAX_LINES: Final = 20_000
"""Distinct source lines that the timeline names; programs have hundreds."""


class TextTables:
    """Interns visible, shortened text; ids are stable within one page."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {}
        self._frames: dict[tuple[int, int, int, bool], int] = {}
        self._stacks: list[list[int]] = []
        self._n_references = 0
        self.n_cut_stacks = 0

    def string(self, text: str) -> int:
        """Return the id of a text, made visible and at most ``MAX_TEXT`` characters long."""
        # Cut twice: making characters visible can lengthen a hostile string sixfold.
        shown = escape.shorten_left(
            escape.visible(escape.shorten_left(text, 4 * MAX_TEXT)), MAX_TEXT
        )
        return self._strings.setdefault(shown, len(self._strings))

    def frame(self, filename: str, line: int, function: str, *, is_library: bool) -> int:
        """Return the id of a frame."""
        key = (self.string(filename), min(line, MAX_EXACT), self.string(function), is_library)
        return self._frames.setdefault(key, len(self._frames))

    def stack(self, frames: list[int], user_frame: int | None) -> int:
        """Add a stack, innermost frame first, and return its id."""
        kept = frames[:MAX_STACK_DEPTH]
        if self._n_references + len(kept) > MAX_FRAME_REFERENCES:
            kept = kept[:1] if user_frame is None else [user_frame]
        if len(kept) < len(frames):
            self.n_cut_stacks += 1
        self._n_references += len(kept)
        self._stacks.append(kept)
        return len(self._stacks) - 1

    def encode(self, blob: BlobWriter) -> dict[str, Any]:
        """Return the JSON part of the tables."""
        frames = list(self._frames)
        return {
            "strings": list(self._strings),
            "file": blob.add([f[0] for f in frames]),
            "line": blob.add([f[1] for f in frames]),
            "name": blob.add([f[2] for f in frames]),
            "library": blob.add([int(f[3]) for f in frames]),
            "stack_start": blob.add(np.cumsum([0, *(len(s) for s in self._stacks)])),
            "stack_frames": blob.add([f for s in self._stacks for f in s]),
            "cut_stacks": self.n_cut_stacks,
        }


class SnapshotStacks:
    """Maps stack ids of a snapshot to stacks of the page, each translated once."""

    def __init__(self, snapshot: Snapshot, tables: TextTables) -> None:
        classes = frame_classes(snapshot)
        self._snapshot = snapshot
        self._tables = tables
        self._is_library = (classes != USER).tolist()
        self._user_frames = user_frames(snapshot, classes)
        self._known: dict[int, int] = {-1: -1}

    def page_stack(self, stack_id: int) -> int:
        """Return the page's id of a stack of the snapshot; -1 for none recorded."""
        known = self._known.get(stack_id)
        if known is None:
            ids = self._frame_ids(stack_id)
            frames = [self._frame(i) for i in ids]
            user = int(self._user_frames[stack_id])
            known = self._tables.stack(frames, None if user < 0 else self._frame(user))
            known = known if frames else -1
            self._known[stack_id] = known
        return known

    def page_lines(self, stack: npt.NDArray[np.int32]) -> npt.NDArray[np.int64] | None:
        """Return the page's frame id of the user's line of each stack, -1 for none.

        None where there are more than ``MAX_LINES`` distinct ones.
        """
        own = np.append(self._user_frames, np.int32(-1))[stack]
        used, inverse = np.unique(own, return_inverse=True)
        if len(used) > MAX_LINES:
            return None
        ids = [-1 if f < 0 else self._frame(f) for f in used.tolist()]
        return np.array(ids, np.int64)[inverse]

    def _frame_ids(self, stack_id: int) -> list[int]:
        offsets = self._snapshot.stacks.offsets
        low, high = int(offsets[stack_id]), int(offsets[stack_id + 1])
        return [int(i) for i in self._snapshot.stacks.frames[low:high]]

    def _frame(self, frame_id: int) -> int:
        table = self._snapshot.frames
        return self._tables.frame(
            self._text(int(table.filename[frame_id])),
            int(table.line[frame_id]),
            self._text(int(table.name[frame_id])),
            is_library=self._is_library[frame_id],
        )

    def _text(self, string_id: int) -> str:
        return "" if string_id < 0 else self._snapshot.strings[string_id]
