"""The time that a line of a log prints at its start."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from fragdoctor.model.story import Moment

_HEAD: Final = 120
_MONTHS: Final = [
    "jan",
    "feb",
    "mar",
    "apr",
    "may",
    "jun",
    "jul",
    "aug",
    "sep",
    "oct",
    "nov",
    "dec",
]
_HMS: Final = r"(?P<H>\d{1,2}):(?P<M>\d\d)(?::(?P<S>\d\d)(?:[.,](?P<f>\d{1,9}))?)?"
_FULL: Final = re.compile(
    rf"(?<!\d)(?P<y>\d{{4}})[-/](?P<m>\d{{1,2}})[-/](?P<d>\d{{1,2}})[T _]{_HMS}"
    r"(?P<z>Z|[+-]\d\d:?\d\d)?",
    re.ASCII,
)
_SYSLOG: Final = re.compile(
    r"(?<![A-Za-z])(?P<b>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\s{1,2}"
    rf"(?P<d>\d{{1,2}})\s{_HMS}",
    re.ASCII,
)
_GLOG: Final = re.compile(rf"(?:^|[\s\[])[IWEF](?P<m>\d\d)(?P<d>\d\d)\s{_HMS}", re.ASCII)
_SHORT: Final = re.compile(
    rf"(?:^|[\s\[(])(?P<m>\d{{1,2}})[-/](?P<d>\d{{1,2}})(?:[-/](?P<y>\d{{2,4}}))?[ ,]\s?{_HMS}",
    re.ASCII,
)
_CLOCK: Final = re.compile(
    r"^[\s\[(]{0,4}(?:\[?[A-Za-z_.:-]{1,20}\d{0,5}\]?[:\s]{1,2})?[\[(]?"
    r"(?P<H>\d{1,2}):(?P<M>\d\d):(?P<S>\d\d)(?:[.,](?P<f>\d{1,9}))?(?![\d:<])",
    re.ASCII,
)
# Yearless days are counted in a leap year, so that the 29th of February is one.
_SOME_YEAR: Final = 1972


def time_of(line: str) -> tuple[float | None, Moment]:
    """Return the seconds of the time that a plain line starts with, and how complete it is."""
    head = line[:_HEAD]
    if ":" not in head:
        return None, Moment.NONE
    for pattern, moment in (
        (_FULL, Moment.DATED),
        (_SYSLOG, Moment.YEARLESS),
        (_GLOG, Moment.YEARLESS),
        (_SHORT, Moment.YEARLESS),
    ):
        match = pattern.search(head)
        if match is not None:
            return _dated(match, moment)
    match = _CLOCK.match(head)
    return (_seconds(match), Moment.CLOCK) if match is not None else (None, Moment.NONE)


def _seconds(match: re.Match[str]) -> float:
    fraction = match.group("f")
    return (
        3600 * int(match.group("H"))
        + 60 * int(match.group("M"))
        + int(match.group("S") or 0)
        + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)
    )


def _dated(match: re.Match[str], moment: Moment) -> tuple[float | None, Moment]:
    parts = match.groupdict()
    month = _MONTHS.index(parts["b"].lower()) + 1 if parts.get("b") else int(parts["m"])
    year = int(parts["y"]) if parts.get("y") else _SOME_YEAR
    if parts.get("y"):
        year += 2000 if year < 100 else 0
        moment = Moment.DATED
    try:
        day = datetime(year, month, int(parts["d"]), tzinfo=UTC)
        seconds = (day + timedelta(seconds=_seconds(match))).timestamp()
    except (ValueError, OverflowError):
        return None, Moment.NONE
    zone = parts.get("z")
    if not zone:
        return seconds, moment
    return seconds - _offset(zone), Moment.ZONED


def _offset(zone: str) -> int:
    if zone == "Z":
        return 0
    digits = zone[1:].replace(":", "")
    sign = -1 if zone[0] == "-" else 1
    return sign * (3600 * int(digits[:2]) + 60 * int(digits[2:]))
