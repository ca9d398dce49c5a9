"""What a rule is, what it looks at, and how all rules are run.

A rule finds one pattern. Its docstring is its documentation: ``fragdoctor explain CODE`` prints it.
A rule that lacks an input is skipped with the reason; it never passes silently.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import PurePath
from typing import Final, TypeAlias, TypeVar

from msgspec import Struct

from fragdoctor.analysis.failed_attempts import LeftMemory, left_of_attempts
from fragdoctor.analysis.kept import LARGE_SHARE
from fragdoctor.analysis.result import DeviceAnalysis, OomEvent
from fragdoctor.analysis.weight_copies import WeightCopies, find_weight_copies
from fragdoctor.model.case import Case, MemoryStats, OomMessage
from fragdoctor.model.finding import (
    Confidence,
    Evidence,
    Finding,
    Location,
    RuleResults,
    Severity,
    SkippedRule,
)
from fragdoctor.model.settings import AllocatorSettings
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.model.story import LogStory
from fragdoctor.rules.failed_request import FailedRequest, known
from fragdoctor.rules.request_sources import matching_oom
from fragdoctor.trace.stacks import NATIVE, PACKAGE, TORCH, USER, classify_file, is_plumbing

MAX_STACK = 12
"""The most frames of a stack in a report; the innermost ones say where."""


class Skip(Exception):  # noqa: N818 - it is a decision, not an error
    """Raised by a rule that cannot judge this input, with the reason."""


T = TypeVar("T")


def needed(value: T | None, reason: str) -> T:
    """Return what a rule needs, or skip the rule for this reason if there is none."""
    if value is None:
        raise Skip(reason)
    return value


class Context(Struct, frozen=True, dict=True):
    """One device of a case.

    Attributes:
        device: the device, or None if no input names one.
        analysis: analysis of the snapshot, or None without a snapshot.
        message: the message that the case is about, if it is about this device.
        failed_request: its figures from all inputs together, or None if no request failed.
        stats: statistics of this device, oldest first.
        is_series: whether the statistics are a series over time.
        story: story of the log, or None if it has none.
    """

    case: Case
    device: int | None = None
    analysis: DeviceAnalysis | None = None
    message: OomMessage | None = None
    failed_request: FailedRequest | None = None
    stats: tuple[MemoryStats, ...] = ()
    is_series: bool = False
    story: LogStory | None = None

    def need_analysis(self) -> DeviceAnalysis:
        """Return the analysis of the snapshot, or skip the rule without a snapshot."""
        return needed(self.analysis, "no memory snapshot was given")

    def need_trace(self) -> DeviceAnalysis:
        """Return the analysis of a snapshot with a trace, or skip the rule without a trace."""
        a, why = self.analysis, "no snapshot with a trace of events was given"
        return needed(a if a is not None and a.capture.has_trace else None, why)

    def need_request(self) -> FailedRequest:
        """Return the failed request, or skip the rule without one."""
        return needed(self.failed_request, "no failed request is known (no event, no message)")

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot of the case."""
        return self.case.snapshot

    @property
    def backend(self) -> str:
        """Backend of the message, or CUDA without one."""
        return "cuda" if self.message is None else self.message.backend

    @property
    def settings(self) -> AllocatorSettings | None:
        """The recorded settings, or None if no file records them."""
        snapshot = self.case.snapshot
        if snapshot is None or not snapshot.settings.is_recorded:
            return None
        return snapshot.settings

    @property
    def torch_version(self) -> tuple[str, str]:
        """Lowest and highest PyTorch version that fits the inputs; "" is an open end."""
        return self.case.torch_versions(self.message)

    @property
    def total_bytes(self) -> int | None:
        """Size of the device from a message or a bundle, else from the user.

        The user's size is ignored if the recording knows better, since it is of another card.
        """
        given = self.case.overrides.capacity_bytes
        return given if self.uses_given_capacity else self._recorded_bytes

    @property
    def limit_bytes(self) -> int | None:
        """What a memory fraction allows this process, or None if no input tells of one."""
        r, fraction = self.failed_request, self.case.overrides.memory_fraction
        limit = None if r is None else r.limit_bytes
        if limit is None and fraction is not None and self.total_bytes is not None:
            limit = int(fraction * self.total_bytes)
        is_whole = limit is None or (self.total_bytes is not None and limit >= self.total_bytes)
        return None if is_whole else limit

    @property
    def _recorded_bytes(self) -> int | None:
        """Size of the device from a message, else from a bundle."""
        printed = None if self.message is None else known(self.message.total_bytes)
        bundle = self.case.bundle
        device = None if bundle is None else bundle.device(self.device)
        return device.total_bytes if printed is None and device is not None else printed

    @property
    def proven_capacity_bytes(self) -> int | None:
        """What PyTorch could have, as proven by a failed request of the trace, else None."""
        return None if self.analysis is None else self.analysis.capacity_estimate_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that the trace reserved, or 0 without a trace."""
        line = None if self.analysis is None else self.analysis.timeline
        return 0 if line is None else line.peak_reserved_bytes

    @cached_property
    def failed_event(self) -> OomEvent | None:
        """The recorded failure that the case is about, or None if the trace has none."""
        return None if self.analysis is None else matching_oom(self.analysis, self.message)

    @cached_property
    def weight_copies(self) -> WeightCopies | None:
        """The weights held twice when the request failed, or at the peak if none did."""
        a = self.analysis
        if a is None or a.timeline is None:
            return None
        event = self.failed_event
        state = a.timeline.peak_allocated_state if event is None else event.row
        found = find_weight_copies(a.trace, a.phases, state)
        least = LARGE_SHARE * int(a.timeline.allocated_bytes[state])
        return found if found is not None and found.n_bytes >= least else None

    @cached_property
    def left_of_attempts(self) -> LeftMemory | None:
        """What attempts before the failed one left in memory, or None if little."""
        a, event = self.analysis, self.failed_event
        if a is None or event is None or a.timeline is None:
            return None
        return left_of_attempts(a.trace, a.ooms, event)

    @property
    def uses_given_capacity(self) -> bool:
        """Whether the user's size may be that of the device, as far as the inputs show."""
        given = self.case.overrides.capacity_bytes
        if given is None or self._recorded_bytes is not None:
            return False
        if self.case.overrides.memory_fraction is not None:
            return True  # a fraction refers to the whole device, whose size only the user knows
        return self.proven_capacity_bytes is None and self.peak_reserved_bytes <= given

    @property
    def has_memory_fraction(self) -> bool:
        """Whether anything shows that a memory fraction is set."""
        settings, r = self.settings, self.failed_request
        if settings is not None and settings.memory_fraction is not None:
            return True
        if self.case.overrides.memory_fraction is not None:
            return True
        if r is not None and (r.limit_bytes is not None or (r.is_exact and r.is_covered_by_free)):
            return True
        analysis = self.analysis
        return analysis is not None and any(flush.cause == "gc" for flush in analysis.flushes)

    @property
    def totals(self) -> tuple[DeviceAnalysis | MemoryStats, str] | None:
        """What has the device's totals, and its name: the snapshot, else the last statistics."""
        if self.analysis is not None:
            return self.analysis, "snapshot"
        return (self.stats[-1], self.stats[-1].origin) if self.stats else None

    @property
    def retries(self) -> tuple[int, str] | None:
        """Number of allocation retries, and the input that records it."""
        for stats in reversed(self.stats):
            if stats.n_alloc_retries is not None:
                return stats.n_alloc_retries, "memory_stats"
        if self.analysis is not None and self.analysis.capture.has_trace:
            return self.analysis.n_inferred_retries, "trace"
        return None

    @property
    def n_ooms(self) -> int | None:
        """Number of failed requests by the statistics, else by the trace; None without either."""
        counted = [s.n_ooms for s in self.stats if s.n_ooms is not None]
        a = self.analysis
        of_trace = len(a.ooms) if a is not None and a.capture.has_trace else None
        return counted[-1] if counted else of_trace

    def stack(self, stack_id: int) -> tuple[Location, ...]:
        """Return a stack, innermost frame first, or nothing if none was recorded."""
        return () if self.snapshot is None else self.snapshot.stack(stack_id)

    def user_stack(self, stack_id: int) -> tuple[Location, ...]:
        """Return a stack from the user's own line outward, at most ``MAX_STACK`` frames."""
        return from_user(self.stack(stack_id))[:MAX_STACK]

    def user_line(self, stack_id: int) -> Location | None:
        """Return the user's own line of a stack, or None if no Python frame was recorded."""
        return next(iter(self.python_stack(stack_id)), None)

    def python_stack(self, stack_id: int) -> tuple[Location, ...]:
        """Return a stack as ``user_stack`` does, or nothing if it has only C++ frames."""
        frames = self.stack(stack_id)
        is_native = all(classify_file(f.filename) == NATIVE for f in frames)
        return () if is_native else from_user(frames)[:MAX_STACK]

    def line_of_library(self, stack_id: int) -> Location | None:
        """Return the innermost line of a package that the user's line called into.

        A line of a model is preferred, since trainers, launchers and hooks call it. Returns None
        if the user's own line made the request, or if no line is in a package.
        """
        for frame in self.stack(stack_id):
            kind = classify_file(frame.filename)
            if kind == USER:
                return None
            if kind == PACKAGE and not is_plumbing(frame.filename):
                return frame
        return None

    def frame(self, frame_id: int) -> Location | None:
        """Return a frame as a location, or None for id -1."""
        return None if self.snapshot is None else self.snapshot.location(frame_id)


def from_user(frames: tuple[Location, ...]) -> tuple[Location, ...]:
    """Return frames from the user's own frame outward, else from a package's or PyTorch's."""
    kinds = [classify_file(f.filename) for f in frames]
    for wanted in (USER, PACKAGE, TORCH):
        if wanted in kinds:
            return frames[kinds.index(wanted) :]
    return frames


HEADINGS: Final = (
    "What it finds.",
    "Why it costs memory.",
    "Evidence used.",
    "What to do.",
    "What it can get wrong.",
    "Example.",
    "References.",
)
"""The headings of a rule's docstring, in order."""

FINGERPRINT_FRAMES: Final = 5
"""Innermost frames that go into a fingerprint: enough to distinguish call sites, and few enough
that a distant change does not make a finding look new."""


class Found(Struct, frozen=True):
    """What a rule found on one device: a ``Finding`` without what is the same for all of a rule.

    Attributes:
        message, confidence, n_bytes, evidence, locations: as in ``Finding``.
        severity: None for the severity of the rule.
        key: distinguishes the fingerprints of findings without a stack.
    """

    message: str
    confidence: Confidence
    severity: Severity | None = None
    n_bytes: int = 0
    evidence: Sequence[Evidence] = ()
    locations: Sequence[Location] = ()
    key: str = ""


Findings: TypeAlias = Iterator[Found]
Check: TypeAlias = Callable[[Context], Findings]


class Rule(Struct, frozen=True):
    """One pattern that the doctor looks for.

    Attributes:
        code: for example ``FD103``.
        severity: severity of its findings unless they have their own.
        check: yields what is found on one device; raises ``Skip`` if the input allows no judgment.
    """

    code: str
    severity: Severity
    check: Check

    @property
    def name(self) -> str:
        """What the rule finds, in kebab-case."""
        return self.check.__name__.replace("_", "-")

    @property
    def text(self) -> str:
        """The documentation of the rule."""
        return inspect.getdoc(self.check) or ""

    @property
    def summary(self) -> str:
        """The first line of the documentation."""
        return self.text.partition("\n")[0].removesuffix(".")


def rule(code: str, severity: Severity) -> Callable[[Check], Rule]:
    """Make a function that checks one device a rule; its docstring is the documentation."""
    return lambda check: Rule(code, severity, check)


def fingerprint(code: str, locations: Sequence[Location], key: str = "") -> str:
    """Return a stable name of a finding: code and normalized stack, no addresses, no line numbers.

    Functions and base names of files survive edits elsewhere; paths and line numbers do not.
    """
    stack = [
        f"{PurePath(place.filename.replace(chr(92), '/')).name}:{place.function}"
        for place in locations[:FINGERPRINT_FRAMES]
    ]
    text = "|".join([code, key, *stack])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def run_rules(rules: Iterable[Rule], contexts: Sequence[Context]) -> RuleResults:
    """Return the results of all rules for all devices, worst first."""
    findings: list[Finding] = []
    skipped: list[SkippedRule] = []
    for rule in rules:
        reasons: list[str] = []
        for context in contexts:
            try:
                findings.extend(_finding(rule, context, found) for found in rule.check(context))
            except Skip as skip:
                reasons.append(str(skip))
        if len(reasons) == len(contexts):
            reason = reasons[0] if reasons else "there is nothing to look at"
            skipped.append(SkippedRule(rule.code, rule.name, reason))
    findings.sort(key=lambda f: (-f.severity, -f.n_bytes, f.code, f.device or 0))
    return RuleResults(tuple(findings), tuple(skipped))


def _finding(rule: Rule, context: Context, found: Found) -> Finding:
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=rule.severity if found.severity is None else found.severity,
        confidence=found.confidence,
        message=found.message,
        device=context.device,
        n_bytes=found.n_bytes,
        evidence=tuple(found.evidence),
        locations=tuple(found.locations),
        fingerprint=fingerprint(rule.code, found.locations, found.key),
    )
