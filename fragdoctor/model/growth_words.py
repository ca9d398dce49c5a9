"""How people say that memory grows until it runs out, in several languages.

A clause names the memory, says that it rises, and says that this goes on; languages differ in the
words and in their order.
"""

from __future__ import annotations

from typing import Final

_GAP: Final = r"[^.!?;\n。\uff01\uff1f]{0,40}?"
_MEMORY: Final = r"\b(?:(?:gpu|cuda|cpu|host|system)[ -]){0,2}(?:memory|v?ram)\b"
_RISING: Final = r"(?:incre(?:as|ment)|gr[eo]w|ris(?:es?|ing)|climb|creep)\w{0,5}"
_LANGUAGES: Final = (
    (  # English
        rf"{_MEMORY}|\busage\b",
        r"\b(?:ceaseless|gradual|steadi|stead|continu|constant|slow|unlimit|unbounded)\w{0,5}\b"
        r"|\b(?:keeps?|kept|over time|each|every|until|till|without reducing"
        r"|(?:with|more) (?:the |more )?(?:iteration|step|epoch)s?)\b",
        rf"\b{_RISING}\b(?!-)",
    ),
    (  # Chinese
        r"[显内]存(?:占用|使用)?",
        r"一直|持续|不断|不停|逐渐|逐步|慢慢|缓慢|越来越|越用|越占|随着|每[过次个轮]",
        r"[增涨升](?![强压])|越来越[多大高]|越[占用]越|变[多大]|多占",
    ),
    (  # Japanese
        r"メモリ|VRAM",
        r"徐々に|だんだん|どんどん|次第に|少しずつ|ずつ|続け|たびに|ごとに",
        r"増|膨ら|上が|溜ま|蓄積",
    ),
    (  # Korean
        r"메모리|VRAM",
        r"계속|점점|점차|조금씩|지속적|마다",
        r"증가|늘어|올라|쌓|누적|커",
    ),
    (  # Russian
        r"(?:видео)?памят\w{1,3}",
        r"постоянно|постепенно|кажд\w{1,4}|продолжа\w{1,4}|вс[её] (?:время|больше)",
        r"раст[её]т|расти|увеличива\w{1,5}|утек\w{1,4}",
    ),
    (  # German, French, Spanish and Portuguese
        r"\w{0,12}speicher\w{0,12}|m[ée]moires?|mem[oó]ria",
        r"immer|ständig|stetig|jede[rmns]?|nach und nach|chaque|sans cesse|continu\w{0,8}|cada"
        r"|constantemente|poco a poco|progressiv\w{0,6}",
        r"steigt|wächst|zunimmt|nimmt .{0,20}zu|augment\w{1,4}|croît|grandit|aument\w{1,3}|crec\w{1,3}"
        r"|cresc\w{1,3}",
    ),
)
"""For each language: the memory, that it goes on, that it rises."""


def _in_any_order(memory: str, goes_on: str, rises: str) -> str:
    memory, goes_on, rises = f"(?:{memory})", f"(?:{goes_on})", f"(?:{rises})"
    orders = ((memory, goes_on, rises), (memory, rises, goes_on), (goes_on, memory, rises),
              (goes_on, rises, memory))  # fmt: skip
    return "|".join(_GAP.join(order) for order in orders)


GROWS: Final = (
    "(?:"
    + "|".join(_in_any_order(*words) for words in _LANGUAGES)
    + rf"|(?:{_MEMORY}|\busage\b)(?: \w{{1,20}}){{0,5}}? (?:will|were|was|is|been|becom\w{{1,3}}|gets?)"
    rf"(?: \w{{1,20}}){{0,3}}? (?:{_RISING}|(?:larger|higher|bigger)(?! than)|fill\w{{0,3}})"
    rf"|{_MEMORY} (?:leak(?:s|age|ing)?\b(?! (?:check|test|free)\b)|growth\b)"
    rf"|{_MEMORY}\W{{1,3}}(?:usage |consumption |footprint )?(?:explod|blows? up)\w{{0,3}}"
    r"|\bgr[eo]ws? (?:to (?:over |about |~)?\d{1,3} ?(?:gi?b|gigabytes)|larger after each)\b"
    r"|\b(?:steady|gradual) increase|\bmore (?:gpu )?memory (?:with|at|after|in|on) (?:each|every)\b"
    r"|\bincreasing GPU.memory|内存泄漏|显存泄[漏露]|随着[^。\n]{0,20}?[增多加][^。\n]{0,12}?显存(?:溢出|爆))"
)
"""The ways in which people say that memory grows."""
