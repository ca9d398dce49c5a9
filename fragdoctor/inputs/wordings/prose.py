"""Tell a sentence that reports a failure from one that explains, forbids or denies it.

Advice and rules ("if you see", "may cause"), denials ("never throws") and memory that levels off
report no failure.
"""

from __future__ import annotations

import re
from typing import Final

_HAPPENS: Final = re.compile(
    r"error|fail|exception|fatal|panic|abort|terminat|unable|crash|kill|blow|explo|complain|report"
    r"|die[sd]|exceed|[爆炸了]|报错|溢出|一直|直到|导致|出现|발생|오류|에러|発生|エラー|\b(?:I|we|my|our|me|it)\b"
    r"|\b(?:g[eo]t|went|goes|thr[eo]w|rais|trigger|caus|leads|led|r[au]n|hit|keep|kept|exhaust)"
    r"|\b(?:but|still|always|finally|meets?|met|same (?:here|issue)) ?"
    r"|\b(?:does|do|can|could|is)\s?n(?:o|')t\b(?! (?:enough|sufficient))",
    re.IGNORECASE,
)
_HEDGES: Final = re.compile(
    r"\b(?:may|might|could(?! not)|would|should|(?:can|will) (?:be|cause|lead|run|get)"
    r"|your (?!(?:gpu|cuda|card|device|memory|v?ram|system|machine|batch)\b))\b",
    re.IGNORECASE,
)
"""Words that make a sentence of a manual no report; people who ask for help use them as well."""
_EXPLAINS: Final = re.compile(
    r"\b(?:you(?! (?:suggested|said|mentioned|wrote|asked))"
    r"|your(?= (?:gpu|cuda|card|device|memory|v?ram|system|machine|batch)\b)"
    r"|users?|means?|common|frequent|fixe[ds]"
    r"|errors (?:happen|occur|arise)|make sure"
    r"|handl(?:e|es|ed|ing)|avoids?|prevents?|protection|such as|instead of|as expected)\b"
    r"|\b(?:when(?:ever)?|once|if|before) (?:(?:the|a|cuda|gpu|device|memory) ){0,3}(?:is |runs )?$"
    r"|\b(?:never|not|n't) (?:throw|rais|report|caus|giv|return)(?:e?s?|ing) (?:an? |any )?$"
    r"|\bif (?:the|a) (?:process|program|job)\b"
    r"|\b(?:stays?|remains?|is) (?:constant|stable|flat|bounded)\b|\b(?:levels? off|plateaus?)\b"
    r"|^\W{0,9}(?:how does|never|tips)\b"
    r"|\b(?:closed?|removed?s?|resolved?|detecting|finding) (?:an? |the )?$"
    r"|\be\.g\."
    r"|\bto (?:avoid|prevent|reduce|handle)\b"
    r"|\b(?:no|not|never|without|(?<!rank )(?<!gpu )(?<!cuda )0) $"
    r"|\bfor example\b|^\W{0,20}(?:#|//|except\b|raise\b|assert\b|fix\b|fix\()|['\"] in \w"
    r"|\bhint: ['\"]?$",
    re.IGNORECASE,
)
_REPORTS: Final = re.compile(
    r"(?:\b(?:I|we)(?:'m|'ve| am| are| have| had| was)? (?:still |always |also |often |just )?"
    r"(?:g[eo]t|getting|found|find|see(?:ing)?|saw|hit|had|have|fac(?:e|ing)|encounter(?:ed)?"
    r"|experienc(?:ed?|ing)|r[au]n|running|keep|kept)\b|\b(?:has|did) (?:anyone|you) (?:\w{1,9} )?"
    r"(?:meet|met|fac|encounter|experienc|see))(?![^\n]{0,400}\b(?:(?:if|would|may"
    r"|might|could|no|not|never|without)\b|avoid|prevent|solv|fix))",
    re.IGNORECASE,
)
"""People who report their own failure may add advice in the same sentence."""

DENIES: Final = re.compile(
    r"\b(?:no|not|never|without)\b|n['\u2019]t\b|\b(?:fixe[ds]|closed?|removed?s?|resolved?)\b",
    re.IGNORECASE,
)
"""Words before a failure that did not happen, or no longer does."""
_NAMES_ERROR: Final = re.compile(r"(?:\b\w{0,40}Error|\b[Ee]xception): ?[\"'`]{0,3}$")
_NEAR: Final = 40
"""Characters before an error's name in which words can explain it: "fix RuntimeError: ..."."""


def reports_failure(
    told: str, before: str, line: str, *, is_report: bool = False, is_post: bool = False
) -> bool:
    """Return whether words in a sentence report a failure of the program that the text is about.

    ``before`` is the part of the sentence before the words, and ``line`` what the same line says up
    to the sentence's end. ``is_report`` says that the words stand where only reports have them, and
    ``is_post`` that they are of somebody who asks for help.
    """
    happens = is_report or is_post or _HAPPENS.search(line)
    if _NAMES_ERROR.search(before):  # what follows is the error's own text
        told = before = before[-_NEAR:]
    explaining = (_EXPLAINS,) if is_post else (_EXPLAINS, _HEDGES)
    explains = any(words.search(part) for words in explaining for part in (told, before))
    return bool(_REPORTS.search(before) or (happens and not explains))
