"""What several texts and statistics of one case say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fragdoctor.model.oom import OomLog, OomMessage
from fragdoctor.model.stats import StatsSeries
from fragdoctor.model.story import Scene


def joined_logs(logs: Sequence[OomLog]) -> OomLog | None:
    """Return the messages of all texts as one log; the first text's first cause is primary."""
    if len(logs) < 2:
        return logs[0] if logs else None
    messages: list[OomMessage] = []
    primary: int | None = None
    scenes: Sequence[Scene] = ()  # one text's: lines of several texts have no common order
    for log in logs:
        if len(log.scenes) > len(scenes):
            scenes = _moved(log.scenes, len(messages))
        if primary is None and log.messages:
            primary = len(messages) + log.primary
        messages.extend(log.messages)
    return OomLog(
        tuple(messages),
        tuple(m for log in logs for m in log.markers),
        primary or 0,
        sum(log.n_lines for log in logs),
        sum(log.n_bytes for log in logs),
        scenes,
    )


def _moved(scenes: Sequence[Scene], n_before: int) -> tuple[Scene, ...]:
    """Return scenes that refer to messages which now stand behind others."""
    return tuple(
        s if s.message is None else replace(s, message=s.message + n_before) for s in scenes
    )


def joined_stats(series: Sequence[StatsSeries]) -> StatsSeries | None:
    """Return all statistics as one series; a rounded summary yields to exact figures."""
    if len(series) < 2:
        return series[0] if series else None
    entries = [e for s in series for e in s.entries]
    exact = {e.device for e in entries if e.origin == "memory_stats"}
    kept = [
        e for e in entries if e.origin == "memory_stats" or not (e.device in exact or None in exact)
    ]
    repeats = len({e.device for e in kept}) < len(kept)
    return StatsSeries(tuple(kept), is_series=repeats or any(s.is_series for s in series))
