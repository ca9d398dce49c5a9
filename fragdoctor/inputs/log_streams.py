"""Split a log into streams of plain text, one per rank, searchable across line breaks.

Messages are pasted in every shape: wrapped at any column, quoted, colored, with a prefix on each
line, with the lines of several ranks interleaved. So matching works on *squeezed* text: without
prefixes and white space, in ASCII lower case, with the lines of one rank joined. Offsets lead back
to lines.

The time is linear in the size of the text: short texts are squeezed whole; in longer ones, a
search for a few literals of the wordings picks the lines around which to look.
"""

from __future__ import annotations

import string
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.inputs.log_cleaning import ACTOR, plain_lines, rank_in, shared_prefix, split_prefix

_WHOLE: Final = 256 * 1024  # a pasted text up to this size is searched whole
_CHUNK: Final = 256 * 1024
_PIECE: Final = 4096  # longer lines are cut into pieces of this size to find offsets quickly
_BEFORE: Final = 12
_AFTER: Final = 40
_OVERLAP: Final = 80
_WINDOW_LINES: Final = 2000
_WINDOW_CHARS: Final = 1024 * 1024
_LOWER: Final = str.maketrans(
    f"{string.ascii_uppercase}\uff08\uff09\uff0c\uff1b\uff1a\u3002",  # full-width punctuation
    f"{string.ascii_lowercase}(),;:.",
)
_SQUEEZED: Final = _LOWER | dict.fromkeys(map(ord, string.whitespace))


class RawLine(NamedTuple):
    """An unchanged line of the input, or a piece of a long line."""

    ordinal: int
    number: int
    raw: str


class LogLine(Struct, frozen=True):
    """A plain line: its ``number`` in the input, its prefix, and its text."""

    ordinal: int
    number: int
    prefix: str
    text: str


class LogStream:
    """The lines of one source, joined and squeezed.

    Attributes:
        squeezed: the text without white space, in ASCII lower case.
    """

    def __init__(self, lines: Sequence[LogLine]) -> None:
        self._lines = lines
        self._starts: list[int] = []
        parts: list[str] = []
        offset = 0
        for line in lines:
            self._starts.append(offset)
            part = "".join(line.text.split()).translate(_LOWER)
            parts.append(part)
            offset += len(part)
        self.squeezed = "".join(parts)
        self._offsets: tuple[int, list[int]] = (-1, [])

    def _index(self, position: int) -> int:
        return max(0, bisect_right(self._starts, position) - 1)

    def _unsqueezed(self, index: int, n: int) -> int:
        """Return the offset of a line's n-th character that is not white space."""
        text = self._lines[index].text
        if n == 0:
            return len(text) - len(text.lstrip())
        if n == self._end(index) - self._starts[index] - 1:
            return len(text.rstrip()) - 1
        if self._offsets[0] != index:
            self._offsets = index, [i for i, char in enumerate(text) if not char.isspace()]
        offsets = self._offsets[1]
        return offsets[n] if n < len(offsets) else len(text)

    def _end(self, index: int) -> int:
        """Return where a line ends in the squeezed text."""
        return self._starts[index + 1] if index + 1 < len(self._starts) else len(self.squeezed)

    def line_at(self, position: int) -> int:
        """Return the number of the line that holds a position."""
        return self._lines[self._index(position)].number

    def ordinal_at(self, position: int) -> int:
        """Return the ordinal of the raw line that holds a position."""
        return self._lines[self._index(position)].ordinal

    def rank_at(self, position: int) -> int | None:
        """Return the rank printed before a position on its line."""
        index = self._index(position)
        line = self._lines[index]
        offset = self._unsqueezed(index, position - self._starts[index])
        return rank_in(line.prefix + " " + line.text[max(0, offset - 200) : offset])

    def line_text(self, position: int) -> str:
        """Return the line that holds a position, with folded white space, up to 500 characters."""
        return " ".join(self._lines[self._index(position)].text[:2000].split())[:500]

    def before(self, position: int, length: int = 60) -> str:
        """Return the squeezed text before a position, back to the start of its line at most."""
        start = self._starts[self._index(position)]
        return self.squeezed[max(start, position - length) : position]

    def after(self, position: int, length: int = 60) -> str:
        """Return the squeezed text after a position, up to the end of its line at most."""
        index = self._index(max(0, position - 1))
        return self.squeezed[position : min(self._end(index), position + length)]

    def ends_at(self, position: int) -> bool:
        """Return whether a line ends at a position, or goes on with punctuation only."""
        return not self.after(position, 1).isalnum()

    def intro(self, position: int, limit: int = 300) -> str:
        """Return the text before a position on its line, white space folded, middle cut if long."""
        index = self._index(position)
        line = self._lines[index]
        before = line.text[: self._unsqueezed(index, position - self._starts[index])]
        text = f"{line.prefix} {before}"
        if len(text) <= limit:
            return " ".join(text.split())
        half = limit // 2
        return " ".join(f"{text[: limit - half - 5]} ... {text[-half:]}".split())

    def text(self, start: int, end: int, limit: int = 2000) -> str:
        """Return the text between two positions as printed, with white space folded."""
        pieces: list[str] = []
        size = 0
        for index in range(self._index(start), self._index(max(start, end - 1)) + 1):
            text, base = self._lines[index].text, self._starts[index]
            low = self._unsqueezed(index, start - base) if start > base else 0
            high = self._unsqueezed(index, end - 1 - base) + 1
            pieces.append(" ".join(text[low:high].split()))
            size += len(pieces[-1]) + 1
            if size > limit:
                break
        return " ".join(piece for piece in pieces if piece)[:limit]


class Window(Struct, frozen=True):
    """Neighboring raw lines to search for messages.

    Attributes:
        lines: the lines; a long line comes in pieces that have the same number.
        report_before: messages that start at or after this ordinal belong to the next window.
    """

    lines: Sequence[RawLine]
    report_before: int | None = None

    def streams(self) -> list[LogStream]:
        """Return the window's streams; a line without a source belongs to the last named source."""
        grouped: dict[object, list[LogLine]] = {}
        key: object = None
        for line in _without_shared_prefixes(self._plain()):
            source = _source(line.prefix)
            if key is None and source is not None and None in grouped:
                grouped[source] = grouped.pop(None)  # the lines above the first named source
            key = source if source is not None else key
            grouped.setdefault(key, []).append(line)
        return [LogStream(lines) for lines in grouped.values()]

    def _plain(self) -> Iterator[LogLine]:
        last_number = 0
        for ordinal, number, raw in self.lines:
            for i, plain in enumerate(plain_lines(raw)):
                if number == last_number and i == 0:  # the next piece of the same long line
                    yield LogLine(ordinal, number, "", plain)
                else:
                    yield LogLine(ordinal, number, *split_prefix(plain))
                last_number = number


def _without_shared_prefixes(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """Yield lines without any unknown prefix that they share with the line before or after."""
    filled = [line for line in lines if line.text]
    previous = ""
    for i, line in enumerate(filled):
        cut = shared_prefix(previous, line.text)
        if not cut and i + 1 < len(filled):
            cut = shared_prefix(filled[i + 1].text, line.text)
        previous = line.text
        yield replace(line, prefix=line.prefix + line.text[:cut], text=line.text[cut:])


def _source(prefix: str) -> object:
    """Return what identifies the writer of an interleaved line: a rank, a worker, a container."""
    if not prefix:
        return None
    rank = rank_in(prefix)
    if rank is not None:
        return rank
    actor = ACTOR.search(prefix)
    return (actor.group(1) or actor.group(2)) if actor else None


def windows(text: str, may_hold: Callable[[str], bool]) -> Iterator[Window]:
    """Yield the parts of a text that are worth searching closely, in order.

    ``may_hold`` says whether squeezed text, or a line of it, may hold a message.
    """
    context: deque[RawLine] = deque(maxlen=_BEFORE)
    current: list[RawLine] = []
    quiet = size = 0
    whole = len(text) <= _WHOLE
    for chunk in _chunks(text):
        has_hit = whole or may_hold(chunk.text.translate(_SQUEEZED))
        if not (has_hit or current or whole):
            context.extend(chunk.tail(_BEFORE).lines()[-_BEFORE:])
            continue
        for line in chunk.lines():
            hit = whole or (has_hit and may_hold(line.raw.translate(_SQUEEZED)))
            if not (hit or current):
                context.append(line)
                continue
            if not current:
                current, quiet = list(context), 0
                size = sum(len(c.raw) for c in current)
            current.append(line)
            size += len(line.raw)
            quiet = 0 if hit else quiet + 1
            if quiet > _AFTER:
                yield Window(current)
                context.extend(current[-_BEFORE:])
                current = []
            elif len(current) > _WINDOW_LINES or size > _WINDOW_CHARS:
                overlap = current[-_OVERLAP:]
                yield Window(current, overlap[0].ordinal)
                current, size = overlap, sum(len(c.raw) for c in overlap)
    if current:
        yield Window(current)


class _Chunk(NamedTuple):
    """A piece of a text, with the ordinal and number of its first line."""

    ordinal: int
    number: int
    text: str

    def lines(self) -> list[RawLine]:
        """Return the chunk's lines, long ones in pieces; the last is cut off at the chunk's end."""
        found: list[RawLine] = []
        ordinal = self.ordinal
        for number, line in enumerate(self.text.split("\n"), self.number):
            for i in range(0, len(line) or 1, _PIECE):
                found.append(RawLine(ordinal, number, line[i : i + _PIECE]))
                ordinal += 1
        if self.text.endswith("\n"):
            found.pop()
        return found

    def tail(self, n_lines: int) -> _Chunk:
        """Return the last lines as a separate chunk."""
        start = len(self.text)
        for _ in range(n_lines + 1):
            start = max(0, self.text.rfind("\n", 0, start))
        if not start:
            return self
        start += 1
        n_before = self.text.count("\n", 0, start)
        # Ordinals only have to increase, so those of the lines before are estimated from above.
        ordinal = self.ordinal + n_before + start // _PIECE
        return _Chunk(ordinal, self.number + n_before, self.text[start:])


def _chunks(text: str) -> Iterator[_Chunk]:
    """Yield pieces of a text that end at the end of a line, unless that line is too long."""
    position, number, ordinal = 0, 1, 0
    while position < len(text):
        end = text.find("\n", position + _CHUNK)
        end = len(text) if end < 0 else end + 1
        end = min(end, position + 2 * _CHUNK)
        chunk = _Chunk(ordinal, number, text[position:end])
        yield chunk
        n_breaks = chunk.text.count("\n")
        number += n_breaks
        ordinal += n_breaks + len(chunk.text) // _PIECE + 1
        position = end
