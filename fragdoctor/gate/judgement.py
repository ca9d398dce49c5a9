"""The judgment of many files, or of compared runs: which pass, which fail, and why."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from fragdoctor.errors import ConfigError, FragdoctorError
from fragdoctor.gate.baseline import DEFAULT_TOLERANCE, Baseline, entry_of, what_got_worse
from fragdoctor.gate.budgets import (
    BudgetResult,
    Budgets,
    Measures,
    Outcome,
    Reason,
    check_budgets,
    fits_on,
    measured,
)
from fragdoctor.model.comparison import Comparison
from fragdoctor.model.diagnosis import NO_PROBLEM, Diagnosis
from fragdoctor.model.finding import Finding, Location, Severity
from fragdoctor.rules.registry import RULES
from fragdoctor.rules.rule import fingerprint
from fragdoctor.units import Amount, format_size, plural

CAUGHT: Final = "FD206"
"""The rule about failures that the program survived."""


class GateStatus(StrEnum):
    """The result for one file."""

    OK = "ok"
    FAILED = "failed"
    ERROR = "error"


class FileJudgement(Struct, frozen=True):
    """The judgment of one input.

    Attributes:
        name: as given; hostile text.
        reasons: why it fails, worst first.
        budgets: all budgets with their outcome; ``SKIP`` if this input cannot say.
        findings: those that count after ``--select`` and ``--ignore``, including passed ones.
        diagnosis: without the snapshot's columns; None if the input could not be read.
        error: why it could not be read.
        is_new: whether there is a baseline that does not know this file.
        remark: what to say if there is nothing to diagnose.
        is_judged: whether it holds something to judge: a failure, or memory figures.
    """

    name: str
    reasons: Sequence[Reason] = ()
    budgets: Sequence[BudgetResult] = ()
    findings: Sequence[Finding] = ()
    measures: Sequence[Measures] = ()
    diagnosis: Diagnosis | None = None
    error: FragdoctorError | None = None
    is_new: bool = False
    remark: str = ""
    is_judged: bool = True

    @property
    def status(self) -> GateStatus:
        """The result."""
        if self.error is not None:
            return GateStatus.ERROR
        return GateStatus.FAILED if self.reasons else GateStatus.OK

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed, 2 unreadable, 3 refused."""
        return self.error.exit_code if self.error is not None else int(bool(self.reasons))

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Failures that the program survived and that are not a reason to fail."""
        failing = {reason.code for reason in self.reasons}
        return tuple(f for f in self.findings if f.code == CAUGHT and f.code not in failing)


class CheckReport(Struct, frozen=True):
    """The judgment of all inputs.

    Attributes:
        budgets: options of the budgets that were set.
        unjudged: the options among them that no input could answer; a gate must not pass on these.
        has_baseline: whether files were compared with a baseline.
    """

    files: Sequence[FileJudgement]
    budgets: Sequence[str] = ()
    unjudged: Sequence[str] = ()
    has_baseline: bool = False
    notes: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """Return the worst code of all files; 2 if some budget or everything was unjudged."""
        worst = max((f.exit_code for f in self.files), default=0)
        return max(worst, 2) if self.unjudged or self.has_nothing else worst

    @property
    def has_nothing(self) -> bool:
        """Whether no input holds anything to judge: a gate must not pass on that."""
        return not any(f.is_judged or f.status is GateStatus.ERROR for f in self.files)

    def count(self, status: GateStatus) -> int:
        """Return how many files have this status, leaving out those with nothing to judge."""
        return sum(f.status is status and f.is_judged for f in self.files)


class Gate(Struct, frozen=True):
    """What files are judged by.

    Attributes:
        select, ignore: prefixes of rule codes; ignore wins, and an empty select means all.
        fail_on: lowest severity of a finding that fails a file.
        accepts_findings: only budgets fail a file (a baseline is being written).
    """

    budgets: Budgets = field(default_factory=Budgets)
    fail_on: Severity = Severity.ERROR
    select: Sequence[str] = ()
    ignore: Sequence[str] = ()
    baseline: Baseline | None = None
    tolerance: Amount = DEFAULT_TOLERANCE
    accepts_findings: bool = False

    def counts(self, finding: Finding) -> bool:
        """Return whether a finding is considered at all."""
        if finding.code.startswith(tuple(self.ignore)):
            return False
        return not self.select or finding.code.startswith(tuple(self.select))


def judge(name: str, diagnosis: Diagnosis, gate: Gate, n_files: int = 1) -> FileJudgement:
    """Return the judgment of one case that could be read.

    Its snapshot is replayed if ``fits_on`` is asked for, then dropped; ``n_files`` are judged
    together.
    """
    fit_size = gate.budgets.fits_on
    fits = () if fit_size is None else fits_on(diagnosis.case, fit_size)
    budgets = check_budgets(diagnosis, gate.budgets, fits)
    findings = tuple(f for f in diagnosis.findings if gate.counts(f))
    entry = gate.baseline.find(name, n_files) if gate.baseline is not None else None
    exceeded = [r for r in budgets if r.outcome is Outcome.EXCEEDED]
    reasons = [Reason(r.budget, r.text, device=r.device) for r in exceeded]
    if entry is not None:
        reasons += what_got_worse(
            diagnosis, findings, entry, tolerance=gate.tolerance, fail_on=gate.fail_on
        )
    elif not gate.accepts_findings:
        reasons += [Reason.of(f) for f in findings if f.severity >= gate.fail_on]
        reasons += _of_verdict(diagnosis, reasons, gate)
    measures = measured(diagnosis)
    is_known = diagnosis.verdict.cause not in NO_PROBLEM or any(m.has_any for m in measures)
    return FileJudgement(
        name=name,
        reasons=tuple(_placed(r, diagnosis) for r in reasons),
        budgets=budgets,
        findings=findings,
        measures=measures,
        diagnosis=replace(diagnosis, case=replace(diagnosis.case, snapshot=None)),
        is_new=gate.baseline is not None and entry is None,
        is_judged=is_known or bool(reasons),
    )


def rule_codes(values: Sequence[str]) -> list[str]:
    """Return rule codes from options that may each hold several, separated by commas.

    Raises:
        ConfigError: if no rule's code begins with one of them.
    """
    codes = [c.strip().upper() for value in values for c in value.split(",") if c.strip()]
    for code in codes:
        if not any(rule.code.startswith(code) for rule in RULES):
            raise ConfigError(
                f"No rule's code begins with {code!r}.", hint="List them: fragdoctor explain"
            )
    return codes


def report(files: Sequence[FileJudgement], gate: Gate, notes: Sequence[str] = ()) -> CheckReport:
    """Return the judgment of all inputs, with the budgets that none of them could answer."""
    answered = {r.budget for f in files for r in f.budgets if r.outcome is not Outcome.SKIP}
    read_any = any(f.status is not GateStatus.ERROR for f in files)
    names = gate.budgets.names
    return CheckReport(
        files=tuple(files),
        budgets=names,
        unjudged=tuple(n for n in names if n not in answered) if read_any else (),
        has_baseline=gate.baseline is not None,
        notes=tuple(notes),
    )


def new_baseline(files: Sequence[FileJudgement]) -> Baseline:
    """Return the baseline that accepts all these files as they are."""
    return Baseline(
        {
            f.name.replace("\\", "/"): entry_of(f.diagnosis, f.findings)
            for f in files
            if f.diagnosis is not None
        }
    )


def _placed(reason: Reason, diagnosis: Diagnosis) -> Reason:
    """Return a reason with the lines it is about; a finding and the verdict have their own."""
    if reason.fingerprint:
        return reason
    locations = _blamed(reason, diagnosis)
    return replace(reason, locations=locations, fingerprint=fingerprint(reason.code, locations))


def _of_verdict(diagnosis: Diagnosis, reasons: Sequence[Reason], gate: Gate) -> list[Reason]:
    """Return the verdict as the reason if a failure was read that no rule covers."""
    verdict = diagnosis.verdict
    if verdict.cause in NO_PROBLEM or any(r.code.startswith("FD") for r in reasons):
        return []
    if gate.select or any(
        f.severity >= gate.fail_on and not gate.counts(f) for f in diagnosis.findings
    ):
        return []  # the rule that covers it was deselected
    # A program that catches its failures and continues is meant to.
    is_caught = any(f.code == CAUGHT for f in diagnosis.findings)
    severity = Severity.WARNING if is_caught else Severity.ERROR
    if severity < gate.fail_on:
        return []
    return [
        Reason(
            code="verdict",
            text=verdict.summary,
            severity=severity,
            device=verdict.device,
            fingerprint=fingerprint("verdict", (), verdict.cause.value),
        )
    ]


def _blamed(reason: Reason, diagnosis: Diagnosis) -> tuple[Location, ...]:
    """Return the line that contributes most to what a budget or a figure measures."""
    found: list[tuple[int, tuple[Location, ...]]] = []
    if reason.code in ("max-peak", "min-headroom", "peak", "retries", "ooms"):
        found = [
            (h.peak_bytes or h.held_bytes, (h.location, *h.stack[1:]))
            for h in diagnosis.holders
            if h.device == reason.device and h.location is not None
        ]
    elif reason.code in ("max-stranded", "stranded"):
        found = [
            (p.stranded_bytes, (p.location,))
            for p in diagnosis.stranders
            if p.device == reason.device and p.location is not None
        ]
    elif reason.code == "no-growth":
        growth = [f for f in diagnosis.findings if f.code == "FD401" and f.locations]
        found = [(f.n_bytes, tuple(f.locations)) for f in growth]
    return max(found, key=lambda pair: pair[0], default=(0, ()))[1]


class JudgedGrowth(Struct, frozen=True):
    """One judged figure of one device, first run against last; ``unit`` is bytes or count.

    ``n_requests`` is how many requests, from the beginning, the figures cover; None means the whole
    runs.
    """

    measure: str
    device: int
    before: int
    after: int
    allowed: int
    unit: str = "bytes"
    n_requests: int | None = None

    @property
    def is_exceeded(self) -> bool:
        """Whether it grew by more than is accepted."""
        return self.after - self.before > self.allowed

    @property
    def text(self) -> str:
        """One sentence with the numbers."""
        what, grown = f"{self.measure} of GPU {self.device}", self.after - self.before
        if self.unit == "count":
            return (
                f"{what} rose from {self.before} to {self.after}: the peak is what the run "
                "reached, not what it needs."
            )
        if self.n_requests is not None:
            what += f" over the first {plural(self.n_requests, 'request')}, which both made,"
        if grown <= 0:
            return f"{what} did not grow."
        word = "more than" if self.is_exceeded else "within"
        return (
            f"{what} grew by {format_size(grown)}, {word} the {format_size(self.allowed)} accepted."
        )


def judge_growth(comparison: Comparison, accepted: Amount) -> tuple[JudgedGrowth, ...]:
    """Return the judgment of every peak that both runs report; empty if there is none."""
    found: list[JudgedGrowth] = []
    for peaks in comparison.device_peaks:
        n = peaks.n_common_requests
        for measure, (old, new) in (
            ("Peak allocated memory", peaks.allocated_bytes),
            ("Peak active memory", peaks.active_bytes),
        ):
            if old is not None and new is not None:
                allowed = accepted.of(old) or 0
                found.append(JudgedGrowth(measure, peaks.device, old, new, allowed, n_requests=n))
        before, after = peaks.ooms
        if before is not None and after is not None and after > before:
            failures = "Out-of-memory failures"
            found.append(JudgedGrowth(failures, peaks.device, before, after, 0, "count"))
    return tuple(found)


def has_grown(judged: Sequence[JudgedGrowth]) -> bool:
    """Return whether any peak grew by more than is accepted."""
    return any(g.is_exceeded for g in judged)
