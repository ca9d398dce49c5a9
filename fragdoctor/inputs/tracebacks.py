"""Read the traceback that is printed with a message: the calls that led to the failure.

Python prints the traceback above the exception, innermost call last. ComfyUI's reports print it
below. IPython, rich and pytest draw frames in their own styles. The interleaved lines of several
ranks are told apart as in ``inputs/log_streams.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Final

from msgspec.structs import replace

from fragdoctor.inputs.log_cleaning import plain_lines, rank_in, split_prefix
from fragdoctor.model.case import OomMessage, TracebackFrame

MAX_MESSAGES: Final = 200
"""The most messages that get a traceback: a log repeats its failures, so the first ones suffice."""

MAX_CHARS: Final = 64 * 1024
"""Characters to read above a message: tracebacks of compiled models take hundreds of lines."""

_BELOW_CHARS: Final = 8 * 1024
_MAX_FRAMES: Final = 200
_MAX_LINES: Final = 2000
_MAX_TEXT: Final = 300
_AROUND_LINES: Final = 24
_MAX_AROUND: Final = 2000
_FRAGMENT_LINES: Final = 40

START: Final = "Traceback (most recent call last)"
HANDLED: Final = "During handling of the above exception"

_PATH: Final = r"[^\s\"'<>|:*?][^\"'<>|*?\n]{0,400}?"
_FUNCTION: Final = r"(?P<function>[\w<>.]{1,120}|<cell line: \d{1,6}>)"
_LINE: Final = r"(?P<line>\d{1,7})"
_FORMS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        # Python: File "a.py", line 7, in f
        rf"File \"(?P<file>[^\"\n]{{1,400}})\", line {_LINE}(?:, in {_FUNCTION})?",
        # IPython 8: File a.py:7, in f(x)   Cell In[3], line 7, in f(x)
        rf"File (?P<file>{_PATH}):{_LINE}(?:, in {_FUNCTION})?",
        rf"(?P<file>Cell In\[\d{{1,6}}\]), line {_LINE}(?:, in {_FUNCTION})?",
        # IPython 7: a.py in f(x)
        rf"(?P<file>{_PATH}\.py|<ipython-input-[\w-]{{1,60}}>) in {_FUNCTION}(?:\(|$)",
        # rich: a.py:7 in f    pytest: a.py:7: in f
        rf"(?P<file>{_PATH}\.py):{_LINE}:? in {_FUNCTION}",
        rf"(?P<file>{_PATH}\.py):{_LINE}:? ?(?:in)?$",
    )
)
_MARKED_CODE: Final = re.compile(r"(?:-{1,20}>|❱)\s{0,4}(\d{1,7})\s(.{0,1000})")
_WINDOWS: Final = re.compile(
    r"(?:\b[A-Z]:|~)\\\w|File \"(?:[\w .-]{1,80}\\){1,30}[\w.-]{1,80}\.py\""
)
_SOURCE: Final = re.compile(r"(?:return\s|[A-Za-z_][\w.,\s\[\]*]{0,80}=\s?)[\w.(\[]")
_TYPED: Final = re.compile(rf"[A-Za-z_][\w.]{{0,80}}\(.{{0,400}}\)|{_SOURCE.pattern}")
_FRAME_BARS: Final = " \t│|┃"
_CARETS: Final = re.compile(r"[\s~^_]{0,400}(?:<--- HERE)?$")
"""Marks below a source line, and the line that pytest draws between two frames."""

_LINK: Final = re.compile(r"\[([^\[\]\n]{1,400})\]\(https?://[^()\s]{1,200}\)")
"""How text pasted from Colab links a frame's file."""
_OF_DRIVER: Final = re.compile(r"/ray/_private/(?:worker|client_mode_hook|auto_init_hook)\.py$")
"""Where Ray re-raises a failure of another process: the line did not fail in this process."""
_SCRIPT_MARK: Final = "<--- HERE"
_EXCEPTION: Final = re.compile(r"[A-Za-z_][\w.]{0,120}(?:Error|Exception|Interrupt)\b(?::|$)")


def with_tracebacks(
    text: str, messages: Sequence[OomMessage], starts: dict[int, int]
) -> list[OomMessage]:
    """Return messages with the frames of their tracebacks, and the lines around them.

    ``starts`` holds the offset of each message's line; a message whose line is missing there is
    left unchanged. Each line is read only once, however many messages there are.
    """
    found = list(messages)
    wanted: dict[int, list[int]] = {}
    for n, message in enumerate(messages[:MAX_MESSAGES]):
        if message.line in starts and message.kind != "negative":
            wanted.setdefault(starts[message.line], []).append(n)
    offsets = sorted(wanted)
    for i, (offset, block) in enumerate(_blocks(text, offsets)):
        frames, is_in_handler, around = block
        end = text.find("\n", offset)
        until = offsets[i + 1] if i + 1 < len(offsets) else len(text)
        has_calls = any(frame.file for frame in frames)
        lines = _lines(text[end + 1 : min(until, end + _BELOW_CHARS)]) if end >= 0 else iter(())
        below = [line for _, line in islice(lines, _AROUND_LINES if has_calls else None)]
        told = [] if has_calls else [*_frames(_leading_block(below))]
        # People describe before or after a message what they did, above a traceback that follows.
        prose = [*takewhile(_is_prose, below)] if told else below[:_AROUND_LINES]
        own = _folded(text[offset : offset + 2 * _MAX_AROUND].split("\n", 1)[:1])
        after = _folded(prose)[:_MAX_AROUND]
        frames = told or frames
        if frames and _OF_DRIVER.search(frames[-1].file.replace("\\", "/")):
            frames = []
        for n in wanted[offset]:
            found[n] = replace(
                found[n],
                around=around,
                after=_folded([_after(own, found[n].text), after]),
                frames=tuple(frames[-_MAX_FRAMES:]),
                is_in_handler=is_in_handler,
            )
    above = [None, *found]
    return [
        _with_words_above(_with_frames_of_repeat(m, found[n + 1 :]), above[n])
        for n, m in enumerate(found)
    ]


def _with_words_above(message: OomMessage, above: OomMessage | None) -> OomMessage:
    """Return a message with the words of the sentence above it that only names its error.

    "Training fails with CUDA out of memory:" is a message of its own, but about this failure.
    """
    named = ("bare", "told")
    if above is None or above.variant not in named or message.variant in named:
        return message
    words = above.said[: _MAX_AROUND // 2]
    return replace(message, around=_folded([words, message.around[len(words) - _MAX_AROUND :]]))


def _with_frames_of_repeat(message: OomMessage, later: Sequence[OomMessage]) -> OomMessage:
    """Return a message with what its repetition adds if it has no frames itself.

    A heading or a summary names the error, and a report below it has the traceback, or says what
    was done.
    """
    if message.frames or message.kind == "negative" or not later:
        return message
    again = later[0]
    is_same = all(
        getattr(message, name) == getattr(again, name)
        for name in ("kind", "variant", "requested_bytes", "device_index", "rank")
    )
    after = _folded([message.after, again.said])
    return replace(message, frames=again.frames, after=after) if is_same else message


def _blocks(
    text: str, offsets: Sequence[int]
) -> Iterator[tuple[int, tuple[list[TracebackFrame], bool, str]]]:
    """Yield each message line's frames and the last lines above it, by the same writer or none."""
    written: dict[int | None, list[str]] = {}
    end = 0
    for offset in offsets:
        low = max(end, offset - MAX_CHARS)
        if low > end:
            written = {}
        line_end = text.find("\n", offset)
        end = len(text) if line_end < 0 else line_end + 1
        writer: int | None = None
        # If line breaks were escaped, the message's own line may hold frames.
        for told, line in _lines(text[low : min(end, offset + MAX_CHARS)].removesuffix("\n")):
            writer = told
            written.setdefault(writer, []).append(line)
        above = written.pop(writer, [])[-_MAX_LINES:]
        block, is_in_handler = _last_block(above)
        typed = above[: len(above) - len(block)][-1:]
        frames = list(_frames(block, *typed)) or list(_lone_source(above[:-1]))
        # What no rank wrote is told of all of them.
        by_none = written.get(None, [])[-_AROUND_LINES:] if writer is not None else []
        said = _folded([*by_none, *_told_before(above, len(block))])[-_MAX_AROUND:]
        yield offset, (frames, is_in_handler, said)


def _told_before(above: Sequence[str], n_block: int) -> Sequence[str]:
    """Return the last lines above a message, and those above a traceback that ends with it."""
    last = len(above) - 1
    first = min(last, len(above) - n_block)
    calls = above[max(first, last - _AROUND_LINES) : last]
    return [*above[max(0, first - _AROUND_LINES) : first], *calls]


def _lines(text: str) -> Iterator[tuple[int | None, str]]:
    """Yield plain lines without the prefixes of loggers, each with the rank that wrote it."""
    writer: int | None = None
    for raw in text.split("\n"):
        # The \n in C:\\torch\\nn is not an escaped line break.
        raw = raw.removesuffix("\r")  # noqa: PLW2901 - from a file written on Windows
        is_windows = _WINDOWS.search(raw[:4096]) is not None
        told = _unfolded(raw[:4096])
        for plain in told if is_windows else chain.from_iterable(map(plain_lines, told)):
            prefix, rest = split_prefix(plain)
            rank = rank_in(prefix) if prefix else None
            writer = rank if rank is not None else writer
            yield writer, rest.rstrip(_FRAME_BARS)


def _unfolded(line: str) -> list[str]:
    """Return the lines of a whole traceback that was folded into one, else the line itself."""
    plain = line.translate(_QUOTES)
    if plain.count('File "') < _FOLDED_FRAMES:
        return [line]
    return _CALL.sub(r"\1\n", _BREAK.sub("\n", plain)).split("\n")


_QUOTES: Final = {0x201C: '"', 0x201D: '"'}
_FOLDED_FRAMES: Final = 2
_BREAK: Final = re.compile(
    r"\s{1,20}(?=File \"[^\"\n]{1,400}\", line \d|[A-Za-z_][\w.]{0,120}(?:Error|Exception): )"
)
_CALL: Final = re.compile(r"(File \"[^\"\n]{1,400}\", line \d{1,7}, in [\w<>.]{1,120})[ \t]{1,20}")


def _after(line: str, message: str) -> str:
    """Return what follows a message on its own line."""
    return line.partition(message)[2].lstrip(" .") if message else ""


def _folded(lines: Sequence[str]) -> str:
    return " ".join(" ".join(lines).split())


def _last_block(lines: Sequence[str]) -> tuple[Sequence[str], bool]:
    """Return the traceback at the end of these lines, and whether it was raised in a handler.

    If the opening line of the traceback is missing, such as in a text that was cut off, the
    traceback reaches as far up as frames and their source lines do.
    """
    first = next((i for i in range(len(lines) - 1, -1, -1) if START in lines[i]), None)
    if first is None:
        first = _first_of_fragment(lines)
        return (lines[first:], False)
    ended = [i for i in range(first + 1, len(lines) - 1) if _EXCEPTION.match(lines[i])]
    if ended:  # another exception ended it: the lines below are a fragment, or nothing
        return (lines[ended[-1] + 1 :], False)
    is_in_handler = any(HANDLED in line for line in lines[max(0, first - 4) : first])
    return (lines[first:], is_in_handler)


def _first_of_fragment(lines: Sequence[str]) -> int:
    n_plain = 0
    first = len(lines)
    for i in range(len(lines) - 1, -1, -1):
        if _frame_of(lines[i]) is not None:
            first, n_plain = i, 0
            continue
        n_plain += 1
        if n_plain > 14:  # IPython prints up to a dozen source lines between two frames
            break
    return first


def _lone_source(lines: Sequence[str]) -> Iterator[TracebackFrame]:
    """Yield the source lines left of a cut traceback: the marked ones, or else the last one."""
    yield from (told := [*_marked_source(lines[-_FRAGMENT_LINES:])])
    for line in () if told else reversed(lines[-3:]):
        stripped = line.strip("` \t")
        if stripped and not _CARETS.fullmatch(stripped):
            if _SOURCE.match(stripped):
                yield TracebackFrame("", code=" ".join(stripped.split())[:_MAX_TEXT])
            return


def _marked_source(lines: Sequence[str]) -> Iterator[TracebackFrame]:
    """Yield the lines that IPython marks with an arrow."""
    told = filter(None, (_MARKED_CODE.match(_bare(line)) for line in lines))
    yield from (TracebackFrame("", int(m[1]), code=_bare(m[2])[:_MAX_TEXT]) for m in told)


def _bare(line: str) -> str:
    """Return a line without a box's bars and repeated white space."""
    return " ".join(line.strip(_FRAME_BARS).split())


def _is_prose(line: str) -> bool:
    return START not in line and _frame_of(line) is None


def _leading_block(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines below a message, up to the next exception."""
    for i, line in enumerate(lines):
        if _EXCEPTION.match(line):
            return lines[:i]
    return lines


def _frames(lines: Sequence[str], typed: str = "") -> Iterator[TracebackFrame]:
    """Yield the frames in a block of lines, in order.

    Before 3.13, Python quotes nothing of what was ``typed`` at its prompt.
    """
    frame: TracebackFrame | None = None
    above = ""
    for line in lines:
        found = _frame_of(line)
        if found is not None:
            if frame is not None:
                yield frame
            if found.file == "<stdin>" and _TYPED.match(typed):
                found = replace(found, code=_bare(typed)[:_MAX_TEXT])
            frame = found
            continue
        stripped = line.strip(_FRAME_BARS)
        if frame is not None and above and stripped.endswith(_SCRIPT_MARK):
            # TorchScript also quotes the lines around the one that it marks.
            frame = replace(frame, code=" ".join(above.split())[:_MAX_TEXT])
        if frame is None or not stripped or _CARETS.fullmatch(stripped):
            continue
        above = stripped
        marked = _MARKED_CODE.match(stripped)
        if marked is not None:
            code = _bare(marked[2])
            number = int(marked[1]) if frame.line is None else frame.line
            frame = replace(frame, code=code[:_MAX_TEXT], line=number)
        elif not frame.code and not stripped[0].isdigit() and not _EXCEPTION.match(stripped):
            frame = replace(frame, code=" ".join(stripped.split())[:_MAX_TEXT])
    if frame is not None:
        yield frame


def _frame_of(line: str) -> TracebackFrame | None:
    """Return the frame that a line opens, or None."""
    stripped = _LINK.sub(r"\1", line.strip())
    if len(stripped) > 1000 or not any(mark in stripped for mark in ("py", "File ", "In[")):
        return None
    for form in _FORMS:
        match = form.match(stripped)
        if match is not None:
            groups = match.groupdict()
            number = groups.get("line")
            return TracebackFrame(
                groups["file"][-_MAX_TEXT:],
                int(number) if number else None,
                groups.get("function") or "",
            )
    return None
