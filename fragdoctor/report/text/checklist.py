"""The checklist: each step with its outcome, its figure, and the input that answered it."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.diagnosis import ChecklistItem, Diagnosis, Status
from fragdoctor.report.base import Verbosity
from fragdoctor.report.text.page import INDENT, Column, Page, Span

_MARKS: Final[dict[Status, tuple[str, str]]] = {
    Status.PASS: ("ok", "green"),
    Status.WARN: ("warn", "yellow"),
    Status.FAIL: ("FAIL", "bold red"),
    Status.SKIP: ("skip", "dim"),
}
_MARK_WIDTH: Final = 6
_DETAIL_INDENT: Final = INDENT + _MARK_WIDTH


def write_checklist(page: Page, diagnosis: Diagnosis) -> None:
    """Write one line an item; details follow where an item is not simply passed."""
    items = diagnosis.checklist
    if not items:
        return
    page.heading("Checklist")
    title_width = min(max(len(item.title) for item in items) + 2, page.width // 2 - 8)
    for item in items:
        _write_item(page, item, title_width)


def _write_item(page: Page, item: ChecklistItem, title_width: int) -> None:
    mark = _MARKS[item.status]
    verbose = page.options.verbosity is Verbosity.VERBOSE
    source: Span = (f"  [{item.source}]" if item.source else "", "dim")
    is_skip = item.status is Status.SKIP
    value: Span = item.value or ("" if item.detail else "-")
    if is_skip and item.detail:
        # The reason is all there is to say.
        body: list[Span] = [(item.detail if not item.value else item.value, "dim"), source]
    else:
        body = [value, source]
    page.table(
        [
            Column("fit", max_width=_MARK_WIDTH - 2),
            Column("fit", max_width=title_width),
            Column("wrap"),
        ],
        [[(mark[0].ljust(_MARK_WIDTH - 2), mark[1]), item.title.ljust(title_width - 2), body]],
    )
    shows_detail = verbose or item.status in (Status.FAIL, Status.WARN)
    if item.detail and shows_detail and not (is_skip and not item.value):
        page.paragraph((item.detail, "dim"), indent=_DETAIL_INDENT)
