"""What a rule found: a statement, the numbers behind it, and its place in the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, StrEnum
from itertools import takewhile
from typing import Final

from msgspec import Struct, field


class Severity(IntEnum):
    """How bad a finding is; ``check --fail-on`` compares these."""

    INFO = 0
    WARNING = 1
    ERROR = 2


class Confidence(StrEnum):
    """How sure a statement is. PROVEN follows arithmetically or from an exact replay."""

    PROVEN = "proven"
    LIKELY = "likely"
    POSSIBLE = "possible"


class Evidence(Struct, frozen=True):
    """A named number with its unit and where it came from.

    Attributes:
        name: for example ``reserved``.
        value: the number.
        unit: unit of the number: ``bytes`` or ``count``.
        source: ``snapshot``, ``trace``, ``oom message``, ``memory_stats``, ``replay``, ``user``.
    """

    name: str
    value: int
    unit: str
    source: str


def in_bytes(figures: Mapping[str, int | None], source: str) -> list[Evidence]:
    """Return the figures that are known as evidence from a source."""
    return [Evidence(name, n, "bytes", source) for name, n in figures.items() if n is not None]


ACTIVE: Final = "active"
LIVE_AT_FAILURE: Final = "live at the failure"
"""Names of a verdict's evidence: live memory at the end of the file, and at the failed request."""

WORTH_SAYING: Final = 0.1
"""A part of memory below this share of the whole is worth neither a finding nor a change."""

UNKNOWN_FILE: Final = "(unknown file)"
MAX_LINE: Final = 2**31  # PyTorch writes 2^64 - 1 if it does not know the line


def basename_of(path: str) -> str:
    """Return the name of a file without its folder, for any path separator."""
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def path_parts(path: str) -> tuple[str, ...]:
    """Return the parts of a path, the last one first, for any path separator."""
    return tuple(part for part in path.replace("\\", "/").split("/")[::-1] if part)


def told_apart(paths: Sequence[str]) -> list[str]:
    """Return paths, with ``/``, without the folders that they all share."""
    parts = [path.replace("\\", "/").split("/") for path in paths]
    n = 0
    while all(len(p) > n + 1 for p in parts) and len({p[n] for p in parts}) == 1:
        n += 1
    return ["/".join(p[n:]) for p in parts]


def n_shared(a: Sequence[str], b: Sequence[str]) -> int:
    """Return how many parts two reversed paths share, counted from the file name."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class Location(Struct, frozen=True):
    """A line of a program. Hostile text.

    ``str(location)`` is ``/src/train.py:88 in forward``; an unknown line or function is left out.
    """

    filename: str
    line: int
    function: str

    @property
    def basename(self) -> str:
        """The name of the file without its folder, for any path separator."""
        return basename_of(self.filename)

    @property
    def at(self) -> str:
        """The file and the line alone: ``train.py:88``."""
        return f"{self.basename}:{self.line}"

    @property
    def short(self) -> str:
        """The location without the file's folder: ``train.py:88 in forward``."""
        return self._written(self.basename)

    def __str__(self) -> str:
        return self._written(self.filename)

    def _written(self, filename: str) -> str:
        line = f":{self.line}" if 0 < self.line < MAX_LINE else ""
        function = f" in {self.function}" if self.function else ""
        return f"{filename or UNKNOWN_FILE}{line}{function}"


def line_text(location: Location | None, unknown: str = "an unrecorded line") -> str:
    """Return ``train.py:88 in forward`` for a sentence; hostile text until a report escapes it."""
    return unknown if location is None else location.short


class Finding(Struct, frozen=True):
    """One result of one rule.

    Attributes:
        code: ``FD103``; see ``rules/registry.py``.
        name: the rule's name.
        message: one sentence with its numbers; may quote input, so it is hostile text.
        n_bytes: bytes at stake, for ranking; 0 if that makes no sense.
        fingerprint: code + normalized stack, never addresses.
    """

    code: str
    name: str
    severity: Severity
    confidence: Confidence
    message: str
    device: int | None = None
    n_bytes: int = 0
    evidence: Sequence[Evidence] = ()
    locations: Sequence[Location] = ()
    fingerprint: str = ""


class SkippedRule(Struct, frozen=True):
    """A rule that could not run on this input, and why."""

    code: str
    name: str
    reason: str


class RuleResults(Struct, frozen=True):
    """The results of all rules."""

    findings: Sequence[Finding] = field(default_factory=tuple)
    skipped: Sequence[SkippedRule] = field(default_factory=tuple)
