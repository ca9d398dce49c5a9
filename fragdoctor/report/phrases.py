"""Words that several formats share: titles of causes, locations, predicted effects.

Everything here is raw text: a format escapes it for its sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.model.diagnosis import Cause, Diagnosis, FidelityReport, Predicted, Verdict
from fragdoctor.model.finding import Evidence, Location
from fragdoctor.units import format_count, format_size, plural

CAUSE_TITLES: Final = {
    Cause.HEALTHY: "Healthy",
    Cause.CAPACITY: "Not enough capacity",
    Cause.FRAGMENTATION: "Fragmentation",
    Cause.LEAK: "Memory leak",
    Cause.TRANSIENT_PEAK: "Transient peak",
    Cause.NON_PYTORCH_MEMORY: "Memory outside PyTorch",
    Cause.OTHER_PROCESS: "Another process holds the GPU",
    Cause.MEMORY_LIMIT: "A memory limit, not the device",
    Cause.PRIVATE_POOLS: "Memory shut in private pools",
    Cause.PENDING_FREES: "Frees waiting for other streams",
    Cause.SIZE_BUG: "A bug in a size",
    Cause.HOST_MEMORY: "Host memory, not the GPU",
    Cause.NOT_MEMORY: "Not a memory problem",
    Cause.UNKNOWN: "Cause unknown",
}

METHOD_TITLES: Final = {
    "replay": "replayed",
    "estimate": "estimated by replay",
    "arithmetic": "by arithmetic",
}

ERA_TITLES: Final = {
    "address": "tie-breaking of PyTorch 2.11 and older",
    "block_counter": "tie-breaking of PyTorch 2.12",
    "segment_counter": "tie-breaking of PyTorch 2.13 and newer",
}


def also_text(verdict: Verdict) -> str:
    """Return the further causes that the evidence supports, within a sentence."""
    titles = [CAUSE_TITLES[cause] for cause in verdict.also]
    return ", ".join(title[0].lower() + title[1:] for title in titles)


NO_STACK: Final = "(no Python stack)"
"""In place of a source line: no stack was recorded, or one of C++ frames alone."""


def location_text(location: Location | None, *, absent: str = NO_STACK) -> str:
    """Return ``file.py:88 in forward``; the line is left out where it is unknown."""
    return absent if location is None else str(location)


def verdict_title(verdict: Verdict) -> str:
    """Return the verdict in a few words, with how sure it is."""
    title = CAUSE_TITLES[verdict.cause]
    return title if verdict.cause is Cause.UNKNOWN else f"{title} ({verdict.confidence})"


def verdict_line(verdict: Verdict) -> str:
    """Return the verdict in one line: what ``--quiet`` prints."""
    where = "" if verdict.device is None else f" on GPU {verdict.device}"
    return f"{verdict_title(verdict)}{where}: {verdict.summary}"


def predicted_text(predicted: Predicted) -> str:
    """Return the predicted effect in one sentence, "" where nothing was tested."""
    if predicted.method == "none":
        return ""
    parts: list[str] = []
    if predicted.fits is not None:
        parts.append("fits" if predicted.fits else "still runs out of memory")
    if predicted.peak_reserved_bytes is not None:
        parts.append(f"peak reserved {format_size(predicted.peak_reserved_bytes)}")
    if predicted.margin_bytes is not None:
        sign = "to spare" if predicted.margin_bytes >= 0 else "short"
        parts.append(f"{format_size(abs(predicted.margin_bytes))} {sign}")
    if predicted.retries is not None:
        parts.append(plural(predicted.retries, "retry", "retries"))
    if predicted.driver_calls is not None:
        parts.append(plural(predicted.driver_calls, "driver call"))
    method = METHOD_TITLES.get(predicted.method, predicted.method)
    share = predicted.fidelity_share
    if predicted.method == "replay" and share is not None:
        method += f", baseline {share_text(share)} exact"
    return f"{', '.join(parts) or 'no figures'} ({method})"


def share_text(share: float) -> str:
    """Return a share of 0..1 in per cent; never rounds up to 100."""
    if share >= 1:
        return "100 %"
    return f"{int(share * 1000) / 10:.1f} %"


def fidelity_text(fidelity: FidelityReport) -> str:
    """Return how exactly the model reproduced the file, in one sentence."""
    era = ERA_TITLES.get(fidelity.era, fidelity.era)
    if fidelity.share is None:
        return f"Nothing was replayed. {fidelity.reason}" if fidelity.reason else ""
    with_era = f", with the {era}" if era else ""
    if fidelity.share >= 1 and not fidelity.reason:
        return f"The allocator model reproduces this file exactly{with_era}."
    why = f": {fidelity.reason}" if fidelity.reason else "."
    return (
        f"The allocator model reproduces {share_text(fidelity.share)} of this file{with_era}{why}"
    )


def fidelity_line(diagnosis: Diagnosis) -> str:
    """Return the fidelity for a report; "" where there was no snapshot to replay."""
    fidelity = diagnosis.fidelity
    if fidelity.share is None and diagnosis.case.snapshot is None:
        return ""
    return fidelity_text(fidelity)


def evidence_text(evidence: Evidence) -> str:
    """Return a named number with its unit and source."""
    return f"{evidence.name} {evidence_value(evidence)} ({evidence.source})"


def evidence_value(evidence: Evidence) -> str:
    """Return the number of an evidence in its unit."""
    value = evidence.value
    if isinstance(value, str):
        return value
    if evidence.unit == "bytes":
        return format_size(value)
    if evidence.unit == "share":
        return share_text(float(value))
    if evidence.unit == "us":
        return f"{value / 1e6:.3f} s"
    if isinstance(value, int):
        return format_count(value)
    return f"{value:g}"


def shown_first(diagnosis: Diagnosis, devices: Sequence[int]) -> list[int]:
    """Return devices in the order of a report: the verdict's first, then ascending."""
    first = diagnosis.verdict.device
    return sorted(set(devices), key=lambda d: (d != first, d))
