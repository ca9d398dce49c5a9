"""One rank, read, diagnosed and reduced to a few kilobytes. Runs on the worker."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from typing import Final

import numpy as np
from msgspec.structs import replace

from fragdoctor.errors import FragdoctorError
from fragdoctor.inputs.remote import is_remote, without_secrets
from fragdoctor.model.case import BundleFacts, OomLog
from fragdoctor.model.diagnosis import Cause, DeviceFigures, Diagnosis, Recommendation
from fragdoctor.model.finding import Finding, Location
from fragdoctor.model.fleet import RankInput, RankSource, RankSummary, SourceLine, SummaryOptions
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import Action, BlockState, Snapshot
from fragdoctor.units import format_size

_DIGEST: Final = 12
_MARK: Final = "..."


def weight(text: str) -> int:
    """Return the most bytes that a string can take: pickled, or in JSON with its escapes."""
    return len(json.dumps(text))


def clip(text: str, limit: int, *, is_name: bool = False) -> str:
    """Return text of at most ``limit`` bytes, as measured by ``weight``.

    The end of the text is cut off. A name loses its start, and a digest keeps long names different.
    """
    if len(text) * 12 + 2 <= limit or weight(text) <= limit:
        return text
    digest = ""
    if is_name:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
    kept, room = text[::-1] if is_name else text, limit - len(_MARK) - len(digest)
    kept = kept[:room]
    while kept and weight(kept) > room:
        kept = kept[: -max(1, (weight(kept) - room) // 12)]  # no character takes more than 12
    return f"{digest}{_MARK}{kept[::-1]}" if is_name else kept + _MARK


# Maximum bytes of one string of each kind; together they keep a summary below MAX_SUMMARY_BYTES.
_PATH: Final = 1500
_SENTENCE: Final = 700
_FILE: Final = 160
_FUNCTION: Final = 80
_CONF: Final = 400
_WORD: Final = 60
MAX_HOLDERS: Final = 16
MAX_FINDINGS: Final = 30
MAX_SETTINGS: Final = 12
MAX_SIZES: Final = 16
_ENDLESS: Final = 2**63 - 1


def summarise_within(what: RankInput, options: SummaryOptions) -> RankSummary:
    """Return the summary of one rank, or a row that says that it took too long.

    A hanging read cannot be stopped from within: its thread is left behind, and the worker should
    be replaced.
    """
    if options.timeout_s is None:
        return summarise(what, options)
    _load()  # so that a worker's first rank does not pay for its start
    answer: queue.SimpleQueue[RankSummary] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(summarise(what, options)), daemon=True).start()
    try:
        return answer.get(timeout=options.timeout_s)
    except queue.Empty:
        sentence = f"It did not finish within {options.timeout_s:g} s."
        return failed(what, sentence, "timed_out", hint="Give it longer: --timeout SECONDS.")


def _load() -> None:
    import fragdoctor.diagnosis.pipeline
    import fragdoctor.inputs.cases  # noqa: F401


def summarise(what: RankInput, options: SummaryOptions) -> RankSummary:
    """Return the summary of one rank; a rank that cannot be read becomes a row with the reason."""
    here = _absolute(what, options.folder)
    try:
        return _summary(what, here, options)
    except FragdoctorError as e:
        as_given = e.sentence.replace(here.path, what.path)
        hint = e.hint.replace(here.path, what.path)
        return failed(what, as_given, e.code, hint=hint, exit_code=e.exit_code)
    except MemoryError:
        return _too_large(what, options.memory_bytes)
    except OSError as e:
        return failed(what, f"{what.path} cannot be read: {e.strerror or e}.", "unreadable_input")
    except Exception as e:  # noqa: BLE001 - a bug met in one rank is a row too, named as a bug
        sentence = f"This is a bug in fragdoctor: {type(e).__name__}: {e}"
        return failed(what, sentence, "internal_error", exit_code=70)


def _absolute(what: RankInput, folder: str) -> RankInput:
    """Return the input as this worker finds it: a worker on another machine may run anywhere."""
    if not folder or os.getcwd() == folder:  # noqa: PTH109 - compared as it was taken
        return what

    def found(name: str) -> str:
        return name if is_remote(name) else os.path.join(folder, name)  # noqa: PTH118 - same

    return replace(what, path=found(what.path), beside=tuple(found(n) for n in what.beside))


def _too_large(what: RankInput, memory_bytes: int | None) -> RankSummary:
    if memory_bytes is None:
        return failed(what, "The worker ran out of memory.", "out_of_host_memory")
    return failed(
        what,
        f"It takes more memory than a worker may have, {format_size(memory_bytes)}.",
        "out_of_host_memory",
        hint="Give a worker more: --worker-memory SIZE.",
    )


def failed(
    what: RankInput, error: str, code: str, *, hint: str = "", exit_code: int = 2
) -> RankSummary:
    """Return the row of a rank that could not be examined."""
    return replace(
        _named(what),
        is_read=False,
        error=clip(error, _SENTENCE),
        error_code=clip(code, _WORD),
        hint=clip(hint, _SENTENCE),
        exit_code=exit_code,
    )


def name_of(what: RankInput) -> str:
    """Return the path that names a rank in its summary: its own, cut if it is very long."""
    return clip(without_secrets(os.fspath(what.path)), _PATH, is_name=True)


def _named(what: RankInput) -> RankSummary:
    return RankSummary(
        path=name_of(what),
        rank=what.rank,
        rank_source=what.source,
        local_rank=what.local_rank,
        job=clip(what.job, _WORD),
        host=clip(what.host, _WORD),
    )


def _summary(what: RankInput, here: RankInput, options: SummaryOptions) -> RankSummary:
    from fragdoctor.diagnosis.pipeline import diagnose
    from fragdoctor.inputs.cases import read_case

    case = read_case([here.path], options.overrides, beside=here.beside)
    if case.oom is None and what.said is not None:
        case = replace(case, oom=what.said)
    diagnosis = diagnose(case, replays=options.replays)
    leading = diagnosis.figures_of(diagnosis.verdict.device)
    figures = leading or next(iter(diagnosis.devices), None)
    device = 0 if figures is None else figures.device
    what = _with_manifest(what, case.bundle)
    rank, source = _rank(what, case.oom)
    settings = None if case.snapshot is None else case.snapshot.settings
    known = settings is not None and settings.is_recorded
    sizes, failed_us = ((), None) if case.snapshot is None else _trace_shape(case.snapshot, device)
    has_failed = _has_failed(diagnosis, figures)
    return replace(
        _named(what),
        rank=rank,
        rank_source=source,
        cause=diagnosis.verdict.cause,
        confidence=str(diagnosis.verdict.confidence),
        summary=clip(diagnosis.verdict.summary, _SENTENCE),
        has_failed=has_failed,
        figures=figures,
        settings=_changed_settings(settings) if settings is not None and known else (),
        settings_known=known,
        holders=_holders(diagnosis, device),
        findings=_findings(diagnosis),
        advice=_advice(diagnosis),
        is_replayed=options.replays,
        large_sizes=sizes,
        failed_us=failed_us if has_failed else None,
    )


def _with_manifest(what: RankInput, facts: BundleFacts | None) -> RankInput:
    """Return the input with what its bundle knows for sure in place of guesses."""
    if facts is None:
        return what
    if facts.rank is not None:
        what = replace(what, rank=facts.rank, source=RankSource.MANIFEST)
    local = what.local_rank if facts.local_rank is None else facts.local_rank
    return replace(what, local_rank=local, host=facts.host or what.host)


def _rank(what: RankInput, oom: OomLog | None) -> tuple[int | None, RankSource]:
    """Return the rank: from a name that states it, else a log of one rank, else the guess."""
    if what.rank is not None and what.source in (RankSource.MANIFEST, RankSource.NAME):
        return what.rank, what.source
    if oom is not None:
        said = {m.rank for m in oom.messages} | {m.rank for m in oom.markers}
        said.discard(None)
        if len(said) == 1:
            return said.pop(), RankSource.LOG
    return what.rank, what.source


def line(place: Location | None, n_bytes: int, n_blocks: int) -> SourceLine:
    """Return a line of the program with its names cut; a missing stack gives an unnamed line."""
    if place is None:
        return SourceLine("", 0, "", n_bytes, n_blocks)
    return SourceLine(
        clip(place.filename, _FILE, is_name=True),
        min(place.line, _ENDLESS),
        clip(place.function, _FUNCTION),
        n_bytes,
        n_blocks,
    )


def _has_failed(diagnosis: Diagnosis, figures: DeviceFigures | None) -> bool:
    """Return whether memory ran out."""
    log = diagnosis.case.oom
    if log is not None and any(m.is_device_oom and not m.is_warning for m in log.messages):
        return True
    n_ooms = 0 if figures is None else figures.ooms or 0
    return n_ooms > 0 and diagnosis.verdict.cause != Cause.HEALTHY


def _trace_shape(snapshot: Snapshot, device: int) -> tuple[tuple[tuple[int, int], ...], int | None]:
    """Return what a device's trace, or without one its live blocks, asked for most bytes of.

    These are the ``large_sizes`` of a summary, with the time of the first refusal.
    """
    events, rows = snapshot.events, snapshot.events.device_slice(device)
    action = events.action[rows]
    sizes = events.size_bytes[rows][action == Action.ALLOC]
    if not len(sizes):
        blocks = snapshot.blocks
        is_live = blocks.state != BlockState.INACTIVE
        sizes = blocks.size_bytes[is_live & (snapshot.segments.device[blocks.segment] == device)]
    distinct, counts = np.unique(sizes, return_counts=True)
    by_bytes = np.argsort(-(distinct.astype(np.float64) * counts), kind="stable")[:MAX_SIZES]
    large = tuple((min(int(distinct[i]), _ENDLESS), int(counts[i])) for i in by_bytes)
    times_us = events.time_us[rows][action == Action.OOM].tolist()
    return large, times_us[0] if times_us and times_us[0] >= 0 else None


def _holders(diagnosis: Diagnosis, device: int) -> tuple[SourceLine, ...]:
    held = [
        line(h.location, h.now_bytes if h.peak_bytes is None else h.peak_bytes, h.n_blocks)
        for h in diagnosis.holders
        if h.device == device
    ]
    held.sort(key=lambda h: (-h.n_bytes, h.key))
    return tuple(h for h in held if h.n_bytes > 0)[:MAX_HOLDERS]


def _findings(diagnosis: Diagnosis) -> tuple[Finding, ...]:
    worst = {f.code: f for f in reversed(diagnosis.findings)}  # they are sorted, the worst first
    return tuple(
        replace(f, message="", evidence=(), locations=(), fingerprint="")
        for f in [f for f in diagnosis.findings if worst[f.code] is f][:MAX_FINDINGS]
    )


def _advice(diagnosis: Diagnosis) -> Recommendation | None:
    if not diagnosis.recommendations:
        return None
    r = diagnosis.recommendations[0]
    outlook = r.predicted.outlook and replace(r.predicted.outlook, reason="")
    return Recommendation(
        rank=r.rank,
        code=r.code,
        title=clip(r.title, _CONF),
        setting=clip(r.setting, _CONF),
        change=clip(r.change, _CONF),
        confidence=r.confidence,
        predicted=replace(r.predicted, outlook=outlook),
    )


def _changed_settings(settings: AllocatorSettings) -> tuple[tuple[str, str], ...]:
    """Return the settings that differ from PyTorch's defaults, whatever string set them."""
    default = AllocatorSettings().described()
    own = settings.changed(other={}).described()
    changed = [(name, clip(text, _WORD)) for name, text in own.items() if text != default[name]]
    return tuple(sorted(changed)[:MAX_SETTINGS])
