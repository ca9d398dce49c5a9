"""Read what a text says a failure depends on: with one thing it works, with another it fails.

People say so in conditions ("when I add X", "without X it works"), in versions ("fine in 0.3, out
of memory in 0.4"), in numbers ("num_beams set to 100", "3 seconds work, 9 do not"), and in names of
data sets. What saves memory is no such thing: it was tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from fragdoctor.inputs.told_failures import SENTENCES, SHORTAGE
from fragdoctor.model.case import ContrastKind, ToldContrast
from fragdoctor.model.measures import measures_in

MAX_CHARS: Final = 32 * 1024
_MAX_SENTENCE: Final = 500

_FAILS: Final = re.compile(
    r"(?i)\b(?:errors?|fail\w*+|crash\w*+|kill\w*+|leak\w*+|oom|memory out|increas\w*+|grow\w*+"
    r"|explod\w*+|exceed\w*+|too much|more memory|unable to"
    r"|(?:does|can)(?:n't| ?not)(?: be)? (?:work|run|train|generat)\w*+)\b"
)
_WORKS: Final = re.compile(
    r"(?i)(?<!not )(?<!n't )\b(?:works?|worked|solved|success\w*+|fine(?!-)|able to|used to work"
    r"|(?:is|was|runs?|went|be) (?:\w++ )?(?:okay|ok|well|good|normal(?:ly)?|stable)"
    r"|(?:no|without|any) (?:\w++ )?(?:problems?|issues?|errors?|leaks?)"
    r"|(?:does|do|did)(?:n't| not) (?:occur|happen|appear|leak)"
    r"|can (?:run|load|train|be used)|only succeed)\b"
)
_IS_CURE: Final = re.compile(
    r"(?i)\b(?:still|even|also|tried|try|reduc\w*+|lower\w*+|decreas\w*+|smaller|less|fewer"
    r"|no matter|despite)\b|batch"
)
"""Words for what was tried: that it fails with a cure does not make the cure the cause."""

_OPTION: Final = (
    r"(?:[*`'\"]{0,2}[\w-]{3,30}[*`'\"]{0,2} (?:option|flag|mode|parameter|argument)\b"
    r"|`(?![^`\n]{0,60}(?:\.py\b|python|import|[()]\.|cuda))[^`\n]{3,60}`"
    r"|(?<!\w)--[a-z][\w-]{2,40}(?:[ =](?!and|or|is|it|to)[\w.]{1,12})?"
    r"|\(?\b[A-Za-z]\w{2,30} ?= ?[\w.]{1,12}\)?|\b[a-z]{2,20}(?:_[a-z0-9]{1,20}){1,5}\b)"
)
_I: Final = r"(?:(?:I|we|you|one)(?:'ve| have)? )?"
_WHEN: Final = rf"(?i)\b(?:when(?:ever)?|if|once|after|as soon as|by|since|but) {_I}"
_WHAT: Final = rf" {{1,3}}(?:\w++ ){{0,3}}?(?P<what>{_OPTION})"
_ADDED: Final = re.compile(
    rf"{_WHEN}(?:add|change|enable|activate|turn(?:ed)? on|switch(?:ed)? (?:on|to)|pass|include)"
    rf"\w{{0,3}}{_WHAT}"
)
_REMOVED: Final = re.compile(
    rf"{_WHEN}(?:remov|delet|disabl|turn(?:ed)? off|comment(?:ed)?(?: out)?|drop|skip)\w{{0,3}}"
    rf"(?: out)?{_WHAT}|\bwithout (?P<lacks>{_OPTION})"
)
_VERSION: Final = re.compile(
    r"(?i)(?:\b(?P<name>[a-z][a-z_]{2,24})[ =]{1,2})?(?:\b(?:to|from|version|ver\.?) ){0,2}"
    r"(?<![\w.])(?P<marked>v?)(?P<v>\d{1,2}\.\d{1,2}(?:\.\d{1,4})?)"
    r"(?![\w.]{0,20}\d| ?(?:[gmk]i?b|[bgm]\b|%|it/s|s\b))"
)
_NO_NAME: Final = re.compile(
    r"|(?:back|to|from|version|ver|the|in|on|of|and|with|for|is|was)|\w{1,20}(?:ing|ed)"
)
_CHANGED: Final = re.compile(
    r"(?i)\b(?:upgrad|updat|downgrad|regress|revert|roll(?:ed|ing)? ?back|(?:older|newer|previous"
    r"|latest|new|old) version)\w*+"
)
_UPDATED: Final = re.compile(
    r"(?i)\b(?:after|since|when|once) (?:\w++ ){0,3}?(?:latest |recent |new |last )?"
    r"(?:update[sd]?|updating|upgrad(?:e|ed|ing)|new version)\b"
    r"|\b(?:memory|vram) regression\b|\bregression\b.{0,60}\bmemory"
)
_DATA: Final = re.compile(
    r"(?i)\b(?:large[rn]?|bigger|big|whole|full|entire|(?:my |our )?own|custom|another|different"
    r"|other) (?:\w++ ){0,2}?data ?sets?\b|\bsize of the data ?set\b"
)
_TRAINS_ON: Final = re.compile(r"(?i)\b(?:data ?sets?|train\w*+)\b")
_COUNT: Final = (
    r"(?P<what>(?:--)?(?!(?:max[_-]?)?(?:seq|source|target|len|tokens|img|image|input|cutoff|block))"
    r"(?![\w-]{0,30}(?:epoch|step|worker|gpu|batch|accum|thread|process|iter|lr|seed|chunk|split|patch"
    r"|crop))"
    r"(?:(?:num|n|nb|max|custom_num|number)[_-][a-z]{2,20}(?:[_-][a-z]{2,20}){0,3}"
    r"|[a-z]{2,20}(?:[_-][a-z]{2,20}){0,3}[_-](?:num|count|length|len|size|classes|samples|points"
    r"|beams|sequences|window|class)))\b"
)
_AT: Final = re.compile(
    rf"(?i)(?<![\w.]){_COUNT}[`'\"]{{0,2}}(?: ?= ?| (?:is |was |are |to |set |of |at |as ){{0,4}})"
    r"(?P<than>(?:more|larger|greater|higher) than |over |above |> ?)?"
    r"(?P<n>\d(?:,?\d){0,9}k?)\b(?!\.\d)"
)
_RAISED: Final = re.compile(
    r"(?i)\b(?:when|if|once|after|as soon as|whenever|on|by|(?:the )?more) (?:(?:I|we) )?"
    r"(?:increas|rais|enlarg|bump)\w{0,3}(?: up)? (?:the value (?:for|of) )?"
    r"(?P<what>`?--?[\w-]{3,40}|(?:the |my )?(?!(?:the|gpu|cuda|v?ram|memory|usage|loss|and|with"
    r"|over|after|each|every|until|during|in|as|continu\w*+|batch)\b)\w{2,20}"
    r"(?: (?!(?:to|from|by|and|it|the|cuda|gpu|more)\b)\w{2,20}){0,3})"
)
_AMOUNT: Final = re.compile(
    r"(?i)(?<![\w.,])(?P<n>\d(?:,?\d){0,7}(?:\.\d)?k?)\+?[ -]?(?P<unit>(?!(?:gpu|card|epoch|hour"
    r"|day|step|time|iter|core|worker|thread|process|batch|b?it)s)[a-z]{3,14}s)\b"
)
_CLAUSES: Final = re.compile(
    r"(?i)[.;:?!]\s|,(?!\d)|\b(?:but|however|while|whereas|although|yet)\b"
)
_LONG: Final = re.compile(
    r"(?i)\b(?P<how>long|large|big|huge|high)(?:e?r|ger)?[ -]"
    r"(?P<what>(?:\w++ )?(?:audios?|videos?|files?|recordings?|voices?|wavs?|sequences?|sentences?"
    r"|texts?|documents?|clips?|images?|pictures?|photos?|scenes?|graphs?|proteins?|molecules?)\b"
    r"(?: files?)?)"
)
_BUFFER: Final = re.compile(
    r"(?i)\b(?:replay|experience)[ _-]?(?:buffer|memory|data)\b|\bmemory bank\b"
)
_VOCABULARY: Final = re.compile(
    r"(?i)\b(?:vocab\w*+|dict)\b.{0,40}?\b(?:\d{3}k|(?:\d,?)?\d{3},?\d{3})\b"
)
_PARTS: Final = (
    r"(?:(?!(?:the|of|these|those|my|our|its|such|in|on|to|and|or)\b)[a-z]{2,12}[ -])?"
    r"(?:points?|b?boxes|edges|neighbou?rs|agents|particles|atoms|residues|rays|gaussians|splats"
    r"|objects|queries|proposals|anchors|candidates|keypoints|voxels|vertices|faces|triangles"
    r"|entities|genes|class(?:es)?|identities|transitions|trajectories|experien[ct][ie]{0,2}s"
    r"|pairs)\b"
)
"""What one sample, or what is computed at once, consists of; data sets consist of other things, and
nodes and instances may be machines."""
_COUNTED: Final = re.compile(
    rf"(?i)(?:\b(?:number of|amount of|(?:so |too )?many|(?:a )?lots? of|thousands of|millions of)"
    rf"|(?<![\w.,])\d{{1,3}}(?:,?\d{{3}}){{1,3}}|(?<![\w.,])\d{{1,3}}(?:\.\d)?"
    rf"(?:k|m| thousand| million)\+?) (?P<noun>{_PARTS})"
    rf"|\b(?P<named>{_PARTS}) (?:(?:number|count)\b"
    r"|(?:is|are) (?:too |so |very )?(?:many|much|large|big)\b)"
)
"""What a text counts, in its own words."""
_ARTICLE: Final = re.compile(r"(?i)^(?:the|my|a|an) |[`()*]")


class _Said(NamedTuple):
    """The sentences of a text, and those of them that tell of a failure or of a run that works."""

    all: list[str]
    fails: list[str]
    works: list[str]


def told_contrast(text: str, done: str) -> ToldContrast:
    """Return what a text says a failure depends on; the most exact way of saying it decides.

    ``done`` is the text without what is only proposed.
    """
    said = [
        " ".join(s.group().split())
        for s in SENTENCES.finditer(done[:MAX_CHARS])
        if len(s.group()) <= _MAX_SENTENCE
    ]
    told = _Said(said, list(filter(_is_failure, said)), list(filter(_WORKS.search, said)))
    ways = (_of_versions, _of_change, _of_number, _of_amounts, _of_data, _of_length)
    found = next((found for way in ways for found in way(told)), None)
    if found is not None:
        return found
    if buffer := _BUFFER.search(text):
        return ToldContrast(ContrastKind.BUFFER, buffer.group().lower())
    if _VOCABULARY.search(text):
        return ToldContrast(ContrastKind.COUNTED, "entries of the vocabulary")
    if counted := _COUNTED.search(text):
        noun = (counted["noun"] or counted["named"]).lower()
        return ToldContrast(ContrastKind.COUNTED, _plural(noun))
    return ToldContrast()


def _is_failure(said: str) -> bool:
    return (SHORTAGE.search(said) or _FAILS.search(said)) is not None


def _of_change(told: _Said) -> Iterator[ToldContrast]:
    """Yield what is left out where it works, or was added where it fails."""
    for found in filter(None, map(_REMOVED.search, told.works)):
        if not measures_in(what := found["what"] or found["lacks"]):
            yield ToldContrast(ContrastKind.CHANGE, _clean(what))
    for sentence in told.fails:
        added = _ADDED.search(sentence)
        if added and not _IS_CURE.search(sentence) and not measures_in(added["what"]):
            yield ToldContrast(ContrastKind.CHANGE, _clean(added["what"]))


def _of_versions(told: _Said) -> Iterator[ToldContrast]:
    """Yield the later of two versions, if the text compares them, or an update."""
    compared = [s for s in told.all if _is_failure(s) or _WORKS.search(s) or _CHANGED.search(s)]
    text = "\n".join(s for s in compared if "ried to allocate" not in s)
    found = list(_VERSION.finditer(text))
    versions = {m["v"] for m in found}
    names = {n for m in found if not _NO_NAME.fullmatch(n := (m["name"] or "").lower())}
    is_named = names or all(m["marked"] for m in found)
    is_compared = told.works or _CHANGED.search(text)
    if len(versions) == 2 and len(names) <= 1 and is_named and is_compared:
        old, new = sorted(versions, key=lambda v: [int(part) for part in v.split(".")])
        name = "".join(names)
        yield ToldContrast(ContrastKind.VERSION, f"{name} {new}".strip(), f"{name} {old}".strip())
    elif _UPDATED.search("\n".join(told.all)):
        yield ToldContrast(ContrastKind.VERSION)


def _of_number(told: _Said) -> Iterator[ToldContrast]:
    """Yield what was raised, or an option for a number that a failing sentence gives a value."""
    for raised in filter(None, map(_RAISED.search, told.all)):
        if not re.search("(?i)batch|loader|num_?workers", raised["what"]):
            yield ToldContrast(ContrastKind.RAISED, _clean(raised["what"]))
    for sentence in told.fails:
        at = [found for found in _AT.finditer(sentence) if not _IS_CURE.search(sentence)]
        most = max(at, key=lambda found: _value(found["n"]), default=None)
        if most is not None and _value(most["n"]) > 1:
            value = f"{most['than'] or ''}{most['n']}"
            yield ToldContrast(ContrastKind.RAISED, _clean(most["what"]), at=value)


def _of_amounts(told: _Said) -> Iterator[ToldContrast]:
    """Yield what fails in a larger number than the one that works."""
    clauses = [clause for s in told.all for clause in _CLAUSES.split(s)]
    works = [clause for clause in clauses if _WORKS.search(clause)]
    fits = {m["unit"].lower(): m["n"] for clause in works for m in _AMOUNT.finditer(clause)}
    for clause in clauses:
        if _is_failure(clause) and not _WORKS.search(clause):
            for found in _AMOUNT.finditer(clause):
                n = fits.get(unit := found["unit"].lower())
                if n is not None and _value(found["n"]) > _value(n):
                    yield ToldContrast(ContrastKind.AMOUNT, unit, n, found["n"])


def _value(digits: str) -> float:
    return float(digits.rstrip("kK").replace(",", "")) * (1000 if digits[-1] in "kK" else 1)


def _of_data(told: _Said) -> Iterator[ToldContrast]:
    """Yield that it fails with one data set where the same settings work with another."""
    if any(map(_TRAINS_ON.search, told.works)) and any(map(_DATA.search, told.fails)):
        yield ToldContrast(ContrastKind.DATA)


def _of_length(told: _Said) -> Iterator[ToldContrast]:
    """Yield the kind of input that a failing sentence calls long or large."""
    for sentence in told.fails:
        if (found := _LONG.search(sentence)) and not _IS_CURE.search(sentence):
            large = f"{found['how']} {found['what']}".lower()
            yield ToldContrast(ContrastKind.LARGE, _plural(large))


def _clean(words: str) -> str:
    """Return an option as it is written, and a noun with its article."""
    bare = _ARTICLE.sub("", words).strip()
    return bare if re.search(r"[-_=]", bare) else f"the {bare}"


def _plural(noun: str) -> str:
    if noun.endswith("class"):
        return f"{noun}es"
    return noun if noun.endswith(("s", "audio", "vertices")) else f"{noun}s"
