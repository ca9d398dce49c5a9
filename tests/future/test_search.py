"""The search finds what fits, ranks it by what comes next, and uses two threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from programs import program, record, reproduced

from fragdoctor.future.search import (
    best_of,
    pareto_of,
    sweep_candidates,
    usual_candidates,
)
from fragdoctor.future.simulator import search_settings, simulate
from fragdoctor.future.whatif import FairReplay, WhatIf
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.hooks import watched_by
from fragdoctor.model.settings import parse_conf
from fragdoctor.model.simulation import Outlook, OutlookState, ReplayResult, Simulation
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.trace.replay import Reproduction
from fragdoctor.units import MIB


def fragmented() -> Snapshot:
    """Return the run of ten 40 MiB blocks, replaced by 25 MiB ones, then 140 MiB: out of memory."""
    asked = [40 * MIB] * 10 + [-k for k in range(1, 11)] + [25 * MIB] * 10 + [140 * MIB]
    return record(program(*asked), capacity_bytes=450 * MIB)


def result(conf: str, *, fits: bool, peak: int, calls: int, retries: int = 0) -> ReplayResult:
    return ReplayResult(
        conf=conf,
        capacity_bytes=1000 * MIB,
        fits=fits,
        oom_event=None if fits else 1,
        peak_reserved_bytes=peak * MIB,
        peak_allocated_bytes=0,
        final_reserved_bytes=0,
        retries=retries,
        ooms=0 if fits else 1,
        driver_calls=calls,
    )


def searched(reproduction: Reproduction, what_if: WhatIf = WhatIf()) -> Simulation:  # noqa: B008
    """Return a search over the usual settings."""
    fair = FairReplay(reproduction)
    return search_settings(fair, usual_candidates(reproduction), what_if)


def test_search_finds_the_setting_that_fits() -> None:
    reproduction = reproduced(fragmented())

    found = searched(reproduction)

    assert not found.is_fine
    assert found.best is not None
    assert found.best.conf == "expandable_segments:True"
    assert found.best.fits
    assert [r.conf for r in found.results] == list(usual_candidates(reproduction))
    assert any(not r.fits for r in found.results)


def test_search_of_run_without_trouble_recommends_nothing() -> None:
    found = searched(reproduced(record(program(30 * MIB, -1, 20 * MIB))))

    assert found.is_fine
    assert found.best is None


def test_search_is_the_same_every_time_and_reports_progress() -> None:
    reproduction = reproduced(fragmented())
    seen: list[tuple[int, int]] = []
    caller = threading.get_ident()

    def watch(_what: str, done: int, total: int) -> None:
        assert threading.get_ident() == caller
        seen.append((done, total))

    with watched_by(watch):
        first = searched(reproduction)
    again = searched(reproduction)

    assert first == again
    n = len(first.results)
    assert seen == [(i + 1, n) for i in range(n)]


def test_search_under_larger_capacity_fits_as_it_is() -> None:
    reproduction = reproduced(fragmented())

    found = searched(reproduction, WhatIf(capacity_bytes=800 * MIB))

    assert found.is_fine


def test_candidates_are_known_to_the_version() -> None:
    reproduction = reproduced(fragmented())

    for version in ("2.1.2", "2.4.1", "2.12.1", "2.15.0"):
        confs = sweep_candidates(reproduction, version)
        for conf in confs:
            parse_conf(conf, version)
        assert len(set(confs)) == len(confs)
    assert not any("large_segment" in c for c in usual_candidates(reproduction, "2.4.1"))
    assert 8 <= len(usual_candidates(reproduction)) <= 15


def test_search_names_only_what_gains_on_a_run_that_fits() -> None:
    """A run with a retry: most settings spare it nothing, and are no answer."""
    program_ = program(30 * MIB, 40 * MIB, -1, 60 * MIB, -3)
    reproduction = reproduced(record(program_, capacity_bytes=110 * MIB))

    found = searched(reproduction)

    had = reproduction.result
    assert had.fits
    assert had.retries == 1
    assert found.best is None


def test_best_is_never_an_open_question() -> None:
    known = result("a:1", fits=True, peak=900, calls=50)
    is_open = replace(result("b:1", fits=True, peak=500, calls=1), is_conclusive=False)

    assert best_of([known, is_open]) is known
    assert best_of([is_open]) is None
    assert pareto_of([known, is_open]) == (known,)


def going_on(conf: str, peak: int, **outlook: Any) -> ReplayResult:
    later = outlook.pop("peak_reserved_bytes", 0) * MIB
    told = Outlook(peak_reserved_bytes=later, **outlook)
    return replace(result(conf, fits=True, peak=peak, calls=10), outlook=told)


def test_best_goes_on_best_however_little_room_it_leaves() -> None:
    fails = going_on("a:1", 500, state=OutlookState.FAILS, fails_after_steps=9)
    unlikely = going_on("b:1", 600, state=OutlookState.OPEN, likely=OutlookState.FAILS)
    is_open = going_on("c:1", 700, state=OutlookState.OPEN)
    likely = going_on("d:1", 800, state=OutlookState.OPEN, likely=OutlookState.HOLDS)
    holds = going_on("e:1", 900, state=OutlookState.HOLDS, peak_reserved_bytes=990)
    by_prospect = [holds, likely, is_open, unlikely, fails]

    for i, best in enumerate(by_prospect):
        assert best_of([*by_prospect[:i:-1], best]) is best


def test_best_leaves_the_most_room_in_the_whole_run_then_costs_least() -> None:
    later = going_on("a:1", 700, state=OutlookState.HOLDS, peak_reserved_bytes=950)
    roomy = going_on("b:1", 800, state=OutlookState.HOLDS, peak_reserved_bytes=800)
    dear = replace(roomy, conf="c:1", driver_calls=90)
    slow = replace(roomy, conf="d:1", retries=2, driver_calls=1)
    lost = result("e:1", fits=False, peak=100, calls=1)

    assert best_of([later, slow, dear, roomy, lost]) is roomy
    assert best_of([later, slow, dear]) is dear
    assert best_of([later, slow]) is slow
    assert best_of([lost]) is None


def test_pareto_holds_what_nothing_beats() -> None:
    low = result("a:1", fits=True, peak=700, calls=90)
    beaten = result("b:1", fits=True, peak=800, calls=95)
    quick = result("c:1", fits=True, peak=900, calls=10)
    lost = result("d:1", fits=False, peak=100, calls=1)

    assert pareto_of([beaten, quick, lost, low]) == (low, quick)


@pytest.mark.shared
def test_sweep_of_a_late_trace_is_judged_like_single_settings(shared: Path) -> None:
    snapshot = read_snapshot(shared / "snapshots" / "kvcache_cat" / "snapshot.pickle")
    reproduction = reproduced(snapshot)
    confs = ("expandable_segments:True", "max_split_size_mb:128")

    found = search_settings(FairReplay(reproduction), confs, WhatIf())

    assert tuple(found.results) == tuple(simulate(snapshot, confs=confs).results)


@pytest.mark.shared
def test_search_of_real_traps(shared: Path) -> None:
    """What helps one workload does not help another: nothing helps the alternating blocks."""
    helps = {}
    for name in ("frag_gpt_varlen", "microbench_alternate", "microbench_40mb"):
        snapshot = read_snapshot(shared / "snapshots" / name / "snapshot.pickle")
        found = searched(reproduced(snapshot))
        helps[name] = found.best.conf if found.best is not None else None

    assert helps == {
        "frag_gpt_varlen": "expandable_segments:True",
        "microbench_alternate": None,
        "microbench_40mb": "expandable_segments:True",
    }
