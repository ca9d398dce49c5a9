"""Patterns for each figure in a report, to detect two different figures for the same thing."""

from __future__ import annotations

import re

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.report.base import RenderOptions, Verbosity, render

SIZE = r"(\d[\d,]*(?:\.\d+)? (?:bytes|B|KiB|MiB|GiB|TiB))"
OF_BAR = r"(?=[ |]+>?[\d.]+%)"
"""What follows a figure of the memory bar, which shows the moment of the failure or the peak."""

FIGURES = {
    "missing": (
        rf"{SIZE} is missing",
        rf"are {SIZE} more than the {SIZE[1:-1]} that PyTorch",
        rf"would be {SIZE} short",
        rf"\bby {SIZE}: no allocator",
        rf"{SIZE} more than PyTorch could",
        rf"[Ss]hort of {SIZE}",
    ),
    "what PyTorch could have": (
        rf"the {SIZE} that PyTorch could have",
        rf"{SIZE} *\|?  ?what PyTorch could have",
    ),
    "outside": (rf"\boutside[ |]+{SIZE}", rf"{SIZE} of this process's memory is outside"),
    "request": (rf"[Rr]equest of {SIZE}(?! at event| fails)",),
    "peak allocated": (
        rf"allocated \(peak {SIZE}",
        rf"peak allocated {SIZE}(?= *\))",
        rf"peak allocated[ |]+{SIZE}(?= most held)",
    ),
    "peak reserved": (
        rf"reserved \(peak {SIZE}",
        rf"peak reserved[ |]+{SIZE}(?= most taken)",
        rf"(?:NO|yes)[ |]+{SIZE}(?:[ |]|(?:[\d,.]+ [KMGT]?i?B)|[\d,-]+)*as recorded",
    ),
    "holes": (rf"{SIZE} of it in holes", rf"{SIZE} is free in holes"),
    "allocated": (
        rf"allocated[ |]+{SIZE}(?= held by)",
        rf"allocated[ |]+{SIZE}{OF_BAR}",
    ),
    "reserved": (rf"reserved[ |]+{SIZE}(?= taken from|[ |]+snapshot)", rf"of {SIZE} reserved is"),
    "stranded": (
        rf"stranded[ |]+{SIZE}{OF_BAR}",
        rf"stranded free[ |]+{SIZE}(?= free,|[ |]+snapshot)",
        rf"with {SIZE} of free cache stranded",
    ),
}
"""Thing -> patterns of sentences with its figure; all sentences of a report must agree on it."""


def contradictions_in(diagnosis: Diagnosis) -> list[str]:
    """Return the things for which the reports on one device give more than one figure."""
    found = []
    moment = diagnosis.devices[0].moment if diagnosis.devices else None
    bar = "" if moment is None or moment.is_end else OF_BAR
    for form, verbosity in (("text", "NORMAL"), ("text", "FULL"), ("markdown", "FULL")):
        options = RenderOptions(120, verbosity=Verbosity[verbosity])
        said = re.sub(r"[\s`*]+", " ", render("analyze", form, diagnosis, options))
        for thing, patterns in FIGURES.items():
            same = [p for p in patterns if not bar or bar not in p]
            figures = {m for pattern in same for m in re.findall(pattern, said)}
            if len(figures) > 1:
                found.append(f"{form}: {thing}: {sorted(figures)}")
    return found
