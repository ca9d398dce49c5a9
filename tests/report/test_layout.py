from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fragdoctor.report.base import MAX_WIDTH, MIN_WIDTH, RenderOptions
from fragdoctor.report.document import BarPart, Column, Gauge, Row
from fragdoctor.report.pictures import apportion
from fragdoctor.report.text_layout import Page


def page(width: int = 60) -> Page:
    return Page(RenderOptions(width))


def test_paragraph_further_lines_hang() -> None:
    one = page()

    one.paragraph("word " * 20, indent=2, hang=2)

    assert one.render().splitlines() == [
        "  " + "word " * 10 + "word",
        "    " + "word " * 8 + "word",
    ]


def test_quoted_line_ends_with_the_page_and_one_to_copy_does_not() -> None:
    one = page()

    one.verbatim("quoted " * 20, 2, is_cut=True)
    one.verbatim("copied " * 20, 2)

    quoted, copied = one.render().splitlines()
    assert quoted == f"  {'quoted ' * 7}quoted..."
    assert copied.split() == ["copied"] * 20


def test_text_without_color_loads_no_console() -> None:
    code = (
        "import sys; from fragdoctor.report.base import RenderOptions; "
        "from fragdoctor.report.text_layout import Page; one = Page(RenderOptions(60)); "
        "one.paragraph('word ' * 20); one.render(); sys.exit('rich.console' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_table_numbers_are_aligned_right() -> None:
    one = page()

    one.table([Column(kind="right"), Column()], [Row(["1", "a"]), Row(["1,000", "b"])])

    assert one.render() == "      1  a\n  1,000  b\n"


def test_table_path_is_cut_on_the_left() -> None:
    one = page()

    path = "/a/very/long/path" * 6 + "/train.py:8 in f"
    one.table([Column(), Column(kind="path")], [Row(["x", path])])

    line = one.render().rstrip("\n")
    assert line.endswith("/train.py:8 in f")
    assert "..." in line
    assert len(line) <= 60


def test_table_list_breaks_after_commas() -> None:
    one = page()

    conf = "expandable_segments:True,max_split_size_mb:1"
    one.table([Column(), Column(kind="list")], [Row(["x" * 20, conf])])

    assert [line.split()[-1] for line in one.render().splitlines()] == [
        "expandable_segments:True,",
        "max_split_size_mb:1",
    ]


def test_blank_is_never_doubled_nor_first() -> None:
    one = page()

    one.blank()
    one.paragraph("a", indent=0)
    one.blank()
    one.blank()
    one.heading("b")

    assert one.render() == "a\n\nb\n"


def test_width_is_held_between_bounds() -> None:
    assert page(1).width == MIN_WIDTH
    assert page(10_000).width == MAX_WIDTH


@given(
    rows=st.lists(st.tuples(st.text(max_size=90), st.text(max_size=90)), min_size=1, max_size=6),
    kind=st.sampled_from(["wrap", "list", "path"]),
    width=st.integers(60, 120),
)
def test_table_any_text_stays_within_the_width(
    rows: list[tuple[str, str]], kind: str, width: int
) -> None:
    one = page(width)

    one.table([Column(), Column(kind=kind)], [Row(row) for row in rows])  # type: ignore[arg-type]

    assert all(cell_len(line) <= width for line in one.render().split("\n"))


@given(sizes=st.lists(st.integers(1, 2**40), min_size=1, max_size=8), width=st.integers(8, 120))
def test_apportion_fills_the_bar_and_shows_every_part(sizes: list[int], width: int) -> None:
    parts = [BarPart("x", n, "") for n in sizes]

    cells = apportion(parts, width)

    assert sum(cells) == width
    assert min(cells) >= 1


@given(sizes=st.lists(st.integers(1, 2**40), min_size=2, max_size=8))
def test_apportion_keeps_the_order_of_sizes(sizes: list[int]) -> None:
    cells = apportion([BarPart("x", n, "") for n in sizes], 100)

    for a, cell_a in zip(sizes, cells, strict=True):
        for b, cell_b in zip(sizes, cells, strict=True):
            assert cell_a >= cell_b - 1 or a < b


@given(st.integers(MIN_WIDTH, MAX_WIDTH), st.integers(1, 50))
def test_paragraph_keeps_numbers_with_their_units(width: int, n: int) -> None:
    one = page(width)

    one.paragraph("x" * n + " peak 2.96 GiB of 24.00 GiB, 12%, 0 B free, 3 Blocks")

    text = one.render()
    lines = text.splitlines()
    assert " ".join(text.split()) == " ".join(
        f"{'x' * n} peak 2.96 GiB of 24.00 GiB, 12%, 0 B free, 3 Blocks".split()
    )
    assert not [line for line in lines if line.split()[0].strip(",") in {"GiB", "B", "%"}]


def test_table_list_breaks_after_a_comma_without_doubling_its_space() -> None:
    one = page(40)

    text = "lengths of 64 or 128, or samples alike"
    one.table([Column(kind="list"), Column(kind="wrap")], [Row([text, "x"])])

    assert "  or" not in one.render().replace("\n  ", "\n")


def test_table_column_without_room_is_left_out() -> None:
    columns = [Column(), Column(from_width=100)]
    narrow, wide = page(80), page(100)

    narrow.table(columns, [Row(["a", "b"])])
    wide.table(columns, [Row(["a", "b"])])

    assert (narrow.render(), wide.render()) == ("  a\n", "  a  b\n")


def test_table_notes_stand_below_their_row() -> None:
    one = page()

    one.table([Column()], [Row(["a"], ["note"]), Row(["b"])])

    assert one.render() == "  a\n      note\n  b\n"


def test_gauge_is_drawn_to_scale() -> None:
    one = Page(RenderOptions(unicode=True))

    one.table([Column()], [Row([Gauge(0.5, 0.2)])])

    assert one.render() == "  ··███·····\n"
