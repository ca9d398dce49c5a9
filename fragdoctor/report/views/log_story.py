"""A log told in order of time: what happened when, what caused what, which figures grow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from fragdoctor.model.case import LogMarker, OomLog, OomMessage
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.story import (
    FAILURES,
    Direction,
    LogStory,
    Scene,
    SceneKind,
    TrialOutcome,
    TrialTrend,
)
from fragdoctor.report import document as doc
from fragdoctor.report.document import Detail, Span, Style, bad, dim, strong, warn
from fragdoctor.report.words import shortened
from fragdoctor.units import format_count, format_size, plural

_SHORT_ROWS: Final = 8
_FULL_ROWS: Final = 200
_SHORT_TRENDS: Final = 3
_MAX_TEXT: Final = 160
_MAX_MESSAGE: Final = 4000
_DIRECTION_STYLES: Final = {Direction.GROWS: Style.BAD, Direction.LEVEL: Style.GOOD}


def story_section(diagnosis: Diagnosis) -> doc.Section:
    """Return the story of a log and its trends, or nothing if the log tells none."""
    story = diagnosis.story
    if story is None:
        return doc.Section("What happened", ())
    blocks = [
        *_events(diagnosis, story, _SHORT_ROWS, Detail.SHORT),
        *_events(diagnosis, story, _FULL_ROWS, Detail.FULL),
        *_trends(story),
    ]
    return doc.Section("What happened", blocks, story_facts(story), "story")


def _events(
    diagnosis: Diagnosis, story: LogStory, limit: int, detail: Detail
) -> list[doc.DocumentBlock]:
    rows, n_left = story_rows(diagnosis, story, limit)
    table = doc.tabled(
        rows,
        *([doc.Column("time", itemgetter(0), style=Style.DIM)] if story.is_by_time else []),
        doc.Column("line", itemgetter(1), "right"),
        *([doc.Column("who", itemgetter(2))] if any(who for _, _, who, _ in rows) else []),
        doc.Column("what", itemgetter(3), "wrap"),
        detail=detail,
    )
    more = "--format json has" if detail is Detail.FULL else "--full has"
    left = f"{plural(n_left, 'event')} left out; {more} more" if n_left else ""
    return [table, doc.Paragraph(dim(left), detail=detail)]


def _trends(story: LogStory) -> list[doc.DocumentBlock]:
    trends = [t for t in story.trends if t.slope_bytes is not None]
    trends.sort(key=lambda t: t.direction is Direction.UNCLEAR)
    n_clear = sum(t.direction is not Direction.UNCLEAR for t in trends)
    if not trends and story.trends:
        n = len(story.trends[0].points)
        return [doc.Paragraph(dim(f"A trend needs three points; there are {n}."))]
    return [
        doc.tabled(
            trends,
            doc.Column("figure", _trend_title),
            doc.Column("from", _trend_span, max_width=28),
            doc.Column("goes", _direction, "wrap"),
            shown=min(_SHORT_TRENDS, max(1, n_clear)),
        )
    ]


def _trend_title(trend: TrialTrend) -> str:
    """Return the name of a trend's figure, and where the figure was read."""
    at = "printed" if trend.label else "at OOM"
    rank = "" if trend.rank is None else f", rank {trend.rank}"
    return f"{trend.figure} {at}{rank}"


def _trend_span(trend: TrialTrend) -> str:
    return f"{format_size(trend.points[0])} to {format_size(trend.points[-1])}"


def _direction(trend: TrialTrend) -> doc.Content:
    style = _DIRECTION_STYLES.get(trend.direction)
    word = trend.direction.value
    return [Span(word, style) if style else word, ", ", trend_text(trend)]


def message_sections(diagnosis: Diagnosis) -> list[doc.Section]:
    """Return the messages of a text, the first cause on top, and the lines near them."""
    log = diagnosis.case.oom
    if log is None:
        return []
    # The story already has all messages in order.
    detail = Detail.USUAL if diagnosis.story is None else Detail.FULL
    several = len(log.messages) > 1
    judged = diagnosis.case.primary_message
    text = "" if judged is None else judged.text[:_MAX_MESSAGE]
    markers = doc.tabled(
        log.markers,
        doc.Column("", _marker_place),
        doc.Column("", lambda m: m.kind.replace("-", " ")),
        doc.Column("", lambda m: dim(shortened(m.text, _MAX_TEXT)), "wrap"),
        shown=3,
        detail=detail,
    )
    title = "Beside them" if several else "Other lines of this text"
    note = f"{format_count(len(log.messages))} in this text"
    messages = [_messages(log, detail)] if several else []
    budgets = (("Server's budget", log.server, "server"), ("XLA's program", log.program, "program"))
    return [
        *(
            doc.Section(
                name,
                [doc.tabled(lines, doc.Column("", "name"), doc.Column("", "n_bytes"))],
                id=id_,
            )
            for name, lines, id_ in budgets
        ),
        doc.Section("Messages", messages, note, "messages"),
        doc.Section("The message", [doc.Paragraph(text)], id="message", detail=Detail.FULL),
        doc.Section(title, [markers], id="markers"),
    ]


def _messages(log: OomLog, detail: Detail) -> doc.Table:
    order = sorted(range(len(log.messages)), key=lambda i: (i != log.primary, i))
    has_ranks = any(m.rank is not None for m in log.messages)
    return doc.tabled(
        [log.messages[i] for i in order],
        doc.Column("", lambda m: strong("judged") if m is log.messages[log.primary] else ""),
        doc.Column("line", "line"),
        *([doc.Column("rank", "rank")] if has_ranks else []),
        doc.Column("GPU", "device_index"),
        doc.Column("requested", "requested_bytes"),
        doc.Column("free", "true_free_bytes"),
        doc.Column("kind", _kind, "wrap"),
        shown=3,
        detail=detail,
    )


def _kind(message: OomMessage) -> str:
    is_usual = message.kind == "pytorch-caching-allocator"
    kind = message.backend if is_usual else message.kind
    return f"{kind}, {message.sub_kind}" if message.sub_kind else kind


def _marker_place(marker: LogMarker) -> str:
    rank = "" if marker.rank is None else f", rank {marker.rank}"
    return f"line {format_count(marker.line)}{rank}"


def story_facts(story: LogStory) -> str:
    """Return the story as a line of counts."""
    n_failed = sum(t.outcome is TrialOutcome.FAILED or t.n_ooms > 0 for t in story.trials)
    failed = f" ({format_count(n_failed)} failed)" if n_failed else ""
    facts = (
        f"by {'time' if story.is_by_time else 'line'}",
        f"over {duration_text(story.duration_s)}" if story.duration_s else "",
        f"{plural(len(story.trials), 'trial')}{failed}" if story.trials else "",
        plural(story.n_ooms, "OOM"),
        plural(story.n_consequences, "consequence") if story.n_consequences else "",
        plural(story.n_retries, "retry", "retries") if story.n_retries else "",
        plural(story.n_restarts, "restart") if story.n_restarts else "",
    )
    return ", ".join(fact for fact in facts if fact)


def duration_text(seconds: float) -> str:
    """Return a length of time in readable units."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 2 * 3600:
        return f"{whole // 60} min"
    if whole < 2 * DAY_S:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // DAY_S} days"


def trend_text(trend: TrialTrend) -> str:
    """Return the course of a figure: number of points, slope with its bounds, confidence."""
    step = {"trial": "trial", "oom": "OOM", "print": "print"}[trend.over]
    n = plural(len(trend.points), step)
    sure = f" ({trend.confidence.value})" if trend.confidence is not None else ""
    if trend.direction in (Direction.LEVEL, Direction.UNCLEAR):
        return f"{n}{sure}"
    bounds = f", {trend.bounds}" if trend.bounds else ""
    own = "; each has its own process, so nothing is left over" if trend.has_process_each else ""
    return f"{format_size(trend.slope_bytes)} a {step}{bounds}; {n}{sure}{own}"


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


def story_rows(diagnosis: Diagnosis, story: LogStory, limit: int) -> tuple[list[StoryRow], int]:
    """Return the rows of a story, at most this many, and the number of events left out.

    Neighboring trials without a failure are one row. Rows that tell the least are left out, from
    the middle.
    """
    log = diagnosis.case.oom
    groups = _grouped(story.events)
    chosen = _chosen(groups, limit)
    has_days = (story.duration_s or 0) >= DAY_S / 2
    primary = log.primary if log is not None and story.n_ooms > 1 else None
    rows: list[StoryRow] = []
    last = -1
    for g in chosen:
        rows += _left_out([event for group in groups[last + 1 : g] for event in group])
        last, events = g, groups[g]
        first = events[0]
        is_judged = primary is not None and first.message == primary
        happened = _what(events, () if log is None else log.messages)
        what = _styled(first, happened, _JUDGED if is_judged else _note(first))
        when = _time_text(first.time_s, has_days=has_days)
        rows.append((when, format_count(first.line), _who(first), what))
    n_left = len(story.events) - sum(len(groups[g]) for g in chosen)
    return rows, n_left


def _grouped(events: Sequence[Scene]) -> list[list[Scene]]:
    """Return events grouped in rows: consecutive uneventful trials, repeated retries or flushes."""
    groups: list[list[Scene]] = []
    for event in events:
        if groups and _joins(groups[-1][-1], event):
            groups[-1].append(event)
        else:
            groups.append([event])
    return groups


def _joins(last: Scene, event: Scene) -> bool:
    if event.caused_by is not None or last.caused_by is not None:
        return False
    if event.kind in _TRIAL_WORDS and last.kind in _TRIAL_WORDS:
        ends = (SceneKind.TRIAL_FAILED,)
        return event.kind not in ends and last.kind not in ends
    is_repeat = event.kind is last.kind and event.kind in (SceneKind.RETRY, SceneKind.CACHE_FLUSH)
    return is_repeat and event.rank == last.rank


def _chosen(groups: Sequence[Sequence[Scene]], limit: int) -> list[int]:
    """Return the indices of the rows to show: the ends, then the most telling, outermost first."""
    last = len(groups) - 1
    outer = {g: min(g, last - g) for g in range(len(groups))}
    told = sorted(outer, key=lambda g: (outer[g] > 0, -_importance(groups[g]), outer[g]))
    return sorted(told[:limit])


def _importance(group: Sequence[Scene]) -> int:
    event = group[0]
    if len(group) > 1:
        return _MOST  # a whole stretch of the log in one row
    if event.kind in FAILURES or event.kind is SceneKind.RESTART:
        return _MOST if event.caused_by is None else _MOST - 1
    return _IMPORTANCE.get(event.kind, _MOST)


def _left_out(gap: Sequence[Scene]) -> list[StoryRow]:
    """Return a row for the events left out between two rows, if they include failures."""
    own = [e for e in gap if e.kind in FAILURES and e.caused_by is None]
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
        "requested": message.requested_bytes,
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
