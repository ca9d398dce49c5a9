"""Pick the lines of a log that belong to its story, without looking at every line.

A few literals pick the lines. If a literal occurs in more lines than its budget, half of the budget
goes to the first of these lines and half to evenly spaced lines, the same ones for all literals. So
reading a log of a gigabyte takes little more than the search for the literals. Lines right above a
failure are always examined: they say how far the run had come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.inputs.log_cleaning import plain_lines, rank_in
from fragdoctor.inputs.scene_lines import (
    FIGURE_LITERALS,
    HAPPENING_LITERALS,
    PROGRESS_LITERALS,
    TRIAL_LITERALS,
    figures_of,
    happening_of,
    place_of,
    time_of,
    trial_of,
)
from fragdoctor.model.case import LogMarker, OomMessage
from fragdoctor.model.story import Scene, SceneKind

_CHUNK: Final = 512 * 1024
_MAX_LINE: Final = 2000
_ABOVE: Final = 3000
"""Characters above a failure that are always read: its traceback, and the last progress."""

_NEAR: Final = 10_000
_MAX_PLACES: Final = 5000
_MAX_TEXT: Final = 300
_MAX_ON_LINE: Final = 20
_PROGRESS_BUDGET: Final = 1500
_FIGURE_BUDGET: Final = 5000
_BUDGET: Final = 20_000

_BUDGETS: Final = {
    **dict.fromkeys(TRIAL_LITERALS, _BUDGET),
    **dict.fromkeys(HAPPENING_LITERALS, _BUDGET),
    **dict.fromkeys(FIGURE_LITERALS, _FIGURE_BUDGET),
    **dict.fromkeys(PROGRESS_LITERALS, _PROGRESS_BUDGET),
}
_STEMS: Final = ("batch", "ret", "res", " error")
"""If a chunk lacks one of these stems, the literals that contain the stem are not searched for."""

_STEM_OF: Final = {
    literal: next((stem for stem in _STEMS if stem in literal), "") for literal in _BUDGETS
}
_PID: Final = re.compile(r"(?<![a-z])pid[=: ]\s?(\d{1,9})(?!\d)", re.IGNORECASE)
_BREAKS: Final = ("\n", "\r")
_KINDS: Final = {
    "device-assert": SceneKind.DEVICE_ASSERT,
    "illegal-access": SceneKind.ILLEGAL_ACCESS,
    "launch-failure": SceneKind.CUDA_ERROR,
    "launch-resources": SceneKind.CUDA_ERROR,
    "cudnn-execution": SceneKind.CUDA_ERROR,
    "cublas-execution": SceneKind.CUDA_ERROR,
    "collective-timeout": SceneKind.COLLECTIVE,
    "nccl-error": SceneKind.COLLECTIVE,
    "killed": SceneKind.KILLED,
    "restart": SceneKind.RESTART,
    "cache-flush": SceneKind.CACHE_FLUSH,
    "expandable-unsupported": SceneKind.WARNING,
    "cudamalloc-warning": SceneKind.WARNING,
}


class _Line(Struct, frozen=True):
    """The text between two line breaks (``_BREAKS``)."""

    start: int
    number: int
    raw: str


class _Places:
    """Finds the line at an offset; takes linear time if the offsets come in ascending order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._number = 1

    def line(self, offset: int, after: int) -> _Line:
        """Return the line around an offset, starting no earlier than ``after``.

        For a long line, return a piece of up to ``_MAX_LINE`` characters on each side.
        """
        low, high = max(after, offset - _MAX_LINE), offset + _MAX_LINE
        start = max(low, *(self._text.rfind(b, low, offset) + 1 for b in _BREAKS))
        ends = [at for b in _BREAKS if (at := self._text.find(b, offset, high)) >= 0]
        end = min(ends, default=min(high, len(self._text)))
        self._number += self._text.count("\n", self._position, start)
        self._position = start
        return _Line(start, self._number, self._text[start:end])


def scan(
    text: str, messages: Sequence[OomMessage], markers: Sequence[LogMarker]
) -> tuple[Scene, ...]:
    """Return the scenes of a log in the order of lines, its messages among them."""
    known = _known_lines(messages, markers)
    if len(text) > _MAX_LINE * 4 or "\n" in text.strip():
        starts = line_starts(text, sorted(known)[:_MAX_PLACES])
        offsets = sorted({*_hits(text), *_offsets_above(text, starts.values())})
    else:
        starts, offsets = line_starts(text, sorted(known)), []
    places = _Places(text)
    scenes: list[Scene] = []
    end = 0
    for offset in sorted({*offsets, *starts.values()}):
        if offset < end:
            continue
        line = places.line(offset, end)
        end = line.start + len(line.raw) + 1
        # The first part of a line in the file, not a later state of a progress bar.
        line_start = text.rfind("\n", max(0, line.start - _MAX_LINE), line.start) + 1
        is_first = line.start in (0, line_start)
        scenes.extend(_scenes(line, known.get(line.number, ()) if is_first else ()))
    return tuple(scenes)


def _known_lines(
    messages: Sequence[OomMessage], markers: Sequence[LogMarker]
) -> dict[int, list[Scene]]:
    """Return the scenes of the known messages and markers, by line."""
    known: dict[int, list[Scene]] = {}
    for index, message in enumerate(messages):
        kind = _kind(message)
        listed = known.setdefault(message.line, []) if kind is not None else []
        if kind is not None and len(listed) < _MAX_ON_LINE:
            listed.append(Scene(kind, message.line, message.text, rank=message.rank, message=index))
    for marker in markers:
        kind = _KINDS.get(marker.kind, SceneKind.OTHER)
        listed = known.setdefault(marker.line, [])
        if len(listed) < _MAX_ON_LINE and not any(scene.kind is kind for scene in listed):
            listed.append(Scene(kind, marker.line, marker.text, rank=marker.rank))
    return known


def _kind(message: OomMessage) -> SceneKind | None:
    if message.kind in ("negative", "shared-memory"):
        return None  # its marker becomes the scene
    if message.is_warning:
        return SceneKind.WARNING
    return SceneKind.OOM if message.is_device_oom else SceneKind.HOST_MEMORY


def line_starts(text: str, numbers: Sequence[int]) -> dict[int, int]:
    """Return the offsets of these lines, by line number; ``numbers`` are ascending."""
    found: dict[int, int] = {}
    position, number = 0, 1
    for wanted in numbers:
        while wanted - number > _NEAR:  # count in chunks until near, then line by line
            end = min(len(text), position + _CHUNK)
            n_breaks = text.count("\n", position, end)
            if number + n_breaks >= wanted or end == len(text):
                break
            position, number = end, number + n_breaks
        while number < wanted:
            end = text.find("\n", position)
            if end < 0:
                return found
            position = end + 1
            number += 1
        found[wanted] = position
    return found


def _offsets_above(text: str, starts: Iterable[int]) -> Iterator[int]:
    """Yield the offsets of the lines right above failures."""
    for n, start in enumerate(starts):
        if n >= _MAX_PLACES // 10:
            return
        at = max(0, start - _ABOVE)
        while 0 <= at < start:
            yield at
            breaks = [p for b in _BREAKS if (p := text.find(b, at, start)) >= 0]
            at = min(breaks, default=start) + 1


def _hits(text: str) -> Iterator[int]:
    """Yield the offsets of the literals, thinned to each literal's budget."""
    # Gaps are multiples of the smallest gap, so that all literals pick the same lines.
    most = max(_BUDGETS.values())
    grid = 2 * len(text) // most + 1
    gaps = {literal: grid * -(-most // budget) for literal, budget in _BUDGETS.items()}
    n_left = {literal: budget // 2 for literal, budget in _BUDGETS.items()}
    next_at = dict.fromkeys(_BUDGETS, 0)
    for base in range(0, len(text), _CHUNK):
        # this is the only letter whose lower case is longer; it would shift all later offsets
        chunk = text[base : base + _CHUNK + 32].replace("\u0130", "i").lower()
        has = {stem: stem in chunk for stem in ("", *_STEMS)}
        for literal, gap in gaps.items():
            if not has[_STEM_OF[literal]]:
                continue
            at = max(0, next_at[literal] - base)
            while (at := chunk.find(literal, _from(chunk, at, n_left[literal]))) >= 0:
                if at >= _CHUNK:
                    break
                yield base + at
                n_left[literal] -= 1
                # All rare lines are examined; only a literal that exceeds its budget is thinned.
                at += len(literal) if n_left[literal] > 0 else gap - (base + at) % gap
                next_at[literal] = base + at


def _from(chunk: str, at: int, n_left: int) -> int:
    """Return where to continue searching: when thinned, at a line's start for all literals."""
    if n_left > 0 or not at:
        return at
    return max(at, chunk.find("\n", at, at + _MAX_LINE))


def _scenes(line: _Line, known: Sequence[Scene]) -> Iterator[Scene]:
    """Yield the scenes of one line."""
    parts = [part for part in plain_lines(line.raw) if part.strip()]
    if not parts:
        return
    plain = " ".join(" ".join(parts).split())
    time_s, precision = time_of(plain)
    prefix = plain[:200]
    pid = _PID.search(prefix)
    rank = rank_in(prefix)
    trial, told = trial_of(plain)
    scene = Scene(
        SceneKind.MENTION,
        line.number,
        plain[:_MAX_TEXT],
        time_s,
        precision,
        rank,
        int(pid.group(1)) if pid else None,
        trial,
    )
    for of_table in known:
        yield replace(
            scene,
            kind=of_table.kind,
            text=of_table.text[:_MAX_TEXT] or scene.text,
            rank=rank if of_table.rank is None else of_table.rank,
            message=of_table.message,
        )
    if told is not None:
        yield replace(scene, kind=told)
    if known:
        return
    happening, count = happening_of(plain)
    if happening is not None and told is None:
        yield replace(scene, kind=happening, count=count)
        return
    place = place_of(plain)
    figures = tuple(figures_of(plain))
    if place:
        yield replace(scene, kind=SceneKind.PROGRESS, place=place)
    if figures:
        yield replace(scene, kind=SceneKind.FIGURE, figures=figures)
    if trial and told is None and not (place or figures):
        yield scene
