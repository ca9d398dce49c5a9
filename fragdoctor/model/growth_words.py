"""How people say that memory grows until it runs out, or is not given back, in several languages.

A clause names the memory, says that it rises, and says that this goes on; languages differ in the
words and in their order.
"""

from __future__ import annotations

from typing import Final

_GAP: Final = r"[^.!?;\n。\uff01\uff1f]{0,24}?"
MEMORY: Final = r"\b(?:(?:gpu|cuda|cpu|host|system)[ -]){0,2}(?:memory|v?ram)\b"
_RISING: Final = (
    r"(?:(?:incre(?:as|ment)|gr[eo]w|ris(?:es?|ing)|climb|creep)\w{0,5}"
    r"|(?<!gradient )accumulat(?:es?|ed|ing)"
    r"|(?:pil(?:es?|ed|ing)|add(?:s|ed|ing)?|buil(?:ds?|t|ding)|go(?:es|ing)?) up)"
)
_LANGUAGES: Final = (
    (  # English
        rf"{MEMORY}|\b(?:usage|consumption)\b",
        (
            r"\b(?:(?:ceaseless|gradual|stead|continu|constant|slow|unlimit|linear)\w{0,5}|keeps?|kept|each"
            r"|every|(?:over|some) time|until|till|up to out|without (?:reducing|stop\w{0,4})"
            r"|as (?:the )?(?:\w{1,30} )?(?:iteration|step|epoch|training)s?"
            r"|(?:with|more) (?:the |more )?(?:iteration|step|epoch)s?)\b"
        ),
        rf"\b{_RISING}\b(?!-)",
    ),
    (  # Chinese, Japanese, Korean, Russian, German, French, Spanish and Portuguese
        r"[显内]存|メモリ|메모리|[Пп]амят|(?i:vram|speicher|m[ée]moire|mem[oó]ria)",
        (
            r"一直|持续|不[断停]|逐[渐步]|慢慢|缓慢|越来越|越[用占]|随着|一段时间|每一?[过次个轮]"
            r"|徐々に|だんだん|どんどん|次第に|ずつ|続け|たびに|ごとに|계속|점[점차]|조금씩|마다"
            r"|посто|постеп|кажд|immer|ständig|stetig|jede|chaque|cada|continu|constante|progressiv"
        ),
        (
            r"[增涨升](?![强压])|越来越[多大高]|越[占用]越|变[多大]|多占|増|膨ら|溜ま|증가|늘어|쌓|누적"
            r"|раст[её]т|увелич|утек|steigt|wächst|zunimmt|augment|croît|aument|crec|cresc"
        ),
    ),
)
"""The memory, that it goes on, and that it rises; words of the other languages do not mix."""


def in_any_order(memory: str, goes_on: str, rises: str, gap: str = _GAP) -> str:
    """Return a pattern for a clause that has all three."""
    memory, goes_on, rises = f"(?:{memory})", f"(?:{goes_on})", f"(?:{rises})"
    orders = ((memory, goes_on, rises), (memory, rises, goes_on), (goes_on, memory, rises),
              (goes_on, rises, memory), (rises, memory, goes_on))  # fmt: skip
    return "|".join(gap.join(order) for order in orders)


GROWS: Final = (
    "(?:"
    + "|".join(in_any_order(*words) for words in _LANGUAGES)
    + rf"|(?:{MEMORY}|\busage\b)(?: \w{{1,20}}){{0,5}}? (?:will|were|was|is|been|becom\w{{1,3}}"
    rf"|gets?)(?: \w{{1,20}}){{0,3}}? (?:{_RISING}|(?:larger|higher|bigger)(?! than)|fill\w{{0,3}})"
    rf"|{MEMORY} (?:leak(?:s|age|ing)?\b(?! (?:check|test|free)\b)|growth\b)"
    rf"|{MEMORY}\W{{1,3}}(?:usage |consumption |footprint )?(?:explod|blows? up)\w{{0,3}}"
    r"|\bgr[eo]ws? (?:to (?:over |about |~)?\d{1,3} ?(?:gi?b|gigabytes)|larger after each)\b"
    r"|\b(?:steady|gradual) increase|\bincreasing GPU.memory|[显内]存泄[漏露]"
    rf"|\bmore and more (?:of )?(?:the |my )?{MEMORY}"
    r"|\bmore (?:gpu )?memory (?:with|at|after|in|on) (?:each|every)\b"
    r"|随着[^。\n]{0,20}?[增多加][^。\n]{0,12}?显存(?:溢出|爆))"
)
"""The ways in which people say that memory grows."""

NOT_RELEASED: Final = (
    r"(?:\b(?:not|never|without|unable to)|n['\u2019]t)\s(?:\w{1,20}\s){0,3}?"
    r"(?:releas|free[ds]?\b|freeing|clear|unload|flush|dealloc|let go|go down|drop)"
)
STAYS: Final = (
    r"(?:\b(?:stays?|remains?|still|keeps?)\s(?:\w{1,20}\s){0,3}?"
    r"(?:allocated|occup\w*+|full|us(?:es|ed|ing)|in use|tak\w*+|h[eo]ld\w*+|high|max\w*+)\b)"
)
KEPT: Final = (
    rf"(?:{MEMORY}{_GAP}(?:{NOT_RELEASED}|{STAYS})"
    rf"|{NOT_RELEASED}\w{{0,6}}(?: (?!if\b)\w{{1,20}}){{0,4}}? {MEMORY}"
    rf"|\b(?:keeps? the|(?:is|are|was|were) kept (?:in|on)(?: the)?) {MEMORY}"
    r"|[显内]存[^。\uff0c\n]{0,20}?(?:不|未|没)[^。\uff0c\n]{0,4}?(?:释放|清)"
    r"|(?:不|未|没)[^。\uff0c\n]{0,4}?(?:释放|清)[^。\uff0c\n]{0,6}?[显内]存)"
)
"""The ways in which people say that memory is not given back."""
