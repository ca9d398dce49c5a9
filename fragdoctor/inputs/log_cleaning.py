"""Clean a pasted log line of escapes, markup, quoting and prefixes."""

from __future__ import annotations

import html
import re
from typing import Final

_RAW_DEVICE: Final = re.compile(r"(GPU )([\x00-\x08\x0e-\x1f])(?=[ ;.]|$)")
_ANSI: Final = re.compile(
    r"(?:\x1b|\^\[|\\u001b|\\x1b|\\033|\\e)\[[0-9;:?<=>]{0,40}[ -/]{0,4}[@-~]"
    r"|\x9b[0-9;:?<=>]{0,40}[@-~]"
    r"|\x1b\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)"
    r"|\x1b[()*+][0-9A-Za-z]"
    r"|\x1b[@-Z\\-_]"
    r"|\[(?:[0-9]{1,2};){0,5}[0-9]{1,2}m(?!s)",
    re.IGNORECASE,
)
_ESCAPED_BREAK: Final = re.compile(r"\\{1,4}(?:r\\{1,4}n|n|r)|\r")
_ESCAPED_CODE: Final = re.compile(r"\\{1,4}u([0-9a-fA-F]{4})")
_ESCAPED_MARK: Final = re.compile(r"\\{1,4}(?=[\"'`/<>_*\[\]()])|\\{1,4}t")
_BOLD: Final = re.compile(r"(?<!\w)\*\*(?=\d)|(?<=[\w.!:])\*\*(?!\w)")
_BREAK_TAG: Final = re.compile(r"<(?:br|p|/p|li|div|/div|tr)\s{0,4}/?>", re.IGNORECASE)
_TAG: Final = re.compile(
    r"</?(?:a|b|blockquote|br|code|div|em|font|h[1-6]|hr|i|img|kbd|li|mark|ol|p|pre|s|samp|small"
    r"|span|strong|sub|sup|table|tbody|td|th|thead|tr|tt|u|ul)(?:\s[^<>]{0,300})?/?>",
    re.IGNORECASE,
)
_INVISIBLE: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2060\ufeff]"
)
_QUOTE: Final = re.compile(r"(?:\s{0,40}(?:>(?!=)|[│┃┆┊║▌\u276f|]|[╭╰╮╯─━═]{2,200})\s{0,2}){1,20}")
_QUOTE_END: Final = re.compile(r"\s{0,400}[│┃┆┊║▌|]\s{0,10}$")

_PREFIXES: Final = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        # dates and times in the formats of loggers, container engines and syslog
        (
            r"[\[(]?\d{4}[-/]\d{1,2}[-/]\d{1,2}[Tt _]\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,12})?)?"
            r"(?:[Zz]|[+-]\d\d:?\d\d| UTC)?[\])]?:?(?=[\s\[(|:-]|$)"
        ),
        (
            r"[\[(]?(?:\d{1,2}[-/]\d{1,2}(?:[-/]\d{2,4})?[ ,]\s{0,3})?"
            r"\d{1,2}:\d\d:\d\d(?:[.,]\d{1,9})?"
            r"(?:\s[AP]M)?[\])]?:?(?=[\s\[(|:-]|$)"
        ),
        r"[\[(]\d\d/\d\d\s\d\d:\d\d:\d\d\s[\w.:-]{1,60}[\])]:",
        (
            r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\s{1,2}\d{1,2}\s\d\d:\d\d:\d\d"
            r"(?:\s[\w.-]{1,60})?(?:\s[\w./-]{1,60}(?:\[\d{1,9}\])?:)?"
        ),
        # glog and torch.distributed: E0330 21:37:34.807000 155011 path.py:869]
        r"\[?[IWEF]\d{3,4}\s\d\d:\d\d:\d\d\.\d{1,9}\s{0,4}(?:\d{1,9}\s)?[\w./-]{0,160}:\d{1,6}\]",
        r"\[\d{1,6}\.\d{6}\]",
        # ranks and workers
        r"\[(?:default|rank:?\s?|Rank\s|RANK\s?)\d{1,6}\]:?",
        r"\[1,\d{1,6}\](?:<std(?:err|out)>)?:?",
        r"\[[\w.-]{1,80}:\d{1,6}\]:",
        r"\((?=[^()]{0,120}(?:pid|rank|ip)[=:])[^()]{1,160}\):?",
        r"<?(?:[Gg]lobal[ _])?(?:rank|Rank|RANK)[ =:]{1,2}\d{1,6}>?(?:[:|\]\)]|\s-)",
        # containers, pods, streams
        r"[A-Za-z][\w./-]{0,80}\s{0,20}\|(?=\s|$)",
        r"(?:[A-Za-z][\w./-]{0,80}[\s:]{1,3})?(?:stderr|stdout|STDERR|STDOUT)(?:\s[FPfp])?:?(?=\s|$)",
        # levels, components and sources
        r"(?i:debug|info|warning|warn|error|critical|fatal):[\w.]{1,80}:",
        (
            r"\[?(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL|error|warn|info)\]?"
            r"(?::[\w.]{1,80})?[:|]?(?:\s\[[A-Za-z][\w.-]{0,60}\])?(?=\s|\[|$)"
        ),
        r"\[?[\w./-]{1,120}\.(?:py|cc|cpp|cu|c|h|rs|go):\d{1,6}\]",
        r"\[\d{1,9}\](?=\s\[)",
        # shells and notebooks
        r"(?:stderr|stdout):",
        r"`{3}[a-z]{0,12}|~{3}|[-*•]\s{1,40}(?=\S)",
    )
)
_KEYWORD: Final = re.compile(
    r"[A-Za-z_.]{0,60}(?:error|exception)|cuda|ggml|hip |npu |xpu |mps |out of|file \"|traceback"
    r"|\s\[\d{1,3}\]\s|allocat|reserved|memory|gpu |process |including|tried",
    re.IGNORECASE,
)
_DIGITS: Final = re.compile(r"[0-9]")
_SEPARATOR_END: Final = re.compile(r".{0,200}[\]|:>)»#/-]\s|.{0,200}[\]|>»:]", re.DOTALL)
_MAX_PREFIX: Final = 240


def plain_lines(raw: str) -> list[str]:
    r"""Return a physical line as one or more plain lines.

    Escape codes, HTML and control characters are removed; line breaks that were escaped (``\n`` in
    JSON or in a ``repr``) or written as ``<br>`` split the line.
    """
    if "GPU " in raw:
        # torch 2.3.0 prints the device number as a raw character (#126766)
        raw = _RAW_DEVICE.sub(lambda m: f"{m.group(1)}{ord(m.group(2))}", raw)
    if "\x1b" in raw or "[" in raw or "\x9b" in raw:
        raw = _ANSI.sub("", raw)
    if "\\" in raw:
        raw = _ESCAPED_CODE.sub(lambda m: chr(int(m.group(1), 16)), raw)
        raw = _ANSI.sub("", raw) if "\x1b" in raw else raw
        raw = _ESCAPED_MARK.sub(" ", raw) if "\\t" in raw else _ESCAPED_MARK.sub("", raw)
    if "&" in raw:
        raw = html.unescape(html.unescape(raw))
    if "<" in raw:
        raw = _TAG.sub("", _BREAK_TAG.sub("\r", raw))
    if "**" in raw:
        raw = _BOLD.sub("", raw)
    parts = _ESCAPED_BREAK.split(raw) if "\\" in raw or "\r" in raw else [raw]
    return [_INVISIBLE.sub("", part) for part in parts]


def split_prefix(line: str) -> tuple[str, str]:
    """Return the prefix that a logger, a launcher or a mail program added, and the bare line."""
    rest, position = line, 0
    for _ in range(12):
        step = _one_prefix(rest)
        if step == 0 or position + step > _MAX_PREFIX:
            break
        position += step
        rest = line[position:]
    blanks = len(rest) - len(rest.lstrip())
    end = _QUOTE_END.search(rest) if position and rest[-2:].strip()[-1:] in "│┃┆┊║▌|" else None
    return line[:position], rest[blanks : end.start()] if end else rest[blanks:]


def _one_prefix(rest: str) -> int:
    """Return the length of the next prefix, or 0 if there is none."""
    blanks = len(rest) - len(rest.lstrip())
    quote = _QUOTE.match(rest)
    if quote and quote.end() > 0:
        return quote.end()
    for pattern in _PREFIXES:
        match = pattern.match(rest, blanks)
        if match and match.end() > blanks:
            return match.end()
    return 0


def shared_prefix(previous: str, line: str) -> int:
    """Return the length of an unknown prefix that two neighboring lines share.

    Its digits may differ (clocks, counters). The prefix ends at a separator and before the first
    word of a message, so two equal messages are never taken for a prefix.
    """
    a, b = previous[:_MAX_PREFIX], line[:_MAX_PREFIX]
    if len(a) < 4 or a[:1] != b[:1]:
        return 0
    a, b = _DIGITS.sub("0", a), _DIGITS.sub("0", b)
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    keyword = _KEYWORD.search(b, 0, n + 60)
    if keyword:
        n = min(n, keyword.start())
    match = _SEPARATOR_END.match(b[:n])
    return match.end() if match and match.end() >= 3 else 0


RANK_PATTERNS: Final = tuple(
    re.compile(pattern, re.ASCII | re.IGNORECASE)
    for pattern in (
        r"\[rank[:\s]{0,2}(\d{1,6})\]",
        r"(?<![a-z_])(?:global[_ ])?rank[\"']?\s{0,2}[=:#]?\s{0,2}(\d{1,6})(?![\d/])",
        r"\[default(\d{1,6})\]",
        r"\[1,(\d{1,6})\](?:<std|:)",
        r"^\s{0,40}\[[a-z][\w.-]{0,80}:(\d{1,6})\]:",
    )
)
ACTOR: Final = re.compile(
    r"\(([\w.:-]{1,60}\s[^()]{0,60}pid[=:]\s?\d{1,9}[^()]{0,80})\)"
    r"|(?:^|\s)([A-Za-z][\w.-]{0,80})\s{0,20}(?:\||stderr|stdout)",
    re.ASCII,
)


def rank_in(prefix: str) -> int | None:
    """Return the rank named in a prefix, or None; a local rank does not count."""
    for pattern in RANK_PATTERNS:
        match = pattern.search(prefix)
        if match:
            return int(match.group(1))
    return None
