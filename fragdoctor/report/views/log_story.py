"""A log told in order of time: what happened when, what caused what, which figures grow."""

from __future__ import annotations

from operator import itemgetter
from typing import Final

from fragdoctor.model.case import LogMarker, OomLog, OomMessage
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.story import Direction, LogStory, TrialOutcome, TrialTrend
from fragdoctor.report import document as doc
from fragdoctor.report.document import Detail, Span, Style, dim, strong
from fragdoctor.report.views.log_story_rows import DAY_S, story_rows
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
        return doc.Section("Story", ())
    blocks = [
        *_events(diagnosis, story, _SHORT_ROWS, Detail.SHORT),
        *_events(diagnosis, story, _FULL_ROWS, Detail.FULL),
        *_trends(story),
    ]
    return doc.Section("Story", blocks, story_facts(story), "story")


def _events(
    diagnosis: Diagnosis, story: LogStory, limit: int, detail: Detail
) -> list[doc.DocumentBlock]:
    rows, n_left = story_rows(diagnosis, limit)
    table = doc.tabled(
        rows,
        *([doc.Column("time", itemgetter(0), style=Style.DIM)] if story.is_by_time else []),
        doc.Column("line", itemgetter(1), "right"),
        *([doc.Column("who", itemgetter(2))] if any(who for _, _, who, _ in rows) else []),
        doc.Column("what", itemgetter(3), "wrap"),
        detail=detail,
    )
    more = "--format json has" if detail is Detail.FULL else "--full has"
    left = dim(f"{plural(n_left, 'event')} left out; {more} more") if n_left else ""
    return [table, doc.Paragraph(left, detail=detail)]


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
        doc.Column("asked", "requested_bytes"),
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


def duration_text(seconds: float | None) -> str:
    """Return a length of time in readable units."""
    if seconds is None:
        return "unknown"
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
    if trend.slope_bytes is None:
        return f"{n} do not say"
    sure = f" ({trend.confidence.value})" if trend.confidence is not None else ""
    if trend.direction in (Direction.LEVEL, Direction.UNCLEAR):
        return f"{n}{sure}"
    bounds = ""
    if trend.low_bytes is not None and trend.high_bytes is not None:
        low, high = format_size(trend.low_bytes), format_size(trend.high_bytes)
        bounds = f", 90 %: {low} to {high}" if low != high else ""
    own = "; each has its own process, so nothing is left over" if trend.has_process_each else ""
    return f"{format_size(trend.slope_bytes)} a {step}{bounds}; {n}{sure}{own}"
