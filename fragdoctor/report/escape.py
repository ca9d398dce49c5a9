r"""Making untrusted text safe, one function for each place where text ends up.

File names, function names, setting strings, messages and annotations come from files of
strangers. They stay raw in the data model; a renderer passes **every** string through the function
of its sink, its own wording included, so that no call can be forgotten for "safe" text.

Characters that a reader cannot see, or that change how other characters look, are written out
(``\x1b``, ``\u202e``): control characters C0 and C1, bidirectional controls, zero-width and other
invisible characters, line and paragraph separators, lone surrogates, private use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from fragdoctor.lazy import regex
from fragdoctor.model.finding import n_shared

# Unicode 15 categories Cc, Cf, Cs, Co, Zl, Zp, and characters that are invisible according to
# Default_Ignorable_Code_Point. tests/report/test_escape.py compares with unicodedata.
_UNSEEN: Final = (
    "\x00-\x1f\x7f-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2"
    "\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ue000-\uf8ff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff\U000f0000-\U0010ffff"
)
_UNSEEN_RUN: Final = regex(f"[{_UNSEEN}]")
_MARKS: Final = "\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"
# Real languages put up to three combining marks on a letter; taller stacks are hostile.
_MARK_TOWER: Final = regex(f"([{_MARKS}]{{3}})([{_MARKS}]+)")
_SHORT_ESCAPES: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_WORD: Final = "[^\\W_]"
_MARKDOWN_BACKSLASH: Final = regex(
    # An underscore inside a word does not mean emphasis, and names are full of them.
    rf"[\\*{{}}\[\]~|]|(?<!{_WORD})_|_(?!{_WORD})"
)
_MARKDOWN_ENTITY: Final = regex(r"[<>&@#$`]|:(?=//|[\w+-]+:)")
_MARKDOWN_START: Final = regex(r"^(\s*)(?:([-+=])|(\d+)([.)])(?=\s|$))")
_SEPARATOR: Final = regex(r"[/\\]")
_MIN_FILE_NAME: Final = 8
_CSV_FORMULA_START: Final = frozenset("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


def _written_out(match: re.Match[str]) -> str:
    char = match.group()
    short = _SHORT_ESCAPES.get(char)
    if short is not None:
        return short
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def visible(text: str) -> str:
    """Return text in which every character is visible and stays where it was written."""
    shown = _UNSEEN_RUN.sub(_written_out, text)
    return _MARK_TOWER.sub(lambda m: f"{m.group(1)}<+{len(m.group(2))} marks>", shown)


def terminal(text: str) -> str:
    """Return one line of text that cannot move the cursor, color, or reorder a terminal.

    The result is plain: print it without markup (``rich.text.Text``, never ``[red]...``).
    """
    return visible(text)


def markdown(text: str) -> str:
    """Return text that Markdown shows as it is: no emphasis, links, mentions, HTML or tables."""
    shown = _MARKDOWN_BACKSLASH.sub(r"\\\g<0>", visible(text))
    shown = _MARKDOWN_ENTITY.sub(lambda m: f"&#{ord(m.group())};", shown)
    shown = re.sub(r"(?i)\bwww\.", lambda m: f"{m.group()[:-1]}&#46;", shown)
    return _MARKDOWN_START.sub(_unlisted, shown)


def _unlisted(match: re.Match[str]) -> str:
    """Escape the start of a line so that it begins neither a list nor a heading's underline."""
    space, sign, number, dot = match.groups()
    return f"{space}\\{sign}" if sign else f"{space}{number}\\{dot}"


def markdown_code(text: str, *, in_table: bool = False) -> str:
    """Return a Markdown code span that holds the text, whatever backticks it contains."""
    shown = visible(text)
    if in_table:
        shown = shown.replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if longest or not shown.strip() else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


MAX_TEXT: Final = 4000
"""The most characters of one text: a megabyte of name must not become a megabyte of report."""


def bounded(text: str) -> str:
    """Return a text without its middle if it is very long."""
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else f"{text[:half]} ... {text[-half:]}"


def csv_cell(text: str) -> str:
    """Return text that no spreadsheet takes for a formula; the csv module does the quoting."""
    stripped = text.lstrip(" \u00a0\ufeff")
    shown = visible(text)
    return f"'{shown}" if stripped[:1] in _CSV_FORMULA_START and stripped else shown


def github_message(text: str) -> str:
    """Return text for the message of a GitHub workflow command (``::error::...``)."""
    shown = visible(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))
    # A message cannot start a command of its own: only "::" at the start of a line does.
    return re.sub(r"^\s*(?=::|##\[)", "\\\\", shown)


def github_property(text: str) -> str:
    """Return text for a property of a GitHub workflow command (``file=...,title=...``)."""
    return github_message(text).replace(":", "%3A").replace(",", "%2C")


def json_text(text: str) -> str:
    """Return text that strict JSON readers accept: lone surrogates become U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def shorten_left(text: str, width: int, ellipsis: str = "...") -> str:
    """Return text of at most ``width`` characters, cut at the start: path ends tell the most."""
    if len(text) <= width:
        return text
    keep = width - len(ellipsis)
    if keep <= 0:
        return text[-width:] if width > 0 else ""
    tail = text[-keep:]
    # Start at a path separator if one is near, so that no directory name is cut in half.
    cut = min((i for i in (tail.find("/"), tail.find("\\")) if i >= 0), default=-1)
    return ellipsis + (tail[cut:] if 0 <= cut <= keep // 2 else tail)


def shorten_apart(texts: Sequence[str], width: int, ellipsis: str = "...") -> list[str]:
    """Return paths of at most ``width`` characters each, keeping different paths different.

    If the ends alone would be the same, the folder that differs is kept: ``.../b/.../c.txt``.
    Only if that does not fit either may two paths look alike.
    """
    distinct = dict.fromkeys(texts)
    shown: dict[str, str] = {}
    for text in distinct:
        short = shown[text] = shorten_left(text, width, ellipsis)
        if short != text:
            end = short.removeprefix(ellipsis)
            others = [other for other in distinct if other != text and other.endswith(end)]
            shown[text] = _telling(text, others, width, ellipsis) if others else short
    return [shown[text] for text in texts]


def _telling(text: str, others: Sequence[str], width: int, ellipsis: str) -> str:
    """Return a path's end and the folders that tell it apart from the others."""
    parts = _SEPARATOR.split(text)
    kept = {len(parts) - 1}
    for other in others:
        n_same = n_shared(parts[::-1], _SEPARATOR.split(other)[::-1])
        kept.add(max(0, len(parts) - 1 - n_same))
    head, before = "", -1
    for i in sorted(kept):
        head += f"{ellipsis}/" if i > before + 1 else ""
        head += f"{parts[i]}/" if i < len(parts) - 1 else ""
        before = i
    room = width - len(head)
    if room < min(len(parts[-1]), _MIN_FILE_NAME):
        return shorten_left(text, width, ellipsis)
    return head + shorten_left(parts[-1], room, ellipsis)
