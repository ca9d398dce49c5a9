"""Any document in any format: hostile text stays text, nothing of a document is lost."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import diagnoses
import pytest
from attacks import ATTACKS, assert_all_seen
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fragdoctor.model.finding import Location
from fragdoctor.report import document as doc
from fragdoctor.report import html, markdown, text
from fragdoctor.report.base import RenderOptions, Verbosity

ANSI = re.compile(r"\x1b\[[0-9;]*m")
RENDERERS = {"text": text.render, "markdown": markdown.render, "html": html.render}

words = st.one_of(st.sampled_from(ATTACKS), st.text(max_size=30))
styles = st.sampled_from(list(doc.Style))
contents = st.one_of(words, st.lists(st.one_of(words, st.builds(doc.Span, words, styles))))
details = st.sampled_from(list(doc.Detail))
shares = st.floats(0, 1)
cells = st.one_of(
    contents,
    st.builds(doc.Gauge, end=shares, start=st.just(0.0), style=styles),
)
kinds = st.sampled_from(["fit", "right", "wrap", "list", "path"])
columns = st.lists(st.builds(doc.Column, words, kind=kinds), min_size=1, max_size=4)
names = st.sampled_from(["allocated", "stranded", "cached", "free"])
parts = st.builds(doc.BarPart, names, st.integers(1, 2**45), words)


@st.composite
def tables(draw):
    laid_out = draw(columns)
    rows = draw(st.lists(st.lists(cells, min_size=len(laid_out), max_size=len(laid_out)),
                         max_size=4))  # fmt: skip
    notes = draw(st.lists(contents, max_size=3))
    return doc.Table(laid_out, [doc.Row(row, notes) for row in rows], detail=draw(details))


leaves = st.one_of(
    st.builds(doc.Paragraph, contents, detail=details),
    st.builds(doc.Facts, st.lists(st.tuples(words, contents), max_size=3), detail=details),
    st.builds(doc.Bullets, st.lists(contents, max_size=3), detail=details),
    st.builds(doc.Code, st.lists(words, max_size=3), detail=details),
    st.builds(doc.Bar, st.lists(parts, min_size=1, max_size=4), detail=details),
    st.builds(doc.Timeline, st.just(diagnoses.strip()), detail=details),
    tables(),
)  # fmt: skip
items = st.builds(doc.ListItem, contents, st.lists(leaves, max_size=2), words, styles)
blocks = st.one_of(leaves, st.builds(doc.Listing, st.lists(items, max_size=3), detail=details))
sections = st.builds(doc.Section, words, st.lists(blocks, max_size=3), words, st.just("id"))
documents = st.builds(
    doc.ReportDocument,
    title=words,
    headline=contents,
    brief=st.lists(contents, max_size=2),
    sections=st.lists(sections, max_size=3),
    lead=st.lists(blocks, max_size=2),
    kicker=words,
    footer=words,
)
looks = st.builds(
    RenderOptions, width=st.integers(60, 120), color=st.booleans(), unicode=st.booleans(),
    verbosity=st.sampled_from(Verbosity),
)  # fmt: skip


class Strict(HTMLParser):
    """Reads a page; its tags must nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in {"meta", "link", "br", "input"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@settings(deadline=None, max_examples=60)
@given(documents, looks)
def test_text_of_any_document_cannot_move_a_terminal(document, look):
    shown = text.render(document, look)

    assert_all_seen(ANSI.sub("", shown).replace("\n", ""))


def test_code_beside_code_is_one_span_of_markdown():
    beside = [doc.code("a"), "", doc.code("<script>"), " and ", doc.strong("b"), doc.strong("c")]
    document = doc.ReportDocument("t", "", [], [], [doc.Paragraph(beside)])

    assert "`a<script>` and **bc**" in markdown.render(document, RenderOptions())


def test_backtick_beside_code_is_no_part_of_its_mark():
    beside = ["a tick`", doc.code("<script>")]
    document = doc.ReportDocument("t", "", [], [], [doc.Paragraph(beside)])

    assert "a tick&#96;`<script>`" in markdown.render(document, RenderOptions())


@settings(deadline=None, max_examples=60)
@given(documents, looks)
def test_markdown_of_any_document_holds_no_markup_of_an_input(document, look):
    shown = markdown.render(document, look)

    assert_all_seen(shown.replace("\n", ""))
    outside = re.sub(r"(?ms)^(`{3,})$.*?^\1$", "", shown)
    outside = re.sub(r"(`+).*?\1(?!`)", "", outside)
    assert set(re.findall(r"<[^>]+>", outside)) <= {
        "<details>", "</details>", "<summary>", "</summary>", "<br>",
    }  # fmt: skip
    assert not re.search(r"(?<!\\)\]\(|!\[", outside)


@settings(deadline=None, max_examples=40)
@given(documents, looks)
def test_page_of_any_document_has_our_tags_alone(document, look):
    page = Strict(html.render(document, look))

    assert page.tags & {"script", "img", "iframe", "object", "form", "a"} <= {"a"}
    assert not [a for a in page.attributes if a.startswith("on") or a in ("style", "src")]


def test_page_without_scripts_changes_its_theme_all_the_same():
    page = html.render(whole(), RenderOptions())

    for theme in ("dark", "light"):
        assert f'<input type="checkbox" id="to-{theme}">' in page
        assert f":has(#to-{theme}:checked)" in page
    assert 'id="theme"' not in page


def whole() -> doc.ReportDocument:
    """Return a document in which every word occurs once."""
    table = doc.Table((doc.Column("title1"), doc.Column("title2", kind="right")),
                      (doc.Row(("cell1", doc.strong("cell2")), ("note1",)),))  # fmt: skip
    item = doc.ListItem("head1", (doc.Paragraph("inner1"), doc.Code(["code1"])), "1.")
    return doc.ReportDocument(
        title="window",
        headline=[doc.bad("headline1"), " headline2"],
        brief=["brief1"],
        lead=[doc.Paragraph("lead1")],
        sections=[
            doc.Section("section1", (table, doc.Bullets(["bullet1"])), "remark1", "one"),
            doc.Section("section2", (doc.Listing([item]), doc.Facts([("label1", "value1")]))),
            doc.Section("section3", (doc.Paragraph("full1", detail=doc.Detail.FULL),)),
        ],
    )


@pytest.mark.parametrize("name", RENDERERS)
def test_every_word_of_a_document_is_in_every_format(name):
    shown = RENDERERS[name](whole(), RenderOptions(verbosity=Verbosity.FULL))

    expected = ["headline1", "headline2", "lead1", "title1", "cell1", "cell2", "note1", "bullet1",
                "section1", "remark1", "head1", "inner1", "code1", "label1", "value1",
                "full1"]  # fmt: skip
    assert [w for w in expected if w not in shown] == []
    # A page names a section in its bar too, and a column beside its figures on a small screen.
    once = expected if name != "html" else [w for w in expected if w not in ("section1", "title1")]
    assert [w for w in once if shown.count(w) != 1] == []


@pytest.mark.parametrize("name", ["text", "markdown"])
def test_quiet_is_the_brief_alone(name):
    assert RENDERERS[name](whole(), RenderOptions(verbosity=Verbosity.QUIET)) == "brief1\n"


def test_short_text_leaves_out_what_is_for_the_full_report():
    short = text.render(whole(), RenderOptions())

    assert "full1" not in short
    assert "section3" not in short


def test_markdown_folds_what_the_short_report_leaves_out():
    shown = markdown.render(whole(), RenderOptions())

    before, folded = shown.split("<details>")
    assert "full1" in folded
    assert "full1" not in before


def test_quoted_source_is_not_offered_to_be_copied():
    cure, source = doc.Code(["export X=1"]), doc.Code(["61 | loss = model(x)"], is_quoted=True)
    shown = html.render(replace(whole(), lead=[source, cure], sections=[]), RenderOptions())

    assert "61 | loss = model(x)" in shown
    assert shown.count(">Copy<") == 1


def test_section_without_anything_to_show_has_no_heading():
    empty = replace(whole(), sections=[doc.Section("alone", (doc.Bullets(()), doc.Paragraph("")))])

    assert not [n for n, render in RENDERERS.items() if "alone" in render(empty, RenderOptions())]


def test_table_is_read_from_fields_by_what_their_names_say():
    place = Location("train.py", 8, "step")
    items = [doc.BarPart("a", 1024, "x")]

    table = doc.tabled(
        [diagnoses.fragmentation().stranders[0]],
        doc.Column("bytes", "stranded_bytes"),
        doc.Column("blocks", "n_blocks"),
        doc.Column("line", "location"),
    )

    assert [c.kind for c in table.columns] == ["right", "right", "path"]
    assert [doc.plain(c) for c in table.rows[0].cells][:2] == ["412.00 MiB", "3"]
    assert doc.plain(doc.written(place)) == "train.py:8 in step"
    assert doc.tabled(items, doc.Column("", "meaning")).rows[0].cells == ["x"]
    assert doc.written(None, "peak_bytes") == "-"
