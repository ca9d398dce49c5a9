"""Results for machine-readable formats: few of them, each with a place and a fingerprint.

A place is the user's file below the source root with a line, or else the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Final
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.gate.budgets import Reason
from fragdoctor.gate.judgement import CheckReport, FileJudgement
from fragdoctor.model.diagnosis import NO_PROBLEM, Diagnosis
from fragdoctor.model.finding import MAX_LINE, Location, Severity
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.source_files import MAX_PATH, file_of, relative
from fragdoctor.report.words import shortened, verdict_title
from fragdoctor.rules.registry import find_rule


class ResultPlace(Struct, frozen=True):
    """A file and a line in it; ``line`` is None if it is unknown.

    ``path`` is relative to the source root if the file is below it; it is hostile text.
    """

    path: str
    line: int | None = None
    function: str = ""

    @property
    def is_relative(self) -> bool:
        """Whether the path is relative to the source root."""
        return not self.path.startswith("/") and ":" not in self.path[:3]

    @property
    def uri(self) -> str:
        """Return the path as a URI reference: relative, or ``file:///...``; ASCII."""
        text = quote(self.path.encode("utf-8", "replace"), safe="/-._~")
        if self.is_relative:
            return text
        return f"file://{text}" if text.startswith("/") else f"file:///{text}"


def place_of(location: Location, look: RenderOptions) -> ResultPlace:
    """Return the place of a line of the user's program, relative to the source root."""
    line = location.line if 0 < location.line < MAX_LINE else None
    path = relative(location.filename or "unknown", look)
    place = ResultPlace(path, line, location.function[:MAX_PATH])
    found = None if place.is_relative else file_of(location, look)
    return place if found is None else replace(place, path=found)


def place_of_input(name: str, look: RenderOptions) -> ResultPlace:
    """Return the input itself as a place."""
    return ResultPlace("stdin" if name in ("-", "standard input") else relative(name, look))


MAX_RESULTS: Final = 200
"""The most results of one run: nobody reads hundreds of them, and code hosts refuse them."""

BUDGET_TITLES: Final = {
    "max-peak": "Peak of active memory over budget",
    "max-stranded": "Stranded free memory over budget",
    "max-retries": "Allocation retries over budget",
    "min-headroom": "Headroom under budget",
    "fits-on": "Does not fit on the device",
    "no-growth": "Memory grows",
    "verdict": "The program ran out of memory",
    "peak": "Peak memory worse than the baseline",
    "stranded": "Stranded free memory worse than the baseline",
    "retries": "Allocation retries worse than the baseline",
    "ooms": "Out-of-memory failures worse than the baseline",
    "unreadable": "The input cannot be read",
    "unjudged": "A budget that no input can answer",
}


class Result(Struct, frozen=True):
    """One thing to look at.

    Attributes:
        code: the rule (``FD101``) or the budget (``max-peak``).
        message: one sentence with its numbers; hostile text.
        level: how bad it is.
        place: where to look: the user's line, or else the input.
        stack: the source lines behind it, innermost first.
        source: the input that it comes from.
        fingerprint: stable, because it leaves out addresses and line numbers.
    """

    code: str
    message: str
    level: Severity
    place: ResultPlace
    source: str
    fingerprint: str
    stack: Sequence[ResultPlace] = ()

    @property
    def sourced(self) -> str:
        """The message, with the name of its input if the place does not name it."""
        is_there = self.source in ("", self.place.path)
        return self.message if is_there else f"{self.message} [{self.source}]"


def results_of_check(report: CheckReport, look: RenderOptions) -> Iterator[Result]:
    """Yield why files fail or cannot be read (up to ``MAX_RESULTS``), and what was not judged."""
    every = chain.from_iterable(_of_file(judgement, look) for judgement in report.files)
    yield from islice(every, MAX_RESULTS)
    for name in report.unjudged:
        text = f"--{name} could not be judged in any of the files."
        yield _of(Reason("unjudged", text, fingerprint=f"un-{name}"), ".", look)


def _of_file(judgement: FileJudgement, look: RenderOptions) -> Iterator[Result]:
    reasons = [*judgement.reasons, *map(Reason.of, judgement.warnings)]
    if (error := judgement.error) is not None:
        text = f"{error} {error.hint}".strip()
        reasons.append(Reason("unreadable", text, fingerprint=f"unreadable-{error.code}"))
    for reason in reasons:
        yield _of(reason, judgement.name, look)


def results_of_diagnosis(diagnosis: Diagnosis, look: RenderOptions) -> Iterator[Result]:
    """Yield findings from warnings up, and the verdict if no rule reports the failure."""
    source = diagnosis.case.sources[0] if diagnosis.case.sources else "-"
    findings = [f for f in diagnosis.findings if f.severity >= Severity.WARNING][:MAX_RESULTS]
    for finding in findings:
        yield _of(Reason.of(finding), source, look)
    verdict = diagnosis.verdict
    has_error = any(f.severity is Severity.ERROR for f in findings)
    if not has_error and verdict.cause not in NO_PROBLEM:
        text = f"{verdict_title(verdict)}: {verdict.summary}"
        # From the user's line outward.
        stack = () if diagnosis.failure is None else diagnosis.failure.stack
        name = f"verdict-{verdict.cause.value}"
        reason = Reason("verdict", text, locations=stack, fingerprint=name)
        yield _of(reason, source, look)


def _of(reason: Reason, source: str, look: RenderOptions) -> Result:
    stack = tuple(place_of(x, look) for x in reason.locations)
    return Result(
        code=reason.code,
        message=shortened(reason.text),
        level=reason.severity,
        place=stack[0] if stack else place_of_input(source, look),
        source=source,
        fingerprint=reason.fingerprint or reason.code,
        stack=stack,
    )


def title_of(code: str) -> str:
    """Return a few words about a rule or a budget: our text, not from an input."""
    rule = find_rule(code)
    return rule.summary if rule is not None else BUDGET_TITLES.get(code, code)
