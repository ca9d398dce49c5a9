"""The complaint of a post about memory, where nothing says that it ran out.

Memory is the subject, and the predicate says what is wrong with it: it is spread unevenly over the
GPUs, is taken on a GPU that was not chosen, is not given back, or is more than there should be.
Memory that grows is a failure already (``told_failures``).
"""

from __future__ import annotations

import re
from typing import Final

from msgspec.structs import replace

from fragdoctor.inputs.told_failures import (
    MAX_CHARS,
    SENTENCES,
    SHORTAGE,
    asks_for_help,
    message_of,
)
from fragdoctor.inputs.wordings.prose import DENIES
from fragdoctor.inputs.wordings.wording import ALLOCATOR, HOST
from fragdoctor.lazy import regex
from fragdoctor.model.case import KEPT_MEMORY, TOO_MUCH, UNEVEN, OomMessage
from fragdoctor.model.growth_words import KEPT, MEMORY, in_any_order
from fragdoctor.model.ledger import ON_FIRST, USES_FIRST

_MAX_TITLE: Final = 120
_MAX_TOLD: Final = 300
_NEAR: Final = 700
_CLAUSE: Final = r"[^.!?;\n]{0,40}?"
_SIZE: Final = r"\d{1,4}(?:\.\d)? ?g(?:i?b|igs)?\b"
_USES: Final = (
    r"\b(?:us(?:es?|ed|ing|age)|tak(?:es?|ing)|consum\w{1,6}|occup\w{1,7}|needs?|needed"
    r"|requir\w{1,4}|eat(?:s|ing)?|costs?|loads?|contains?)\b"
)
_MUCH: Final = (
    r"(?:\b(?:(?<!how )much|huge|large|high|big|excessive|insane|unexpected|more|increas\w{1,3}"
    r"|lots? of|all|double|twice|\d ?(?:x|times)|saturated|maxed|full|limited)\b|[>~]"
    rf"|\b(?:over|above|up to|roughly|around|about|almost) (?:all )?(?:of )?(?:\w++ )?{_SIZE})"
)
_LACKS: Final = r"\b(?:overflow\w*+|insufficient|saturated|not (?:\w++ )?enough)\b"
_MEETS: Final = (
    r"\b(?:g[eo]t|getting|ha(?:s|d|ve|ving)|fac\w{1,3}|hit|me?et|across|encounter\w{0,3}"
    r"|related to) (?:\w++ ){0,4}"
)
_TOO_MUCH: Final = (
    in_any_order(MEMORY, _USES, _MUCH, _CLAUSE),
    rf"(?:{MEMORY}|{_SIZE}){_CLAUSE}{_LACKS}|{_LACKS} (?:\w++ ){{0,2}}{MEMORY}",
    rf"\b(?:(?:reduc|lower|decreas|sav)\w{{1,3}} (?:\w++ ){{0,3}}?|less ){MEMORY}[^.!\n]{{0,99}}\?",
    rf"(?:\A\W{{0,20}}|{_MEETS}){MEMORY} (?:error|issue|problem)s?\b",
    r"[显内]存[^。\uff0c\n]{0,12}[太很更过][高多大]|占用[太很更过]",
)
_PREDICATES: Final = {
    kind: regex(words, re.IGNORECASE | re.ASCII)
    for kind, words in (
        (UNEVEN, f"{ON_FIRST}|{USES_FIRST}"),
        (KEPT_MEMORY, KEPT),
        (TOO_MUCH, "|".join(_TOO_MUCH)),
    )
}
"""The finer kind of each complaint, and how people make it."""
_DENIED: Final = regex(
    r"(?i)\b(?:no longer|fix\w{0,3}|avoids?|prevents?|instead|no problem|if you|may|might"
    r"|you (?:can|should))\b"
)
_TELLS: Final = regex(
    r"(?m)\bI(?:'m|'ve)? [a-z]|\bimpossible\b"
    r"|^(?:What|How|Why|Is|Are|Can|Could|Does|Do|Any)\b[^.\n]{0,200}\?"
)
"""What people write who tell of their own run, or ask about it."""
_PERSONAL: Final = regex(r"(?i)\b(?:i|we|my|our|me)\b|[?\uff1f]")
_AVOIDS: Final = regex(r"(?i)\b(?:avoid|prevent)")
_ANY_MEMORY: Final = regex(
    r"(?i)\b(?:(?:graphics?|video|gpu|cuda) )?(?:memory|mem|v?ram)\b|[显内]存"
)
_TROUBLE: Final = regex(
    r"(?i)\b(?:issue|problem|error|leak|limit|explo|blow|increas|grow|r[io]s[ei]|spike|jump|enough"
    r"|insufficien|too|huge|large|high|(?<!how )much|full|exceed|crash|fail|kill|why|unable|cannot"
    r"|can't|releas|unload|reduc)|[爆增满高升多大]|不[够足]"
)
"""What a sentence about memory says where memory is the trouble."""
_OF_ELSE: Final = regex(
    r"(?im)^[^\n]{0,40}?\b\w{1,40}(?:Error|Exception): (?![^\n]{0,200}memory)|segmentation fault"
)
"""An error about something else, which the post is about."""
_BLANKS: Final = regex(r"[ \t]{2,}+")
_HOLDS: Final = regex(r"(?i)memor|\d ?[mg]i?b\b|\bload|\boom\b|显存|usage")


def told_complaint(text: str) -> OomMessage | None:
    """Return what a post complains about, by its first complaint; its title is one by itself."""
    head = _BLANKS.sub(" ", text[: MAX_CHARS // 8])  # tables have many
    title, _, body = head.strip().partition("\n")
    is_titled = body.strip() and len(title) <= _MAX_TITLE and not title.startswith("#")
    for part in (title if is_titled else "", head):
        for kind, words in _PREDICATES.items():
            found = words.search(part)
            if found is None or (kind == UNEVEN and not _HOLDS.search(head)):
                continue
            near = head[max(0, found.start() - _NEAR) : found.end() + _NEAR]
            told = part[part.rfind("\n", 0, found.start()) + 1 : found.end()][-_MAX_TOLD:]
            is_post = part is title or asks_for_help(near) or _TELLS.search(near)
            if is_post and not _DENIED.search(told):
                return _message(kind, found, told, head)
    is_post = asks_for_help(head) or _TELLS.search(head)
    return _feared(head) if is_post and not _OF_ELSE.search(head) else None


def _feared(head: str) -> OomMessage | None:
    """Return what people say at the start of a post of memory and trouble in one sentence."""
    for sentence in SENTENCES.finditer(head, 0, _NEAR):
        start, end = sentence.span()
        is_own = _PERSONAL.search(head, start, end) or not _AVOIDS.search(head, start, end)
        found = SHORTAGE.search(head, start, end) if is_own else None
        if found is None and _TROUBLE.search(head, start, end):
            found = _ANY_MEMORY.search(head, start, end)
        if found is not None and not DENIES.search(head, start, found.start()):
            return _message(TOO_MUCH, found, sentence.group(), head)
    return None


def _message(kind: str, found: re.Match[str], told: str, head: str) -> OomMessage:
    """Make the message of a complaint; nothing of the kind is told of the host."""
    message = message_of(found, told, head)
    if message.kind != HOST:
        message = replace(message, kind=ALLOCATOR, sub_kind=kind)
    return replace(message, text=" ".join(told.split()), after=" ".join(head.split())[:500])
