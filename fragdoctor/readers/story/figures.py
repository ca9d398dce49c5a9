"""Figures of memory that programs print: allocated, reserved, used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Final

from fragdoctor.model.story import PrintedFigure

LITERALS: Final = ("alloc", "reserved", "mem", "mib /", "vram", "max_ma")

_UNITS: Final = {"k": 1, "m": 2, "g": 3, "t": 4}
_NUMBER: Final = r"(?P<n>\d{1,15}(?:,\d{3}){0,4}(?:\.\d{1,9})?)"
_UNIT: Final = r"(?P<u>bytes|[kmgt]i?b|[kmgt]|b)"
# As in: GPU memory allocated: 3.21 GiB; mem_alloc=3.21GB; allocated_gb: 3.21; Memory (MB): 512
_VALUE: Final = re.compile(
    rf"[:=]\s{{0,4}}(?:\d[\d.]{{0,12}}\s?[kmgt]?i?b?\s?->\s?)?{_NUMBER}"
    rf"\s{{0,2}}(?:{_UNIT}(?![\w]))?"
)
_NO_LABEL: Final = re.compile(r"[^\w ./()\[\]-]")
_MAX_LABEL: Final = 60
_PLAIN: Final = re.compile(
    rf"{_NUMBER}\s{{0,2}}{_UNIT}\s(?P<label>allocated|reserved|used)(?![\w])"
)
_SPACED: Final = re.compile(
    r"(?<![a-z])(?P<label>(?:gpu |cuda )?(?:mem|memory|vram)"
    r"(?:[_ ](?:allocated|reserved|usage|used))?"
    rf"|alloc(?:ated)?|reserved)\s{{1,3}}{_NUMBER}\s{{0,2}}(?:{_UNIT}(?![\w]))?(?![\w.])"
)
# DeepSpeed's see_memory_usage: MA is allocated, CA is reserved, Max_MA and Max_CA are peaks.
_DEEPSPEED: Final = re.compile(
    rf"(?<![a-z_])(?P<label>ma|ca)\s{{1,4}}{_NUMBER}\s{{0,2}}{_UNIT}(?![\w])"
)
_SMI: Final = re.compile(r"(?<!\d)(?P<n>\d{1,7})\s?mib\s?/\s{0,3}\d{1,7}\s?mib")
_LABEL_UNIT: Final = re.compile(r"[_ (\[](bytes|[kmgt]i?b)[)\]]?\s{0,2}$")
_PEAK: Final = re.compile(r"(?<![a-z])(?:max|peak|high)|max_mem|total|limit|capacity|free|cpu|ram")
_ABOUT: Final = re.compile(r"alloc|reserv|cache|mem|vram|used|usage")
_WORDS: Final = re.compile(
    r"(?<![a-z])(?:gpu|cuda|device|vram|memory|mem|alloc\w{0,6}|reserved|cached?|used|usage|current"
    r"|before|after|start|end)(?![a-z])"
)
_MIN_PLAIN_BYTES: Final = 1 << 20
"""A number without a unit is taken for bytes from here on; below it could be anything."""


def figures_of(plain: str) -> Iterator[PrintedFigure]:
    """Yield what a line prints of memory in use now; peaks, totals and free memory are left out."""
    lowered = plain[:1000].lower()
    if not any(literal in lowered for literal in LITERALS):
        return
    smi = _SMI.search(lowered)
    if smi is not None:
        yield PrintedFigure("used", "nvidia-smi", int(smi.group("n")) << 20)
        return
    spans: list[tuple[int, int]] = []
    for match, label in _labelled(lowered):
        start, end = match.span("n")
        figure = _figure(match, label)
        if figure is not None and not any(start < b and a < end for a, b in spans):
            spans.append((start, end))
            yield figure


def _labelled(lowered: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield numbers with the words that say what they are."""
    if "max_ma" in lowered:
        names = {"ma": "allocated", "ca": "reserved"}
        yield from ((m, names[m.group("label")]) for m in _DEEPSPEED.finditer(lowered))
        return
    yield from ((m, _label_before(lowered, m.start())) for m in _VALUE.finditer(lowered))
    for pattern in (_SPACED, _PLAIN):
        yield from ((m, m.group("label")) for m in pattern.finditer(lowered))


def _label_before(lowered: str, end: int) -> str:
    """Return the words before a colon, in the same sentence."""
    before = lowered[max(0, end - _MAX_LABEL) : end].rstrip(" '\"")
    return _NO_LABEL.split(before)[-1]


def _figure(match: re.Match[str], label: str) -> PrintedFigure | None:
    if not _ABOUT.search(label) or _PEAK.search(label):
        return None
    unit = match.group("u") or ""
    inner = _LABEL_UNIT.search(label)
    if not unit and inner:
        unit = inner.group(1)
    n_bytes = _bytes(match.group("n"), unit)
    if n_bytes is None:
        return None
    name = "used"
    if "alloc" in label:
        name = "allocated"
    elif "reserv" in label or "cache" in label:
        name = "reserved"
    return PrintedFigure(name, " ".join(_WORDS.findall(label))[:60], n_bytes)


def _bytes(number: str, unit: str) -> int | None:
    value = Decimal(number.replace(",", ""))
    if not unit:
        is_bytes = "." not in number and value >= _MIN_PLAIN_BYTES
        return int(value) if is_bytes and value < 2**50 else None
    n_bytes = int(value * 1024 ** _UNITS.get(unit[0], 0))
    return n_bytes if n_bytes < 2**50 else None
