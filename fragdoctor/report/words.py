"""The words that all reports share: titles of the model's values, and figures as phrases.

Everything here is raw text: a format escapes it for its sink.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from fragdoctor.model.diagnosis import (
    SOUND,
    Cause,
    Diagnosis,
    Failure,
    Moment,
    Predicted,
    RunState,
    Status,
    Verdict,
)
from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.model.phases import Category, CategoryShare
from fragdoctor.model.simulation import FidelityReport, Outlook, OutlookState
from fragdoctor.report.document import Style
from fragdoctor.units import format_count, format_share, format_size, plural

LIVE_WHEN: Final = {
    Moment.FAILURE: "when it failed",
    Moment.PEAK: "at the peak",
    Moment.END: "at the end",
}

CAUSE_TITLES: Final = {
    Cause.HEALTHY: "Healthy",
    Cause.CAPACITY: "Not enough capacity",
    Cause.FRAGMENTATION: "Fragmentation",
    Cause.LEAK: "Memory leak",
    Cause.TRANSIENT_PEAK: "Transient peak",
    Cause.NON_PYTORCH_MEMORY: "Memory outside PyTorch",
    Cause.OTHER_PROCESS: "Memory taken by another process",
    Cause.MEMORY_LIMIT: "Memory limit reached",
    Cause.PRIVATE_POOLS: "Memory locked up in private pools",
    Cause.PENDING_FREES: "Frees waiting for other streams",
    Cause.SIZE_BUG: "A wrong tensor size",
    Cause.HOST_MEMORY: "Out of host memory, not GPU memory",
    Cause.NOT_MEMORY: "Not a memory problem",
    Cause.UNKNOWN: "Cause unknown",
}

# How healthy a healthy run is.
_STATE_TITLES: Final = {
    RunState.NEAR_LIMIT: "Near the limit",
    RunState.NO_HISTORY: "No history recorded",
    RunState.EMPTY: "Nothing recorded",
}

_STATE_TITLES_ALONE: Final = (RunState.NO_HISTORY, RunState.EMPTY)
"""States whose title needs no degree of confidence."""

NO_MESSAGE: Final = "no-message"
"""The ``decider`` of the verdict on a text in which nothing failed."""

STATUS_WORDS: Final = {
    Status.PASS: ("ok", Style.GOOD),
    Status.WARN: ("warn", Style.WARN),
    Status.FAIL: ("FAIL", Style.BAD),
    Status.SKIP: ("unknown", Style.DIM),
}

SEVERITY_STYLES: Final = {
    Severity.ERROR: Style.BAD,
    Severity.WARNING: Style.WARN,
    Severity.INFO: Style.DIM,
}

CHECK_TITLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "capacity": "Real capacity",
        "gap": "Gap",
        "retries": "Retries",
        "largest_free_block": "Largest free block",
        "fragmentation_ratio": "Fragmentation ratio",
        "outside_pytorch": "Outside PyTorch",
        "growth": "Growth",
        "size_diversity": "Variety of sizes",
        "capture_quality": "Recording",
        "settings": "Settings",
    }
)
"""Checklist item id -> its short name."""

CATEGORY_NAMES: Final = {category: category.word.replace("_", " ") for category in Category}

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


def cause_style(cause: Cause) -> Style:
    """Return the style of a cause: good, open, or a problem."""
    if cause in SOUND:
        return Style.GOOD
    return Style.WARN if cause is Cause.UNKNOWN else Style.BAD


def verdict_name(verdict: Verdict) -> str:
    """Return the verdict in a few words: its cause, or the state of a healthy run."""
    if verdict.cause is Cause.HEALTHY:
        return _STATE_TITLES.get(verdict.state, CAUSE_TITLES[verdict.cause])
    if verdict.decider == NO_MESSAGE:
        return "No memory failure found"
    return CAUSE_TITLES[verdict.cause]


def verdict_title(verdict: Verdict, *, is_placed: bool = False) -> str:
    """Return the verdict in a few words, with its GPU if asked for, and its confidence."""
    is_plain = verdict.cause is Cause.HEALTHY and verdict.state in _STATE_TITLES_ALONE
    name = verdict_name(verdict)
    if is_placed and verdict.device is not None:
        name += f" on GPU {verdict.device}"
    if is_plain or verdict.decider == NO_MESSAGE:
        return name
    return titled(verdict.cause, verdict.confidence, name)


def titled(cause: Cause, confidence: Confidence | str, name: str = "") -> str:
    """Return a cause with its confidence; an unknown cause has none."""
    name = name or CAUSE_TITLES[cause]
    return name if cause is Cause.UNKNOWN or not confidence else f"{name} ({confidence})"


def verdict_style(verdict: Verdict) -> Style:
    """Return the style of a verdict."""
    is_open = verdict.cause is Cause.HEALTHY and verdict.state in _STATE_TITLES
    return Style.WARN if is_open else cause_style(verdict.cause)


def verdict_line(verdict: Verdict) -> str:
    """Return the verdict in one line, as ``--quiet`` prints it."""
    return f"{verdict_title(verdict, is_placed=True)}: {verdict.summary}"


def failure_line(failure: Failure | None) -> str:
    """Return who asked for how much in one sentence, or "" if neither is known.

    A library that fails without figures may have failed for a reason other than memory.
    """
    if failure is None or (failure.location is None and failure.requested_bytes is None):
        return ""
    if failure.requested_bytes is None and failure.location is not None:
        return f"Failed at {failure.location.short}."
    gpu = "" if failure.device is None else f" on GPU {failure.device}"
    at = "" if failure.location is None else f" at {failure.location.short}"
    if failure.backward_of is not None:
        comma = "," if at else ""
        at += f"{comma} in the backward pass near {failure.backward_of.short}"
    asked, segment, free = failure.requested_bytes, failure.segment_bytes, failure.free_bytes
    is_free = "free"
    if failure.limit_bytes is not None:
        free = failure.left_bytes
        is_free = f"left of the {format_size(failure.limit_bytes)} allowed"
    # If the request itself would have fit, the reader must know what the driver was asked for.
    is_enough = asked is not None and free is not None and segment is not None and asked <= free
    for_segment = f" (a segment of {format_size(segment or 0)})" if is_enough else ""
    figures = ((asked, f"requested{for_segment}"), (free, is_free))
    said = ", ".join(f"{format_size(n)} {what}" for n, what in figures if n is not None)
    return f"Out of memory{gpu}{at}{f': {said}' if said else ''}."


def also_text(verdict: Verdict) -> str:
    """Return the other causes that the evidence supports, as part of a sentence.

    A run with a proven failure is not healthy, even if the program caught the failure.
    """
    is_proven = verdict.confidence is Confidence.PROVEN
    causes = [c for c in verdict.also if not (is_proven and c is Cause.HEALTHY)]
    titles = [CAUSE_TITLES[cause].partition(",")[0] for cause in causes]
    return ", ".join(title[0].lower() + title[1:] for title in titles)


def sureness(share: CategoryShare) -> str:
    """Return the confidence of a category, or "-" for unknown memory."""
    return "-" if share.category is Category.UNKNOWN else share.confidence.value


def predicted_text(predicted: Predicted) -> str:
    """Return the predicted effect in one sentence, or "" if nothing was tested."""
    if predicted.method == "none":
        return ""
    parts: list[str] = []
    if predicted.fits is not None:
        parts.append("fits" if predicted.fits else "still runs out of memory")
    parts += predicted_figures(predicted)
    if predicted.driver_calls is not None:
        parts.append(plural(predicted.driver_calls, "driver call"))
    outlook = "" if predicted.outlook is None else outlook_text(predicted.outlook)
    said = "; ".join(p for p in (", ".join(parts), outlook) if p)
    return f"{said or 'no figures'} ({method_text(predicted)})"


def predicted_figures(predicted: Predicted) -> list[str]:
    """Return the peak, margin and retries of a prediction, a few words each."""
    parts: list[str] = []
    if predicted.peak_reserved_bytes is not None:
        parts.append(f"peak reserved {format_size(predicted.peak_reserved_bytes)}")
    if predicted.margin_bytes is not None and predicted.fits is not False:
        sign = "to spare" if predicted.margin_bytes >= 0 else "short"
        parts.append(f"{format_size(abs(predicted.margin_bytes))} {sign}")
    if predicted.retries:
        parts.append(plural(predicted.retries, "retry", "retries"))
    return parts


def method_text(predicted: Predicted) -> str:
    """Return how an effect was found, with the accuracy of the replay."""
    method = METHOD_TITLES.get(predicted.method, predicted.method)
    share = predicted.fidelity_share
    if predicted.method == "replay" and share is not None:
        method += f", baseline {share_text(share)} exact"
    return method


def outlook_text(outlook: Outlook) -> str:
    """Return whether a run survives to its end, in one of five phrases, and why."""
    when = ""
    if outlook.fails_after_steps is not None:
        n = outlook.fails_after_steps
        when = f" after {plural(n, 'more step')}" if n else " in the current step"
    if outlook.state is OutlookState.FAILS:
        found = f"will fail{when}"
    elif outlook.state is OutlookState.HOLDS:
        found = "will finish"
    else:
        found = {
            OutlookState.HOLDS: "likely finishes",
            OutlookState.FAILS: f"likely fails{when}",
            None: "whether it finishes is open",
        }[outlook.likely]
    is_open = outlook.state is OutlookState.OPEN and outlook.likely is None
    if not outlook.reason:
        return found
    return f"{found}: {outlook.reason}" if is_open else f"{found} ({outlook.reason})"


def share_text(share: float) -> str:
    """Return a share of 0..1 in percent; never rounds up to 100."""
    if share >= 1:
        return "100%"
    return f"{int(share * 1000) / 10:.1f}%"


def fidelity_text(fidelity: FidelityReport) -> str:
    """Return how accurately the model reproduced the file, in one sentence."""
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


def evidence_text(evidence: Evidence) -> str:
    """Return a named number with its unit and source."""
    return f"{evidence.name} {evidence_value(evidence)} ({evidence.source})"


def evidence_value(evidence: Evidence) -> str:
    """Return the number of a piece of evidence in its unit."""
    is_size = evidence.unit == "bytes"
    return format_size(evidence.value) if is_size else format_count(evidence.value)


def by_device(diagnosis: Diagnosis) -> Callable[[Any], tuple[bool, int]]:
    """Return a key that sorts what is about devices: the verdict's device first, then ascending."""
    first = diagnosis.verdict.device
    return lambda item: (item.device != first, item.device)


MAX_TEXT: Final = 1000
"""The most characters of one sentence: a megabyte of name must not become one of report."""


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text, cut to a limit."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def source_name(source: str) -> str:
    """Return the name of an input as people should read it."""
    return "standard input" if source == "-" else source


def share_of(part: int, whole: int) -> str:
    """Return a share in percent; nearly all is never shown as 100: the rest may be what matters."""
    shown = format_share(part, whole)
    return ">99%" if shown == "100%" and part < whole else shown
