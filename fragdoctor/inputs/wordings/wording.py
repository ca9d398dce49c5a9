"""Defines a wording and how it is found in squeezed text (see ``inputs/log_streams.py``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import cache
from typing import Any, Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.inputs.log_streams import LogStream
from fragdoctor.inputs.wordings.prose import reports_failure
from fragdoctor.model.case import OomMessage

SIZE: Final = (
    r"(?:\d[\d,]{0,30}(?:\.\d{0,12})?(?:bytes?|[kmgtpe]i?bytes?|[kmgtpe]i?b|[kmgt](?![a-z])))"
)
COUNT: Final = r"(?:\d[\d,]{0,30})"
ABSURD_BYTES: Final = 16 * 2**40  # far beyond any device; such a size was computed from garbage
_PARTS: Final = re.compile(r"(\d[\d,]{0,30}(?:\.\d{0,12})?)([a-z]{0,8})", re.ASCII)
_DECIMAL_COMMA: Final = re.compile(r"\d{1,30},\d{1,2}")
_POWERS: Final = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}
_SOURCE: Final = re.compile(
    r"(?:(?:raise[\w.]{1,60}|print|str|warn|fail|match|startswith|find|search|format)\("
    r"|\.(?:warn|warning|error|info|debug|exception|critical|count|write)\("
    r"|==|!=|\bin|if|elif|(?<![rf])or|and|not|return|,|\[|\+)[frbu]{0,2}[\"'`]{1,3}"
    r"(?![])}])[^\"'`]{0,80}$",  # a quote before a closing bracket ends a string
    re.ASCII,
)

ALLOCATOR: Final = "pytorch-caching-allocator"
DRIVER: Final = "driver-no-figures"
HOST: Final = "host-ram"
KV_CACHE: Final = "kv-cache"
OTHER: Final = "other-framework"
NEGATIVE: Final = "negative"
SHARED_MEMORY: Final = "shared-memory"

BACKEND_OF_WORD: Final = {
    "cuda": "cuda",
    "hip": "rocm",
    "rocm": "rocm",
    "xpu": "xpu",
    "sycl": "xpu",
    "npu": "npu",
    "musa": "musa",
    "mlu": "mlu",
    "gcu": "gcu",
    "vulkan": "vulkan",
    "metal": "mps",
    "cpu": "cpu",
}

Fields: TypeAlias = dict[str, Any]
Refine: TypeAlias = Callable[[Fields, re.Match[str], LogStream], Fields | None]


def printed_bytes(text: str) -> int:
    """Return the bytes of a squeezed, lowercase size: the printed decimal times its unit, rounded.

    Units are powers of 1024 however they are spelled; a bare number means bytes.
    """
    match = _PARTS.match(text)
    if match is None:
        msg = f"{text!r} is not a size"
        raise ValueError(msg)
    number, unit = match.groups()
    power = 0 if unit.startswith("byte") else _POWERS[unit[:1]]
    if _DECIMAL_COMMA.fullmatch(number):  # from a C program under a European locale
        number = number.replace(",", ".")
    return int((Decimal(number.replace(",", "")) * 1024**power).to_integral_value())


def value_of(name: str, text: str) -> int:
    """Return a named group's text as the number for the field with that name."""
    return printed_bytes(text) if name.endswith("_bytes") else int(text.replace(",", ""))


class Hit(Struct, frozen=True):
    """A message found at ``start:end`` of a stream's squeezed text.

    Attributes:
        group: hits with the same group that follow each other closely are one failure.
        is_whole: False for a fragment without its beginning.
        is_marker: whether the hit belongs in the list of markers instead of messages.
    """

    start: int
    end: int
    message: OomMessage
    group: str = ""
    is_whole: bool = True
    is_marker: bool = False


class Wording(Struct, frozen=True):
    """One wording of one message.

    Attributes:
        variant: stable name of the wording.
        pattern: a pattern for squeezed text, in the short form of ``expanded``; groups named after
            fields of ``OomMessage`` become these fields, and ``_word`` names the backend.
        sub_kind, kind, backend, is_device_oom, hint, is_warning: as in ``OomMessage``.
        group: see ``Hit``.
        is_marker: see ``Hit``.
        refine: makes the last changes to the fields; returns None to reject the match.
        may_be_prose: whether the words also occur in advice and comments; if so, the wording
            counts only if its line says that something failed.
    """

    variant: str
    pattern: str
    sub_kind: str = ""
    kind: str = ALLOCATOR
    backend: str = "cuda"
    is_device_oom: bool = True
    hint: str = ""
    is_warning: bool = False
    group: str = ""
    is_marker: bool = False
    versions: tuple[str, str] = ("", "")
    refine: Refine | None = None
    may_be_prose: bool = False

    def hits(self, stream: LogStream) -> Iterator[Hit]:
        """Yield the hits of this wording in a stream."""
        for match in matches(self.pattern, stream.squeezed):
            if is_source(stream, match.start()):
                continue
            if self.may_be_prose and not reads_as_failure(stream, match):
                continue
            message = self._message(match, stream)
            if message is not None:
                yield Hit(match.start(), match.end(), message, self.group, is_marker=self.is_marker)

    def _message(self, match: re.Match[str], stream: LogStream) -> OomMessage | None:
        groups = {k: v for k, v in match.groupdict().items() if v}
        fields: Fields = {
            "backend": BACKEND_OF_WORD.get(groups.get("_word", ""), self.backend),
            "sub_kind": self.sub_kind,
            "kind": self.kind,
            "is_device_oom": self.is_device_oom,
            "is_warning": self.is_warning,
            **{name: value_of(name, text) for name, text in groups.items() if name[0] != "_"},
        }
        refined = fields if self.refine is None else self.refine(fields, match, stream)
        if refined is None:
            return None
        if refined.get("requested_bytes", 0) > ABSURD_BYTES:
            refined["sub_kind"] = "size-bug"
        message = OomMessage(
            variant=self.variant,
            version_low=self.versions[0],
            version_high=self.versions[1],
            free_allocated_hint=self.hint,
            **refined,
        )
        return located(message, stream, match.start(), match.end())


def on_host(fields: Fields, sub_kind: str) -> Fields:
    """Return the fields of a message that turns out to be about host memory."""
    of_host = {"kind": HOST, "backend": "cpu", "is_device_oom": False, "sub_kind": sub_kind}
    return fields | of_host


def alone(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Keep the words only if they are a whole line."""
    return None if stream.before(match.start()) or stream.after(match.end()) else fields


def ends_line(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Keep the words only if they end in a colon or end their line, like the name of an error."""
    is_head = match.group().endswith(":")
    return fields if is_head or not stream.after(match.end()).strip("\"'`.,;)") else None


def where(pattern: str, before: int, after: int, **told: Any) -> Refine:
    """Return a refinement that sets fields if a pattern occurs near a match.

    ``before`` and ``after`` say how many characters around the match are searched.
    """
    search = re.compile(pattern).search

    def refine(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields:
        low, high = max(0, match.start() - before), match.end() + after
        return fields | (told if search(stream.squeezed, low, high) else {})

    return refine


def only_where(pattern: str, before: int, after: int, *, is_there: bool = True) -> Refine:
    """Return a refinement that keeps a match only if a pattern occurs, or does not occur, near it.

    The text before and after the match is searched, but not the match itself.
    """
    search = re.compile(pattern).search

    def refine(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
        text, (start, end) = stream.squeezed, match.span()
        found = search(text, max(0, start - before), start) or search(text, end, end + after)
        return fields if is_there == (found is not None) else None

    return refine


_MOST_OF_LINE: Final = 500
_MOST_AFTER_WORDS: Final = 30
"""Characters to read after the words: what a program prints below its error explains nothing."""
_MOST_AFTER: Final = 1500
"""The most characters of a message from its needle on."""


def matches(pattern: str, text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of a pattern in squeezed text, located by the pattern's needle."""
    needle, n_before = needle_of(pattern)
    position = 0
    while (found := text.find(needle, position)) >= 0:
        position = found + len(needle)
        match_at, until = compile_squeezed(pattern).match, found + _MOST_AFTER
        for start in range(max(0, found - n_before), found + 1):
            match = match_at(text, start, until)
            if match is not None and match.end() >= position:
                yield match
                position = match.end()
                break


_ATOM: Final = re.compile(
    r"\((?:\?(?:P<\w+>|<[=!]|[:=!]))?|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[\d,]*\}|."
)


@cache
def needle_of(pattern: str) -> tuple[str, int]:
    """Return the longest text in every match of a pattern, and its largest offset in a match.

    The text is never part of a group. Groups before it count with all of their alternatives, so
    that the offset is an upper bound. Every repetition must be bounded.

    Raises:
        ValueError: a repetition is unbounded.
    """
    runs, widths, last = [("", 0)], [0], 0
    for atom in _ATOM.findall(expanded(pattern)):
        text, n_before = runs[-1]
        is_text = False
        if atom in "?*+" or atom[0] == "{":  # the atom before may be left out or repeated
            times = 1 if atom == "?" else int(atom[1:-1].rpartition(",")[2])
            widths[-1] += last * (times - 1)
            runs[-1] = text[:-1], n_before
        elif atom[0] == "(":
            widths.append(0)
        elif atom == ")":
            last = widths.pop()
            widths[-1] += last
        elif atom not in "|^$":
            last = 1
            widths[-1] += 1
            is_class = atom[0] in ".[" or (atom[0] == "\\" and atom[1].isalnum())
            is_text = len(widths) == 1 and not is_class
        if is_text:
            runs[-1] = text + atom[-1], n_before
        else:
            runs.append(("", widths[0]))
    return max(runs, key=lambda run: len(run[0]))


class Needles:
    """Tells whether squeezed text may hold a message of some wordings, without their patterns.

    Each pattern has a text of its own to look for: in halves, so that one of them is whole where a
    line was wrapped. Where that is too short to tell, the pattern itself is matched there.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._short: list[str] = []
        found = set[str]()
        for pattern in patterns:
            needle, _ = needle_of(pattern)
            half = len(needle) // 2
            if len(needle) < _MIN_NEEDLE:
                self._short.append(pattern)
            else:
                found |= {needle} if half < _MIN_NEEDLE else {needle[:half], needle[half:]}
        needles = [n for n in found if not any(o in n for o in found if o != n)]
        # A text without a stem need not be searched for the needles that contain it.
        self._of_stem: dict[str, list[str]] = {}
        while needles:
            stems = Counter(s for n in needles for s in {n[i : i + 4] for i in range(len(n) - 3)})
            stem = max(stems, key=lambda s: (stems[s], s))
            self._of_stem[stem] = [n for n in needles if stem in n]
            needles = [n for n in needles if stem not in n]

    def may_be_in(self, text: str) -> bool:
        """Return whether a squeezed text may hold a message."""
        return any(
            needle in text
            for stem, needles in self._of_stem.items()
            if stem in text
            for needle in needles
        ) or any(True for pattern in self._short for _ in matches(pattern, text))


_MIN_NEEDLE: Final = 10
"""Characters; fewer stand in many a line that holds no message."""


def located(message: OomMessage, stream: LogStream, start: int, end: int) -> OomMessage:
    """Return a message with its line, rank and text."""
    return replace(
        message,
        line=stream.line_at(start),
        rank=stream.rank_at(start),
        intro=stream.intro(start),
        text=stream.text(start, end),
    )


def is_source(stream: LogStream, position: int) -> bool:
    """Return whether a position is inside a string in source code (``raise X("...``)."""
    return bool(_SOURCE.search(stream.before(position, 120)))


def reads_as_failure(stream: LogStream, match: re.Match[str]) -> bool:
    """Return whether a short wording is a report rather than someone's explanation."""
    before = stream.intro(match.start(), _MOST_OF_LINE)
    words = stream.text(match.start(), match.end())
    line = stream.line_text(match.start())[: len(before) + len(words) + _MOST_AFTER_WORDS]
    line = line.partition(" kernel errors might be")[0]  # c10/cuda/CUDAMiscFunctions.cpp
    is_head = not before.strip("\"'`([{>*-:#! ")
    # A logger's prefix is part of what stands before, but not of the line.
    return reports_failure(line, before, f"{before} {line}", is_report=is_head)


@cache
def compile_squeezed(pattern: str) -> re.Pattern[str]:
    """Return the compiled form of a pattern in short form."""
    return re.compile(expanded(pattern), re.ASCII)


def expanded(pattern: str) -> str:
    """Return a pattern with its short forms written out.

    ``SIZE`` and ``COUNT`` stand for numbers, ``<total_bytes>`` for a group with that name.
    """
    named = re.sub(
        r"(?<!P)<(\w+)>", lambda m: f"(?P<{m.group(1)}>{_group_body(m.group(1))})", pattern
    )
    return named.replace("SIZE", SIZE).replace("COUNT", COUNT)


def _group_body(name: str) -> str:
    if name.endswith("_bytes"):
        return SIZE
    return r"\d{1,4}" if name == "device_index" else COUNT
