from __future__ import annotations

import diagnoses
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.gate.budgets import BudgetResult, Budgets, Outcome, check_budgets
from fragdoctor.model.diagnosis import DeviceFigures, Diagnosis
from fragdoctor.model.finding import Severity, SkippedRule
from fragdoctor.units import GIB, MIB, Amount, parse_amount


def with_figures(**figures: int | None) -> Diagnosis:
    base = DeviceFigures(
        device=0,
        reserved_bytes=1000 * MIB,
        active_bytes=700 * MIB,
        peak_active_bytes=800 * MIB,
        stranded_free_bytes=50 * MIB,
        alloc_retries=2,
        capacity_bytes=1000 * MIB,
    )
    return replace(diagnoses.healthy(), devices=(replace(base, **figures),))


FITS = BudgetResult("fits-on", Outcome.KEPT, "it fits", 0, 5, 6)
FITS_NOT = BudgetResult("fits-on", Outcome.EXCEEDED, "it does not", 1, 9, 6)
NO_TRACE = BudgetResult("fits-on", Outcome.SKIP, "no trace", 0)


def only(
    diagnosis: Diagnosis, budgets: Budgets, fits: tuple[BudgetResult, ...] = ()
) -> BudgetResult:
    (result,) = check_budgets(diagnosis, budgets, fits)
    return result


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("70GiB", Amount(n_bytes=70 * GIB)),
        ("0", Amount(n_bytes=0)),
        ("5%", Amount(share=0.05)),
        (" 12.5% ", Amount(share=0.125)),
        ("100%", Amount(share=1.0)),
    ],
)
def test_amount_of_size_or_percentage_is_read(text: str, expected: Amount) -> None:
    assert expected == parse_amount(text)


@pytest.mark.parametrize(
    "text", ["", "%", "-5%", "101%", "5 percent", "70 gigs", "1e3%", "\u0665%"]
)
def test_amount_of_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_amount(text)


@given(st.integers(0, 2**60), st.integers(0, 100))
def test_amount_as_share_is_between_nothing_and_the_whole(whole: int, percent: int) -> None:
    part = Amount(share=percent / 100).of(whole)

    assert part is not None
    assert 0 <= part <= whole + 1


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        (Budgets(max_peak=Amount(n_bytes=800 * MIB)), Outcome.KEPT),
        (Budgets(max_peak=Amount(n_bytes=800 * MIB - 1)), Outcome.EXCEEDED),
        (Budgets(max_peak=Amount(share=0.8)), Outcome.KEPT),
        (Budgets(max_peak=Amount(share=0.79)), Outcome.EXCEEDED),
        (Budgets(max_stranded=Amount(share=0.05)), Outcome.KEPT),
        (Budgets(max_stranded=Amount(share=0.04)), Outcome.EXCEEDED),
        (Budgets(max_stranded=Amount(n_bytes=0)), Outcome.EXCEEDED),
        (Budgets(max_retries=2), Outcome.KEPT),
        (Budgets(max_retries=1), Outcome.EXCEEDED),
        (Budgets(max_retries=0), Outcome.EXCEEDED),
        (Budgets(min_headroom=Amount(share=0.2)), Outcome.KEPT),
        (Budgets(min_headroom=Amount(share=0.21)), Outcome.EXCEEDED),
        (Budgets(min_headroom=Amount(n_bytes=201 * MIB)), Outcome.EXCEEDED),
    ],
)
def test_budget_at_and_beyond_its_limit(budgets: Budgets, expected: Outcome) -> None:
    assert expected is only(with_figures(), budgets).outcome


def test_budget_exceeded_says_both_numbers() -> None:
    result = only(with_figures(), Budgets(max_peak=Amount(n_bytes=512 * MIB)))

    assert "800.00 MiB" in result.text
    assert "512.00 MiB" in result.text
    assert (result.measured, result.limit) == (800 * MIB, 512 * MIB)


def test_budget_on_peak_ignores_reserved_memory() -> None:
    diagnosis = with_figures(reserved_bytes=64 * GIB, peak_reserved_bytes=64 * GIB)

    assert Outcome.KEPT is only(diagnosis, Budgets(max_peak=Amount(n_bytes=GIB))).outcome


@pytest.mark.parametrize(
    ("missing", "budgets"),
    [
        ({"capacity_bytes": None}, Budgets(min_headroom=Amount(share=0.1))),
        ({"capacity_bytes": None}, Budgets(max_peak=Amount(share=0.9))),
        ({"stranded_free_bytes": None}, Budgets(max_stranded=Amount(n_bytes=1))),
        ({"alloc_retries": None}, Budgets(max_retries=0)),
        ({"peak_active_bytes": None, "active_bytes": None}, Budgets(max_peak=Amount(n_bytes=1))),
    ],
)
def test_budget_without_its_figure_is_skipped_not_passed(
    missing: dict[str, None], budgets: Budgets
) -> None:
    result = only(with_figures(**missing), budgets)

    assert Outcome.SKIP is result.outcome
    assert result.text


def test_budget_of_two_devices_is_decided_by_the_worse_one() -> None:
    one = with_figures().devices[0]
    both = replace(
        with_figures(),
        devices=(one, replace(one, device=1, peak_active_bytes=950 * MIB)),
    )

    result = only(both, Budgets(max_peak=Amount(n_bytes=700 * MIB)))

    assert result.device == 1
    assert "on GPU 1" in result.text


@pytest.mark.parametrize(
    ("fits", "expected"),
    [
        ((FITS,), Outcome.KEPT),
        ((FITS, FITS_NOT), Outcome.EXCEEDED),
        ((NO_TRACE,), Outcome.SKIP),
        ((), Outcome.SKIP),
    ],
)
def test_fits_on_is_what_the_replay_says(fits: tuple[BudgetResult, ...], expected: Outcome) -> None:
    assert expected is only(with_figures(), Budgets(fits_on=GIB), fits).outcome


def test_no_growth_fails_on_a_growing_line() -> None:
    finding = replace(diagnoses.fragmentation().findings[0], code="FD401", severity=Severity.ERROR)
    diagnosis = replace(diagnoses.healthy(), findings=(finding,))

    assert Outcome.EXCEEDED is only(diagnosis, Budgets(no_growth=True)).outcome


def test_no_growth_of_an_input_without_trace_and_series_is_skipped() -> None:
    skipped = tuple(SkippedRule(c, "n", "no trace") for c in ("FD401", "FD402"))
    diagnosis = replace(diagnoses.healthy(), skipped=skipped)

    assert Outcome.SKIP is only(diagnosis, Budgets(no_growth=True)).outcome


def test_no_growth_with_either_rule_run_is_judged() -> None:
    diagnosis = replace(diagnoses.healthy(), skipped=(SkippedRule("FD402", "n", "no stats"),))

    assert Outcome.KEPT is only(diagnosis, Budgets(no_growth=True)).outcome


def test_names_of_budgets_are_spelled_as_options() -> None:
    budgets = Budgets(max_retries=0, no_growth=True, fits_on=1)

    assert budgets.names == ("max-retries", "fits-on", "no-growth")
