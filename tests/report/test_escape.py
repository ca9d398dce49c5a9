"""Each sink must be safe for every text; the attacks here are what strangers put into names."""

from __future__ import annotations

import html.parser
import re
import unicodedata
from collections.abc import Callable

import pytest
from attacks import ATTACKS, UNSEEN, assert_all_seen
from hypothesis import example, given
from hypothesis import strategies as st

from fragdoctor.report import escape, markup

SINKS: dict[str, Callable[[str], str]] = {
    "terminal": escape.terminal,
    "markdown": escape.markdown,
    "markdown_code": escape.markdown_code,
    "html": markup.text,
    "csv": escape.csv_cell,
    "github_message": escape.github_message,
    "github_property": escape.github_property,
}
any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=60)


@pytest.mark.parametrize("sink", SINKS)
@given(text=any_text)
@example(text="\x1b\x9b\u202e\u2028\ud800\U000e0041\x00")
def test_sink_any_text_shows_every_character(sink: str, text: str) -> None:
    assert_all_seen(SINKS[sink](text))


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_sink_attack_shows_every_character(sink: str, attack: str) -> None:
    assert_all_seen(SINKS[sink](attack))


def test_visible_every_code_point_of_unseen_categories_is_written_out() -> None:
    unseen = "".join(chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) in UNSEEN)

    shown = escape.visible(unseen)

    assert shown.isascii()


@given(text=st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=80))
def test_terminal_plain_ascii_is_unchanged(text: str) -> None:
    assert text == escape.terminal(text)


@given(text=any_text)
def test_terminal_is_idempotent(text: str) -> None:
    once = escape.terminal(text)

    assert once == escape.terminal(once)


def test_terminal_control_is_written_out_readably() -> None:
    assert escape.terminal("\x1b[31mred\n\u202eend") == "\\x1b[31mred\\n\\u202eend"


def test_terminal_tower_of_marks_is_cut() -> None:
    assert escape.terminal("e" + "\u0301" * 500) == "e\u0301\u0301\u0301<+497 marks>"


@given(text=any_text)
@example(text="</p><script>")
@example(text="&lt;")
def test_html_any_text_is_one_text_node(text: str) -> None:
    class Collector(html.parser.HTMLParser):
        def __init__(self) -> None:
            super().__init__(convert_charrefs=True)
            self.tags: list[str] = []
            self.data = ""

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.tags.append(tag)

        def handle_data(self, data: str) -> None:
            self.data += data

    parser = Collector()
    parser.feed(str(markup.tag("p", text, title=text)))
    parser.close()

    assert parser.tags == ["p"]
    assert f"{escape.visible(text)}\n" == parser.data


@pytest.mark.parametrize("start", [*"=+-@", "\t=", "\r=", " =", "\uff1d", "\u00a0@"])
def test_csv_cell_formula_is_quoted(start: str) -> None:
    assert escape.csv_cell(f"{start}1").startswith("'")


@pytest.mark.parametrize("text", ["train.py:88", "1.5 GiB", "", "a=b"])
def test_csv_cell_ordinary_text_is_unchanged(text: str) -> None:
    assert text == escape.csv_cell(text)


@given(text=any_text)
@example(text="\n::error::x")
@example(text="##[error]x")
def test_github_message_is_one_line_and_no_command(text: str) -> None:
    message = escape.github_message(text)

    assert "\n" not in message
    assert "\r" not in message
    assert not message.lstrip().startswith(("::", "##["))


def test_github_property_separators_are_encoded() -> None:
    assert escape.github_property("a:b,c%d\ne") == "a%3Ab%2Cc%25d%0Ae"


@pytest.mark.parametrize(
    ("text", "forbidden"),
    [
        ("<b>x</b>", "<"),
        ("@octocat", "@"),
        ("#12", "#"),
        ("https://x", "://"),
        ("www.x.org", "www."),
        (":tada:", ":tada:"),
        ("$x$", "$x"),
        ("a | b", " | "),
        ("[a](b)", "[a]"),
        ("**a**", "**"),
        ("_a_", " _"),
    ],
)
def test_markdown_syntax_is_defused(text: str, forbidden: str) -> None:
    shown = escape.markdown(text)

    assert forbidden not in shown.replace("&#64;", "").replace("&#35;", "")


@pytest.mark.parametrize("text", ["- a", "+ a", "1. a", "12) a", "--- ", "==="])
def test_markdown_line_start_begins_no_list(text: str) -> None:
    assert re.match(r"\s*(\\|\d+\\)", escape.markdown(text))


@pytest.mark.parametrize("text", ["train_step", "0.5 GiB", "a-b", "build_cache()", "C: 1"])
def test_markdown_ordinary_names_stay_readable(text: str) -> None:
    assert text == escape.markdown(text)


@given(text=any_text)
@example(text="`")
@example(text="``` `` `")
def test_markdown_code_fence_is_longer_than_any_inside(text: str) -> None:
    span = escape.markdown_code(text)
    fence = re.match("`+", span)

    assert fence
    inner = span[len(fence.group()) : -len(fence.group())]
    assert fence.group() not in re.findall("`+", inner)


def test_markdown_code_in_table_escapes_the_bar() -> None:
    assert escape.markdown_code("a|b", in_table=True) == "`a\\|b`"


@pytest.mark.parametrize(
    ("path", "width", "expected"),
    [
        ("train.py", 20, "train.py"),
        ("/home/user/project/models/gpt.py:88", 20, ".../models/gpt.py:88"),
        ("/home/user/project/models/gpt.py:88", 17, ".../gpt.py:88"),
        ("averyveryverylongname.py:88", 12, "...ame.py:88"),
        ("C:\\Users\\me\\code\\gpt.py:88", 22, "...\\me\\code\\gpt.py:88"),
        ("abcdef", 2, "ef"),
        ("abcdef", 0, ""),
    ],
)
def test_shorten_left_keeps_the_end(path: str, width: int, expected: str) -> None:
    assert expected == escape.shorten_left(path, width)
    assert len(escape.shorten_left(path, width)) <= width


@pytest.mark.parametrize(
    ("paths", "width", "expected"),
    [
        (["runs/a/snapshot.pickle"], 40, ["runs/a/snapshot.pickle"]),
        (
            ["/data/runs/before/dump/snapshot.pickle", "/data/runs/after/dump/snapshot.pickle"],
            30,
            [".../before/.../snapshot.pickle", ".../after/dump/snapshot.pickle"],
        ),
        (["a/same.pickle", "a/same.pickle"], 8, ["...ickle", "...ickle"]),
        (
            ["x/1/deep/deep/f.pickle", "x/2/deep/deep/f.pickle", "x/2/d/deep/deep/f.pickle"],
            20,
            [".../1/.../f.pickle", ".../2/.../f.pickle", ".../d/.../f.pickle"],
        ),
    ],
)
def test_shorten_apart_keeps_the_folder_that_differs(
    paths: list[str], width: int, expected: list[str]
) -> None:
    assert escape.shorten_apart(paths, width) == expected


@given(st.lists(st.text("ab/", max_size=30), max_size=5), st.integers(1, 40))
def test_shorten_apart_keeps_the_width(paths: list[str], width: int) -> None:
    assert all(len(text) <= width for text in escape.shorten_apart(paths, width))
