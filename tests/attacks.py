"""Text that strangers put into names, and characters that must never reach a reader unseen."""

from __future__ import annotations

import unicodedata

ATTACKS = (
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil.example\x07click\x1b]8;;\x07",
    "\x9b31m",
    "a\rb",
    "a\nb",
    "a\bb",
    "\u202egnp.exe",
    "\u2066x\u2069",
    "zero\u200bwidth",
    "\ufeffbom",
    "line\u2028sep\u2029",
    "\ud800lone",
    "\U000e0041tag",
    "[bold red]markup[/]",
    "[link=http://evil.example]x[/link]",
    "<script>alert(1)</script>",
    "</script><!--",
    '" onload="x',
    "**bold** _it_ `code` ![i](http://x) [l](javascript:x) | cell | @octocat #1",
    "```\nfence\n```",
    "=1+1",
    "+cmd|' /C calc'!A0",
    "@SUM(1)",
    "\t=1",
    "::error file=x::boom",
    "%0A::error::boom",
    "]]>&lt;",
    "e" + "\u0301" * 500,
)
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def assert_all_seen(text: str) -> None:
    bad = [f"U+{ord(c):04X}" for c in text if unicodedata.category(c) in UNSEEN]
    assert bad == []
