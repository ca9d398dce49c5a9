"""Hand-built judgments for tests of the reports of ``check``."""

from __future__ import annotations

import diagnoses
from msgspec.structs import replace

from fragdoctor.errors import InputError
from fragdoctor.gate.budgets import Budgets
from fragdoctor.gate.judgement import CheckReport, FileJudgement, Gate, judge, report
from fragdoctor.model.finding import Severity
from fragdoctor.units import GIB, Amount

GATE = Gate(
    budgets=Budgets(
        max_peak=Amount(n_bytes=3 * GIB),
        max_stranded=Amount(share=0.05),
        max_retries=0,
        min_headroom=Amount(share=0.1),
        no_growth=True,
    )
)


def failing() -> FileJudgement:
    case = diagnoses.fragmentation()
    error = replace(case.findings[0], severity=Severity.ERROR, code="FD102", fingerprint="ab12")
    return judge("runs/a.pickle", replace(case, findings=(error,)), GATE, 3)


def mixed() -> CheckReport:
    """Return a check of one file that fails, one that passes and one that cannot be read."""
    fine = judge("runs/b.pickle", diagnoses.healthy(), GATE, 3)
    broken = FileJudgement(
        "c.pickle", error=InputError("c.pickle is empty.", hint="Record it again.")
    )
    return report([failing(), fine, broken], GATE)


def passing() -> CheckReport:
    return report([judge("runs/b.pickle", diagnoses.healthy(), GATE)], GATE)


def nothing() -> CheckReport:
    return report([], GATE)


def planted(text: str) -> CheckReport:
    """Return a failing check in which ``text`` replaces everything that an input can contain."""
    case = diagnoses.planted(diagnoses.fragmentation(), text)
    error = replace(case.findings[0], severity=Severity.ERROR, code="FD102")
    gate = Gate(budgets=replace(GATE.budgets, fits_on=GIB))
    judged = judge(text, replace(case, findings=(error,)), gate)
    return report([judged, FileJudgement(text, error=InputError(text, hint=text))], gate)


ALL = {f.__name__: f for f in (mixed, passing, nothing)}
