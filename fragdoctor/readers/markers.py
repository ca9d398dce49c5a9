"""Lines of a log that are no lack of memory but belong to its story."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fragdoctor.model.oom import LogMarker
from fragdoctor.readers.log import Stream

_ASSERTION: Final = r"thread:\[\d{1,6},\d{1,6},\d{1,6}\]assertion`"
_MARKERS: Final = (
    ("cache-flush", "allocatorcacheflushes", re.compile(r"allocatorcacheflushes"), 0),
    ("device-assert", "assertion`", re.compile(_ASSERTION), 40),
    ("restart", "restartingworker", re.compile(r"restartingworker(?:s|group)"), 0),
    ("restart", "willrestartworker", re.compile(r"willrestartworkergroup"), 0),
    ("killed", "closingsignalsigterm", re.compile(r"closingsignalsigterm"), 0),
    ("killed", "failed(exitcode:", re.compile(r"failed\(exitcode:-?\d{1,4}\)"), 0),
    ("killed", "exitedunexpectedly", re.compile(r"dataloaderworker\S{0,80}exitedun"), 99),
    ("killed", "signal15(sigterm)", re.compile(r"signal15\(sigterm\)"), 0),
)  # fmt: skip


def markers_of(stream: Stream, report_before: int | None) -> Iterator[LogMarker]:
    """Yield the markers of a stream that belong to its window."""
    text = stream.squeezed
    for kind, literal, pattern, back in _MARKERS:
        position, line = 0, 0
        while (at := text.find(literal, position)) >= 0:
            position = at + len(literal)
            match = pattern.search(text, max(0, at - back), position + 60)
            if match is None or (
                report_before is not None and stream.ordinal_at(at) >= report_before
            ):
                continue
            number = stream.line_at(at)
            if number != line:
                line = number
                yield LogMarker(kind, number, stream.rank_at(at), stream.line_text(at))
