"""The rows of a story: consecutive trials are joined, and the least telling events left out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from fragdoctor.model.case import OomMessage
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.story import FAILURES, Scene, SceneKind
from fragdoctor.report import document as doc
from fragdoctor.report.document import bad, dim, warn
from fragdoctor.report.words import shortened
from fragdoctor.units import format_count, format_size, plural

DAY_S: Final = 86_400
_MAX_NOTE: Final = 70
_MAX_TRIAL: Final = 12
_TITLES: Final = {
    SceneKind.OOM: "OOM",
    SceneKind.HOST_MEMORY: "out of host memory",
    SceneKind.WARNING: "warning: an allocation failed and was tried again",
    SceneKind.DEVICE_ASSERT: "device-side assert",
    SceneKind.ILLEGAL_ACCESS: "illegal memory access",
    SceneKind.CUDA_ERROR: "CUDA error",
    SceneKind.COLLECTIVE: "collective timed out or failed",
    SceneKind.KILLED: "process ended",
    SceneKind.RETRY: "retry",
    SceneKind.CACHE_FLUSH: "cache flushed",
    SceneKind.RESTART: "restart",
    SceneKind.OTHER: "failure",
}
_TRIAL_WORDS: Final = {
    SceneKind.TRIAL_START: "starts",
    SceneKind.TRIAL_END: "finished",
    SceneKind.TRIAL_FAILED: "failed",
    SceneKind.TRIAL_PRUNED: "pruned",
}
_QUOTED: Final = frozenset(
    {SceneKind.DEVICE_ASSERT, SceneKind.CUDA_ERROR, SceneKind.RETRY, SceneKind.RESTART,
     SceneKind.OTHER, SceneKind.COLLECTIVE, SceneKind.KILLED, SceneKind.HOST_MEMORY}
)  # fmt: skip
_IMPORTANCE: Final = {
    SceneKind.PROGRESS: 0,
    **dict.fromkeys((SceneKind.TRIAL_START, SceneKind.TRIAL_END, SceneKind.TRIAL_PRUNED), 1),
    SceneKind.WARNING: 1,
    **dict.fromkeys((SceneKind.TRIAL_FAILED, SceneKind.RETRY, SceneKind.CACHE_FLUSH), 2),
}
_MOST: Final = 4
_JUDGED: Final = "the verdict is about this one"


StoryRow = tuple[str, str, str, doc.Content]
"""When, on which line of the text, who, and what happened."""


def story_rows(diagnosis: Diagnosis, limit: int) -> tuple[list[StoryRow], int]:
    """Return the rows of a story, at most this many, and the number of events left out.

    Neighboring trials without a failure are one row. Rows that tell the least are left out, from
    the middle: progress first, then trials and retries, then failures like those before them.
    """
    story = diagnosis.story
    if story is None:
        return [], 0
    log = diagnosis.case.oom
    groups = _grouped(story.events)
    chosen = _chosen(groups, story.events, limit)
    has_days = (story.duration_s or 0) >= DAY_S / 2
    primary = log.primary if log is not None and story.n_ooms > 1 else None
    rows: list[StoryRow] = []
    last = -1
    for g in chosen:
        rows += _left_out([i for group in groups[last + 1 : g] for i in group], story.events)
        last = g
        events = [story.events[i] for i in groups[g]]
        first = events[0]
        is_judged = primary is not None and first.message == primary
        happened = _what(events, () if log is None else log.messages)
        what = _styled(first, happened, _JUDGED if is_judged else _note(first))
        when = _time_text(first.time_s, has_days=has_days)
        rows.append((when, format_count(first.line), _who(first), what))
    n_left = len(story.events) - sum(len(groups[g]) for g in chosen)
    return rows, n_left


def _grouped(events: Sequence[Scene]) -> list[list[int]]:
    """Return events grouped in rows: consecutive uneventful trials, repeated retries or flushes."""
    groups: list[list[int]] = []
    for i, event in enumerate(events):
        if groups and _joins(events[groups[-1][-1]], event):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _joins(last: Scene, event: Scene) -> bool:
    if event.caused_by is not None or last.caused_by is not None:
        return False
    if event.kind in _TRIAL_WORDS and last.kind in _TRIAL_WORDS:
        ends = (SceneKind.TRIAL_FAILED,)
        return event.kind not in ends and last.kind not in ends
    is_repeat = event.kind is last.kind and event.kind in (SceneKind.RETRY, SceneKind.CACHE_FLUSH)
    return is_repeat and event.rank == last.rank


def _chosen(groups: Sequence[list[int]], events: Sequence[Scene], limit: int) -> list[int]:
    """Return the indices of the rows to show.

    The least telling kinds are dropped first, completely: progress, then trials and retries, then
    consequences of a failure. If there are still too many failures, the middle is dropped.
    """
    kept = list(range(len(groups)))
    ends = {0, len(groups) - 1}
    for least in range(_MOST + 1):
        kept = [g for g in kept if g in ends or _importance(groups[g], events) >= least]
        if len(kept) <= limit:
            return kept
    n_first = limit * 3 // 5
    return [*kept[:n_first], *kept[len(kept) - (limit - n_first - 1) :]]


def _importance(group: Sequence[int], events: Sequence[Scene]) -> int:
    event = events[group[0]]
    if len(group) > 1:
        return _MOST  # a whole stretch of the log in one row
    if event.kind in FAILURES or event.kind is SceneKind.RESTART:
        return _MOST if event.caused_by is None else _MOST - 1
    return _IMPORTANCE.get(event.kind, _MOST)


def _left_out(gap: Sequence[int], events: Sequence[Scene]) -> list[StoryRow]:
    """Return a row for the events left out between two rows, if they include failures."""
    failures = [events[i] for i in gap if events[i].kind in FAILURES]
    own = [e for e in failures if e.caused_by is None]
    if not own:
        return []
    trials = list(dict.fromkeys(e.trial for e in own if e.trial))
    where = f" in trials {trials[0]} to {trials[-1]}" if len(trials) > 1 else ""
    kinds = list(dict.fromkeys(_TITLES.get(e.kind, e.kind.value) for e in own))
    what = f"{plural(len(own), 'more failure')}{where}: {', '.join(kinds)}"
    return [("", "...", "", dim(what))]


def _styled(event: Scene, what: str, note: str) -> doc.Content:
    """Return what happened in the style of its kind, and what is to be noted about it."""
    said: list[str | doc.Span]
    if event.caused_by is not None:
        said = [dim("> "), warn(what)]
    elif event.kind in FAILURES:
        said = [bad(what)]
    else:
        said = [dim(what) if event.kind is SceneKind.PROGRESS else what]
    return [*said, dim(f"  {note}")] if note else said


def _time_text(time_s: float | None, *, has_days: bool) -> str:
    if time_s is None:
        return ""
    at = time.gmtime(time_s)
    return time.strftime("%m-%d %H:%M" if has_days else "%H:%M:%S", at)


def _who(event: Scene) -> str:
    parts = []
    if event.rank is not None:
        parts.append(f"rank {event.rank}")
    elif event.pid is not None:
        parts.append(f"pid {event.pid}")
    if event.trial and event.kind not in _TRIAL_WORDS:
        name = event.trial if len(event.trial) <= _MAX_TRIAL else f"..{event.trial[-10:]}"
        parts.append(f"trial {name}")
    return ", ".join(parts)


def _what(events: Sequence[Scene], messages: Sequence[OomMessage]) -> str:
    first = events[0]
    if first.kind is SceneKind.PROGRESS:
        return first.place
    if first.kind in _TRIAL_WORDS:
        return _trials_what(events)
    title = _TITLES.get(first.kind, first.kind.value)
    if first.message is not None:
        title += _figures(messages[first.message])
    if first.count is not None:
        title += f", {format_count(events[-1].count or 0)} so far"
    elif len(events) > 1:
        title += f", {len(events)} times"
    if first.n_lines > 1 and first.kind is not SceneKind.OOM:
        title += f" ({format_count(first.n_lines)} lines)"
    return title


def _trials_what(events: Sequence[Scene]) -> str:
    names = list(dict.fromkeys(e.trial for e in events))
    words = list(dict.fromkeys(_TRIAL_WORDS[e.kind] for e in events))
    if len(words) > 1 and "starts" in words:
        words.remove("starts")
    said = " or ".join(words)
    if len(names) == 1:
        return f"trial {names[0]} {said}"
    said = said.replace("starts", "start")
    return f"trials {names[0]} to {names[-1]} {said} ({format_count(len(names))})"


def _figures(message: OomMessage) -> str:
    figures = {
        "asked": message.requested_bytes,
        "live": message.live_bytes,
        "unused": message.reserved_unallocated_bytes,
    }
    parts = [f"{name} {format_size(n)}" for name, n in figures.items() if n is not None]
    return f": {', '.join(parts)}" if parts else ""


def _note(event: Scene) -> str:
    if event.caused_by is not None and event.kind in FAILURES:
        return event.reason
    if event.kind in FAILURES and event.reason:
        return f"not a consequence: {event.reason}"
    if event.kind in _QUOTED and event.kind not in FAILURES and event.count is None:
        return shortened(event.text, _MAX_NOTE)
    return ""
