"""What a rule is, and how one run of all rules goes.

A rule finds one pattern. Its docstring is its documentation: ``fragdoctor explain CODE`` prints it.
A rule that lacks what it needs is skipped with the reason, never silently passed.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import PurePath
from typing import ClassVar, Final

from fragdoctor.model.finding import (
    Confidence,
    Evidence,
    Finding,
    Location,
    RuleResults,
    Severity,
    SkippedRule,
)
from fragdoctor.rules.context import Context

HEADINGS: Final = (
    "What it finds.",
    "Why it costs memory.",
    "Evidence used.",
    "What to do.",
    "What it can get wrong.",
    "Example.",
    "References.",
)
"""The headings of a rule's docstring, in their order."""

FINGERPRINT_FRAMES: Final = 5
"""Innermost frames that go into a fingerprint: enough to distinguish call sites, few enough that a
change far outside does not make a finding look new."""


class Need(StrEnum):
    """An input that a rule cannot do without."""

    SNAPSHOT = "snapshot"
    TRACE = "trace"
    MESSAGE = "message"
    STATS = "stats"
    FAILED_REQUEST = "failed_request"


NEED_REASONS: Final = {
    Need.SNAPSHOT: "no memory snapshot was given",
    Need.TRACE: "no snapshot with a trace of events was given",
    Need.MESSAGE: "no out-of-memory message was given",
    Need.STATS: "no memory statistics were given",
    Need.FAILED_REQUEST: "no failed request is known (no event, message or --request)",
}


class Skip(Exception):  # noqa: N818 - it is a decision, not an error
    """Raised by a rule that cannot judge this input; says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Rule(ABC):
    """One pattern that the doctor looks for.

    Attributes:
        code: ``FD103``.
        name: what it finds, in kebab-case.
        summary: one line.
        severity: severity of its findings unless ``finding`` is given another.
        since: first version of fragdoctor with this rule.
        status: ``preview`` or ``stable``.
        needs: inputs without which it is skipped.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    summary: ClassVar[str]
    severity: ClassVar[Severity]
    since: ClassVar[str] = "0.1.0"
    status: ClassVar[str] = "preview"
    needs: ClassVar[frozenset[Need]] = frozenset()

    @abstractmethod
    def check(self, context: Context) -> Iterator[Finding]:
        """Yield the findings on one device.

        Raises:
            Skip: this input does not allow to judge.
        """

    def finding(  # noqa: PLR0913 - the fields of a finding, all by keyword
        self,
        context: Context,
        message: str,
        *,
        confidence: Confidence,
        severity: Severity | None = None,
        n_bytes: int = 0,
        evidence: Sequence[Evidence] = (),
        locations: Sequence[Location] = (),
        key: str = "",
    ) -> Finding:
        """Return a finding of this rule; ``key`` distinguishes findings without a stack."""
        return Finding(
            code=self.code,
            name=self.name,
            severity=self.severity if severity is None else severity,
            confidence=confidence,
            message=message,
            device=context.device,
            n_bytes=n_bytes,
            evidence=tuple(evidence),
            locations=tuple(locations),
            fingerprint=fingerprint(self.code, locations, key),
        )


def fingerprint(code: str, locations: Sequence[Location], key: str = "") -> str:
    """Return a stable name of a finding: code and normalised stack, no addresses, no line numbers.

    Functions and file base names survive an edit elsewhere in the file; paths and lines do not.
    """
    stack = [
        f"{PurePath(place.filename.replace(chr(92), '/')).name}:{place.function}"
        for place in locations[:FINGERPRINT_FRAMES]
    ]
    text = "|".join([code, key, *stack])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def run_rules(rules: Iterable[Rule], contexts: Sequence[Context]) -> RuleResults:
    """Return what all rules say about all devices, worst first."""
    findings: list[Finding] = []
    skipped: list[SkippedRule] = []
    for rule in rules:
        reasons: list[str] = []
        for context in contexts:
            try:
                _require(rule, context)
                findings.extend(rule.check(context))
            except Skip as skip:
                reasons.append(skip.reason)
        if len(reasons) == len(contexts):
            reason = reasons[0] if reasons else "there is nothing to look at"
            skipped.append(SkippedRule(rule.code, rule.name, reason))
    findings.sort(key=lambda f: (-f.severity, -f.n_bytes, f.code, f.device or 0))
    return RuleResults(tuple(findings), tuple(skipped))


def _require(rule: Rule, context: Context) -> None:
    for need in Need:
        if need in rule.needs and not _has(context, need):
            raise Skip(NEED_REASONS[need])


def _has(context: Context, need: Need) -> bool:
    analysis = context.analysis
    return {
        Need.SNAPSHOT: analysis is not None,
        Need.TRACE: analysis is not None and analysis.capture.has_trace,
        Need.MESSAGE: context.message is not None,
        Need.STATS: bool(context.stats),
        Need.FAILED_REQUEST: context.failed_request is not None,
    }[need]
