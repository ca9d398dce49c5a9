"""Read what a log line says besides messages: time, progress, trial, events, memory figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from fragdoctor.inputs.wordings.wording import printed_bytes
from fragdoctor.model.story import PrintedFigure, SceneKind, TimePrecision

_HEAD: Final = 120
_MONTHS: Final = (
    "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
)  # fmt: skip
_HMS: Final = r"(?P<H>\d{1,2}):(?P<M>\d\d)(?::(?P<S>\d\d)(?:[.,](?P<f>\d{1,9}))?)?"
_FULL: Final = re.compile(
    rf"(?<!\d)(?P<y>\d{{4}})[-/](?P<m>\d{{1,2}})[-/](?P<d>\d{{1,2}})[T _]{_HMS}",
    re.ASCII,
)
_SYSLOG: Final = re.compile(
    r"(?<![A-Za-z])(?P<b>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\s{1,2}"
    rf"(?P<d>\d{{1,2}})\s{_HMS}",
    re.ASCII,
)
_GLOG: Final = re.compile(rf"(?:^|[\s\[])[IWEF](?P<m>\d\d)(?P<d>\d\d)\s{_HMS}", re.ASCII)
_SHORT: Final = re.compile(
    rf"(?:^|[\s\[(])(?P<m>\d{{1,2}})[-/](?P<d>\d{{1,2}})(?:[-/](?P<y>\d{{2,4}}))?[ ,]\s?{_HMS}",
    re.ASCII,
)
_CLOCK: Final = re.compile(
    r"^[\s\[(]{0,4}(?:\[?[A-Za-z_.:-]{1,20}\d{0,5}\]?[:\s]{1,2})?[\[(]?"
    r"(?P<H>\d{1,2}):(?P<M>\d\d):(?P<S>\d\d)(?:[.,](?P<f>\d{1,9}))?(?![\d:<])",
    re.ASCII,
)
# Dates without a year are counted in a leap year, so that February 29 is valid.
_SOME_YEAR: Final = 1972


def time_of(line: str) -> tuple[float | None, TimePrecision]:
    """Return the time at the start of a plain line, in seconds, and how complete it is.

    A log has one time zone, so the zone that a line may print is not read.
    """
    head = line[:_HEAD]
    if ":" not in head:
        return None, TimePrecision.NONE
    for pattern, precision in (
        (_FULL, TimePrecision.DATED),
        (_SYSLOG, TimePrecision.YEARLESS),
        (_GLOG, TimePrecision.YEARLESS),
        (_SHORT, TimePrecision.YEARLESS),
    ):
        match = pattern.search(head)
        if match is not None:
            return _dated(match, precision)
    match = _CLOCK.match(head)
    return (
        (_seconds(match), TimePrecision.CLOCK) if match is not None else (None, TimePrecision.NONE)
    )


def _seconds(match: re.Match[str]) -> float:
    fraction = match.group("f")
    return (
        3600 * int(match.group("H"))
        + 60 * int(match.group("M"))
        + int(match.group("S") or 0)
        + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)
    )


def _dated(match: re.Match[str], precision: TimePrecision) -> tuple[float | None, TimePrecision]:
    parts = match.groupdict()
    month = _MONTHS.index(parts["b"].lower()) + 1 if parts.get("b") else int(parts["m"])
    year = int(parts["y"]) if parts.get("y") else _SOME_YEAR
    if parts.get("y"):
        year += 2000 if year < 100 else 0
        precision = TimePrecision.DATED
    try:
        day = datetime(year, month, int(parts["d"]), tzinfo=UTC)
        seconds = (day + timedelta(seconds=_seconds(match))).timestamp()
    except (ValueError, OverflowError):
        return None, TimePrecision.NONE
    return seconds, precision


PROGRESS_LITERALS: Final = ("%|", "epoch", "step", "iter", "batch")

_BAR: Final = re.compile(
    r"(\d{1,3})%\|[^|]{0,300}\|\s{0,4}(\d[\d.]{0,12}[kmg]?)/(\d[\d.]{0,12}[kmg]?)(?![\d.])"
)
_OF: Final = r"(?:\s{0,2}(?:/|of)\s{0,2}(\d{1,12}))?"
_MARK: Final = r"['\"]?[\s:=\[(#]{1,4}"
_EPOCH: Final = re.compile(rf"(?<![a-z])epoch{_MARK}(\d{{1,9}}(?:\.\d{{1,6}})?){_OF}")
_STEP: Final = re.compile(
    r"(?<![a-z])(step|iter|iteration|training_iteration|global_step|batch|update)"
    rf"{_MARK}(\d{{1,12}})(?!\d|\.\d)(?![\d.]{{0,40}}%){_OF}"  # Slurm's step 4711.0 is no count
)
_DESCRIPTION: Final = re.compile(r"([a-z][\w \[\]/-]{0,30}?)[:\s]{0,3}$")


def place_of(plain: str) -> str:
    """Return a run's progress, such as ``epoch 3/10, step 1200``, or "" if the line has none."""
    lowered = plain.lower()
    parts: list[str] = []
    epoch = _EPOCH.search(lowered)
    if epoch is not None:
        parts.append(_counted("epoch", epoch.group(1), epoch.group(2)))
    bar = _BAR.search(lowered) if "%|" in lowered else None
    if bar is not None:
        said = _DESCRIPTION.search(lowered, max(0, bar.start() - 40), bar.start())
        name = f"{said[1].strip()} " if said and not epoch else ""
        parts.append(f"{name}{bar.group(2)}/{bar.group(3)}")
        return ", ".join(parts)
    step = _STEP.search(lowered)
    if step is not None:
        name = step.group(1).replace("training_", "").replace("global_", "")
        parts.append(_counted(name, step.group(2), step.group(3)))
    return ", ".join(parts)


def _counted(name: str, value: str, total: str | None) -> str:
    return f"{name} {value}/{total}" if total else f"{name} {value}"


TRIAL_LITERALS: Final = (
    "trial", "starting run", "sweep", "experiment", "config ", "combination", "fold ",
    "run ",
)  # fmt: skip

_NAME: Final = r"(?P<name>[\w.-]{0,60}\d[\w.-]{0,60})"
# Optuna, Ray Tune, Ax, hand-written loops: "Trial 7 finished", "[trial=7]", "trial_id: ab_00007"
_TRIAL: Final = re.compile(
    r"(?<![\w])trial(?:[ _](?:id|number|no|num|index|name))?['\"]?[\s:=#.(\[-]{1,4}" + _NAME
)
_NUMBERED: Final = re.compile(
    r"(?<![\w/.-])(?P<what>sweep|run|experiment|config|configuration|combination|fold)"
    r"[\s:=#\[(]{1,3}(?P<name>\d{1,9})(?P<total>\s{0,2}(?:/|of)\s{0,2}\d{1,9})?(?![\w.])"
)
_RAY: Final = re.compile(r"(?<![\w])trial (?P<name>[a-z_]\w{0,60}_[0-9a-f]{4,8}_\d{4,6})")
_WANDB: Final = re.compile(r"agent starting run: (?P<name>[a-z0-9]{6,12})(?![\w])")
_BEST: Final = re.compile(r"best(?:\s|_)(?:is\s|value\s|so far\s|of\s)?$")
_END: Final = re.compile(
    r"(?P<failed>fail|error|crash|abort|exception|out of memory|oom)"
    r"|(?P<pruned>prun|stopped early|early.?stop)"
    r"|(?P<end>finish|complet|\bdone\b|\bended\b|succeed|success|terminated)"
    r"|(?P<start>\bstart|\bbegin|launch|running|\bcreated\b)"
)
_HEADLINE: Final = re.compile(r"^[\s=\-#*>~|\[(]{0,40}$")


def trial_of(plain: str) -> tuple[str, SceneKind | None]:
    """Return the trial that a line names, and what the line says about the trial.

    The kind is None if the line only names a trial, such as with a prefix ``[trial 7]``; the name
    is "" if the line names no trial.
    """
    lowered = plain[:1000].lower()
    for pattern in (_WANDB, _RAY, _TRIAL, _NUMBERED):
        match = pattern.search(lowered)
        if match is None:
            continue
        if _BEST.search(lowered[max(0, match.start() - 16) : match.start()]):
            continue
        name = match.group("name").strip(".-_")
        if pattern is _WANDB:
            return name, SceneKind.TRIAL_START
        said = _said(lowered, match)
        if pattern is not _NUMBERED:
            return name, said
        # "run 3" also occurs in sentences; only a total or a headline makes it a trial
        is_counted = bool(match.group("total"))
        is_headline = bool(_HEADLINE.match(lowered[: match.start()]))
        if is_counted or (is_headline and said is not None):
            return name, said or SceneKind.TRIAL_START
    return "", None


def _said(lowered: str, match: re.Match[str]) -> SceneKind | None:
    after = lowered[match.end() : match.end() + 40]
    before = lowered[max(0, match.start() - 24) : match.start()]
    found = _END.search(after) or _END.search(before)
    if found is None:
        is_headline = bool(_HEADLINE.match(before)) and after.strip(" =-#*~|/])0123456789of:") == ""
        return SceneKind.TRIAL_START if is_headline else None
    if found.group("failed"):
        return SceneKind.TRIAL_FAILED
    if found.group("pruned"):
        return SceneKind.TRIAL_PRUNED
    return SceneKind.TRIAL_END if found.group("end") else SceneKind.TRIAL_START


HAPPENING_LITERALS: Final = (
    "retries", "retry", "trying batch", "batch size", "batch_size", "smaller batch", "restart",
    "requeu", "watchdog", "cuda error", "hip error", "cache flushes",
)  # fmt: skip

_COUNTED: Final = re.compile(
    r"(?:num_alloc_retries|alloc(?:ation|ator)?[ _]retries|cudamalloc retries)"
    r"['\"]?[\s:=|]{1,8}(\d{1,9})"
)
_FLUSHES: Final = re.compile(r"(\d{1,9}) pytorch allocator cache flushes")
_SMALLER: Final = re.compile(
    r"(?:retry|trying|reduc|halv|decreas|lower|shrink|fall(?:ing)? back)[\w ]{0,40}"
    r"(?:micro[- ]?)?batch"
    r"|retry[\w /]{0,40}(?:oom|out of memory|smaller|trial|allocation)"
    r"|(?:oom|out of memory)[^.]{0,60}retry"
    r"|batch[ _]size[\s:=]{0,3}\d{0,8}[^.]{0,30}(?:failed|too large|trying)"
    r"|batch[ _]size (?:reduced|halved|lowered|decreased)"
)
# A program that resumes from a checkpoint says so at its first start, too: that is no restart.
_RESTART: Final = re.compile(
    r"(?<![a-z])restart(?:ing|ed)(?![a-z])[^.]{0,60}"
    r"(?:worker|process|train|trial|job|run|actor|attempt|from|script|agent)"
    r"|(?:worker|process|trial|job|run|training|script)s?[^.]{0,30}(?<![a-z])restart(?:ing|ed)"
    r"|restart_count['\"]?[=:]\s?[1-9]"
    r"|requeue?(?:d|ing)"
)
_WATCHDOG: Final = re.compile(r"watchdog[^.]{0,80}(?:timeout|timed out|terminated|exception|hang)")
_ERROR: Final = re.compile(r"(?:cuda|hip) error(?::| \(|\s?\d)")
_NEGATED: Final = re.compile(r"(?:max_restarts|no (?:retry|restart)|without (?:retry|restart))")
_HAPPENINGS: Final = (
    (_NEGATED, None),
    (_WATCHDOG, SceneKind.COLLECTIVE),
    (_ERROR, SceneKind.CUDA_ERROR),
    (_RESTART, SceneKind.RESTART),
    (_SMALLER, SceneKind.RETRY),
)


def happening_of(plain: str) -> tuple[SceneKind | None, int | None]:
    """Return the event that a line reports and its counter, or (None, None) for other lines."""
    lowered = plain[:1000].lower()
    counted = _COUNTED.search(lowered) or _FLUSHES.search(lowered)
    if counted is not None:
        n = int(counted.group(1))
        kind = SceneKind.CACHE_FLUSH if "flushes" in counted.group() else SceneKind.RETRY
        return (kind, n) if n else (None, None)
    return next((kind for said, kind in _HAPPENINGS if said.search(lowered)), None), None


FIGURE_LITERALS: Final = ("alloc", "reserved", "mem", "mib /", "vram", "max_ma")

_NUMBER: Final = r"(?P<n>\d{1,15}(?:,\d{3}){0,4}(?:\.\d{1,9})?)"
_UNIT: Final = r"(?P<u>bytes|[kmgt]i?b|[kmgt]|b)"
# Examples: GPU memory allocated: 3.21 GiB; mem_alloc=3.21GB; allocated_gb: 3.21; Memory (MB): 512
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
"""A number without a unit counts as bytes if it is at least this large; below, it is ambiguous."""


def figures_of(plain: str) -> Iterator[PrintedFigure]:
    """Yield a line's figures of memory currently in use, without peaks, totals and free memory."""
    lowered = plain[:1000].lower()
    if not any(literal in lowered for literal in FIGURE_LITERALS):
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
    """Yield numbers with the words that label them."""
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
    n_bytes = printed_bytes(number + unit)
    is_bytes = bool(unit) or ("." not in number and n_bytes >= _MIN_PLAIN_BYTES)
    return n_bytes if is_bytes and n_bytes < 2**50 else None
