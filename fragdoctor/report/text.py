"""A document as text for a terminal, a pipe or a plain file."""

from __future__ import annotations

from typing import Final

from fragdoctor.report import document as doc
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.pictures import draw_bar, draw_timeline
from fragdoctor.report.text_layout import INDENT, Page
from fragdoctor.units import format_count

MAX_LABEL: Final = 24


def render(document: doc.ReportDocument, options: RenderOptions) -> str:
    """Return the document as text, ending in a newline; quiet gives only its brief lines."""
    if options.verbosity is Verbosity.QUIET:
        return "".join(f"{escape.terminal(doc.plain(line))}\n" for line in document.brief)
    page = Page(options)
    page.paragraph(document.headline, indent=0)
    _write_blocks(page, doc.Section("", document.lead), indent=0)
    last = ""
    for section in document.sections:
        if _write_blocks(page, section, indent=INDENT):
            last = section.title
    if document.footer and options.verbosity is Verbosity.NORMAL:
        if last:  # remarks and footer are one paragraph
            page.blank()
        page.paragraph(doc.dim(document.footer))
    return page.render(document.places)


def _write_blocks(page: Page, section: doc.Section, *, indent: int) -> bool:
    blocks = section.only(doc.DETAILS[page.options.verbosity])
    if not blocks:
        return False
    if section.title:
        page.heading(section.title, section.note)
    elif indent:
        page.blank()
    for block in blocks:
        _write(page, block, indent)
    return True


def _write(page: Page, block: doc.DocumentBlock, indent: int) -> None:  # noqa: C901 - one a block
    """Write a block; pictures that only a page can show are skipped."""
    match block:
        case doc.Gap():
            page.blank()
        case doc.Paragraph():
            page.paragraph(block.content, indent=indent)
        case doc.Facts():
            width = min(MAX_LABEL, max((len(label) for label, _ in block.items), default=0) + 2)
            for label, content in block.items:
                page.labelled(doc.dim(label), content, indent=indent, label_width=width)
        case doc.Bullets():
            for item in block.items:
                page.labelled("-", item, indent=indent, label_width=2)
        case doc.Code():
            for line in block.lines:
                page.verbatim(doc.strong(line), max(indent, INDENT), is_cut=block.is_quoted)
        case doc.Listing():
            _listing(page, block, indent)
        case doc.Table():
            _table(page, block, indent)
        case doc.Bar():
            draw_bar(page, block)
        case doc.Timeline():
            draw_timeline(page, block.strip)


def _listing(page: Page, block: doc.Listing, indent: int) -> None:
    shown = block.items[: _limit(page, block)]
    width = max((len(item.label) for item in shown), default=0) + 1
    for i, item in enumerate(shown):
        if i and block.is_airy:
            page.blank()
        label = doc.Span(item.label or "-", item.style)
        page.labelled(label, item.head, indent=indent, label_width=width + 1)
        for inner in doc.Section("", item.blocks).only(doc.DETAILS[page.options.verbosity]):
            _write(page, inner, indent + width + 1)
    _more(page, len(block.items) - len(shown), indent)


def _table(page: Page, block: doc.Table, indent: int) -> None:
    shown = block.rows[: _limit(page, block)]
    page.table(block.columns, shown, indent=max(indent, INDENT))
    _more(page, len(block.rows) - len(shown), indent)
    if page.options.verbosity is Verbosity.FULL:
        _more(page, block.n_left_out, indent, "--format json")


def _limit(page: Page, block: doc.Listing | doc.Table) -> int | None:
    """Return how many rows or items a report shows; None for all."""
    return None if page.options.verbosity is Verbosity.FULL else block.shown


def _more(page: Page, n: int, indent: int, where: str = "--full") -> None:
    if n > 0:
        page.paragraph(doc.dim(f"{format_count(n)} more with {where}"), indent=indent)
