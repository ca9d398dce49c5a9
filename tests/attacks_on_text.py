"""Strings that a stranger's file may hold, one for each sink that they attack."""

from __future__ import annotations

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07",
    "\u202egpj.exe\u2066",
    "line\n::error file=evil.py::owned\r\n##[error]owned",
    "::stop-commands::token",
    '"><script>alert(1)</script><![CDATA[ ]]>',
    "]]></failure></testcase><testcase name='fake'>",
    "| a | b |\n# heading\n[x](javascript:alert(1)) @everyone `code` <img src=x onerror=1>",
    "=cmd|'/c calc'!A1",
    "\x00\x0b\ufffe\ud800 lone",
    "%0A::error::x%25",
    "../../etc/passwd",
    "/abs/\u2028path,with:marks",
    "",
    "x" * 100_000,
)
