"""The story of a log: a time line with consequences below their causes, and the trends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.story import Direction, LogStory
from fragdoctor.report.base import Verbosity
from fragdoctor.report.story_rows import (
    StoryRow,
    story_facts,
    story_rows,
    trend_span,
    trend_text,
    trend_title,
)
from fragdoctor.report.text.page import Cell, Column, Page
from fragdoctor.units import format_count, plural

_ROWS: Final = 20
_VERBOSE_ROWS: Final = 200
_STYLES: Final = {"failure": "bold red", "effect": "yellow", "trial": "", "quiet": "dim"}
_SPARK: Final = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH: Final = 10
_DIRECTION_STYLES: Final = {Direction.GROWS: "bold red", Direction.LEVEL: "green"}


def write_story(page: Page, diagnosis: Diagnosis) -> None:
    """Write what happened when, what followed from what, and which figures grow."""
    story = diagnosis.story
    if story is None:
        return
    page.heading("Story", story_facts(story))
    verbose = page.options.verbosity is Verbosity.VERBOSE
    rows, n_left = story_rows(diagnosis, _VERBOSE_ROWS if verbose else _ROWS)
    has_who = any(row.who for row in rows)
    columns = [
        *([Column(title="time")] if story.is_by_time else []),
        Column(title="line", align="right"),
        *([Column(title="who")] if has_who else []),
        Column("wrap", title="what"),
    ]
    page.table(columns, [_row(page, row, story=story, has_who=has_who) for row in rows])
    if n_left:
        page.paragraph((f"{format_count(n_left)} events left out; --verbose shows more", "dim"))
    _write_trends(page, story)


def _row(page: Page, row: StoryRow, *, story: LogStory, has_who: bool) -> list[Cell]:
    mark = ("└ " if page.options.unicode else "> ") if row.is_consequence else ""
    style = _STYLES[row.tone]
    what: Cell = [(mark, "dim"), (row.what, style)]
    if row.note:
        what = [(mark, "dim"), (row.what, style), (f"  {row.note}", "dim")]
    return [
        *([(row.time, "dim")] if story.is_by_time else []),
        row.line,
        *([row.who] if has_who else []),
        what,
    ]


def _write_trends(page: Page, story: LogStory) -> None:
    verbose = page.options.verbosity is Verbosity.VERBOSE
    shown = [t for t in story.trends if t.slope_bytes is not None or verbose]
    if not shown:
        if len(story.trends):
            page.paragraph(
                (f"A trend needs three points; here are {len(story.trends[0].points)}.", "dim")
            )
        return
    page.blank()
    shown = shown if verbose else shown[:4]
    page.table(
        [
            Column(),
            *([Column()] if page.options.unicode else []),
            Column(max_width=28),
            Column("wrap"),
        ],
        [
            [
                trend_title(t),
                *([_picture(t.points)] if page.options.unicode else []),
                trend_span(t),
                [(t.direction.value, _DIRECTION_STYLES.get(t.direction, "")), ", ", trend_text(t)],
            ]
            for t in shown
        ],
    )
    if len(story.trends) > len(shown):
        n_more = plural(len(story.trends) - len(shown), "more trend")
        page.paragraph((f"{n_more} with --verbose", "dim"))


def _picture(points: Sequence[int]) -> str:
    """Return the points as a row of bars from zero to their highest."""
    n = min(len(points), _SPARK_WIDTH)
    chosen = [points[i * (len(points) - 1) // max(1, n - 1)] for i in range(n)]
    top = max(chosen)
    last = len(_SPARK) - 1
    return "".join(_SPARK[round(last * p / top) if top else 0] for p in chosen)
