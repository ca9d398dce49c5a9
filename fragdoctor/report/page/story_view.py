"""The story of a log for the page: its rows and its trends as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.report.story_rows import (
    StoryRow,
    story_facts,
    story_rows,
    trend_span,
    trend_text,
    trend_title,
)

MAX_ROWS: Final = 60


@dataclass(frozen=True, slots=True)
class StoryView:
    """Rows of the time line, and trends as (title, span, direction, text)."""

    facts: str
    rows: Sequence[StoryRow]
    n_left: int
    trends: Sequence[tuple[str, str, str, str]]


def story_view(diagnosis: Diagnosis) -> StoryView | None:
    """Return what the page shows of a story, None where there is none."""
    story = diagnosis.story
    if story is None:
        return None
    rows, n_left = story_rows(diagnosis, MAX_ROWS)
    trends = [
        (trend_title(t), trend_span(t), t.direction.value, trend_text(t)) for t in story.trends
    ]
    return StoryView(story_facts(story), rows, n_left, trends)
