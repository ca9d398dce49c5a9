"""A document as GitHub-flavored Markdown: for a pull request, an issue, a job summary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from fragdoctor.report import document as doc
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.words import share_of
from fragdoctor.units import format_count, format_size, plural

MAX_BYTES: Final = 900_000
"""Size limit of a report: GitHub drops a step summary of more than 1 MiB altogether."""

MAX_ROWS: Final = 500
_BOLD: Final = (doc.Style.STRONG, doc.Style.BAD)


def render(document: doc.ReportDocument, options: RenderOptions) -> str:
    """Return the document; details that the short report leaves out are folded."""
    if options.verbosity is Verbosity.QUIET:
        return (
            "".join(f"{_text(doc.plain(line))}\n\n" for line in document.brief).rstrip("\n") + "\n"
        )
    details = doc.DETAILS[options.verbosity]
    lead = doc.Section("", document.lead)
    blocks = [f"## {_text(doc.plain(document.headline))}", *_section(lead, details)]
    for section in document.sections:
        blocks += _section(section, details)
    if options.verbosity is Verbosity.NORMAL:
        folded = [b for s in (lead, *document.sections) for b in _section(s, (doc.Detail.FULL,))]
        if folded:
            inside = "\n\n".join(folded)
            blocks.append(f"<details>\n<summary>All details</summary>\n\n{inside}\n\n</details>")
    return _bounded(blocks)


def _bounded(blocks: Sequence[str]) -> str:
    """Return as many blocks as fit, and say what was left out."""
    kept: list[str] = []
    size = 0
    for block in blocks:
        size += len(block.encode("utf-8", "surrogatepass")) + 2
        if size > MAX_BYTES:
            kept.append("The rest is left out: the report would be too long.")
            break
        kept.append(block)
    return "\n\n".join(kept) + "\n"


def _section(section: doc.Section, details: Sequence[doc.Detail]) -> list[str]:
    body = [text for block in section.only(details) if (text := _block(block))]
    if not body or not section.title:
        return body
    note = f": {section.note}" if section.note else ""
    return [f"### {_text(section.title + note)}", *body]


def _block(block: doc.DocumentBlock) -> str:  # noqa: PLR0911 - one a block
    """Return a block, or "" for a picture that only a page can show."""
    match block:
        case doc.Paragraph():
            return _content(block.content)
        case doc.Facts():
            return "\n".join(f"- {_text(label)}: {_content(c)}" for label, c in block.items)
        case doc.Bullets():
            return "\n".join(f"- {_content(item)}" for item in block.items)
        case doc.Code():
            return _code(block)
        case doc.Listing():
            return "\n".join(_item(item) for item in block.items)
        case doc.Table():
            return _table(block)
        case doc.Bar():
            return _table(_bar(block))
        case doc.Timeline():
            return _timeline(block)
        case _:
            return ""


def _text(text: str) -> str:
    return escape.markdown(escape.bounded(text))


def _content(content: doc.Content, *, in_table: bool = False) -> str:
    # Join words of one style: the marks of two adjacent spans would read as one longer mark.
    runs = groupby(filter(itemgetter(0), doc.spans(content)), key=itemgetter(1))
    return "".join(
        _styled("".join(text for text, _ in run), style, in_table=in_table) for style, run in runs
    )


def _styled(text: str, style: doc.Style | None, *, in_table: bool) -> str:
    if style is doc.Style.CODE and text.strip():
        return escape.markdown_code(text[: escape.MAX_TEXT], in_table=in_table)
    shown = _text(text)
    if style not in _BOLD or not shown.strip():
        return shown
    # Markdown's closing mark must touch the last word, so spaces stay outside the marks.
    core = shown.strip()
    before, _, after = shown.partition(core)
    return f"{before}**{core}**{after}"


def _code(block: doc.Code) -> str:
    lines = [escape.visible(line) for line in block.lines]
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence, *lines, fence])


def _item(item: doc.ListItem) -> str:
    number = item.label.rstrip(".")
    if number.isascii() and number.isdigit() and item.label.endswith("."):
        lead = f"{item.label} "
    else:
        lead = "- " + (f"{_styled(item.label, item.style, in_table=False)} " if item.label else "")
    lines = [f"{lead}{_content(item.head)}"]
    for inner in (b for b in item.blocks if not b.is_empty):
        lines += [f"   {line}" for line in _inner(inner)]
    return "\n".join(lines)


def _inner(block: doc.DocumentBlock) -> list[str]:
    """Return the lines of a block inside a list, each as its own entry."""
    if isinstance(block, doc.Code):
        return [f"- {escape.markdown_code(line)}" for line in block.lines]
    if isinstance(block, doc.Paragraph):
        return [f"- {_content(block.content)}"]
    return _block(block).splitlines()


def _table(block: doc.Table) -> str:
    rows = block.rows[:MAX_ROWS]
    # Drawings are left out: the figures beside them say the same.
    kept = [i for i in range(len(block.columns)) if not isinstance(rows[0].cells[i], doc.Gauge)]
    if not kept:
        return ""
    columns = [block.columns[i] for i in kept]
    # The lines below a row go into its main cell here.
    main = next((i for i, c in enumerate(columns) if not c.is_fitted), len(columns) - 1)
    marks = ["---:" if c.kind == "right" else "---" for c in columns]
    lines = [_row(_text(c.title) for c in columns), _row(marks)]
    for row in rows:
        cells = [_cell(row.cells[i]) for i in kept]
        cells[main] = "<br>".join([cells[main], *(_content(n, in_table=True) for n in row.notes)])
        lines.append(_row(cells))
    n_left = block.n_left_out + len(block.rows) - len(rows)
    more = f"\n\n{format_count(n_left)} more with --format json" if n_left else ""
    return "\n".join(lines) + more


def _cell(cell: doc.Cell) -> str:
    return "" if isinstance(cell, doc.Gauge) else _content(cell, in_table=True)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bar(bar: doc.Bar) -> doc.Table:
    return doc.tabled(
        bar.parts,
        doc.Column("Memory", "name"),
        doc.Column("Bytes", "n_bytes", "right"),
        doc.Column("Share", lambda part: share_of(part.n_bytes, bar.total_bytes), "right"),
        doc.Column("", "meaning"),
    )


def _timeline(block: doc.Timeline) -> str:
    strip = block.strip
    lines = [_row(("Memory", "First", "Peak", "Last")), _row(("---", "---:", "---:", "---:"))]
    for i, name in enumerate(("allocated", "reserved")):
        values = (strip.first_bytes[i], strip.peak_bytes[i], strip.last_bytes[i])
        lines.append(_row((name, *(format_size(v) for v in values))))
    ooms, flushes = plural(strip.n_ooms, "OOM"), plural(strip.n_flushes, "flush", "flushes")
    return "\n".join([*lines, "", f"{ooms}, {flushes}."])
