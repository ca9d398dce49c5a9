"""What to do: the cure and what it gains, the alternatives, and what would not help."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from fragdoctor.lazy import regex
from fragdoctor.model.diagnosis import (
    Cause,
    DeviceFigures,
    Diagnosis,
    Predicted,
    Recommendation,
    RunState,
)
from fragdoctor.model.finding import Confidence, basename_of
from fragdoctor.model.frameworks import SERVERS, frameworks_in
from fragdoctor.model.simulation import OutlookState, Promise
from fragdoctor.report import document as doc
from fragdoctor.report import words
from fragdoctor.rules.traceback_signs import is_seen_to_run
from fragdoctor.trace.stacks import USER, classify_file
from fragdoctor.units import format_size

MAX_ALTERNATIVES: Final = 2
MAX_MEASURES: Final = 4  # besides the first, including those that do not help
VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF="
_REPLAYED: Final = regex(r"^Replayed[^:]*: ")
_RECORD: Final = "fragdoctor run {}"
_SCRIPT: Final = regex(r"[\w.-]{1,40}\.py")
_RECORD_BY_HAND: Final = (
    "torch.cuda.memory._record_memory_history(max_entries=100_000)",
    'torch.cuda.memory._dump_snapshot("snapshot.pickle")',
)
_NAME: Final = regex(r"[A-Za-z_][A-Za-z0-9_]*")


def cure(diagnosis: Diagnosis, source_line: str) -> tuple[str, list[doc.DocumentBlock]]:
    """Return the headline's lead-in to the cure, and the cure with what it gains.

    ``source_line`` is the line of the program to change, if it is available.
    """
    if not diagnosis.recommendations:
        return _without_advice(diagnosis)
    first = diagnosis.recommendations[0]
    lead = _lead(diagnosis, first)
    measure = command(first.setting) or first.title
    is_wanted = diagnosis.verdict.state is not RunState.FITS
    detail = doc.Detail.USUAL if is_wanted else doc.Detail.FULL
    return lead, [
        doc.Code([measure]) if first.setting else doc.Paragraph(doc.strong(sentence(measure))),
        doc.Paragraph(wins(first, diagnosis)),
        doc.Paragraph(f"How: {_how(first.change)}" if first.change else "", detail=detail),
        doc.Code([source_line], is_quoted=True),
    ]


MAX_HOW: Final = 320
"""The most characters of instructions for a measure; ``--full`` shows those of all combined."""


def _how(change: str) -> str:
    """Return the instructions for a measure, cut between two clauses if they are long."""
    cut = change.rfind("; ", 0, MAX_HOW) if len(change) > MAX_HOW else -1
    return sentence(change if cut < 0 else f"{change[:cut]}; more with --full")


def _lead(diagnosis: Diagnosis, first: Recommendation) -> str:
    """Return what the first recommendation is for; if nothing failed, it is not called a cure."""
    if diagnosis.verdict.cause is Cause.HEALTHY:
        if diagnosis.verdict.state is RunState.NEAR_LIMIT:
            return "To gain room:"
        return "To lower the peak, if you want to:" if first.saves_bytes else "If you want to:"
    is_tested = first.predicted.method != "none"
    outlook = first.predicted.outlook
    fails_later = outlook is not None and outlook.fails
    is_cure = is_tested and not fails_later and first.confidence is not Confidence.POSSIBLE
    return "Cure:" if is_cure else "Try:"


def _lowers_peak(advice: Recommendation, diagnosis: Diagnosis) -> bool:
    """Return whether the advice only lowers the peak of a run that already fits."""
    fits = diagnosis.verdict.cause is Cause.HEALTHY and advice.predicted.fits is True
    return fits and bool(advice.saves_bytes)


def _without_advice(diagnosis: Diagnosis) -> tuple[str, list[doc.DocumentBlock]]:
    state = diagnosis.verdict.state
    if state in (RunState.NO_HISTORY, RunState.EMPTY):
        how = "Or in the program, before the first step and where it ends or fails:"
        return "Record the run:", [
            doc.Code([_RECORD.format("train.py")]),
            doc.Paragraph(how),
            doc.Code(_RECORD_BY_HAND),
        ]
    if state is RunState.NEAR_LIMIT and any(f.ooms for f in diagnosis.devices):
        return "Nothing needs to change.", []
    if state is RunState.NEAR_LIMIT and diagnosis.rejected:
        none = "No setting or change that was tried gains room: it takes a smaller batch or model."
        return "", [doc.Paragraph(none)]
    is_well = state is RunState.FITS and diagnosis.verdict.cause is Cause.HEALTHY
    return ("Nothing needs to change." if is_well else ""), []


def brief_cure(diagnosis: Diagnosis) -> str:
    """Return the cure in one line, as ``--quiet`` prints it, or "" if there is nothing to cure."""
    if not diagnosis.recommendations or diagnosis.verdict.state is RunState.FITS:
        return ""
    first = diagnosis.recommendations[0]
    return command(first.setting) or sentence(first.title)


def command(setting: str) -> str:
    """Return the shell command for a setting: to export a variable or to unset it.

    A setting may include text from an input, so it is quoted: a shell must take it as one value.
    """
    name, _, value = setting.partition("=")
    if not _NAME.fullmatch(name):
        return setting
    return f"export {name}={shlex.quote(value)}" if value else f"unset {name}"


def sentence(text: str) -> str:
    """Return a clause as a sentence."""
    text = text.strip()
    if not text:
        return ""
    word, _, rest = text.partition(" ")
    start = text[0].upper() if word.isalpha() and not rest.startswith("= ") else text[0]
    return start + text[1:] + ("" if text.endswith((".", "!", "?", ".)")) else ".")


def wins(advice: Recommendation, diagnosis: Diagnosis) -> str:
    """Return what a recommendation gains for the whole run, and how that is known."""
    p = advice.predicted
    if _lowers_peak(advice, diagnosis) and _REPLAYED.match(advice.why):
        return advice.why
    if p.method == "none":
        saves = advice.saves_bytes
        gain = f"It could free up to {format_size(saves)}. " if saves else ""
        if diagnosis.case.snapshot is not None:
            return f"{gain}It was not tested by replay."
        if not _is_recordable(diagnosis):
            return f"{gain}Not tested."
        script = _script_of(diagnosis)
        run = f": {_RECORD.format(script)}" if script else "."
        return f"{gain}Not tested. To test it, record the run{run}"
    # The remaining room says more than the peak, which is in the full report.
    figures = replace(p, peak_reserved_bytes=None) if p.margin_bytes is not None else p
    said = ["" if p.fits is None else _fits_text(p, diagnosis), *words.predicted_figures(figures)]
    how = words.METHOD_TITLES.get(p.method, p.method).capitalize()
    text = f"{how}: {', '.join(s for s in said if s) or 'no figures'}."
    if p.outlook is None or not p.fits:
        return text
    return f"{text} {sentence(words.outlook_text(p.outlook))}".strip()


def _script_of(diagnosis: Diagnosis) -> str:
    """Return the name of the script that the traceback begins with, or that the text names.

    What only runs a model may be a server or a user interface without a script: "".
    """
    message = diagnosis.case.primary_message
    frames = message.frames if message is not None else ()
    example = "train.py" if message is None else "PROGRAM"
    if message is not None and (named := _RUN_AS.search(message.said)):
        example = named[1]
    elif message is not None and is_seen_to_run(message):
        example = ""
    own = (f.file for f in frames if f.function == "<module>" and classify_file(f.file) == USER)
    files = (file for file in own if "ipykernel" not in file)  # a cell of a notebook
    return next(filter(_SCRIPT.fullmatch, map(basename_of, files)), example)


_RUN_AS: Final = regex(
    r"\b(?:python3?|torchrun|launch|run|running) (?:\S{1,60} ){0,6}?(?:\S{0,100}/)?"
    r"([\w-]{1,60}\.py)\b"
)
"""How texts name the script that they run."""


def _is_recordable(diagnosis: Diagnosis) -> bool:
    """Return whether a recording would show more: the run fails by its own allocations."""
    messages = diagnosis.case.oom.messages if diagnosis.case.oom is not None else ()
    is_own = not messages or any(m.is_of_caching_allocator for m in messages)
    is_served = any(
        f.name in SERVERS
        for m in messages
        for f in frameworks_in(
            (frame.file for frame in m.frames), f"{m.around} {m.intro} {m.after}"
        )
    )
    return is_own and not is_served and diagnosis.verdict.cause not in _OF_OTHERS


_OF_OTHERS: Final = (Cause.OTHER_PROCESS, Cause.HOST_MEMORY, Cause.NOT_MEMORY)


def _fits_text(predicted: Predicted, diagnosis: Diagnosis) -> str:
    if not predicted.fits:
        return "the run still fails"
    is_cut = diagnosis.verdict.state is RunState.FAILED
    is_whole = predicted.outlook is not None and predicted.outlook.state is OutlookState.HOLDS
    if predicted.method == "arithmetic":
        return "the request fits"
    return "the recorded part fits" if is_cut and not is_whole else "the run fits"


def short_advice(diagnosis: Diagnosis) -> doc.Section:
    """Return the alternatives and what would not help, one line each."""
    rows = [
        doc.Row((promise_of(r, diagnosis), _in_short(r, _outcome(r, diagnosis))))
        for r in diagnosis.recommendations[1 : 1 + MAX_ALTERNATIVES]
    ]
    rows += [
        doc.Row(_rejected(r, diagnosis))
        for r in diagnosis.rejected[: min(3, MAX_MEASURES - len(rows))]
    ]
    columns = (doc.Column(), doc.Column(kind="wrap"))
    return doc.Section("Other options", [doc.Table(columns, rows)], detail=doc.Detail.SHORT)


def _in_short(advice: Recommendation, outcome: str) -> doc.Content:
    return [_label(advice), doc.dim(f" ({outcome})" if outcome else "")]


def _label(advice: Recommendation) -> doc.Content:
    """Return a setting without the usual variable, or else what to do."""
    if not advice.setting:
        return advice.title
    _, is_assigned, value = advice.setting.partition("=")
    if is_assigned and not value:
        return "default settings"
    return doc.code(value if advice.setting.startswith(VARIABLE) else advice.setting)


def _outcome(advice: Recommendation, diagnosis: Diagnosis) -> str:
    p = advice.predicted
    if _lowers_peak(advice, diagnosis):
        return f"peak {format_size(advice.saves_bytes)} lower"
    if p.method == "none":
        saves = advice.saves_bytes
        return f"could free up to {format_size(saves)}" if saves else ""
    if p.fits is False:
        return "not enough alone"
    if p.outlook is not None and p.outlook.fails:
        return words.outlook_text(replace(p.outlook, reason=""))
    return f"{format_size(p.margin_bytes)} to spare" if p.margin_bytes is not None else ""


PROMISES: Final[Mapping[Promise, doc.Style]] = MappingProxyType(
    {
        Promise.WILL_FINISH: doc.Style.GOOD,
        Promise.LIKELY_FINISHES: doc.Style.GOOD,
        Promise.GETS_FURTHER: doc.Style.WARN,
        Promise.UNTESTED: doc.Style.DIM,
        Promise.STILL_FAILS: doc.Style.BAD,
    }
)
"""How each promise looks, in text and on the page."""


def promise_of(advice: Recommendation, diagnosis: Diagnosis) -> doc.Span:
    """Return the promise of a recommendation in a word."""
    if _lowers_peak(advice, diagnosis):
        return doc.good("lower peak")
    return promised(advice.predicted.promise, diagnosis)


def promised(promise: Promise, diagnosis: Diagnosis) -> doc.Span:
    """Return the word for a promise; a run that did not fail cannot get further or still fail."""
    if diagnosis.verdict.state is not RunState.FAILED:
        if promise is Promise.GETS_FURTHER:
            return doc.good("fits")
        if promise is Promise.STILL_FAILS:
            return doc.bad("would fail")
    return doc.Span(promise.value, PROMISES[promise])


def _rejected(advice: Recommendation, diagnosis: Diagnosis) -> tuple[doc.Content, doc.Content]:
    """Return a measure that does not help, with its promise in a word and the reason."""
    if advice.predicted.fits is False:
        return promised(Promise.STILL_FAILS, diagnosis), _in_short(advice, "")
    return doc.bad("won't help"), _in_short(advice, _why_not(advice))


def _why_not(advice: Recommendation) -> str:
    """Return in a few words why a measure does not help."""
    if advice.predicted.outlook is not None and advice.predicted.outlook.ends_step:
        return "the step fails further on"
    first = _REPLAYED.sub("", advice.why.split(". ", 1)[0].rstrip("."))
    clause = re.split(r", |: |; ", first, maxsplit=1)[0]
    return clause[:1].lower() + clause[1:] or "it changes nothing here"


def advice_sections(diagnosis: Diagnosis) -> list[doc.Section]:
    """Return every recommendation with its reason, proof and cost, and all that would not help."""
    items = [_item(r) for r in diagnosis.recommendations]
    listing = doc.Listing(items, is_airy=True)
    rejected = doc.tabled(
        diagnosis.rejected,
        doc.Column("measure", _label, "list", max_width=34),
        doc.Column("why not", _reason, "wrap", style=doc.Style.DIM),
    )
    note = "the same requests under other settings"
    full = partial(doc.Section, detail=doc.Detail.FULL)
    return [
        full("What to do", [listing], "best first", "advice"),
        full("Would not help here", [rejected], id="rejected"),
        full("What if", [_what_ifs(diagnosis)], note, "what-if"),
    ]


def _reason(rejected: Recommendation) -> str:
    # For replays and estimates, "why" already says the outcome.
    is_said = rejected.predicted.method in {"replay", "estimate"}
    predicted = "" if is_said else words.predicted_text(rejected.predicted)
    return "; ".join(x for x in (rejected.why.rstrip("."), predicted) if x) or "-"


def _item(one: Recommendation) -> doc.ListItem:
    is_tested = one.predicted.method != "none"
    saves = f"up to {format_size(one.saves_bytes)} (not replayed)" if one.saves_bytes else ""
    blocks = (
        doc.Code([command(one.setting)]),
        doc.Paragraph(doc.code(one.change)),
        doc.facts(
            ("Why", one.why),
            ("Predicted", words.predicted_text(one.predicted)),
            ("Saves", "" if is_tested else saves),
            *(("At", doc.code(doc.location_text(place))) for place in one.locations[:1]),
            ("Cost", one.cost),
            *(("Caveat", caveat) for caveat in one.caveats),
        ),
    )
    head = [doc.strong(one.title), doc.dim(f"  ({one.confidence})")]
    return doc.ListItem(head, [b for b in blocks if not b.is_empty], f"{one.rank}.")


def _what_ifs(diagnosis: Diagnosis) -> doc.Table:
    """Return every setting and change that was replayed, compared with the recorded run."""
    tested = [
        r for r in (*diagnosis.recommendations, *diagnosis.rejected) if r.predicted.method != "none"
    ]
    first = next(iter(diagnosis.devices), DeviceFigures(device=0))
    figures = diagnosis.figures_of(diagnosis.verdict.device) or first
    recorded = _as_recorded(figures)
    ended: doc.Content = doc.bad("failed") if recorded.fits is False else "ran"
    rows = [
        (recorded, ended, doc.strong("as recorded")),
        *((r.predicted, promise_of(r, diagnosis), _label(r)) for r in tested),
    ]
    peaks = [p.peak_reserved_bytes or 0 for p, *_ in rows]
    whole = max(*peaks, figures.allowed_bytes or 0, 1)
    return doc.tabled(
        rows if tested else [],
        doc.Column("", lambda row: row[1]),
        doc.Column("peak reserved", lambda row: doc.size(row[0].peak_reserved_bytes), "right"),
        doc.Column("", lambda row: doc.Gauge((row[0].peak_reserved_bytes or 0) / whole),
                   from_width=120),
        doc.Column("to spare", lambda row: doc.size(row[0].margin_bytes if row[0].fits else None),
                   "right"),
        doc.Column("retries", lambda row: doc.count(row[0].retries), "right", from_width=100),
        doc.Column("calls", lambda row: doc.count(row[0].driver_calls), "right", from_width=100),
        doc.Column("setting or change", lambda row: row[2], "list"),
    )  # fmt: skip


def _as_recorded(f: DeviceFigures) -> Predicted:
    peak, capacity = f.peak_reserved_bytes, f.capacity_bytes
    return Predicted(
        fits=None if f.ooms is None else f.ooms == 0,
        peak_reserved_bytes=peak,
        margin_bytes=None if capacity is None or peak is None else capacity - peak,
        retries=f.alloc_retries,
    )
