"""The verdict in the light of the whole step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fragdoctor.diagnosis import whole_step
from fragdoctor.diagnosis.bench import Bench
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.future.steps import StepKind, Steps
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Cause, Verdict
from fragdoctor.model.finding import Confidence
from fragdoctor.model.simulation import Outlook, OutlookBasis, OutlookState
from fragdoctor.units import GIB, MIB

CAPACITY = GIB
HOLES = Verdict(Cause.FRAGMENTATION, Confidence.PROVEN, "Holes.")


def judged(
    monkeypatch: pytest.MonkeyPatch,
    *,
    n_steps: int = 9,
    growth: int = 0,
    survivors: tuple[Any, ...] | None = (),
    needs: int = 2 * GIB,
    kept: int | None = None,
    once: int = 0,
    makes_model: bool = False,
    is_generating: bool = False,
    verdict: Verdict = HOLES,
) -> Verdict:
    """Return what becomes of a verdict, of fragmentation if nothing else is said."""
    outlook = Outlook(
        OutlookState.FAILS,
        OutlookBasis.REPEATED,
        needs_bytes=None if growth else needs,
        growth_bytes_per_step=growth,
    )
    bench: Any = SimpleNamespace(
        outlook=outlook,
        is_usable=True,
        is_exact=True,
        n_steps=n_steps,
        is_in_step=not makes_model,
        makes_model=makes_model,
        is_generating=is_generating,
        kept_bytes_per_step=growth if kept is None else kept,
        recorded=SimpleNamespace(fits=False, capacity_bytes=CAPACITY),
        survivors=lambda: None if survivors is None else list(survivors),
        reproduction=SimpleNamespace(conditions=SimpleNamespace(allowed_bytes=None)),
    )
    analysis = SimpleNamespace(kept=None, gathered=None, once_slope_bytes=once)
    context: Any = SimpleNamespace(analysis=analysis, failed_request=None)
    monkeypatch.setattr(whole_step, "find_transient", lambda analysis: None)
    return whole_step.with_outlook(verdict, context, bench)


def test_step_that_no_setting_finishes_is_no_fragmentation(monkeypatch) -> None:
    found = judged(monkeypatch)

    assert (found.cause, found.confidence) == (Cause.CAPACITY, Confidence.LIKELY)
    assert Cause.FRAGMENTATION in found.also
    assert "It lacks 1.00 GiB in all." in found.summary


def test_step_of_which_it_is_not_known_keeps_its_verdict(monkeypatch) -> None:
    assert judged(monkeypatch, survivors=None).cause is Cause.FRAGMENTATION


@pytest.mark.parametrize(
    ("basis", "confidence"),
    [
        (OutlookBasis.SCALED, Confidence.LIKELY),
        (OutlookBasis.LOWER_BOUND, Confidence.POSSIBLE),
    ],
)
def test_a_lower_bound_is_little_to_go_by(monkeypatch, basis, confidence) -> None:
    outlook = Outlook(OutlookState.OPEN, basis, likely=OutlookState.HOLDS)

    found = judged(monkeypatch, survivors=(SimpleNamespace(outlook=outlook),))

    assert (found.cause, found.confidence) == (Cause.FRAGMENTATION, confidence)


@pytest.mark.parametrize("survivors", [None, (SimpleNamespace(outlook=None),)])
def test_holes_while_the_model_is_made_are_little_to_go_by(monkeypatch, survivors) -> None:
    found = judged(monkeypatch, survivors=survivors, makes_model=True)

    assert (found.cause, found.confidence) == (Cause.FRAGMENTATION, Confidence.POSSIBLE)


@pytest.mark.parametrize(("n_steps", "cause"), [(9, Cause.LEAK), (1, Cause.CAPACITY)])
def test_growth_is_a_leak_only_where_several_steps_show_it(monkeypatch, n_steps, cause) -> None:
    assert judged(monkeypatch, n_steps=n_steps, growth=24 * MIB).cause is cause


def test_steps_that_become_larger_are_no_leak(monkeypatch) -> None:
    assert judged(monkeypatch, growth=24 * MIB, kept=0).cause is Cause.CAPACITY


def test_caches_of_a_text_that_is_generated_are_no_leak(monkeypatch) -> None:
    assert judged(monkeypatch, growth=24 * MIB, is_generating=True).cause is Cause.CAPACITY


@pytest.mark.parametrize(
    ("n_buffers", "n_grown", "kind", "found"),
    [
        (12, 64, StepKind.EVALUATION, True),
        (12, 8, StepKind.EVALUATION, False),
        (1, 64, StepKind.EVALUATION, False),
        (12, 64, StepKind.TRAIN, False),
    ],
)
def test_text_is_generated_token_by_token(n_buffers, n_grown, kind, found) -> None:
    steps = SimpleNamespace(kind=np.array([kind]))
    bench: Any = SimpleNamespace(
        growing_buffers=(SimpleNamespace(n_buffers=n_buffers, n_grown=n_grown),),
        reproduction=SimpleNamespace(trace=SimpleNamespace(memo={Steps: steps})),
    )
    assert Bench.is_generating.fget(bench) is found


@pytest.mark.parametrize("cause", [Cause.CAPACITY, Cause.MEMORY_LIMIT, Cause.TRANSIENT_PEAK])
@pytest.mark.parametrize("confidence", [Confidence.LIKELY, Confidence.PROVEN])
def test_what_a_setting_mends_lay_in_holes_unless_the_figures_prove_more(
    monkeypatch, cause, confidence
) -> None:
    outlook = Outlook(OutlookState.HOLDS, OutlookBasis.REPEATED)
    mended = SimpleNamespace(outlook=outlook, conf="expandable_segments:True")

    found = judged(
        monkeypatch, survivors=(mended,), verdict=Verdict(cause, confidence, "Nearly full.")
    )

    is_proven = confidence is Confidence.PROVEN
    assert found.cause is (cause if is_proven else Cause.FRAGMENTATION)


def test_growth_that_each_parameter_brings_once_is_no_leak(monkeypatch) -> None:
    assert judged(monkeypatch, growth=24 * MIB, once=23 * MIB).cause is Cause.CAPACITY


@pytest.mark.parametrize(
    ("name", "confidence"),
    [
        # No setting serves even the request, nor did the real allocator.
        ("first_forward_holes", Confidence.LIKELY),
        # Expandable segments serve it; rerun, the step needs 349 MiB of the 342 MiB.
        ("first_backward_holes", Confidence.LIKELY),
    ],
)
def test_holes_are_not_the_cause_where_no_setting_is_known_to_finish_the_first_step(
    name: str, confidence: Confidence
) -> None:
    recording = Path(__file__).parents[1] / "trace" / "recordings" / f"{name}.pickle.gz"
    verdict = diagnose(Case(snapshot=read_snapshot(recording))).verdict
    assert (verdict.cause, verdict.confidence) == (Cause.CAPACITY, confidence)
    assert Cause.FRAGMENTATION in verdict.also
    assert "no allocator setting" in verdict.summary
