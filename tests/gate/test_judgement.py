from __future__ import annotations

import diagnoses
import pytest
from msgspec.structs import replace

from fragdoctor.errors import InputError, RefusedSnapshot
from fragdoctor.gate.budgets import Budgets
from fragdoctor.gate.judgement import (
    FileJudgement,
    Gate,
    GateStatus,
    judge,
    new_baseline,
    report,
)
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Severity
from fragdoctor.units import GIB, Amount


def with_error() -> Diagnosis:
    case = diagnoses.fragmentation()
    error = replace(case.findings[0], severity=Severity.ERROR)
    return replace(case, findings=(error, *case.findings[1:]))


def codes(diagnosis: Diagnosis, gate: Gate) -> list[str]:
    return [r.code for r in judge("a.pickle", diagnosis, gate).reasons]


def test_healthy_case_passes() -> None:
    judged = judge("a.pickle", diagnoses.healthy(), Gate())

    assert (judged.status, judged.exit_code, judged.reasons) == (GateStatus.OK, 0, ())


def test_error_finding_fails_with_its_place() -> None:
    judged = judge("a.pickle", with_error(), Gate())

    assert judged.exit_code == 1
    assert [r.code for r in judged.reasons] == ["FD101"]
    assert judged.reasons[0].locations == (diagnoses.CACHE,)


def test_warning_fails_only_when_asked() -> None:
    case = diagnoses.fragmentation()

    assert "FD101" not in codes(case, Gate())
    assert codes(case, Gate(fail_on=Severity.WARNING)) == ["FD101"]


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (Gate(select=["FD1"]), ["FD101"]),
        (Gate(select=["FD2"]), []),
        (Gate(ignore=["FD101"]), []),
        (Gate(ignore=["FD2"]), ["FD101"]),
        (Gate(select=["FD101"], ignore=["FD1"]), []),
    ],
)
def test_select_and_ignore_choose_the_rules(gate: Gate, expected: list[str]) -> None:
    assert expected == codes(with_error(), gate)


def test_failure_that_no_rule_speaks_about_fails_by_its_verdict() -> None:
    assert codes(diagnoses.capacity(), Gate()) == ["verdict"]
    assert codes(diagnoses.nothing_known(), Gate()) == []


def test_budget_of_peak_names_the_largest_holder() -> None:
    gate = Gate(budgets=Budgets(max_peak=Amount(n_bytes=GIB)))

    judged = judge("a.pickle", with_error(), gate)

    assert judged.reasons[0].code == "max-peak"
    assert judged.reasons[0].locations[0] == diagnoses.CACHE


def test_baseline_accepts_what_it_holds_and_nothing_more() -> None:
    accepted = judge("a.pickle", with_error(), Gate(accepts_findings=True))
    gate = Gate(baseline=new_baseline([accepted]))

    again = judge("a.pickle", with_error(), gate)
    worse = replace(with_error().findings[0], code="FD401", fingerprint="other")
    other = judge("a.pickle", replace(with_error(), findings=(worse,)), gate)

    assert accepted.exit_code == 0
    assert again.exit_code == 0
    assert [r.code for r in other.reasons] == ["FD401"]


def test_baseline_does_not_soften_a_budget() -> None:
    accepted = judge("a.pickle", with_error(), Gate(accepts_findings=True))
    gate = Gate(baseline=new_baseline([accepted]), budgets=Budgets(max_peak=Amount(n_bytes=GIB)))

    assert codes(with_error(), gate) == ["max-peak"]


def test_file_that_the_baseline_lacks_is_judged_as_without_one() -> None:
    accepted = [judge(n, diagnoses.healthy(), Gate(accepts_findings=True)) for n in ("x/a", "y/b")]

    judged = judge("z/c", with_error(), Gate(baseline=new_baseline(accepted)), n_files=2)

    assert judged.is_new
    assert judged.exit_code == 1


def test_exit_code_is_the_worst_of_all_files() -> None:
    fine, failed = judge("a", diagnoses.healthy(), Gate()), judge("b", with_error(), Gate())
    broken = FileJudgement("c", error=InputError("c is empty."))
    hostile = FileJudgement("d", error=RefusedSnapshot("d holds a global."))

    assert report([fine], Gate()).exit_code == 0
    assert report([fine, failed], Gate()).exit_code == 1
    assert report([failed, broken, fine], Gate()).exit_code == 2
    assert report([failed, hostile, broken], Gate()).exit_code == 3


def test_budget_that_no_input_can_answer_does_not_pass() -> None:
    gate = Gate(budgets=Budgets(min_headroom=Amount(share=0.1)))
    case = diagnoses.healthy()
    blind = replace(case, devices=(replace(case.devices[0], capacity_bytes=None),))

    result = report([judge("a", blind, gate)], gate)
    mixed = report([judge("a", blind, gate), judge("b", case, gate)], gate)

    assert result.unjudged == ("min-headroom",)
    assert result.exit_code == 2
    assert mixed.unjudged == ()


def test_text_without_a_failure_passes() -> None:
    quiet = FileJudgement("train.log", remark="nothing in it", is_judged=False)

    assert (quiet.status, quiet.exit_code) == (GateStatus.OK, 0)
    assert report([quiet], Gate()).exit_code == 2  # but a gate does not pass on nothing
