"""One time line for all lines: by printed times where a log has them, by lines otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from fragdoctor.model.story import Moment, Scene

_DAY_S: Final = 86_400
_MIN_TIMED_SHARE: Final = 0.3
"""Tracebacks print no time, so a log with times has them on a part of its lines only."""


def in_order(scenes: Sequence[Scene]) -> tuple[list[Scene], bool]:
    """Return the scenes on one time line and whether that is by time.

    A line without a time has that of the line above it. Times of a kind that is in the minority
    (a library that prints another format) count as none.
    """
    kinds = Counter(s.moment for s in scenes if s.moment is not Moment.NONE)
    if not kinds:
        return sorted(scenes, key=lambda s: s.line), False
    main, n_timed = kinds.most_common(1)[0]
    if n_timed < 2 or n_timed < _MIN_TIMED_SHARE * len(scenes):
        return sorted([replace(s, time_s=None) for s in scenes], key=lambda s: s.line), False
    counted = _days_counted(scenes) if main is Moment.CLOCK else _completed(scenes, main)
    timed = _filled(counted, main)
    return sorted(timed, key=lambda s: (s.time_s or 0.0, s.line)), True


def _completed(scenes: Sequence[Scene], main: Moment) -> list[Scene]:
    """Return times without a year, or a date, with those of the last line that prints them."""
    if main is not Moment.DATED:
        return list(scenes)
    whole: list[Scene] = []
    last: datetime | None = None
    for scene in scenes:
        if scene.moment is Moment.DATED and scene.time_s is not None:
            last = datetime.fromtimestamp(scene.time_s, UTC)
        elif scene.time_s is not None and last is not None:
            time_s = _with_date(scene.moment, scene.time_s, last)
            if time_s is not None:
                whole.append(replace(scene, time_s=time_s, moment=Moment.DATED))
                continue
        whole.append(scene)
    return whole


def _with_date(moment: Moment, time_s: float, last: datetime) -> float | None:
    if moment is Moment.CLOCK:
        midnight = last.replace(hour=0, minute=0, second=0, microsecond=0)
        return midnight.timestamp() + time_s
    if moment is Moment.YEARLESS:
        try:
            return datetime.fromtimestamp(time_s, UTC).replace(year=last.year).timestamp()
        except ValueError:  # the 29th of February of another year
            return None
    return None


def _days_counted(scenes: Sequence[Scene]) -> list[Scene]:
    """Return clock times that go on counting past midnight."""
    counted: list[Scene] = []
    day, last = 0, None
    for scene in scenes:
        if scene.moment is not Moment.CLOCK or scene.time_s is None:
            counted.append(scene)
            continue
        if last is not None and scene.time_s < last - _DAY_S / 2:
            day += 1
        last = scene.time_s
        counted.append(replace(scene, time_s=scene.time_s + day * _DAY_S))
    return counted


def _filled(scenes: Sequence[Scene], main: Moment) -> list[Scene]:
    known = [s.time_s if s.moment is main else None for s in scenes]
    last = next((t for t in known if t is not None), None)
    filled: list[Scene] = []
    for scene, time_s in zip(scenes, known, strict=True):
        last = last if time_s is None else time_s
        filled.append(replace(scene, time_s=last))
    return filled
