from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import builders
import fleets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins

from fragdoctor.fleet.summary import clip, failed, line, summarise, weight
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Location
from fragdoctor.model.fleet import (
    MAX_SUMMARY_BYTES,
    RankInput,
    RankSource,
    RankSummary,
    SummaryOptions,
)

HOSTILE = ["\x01", "\udc80", "\U0001f600", "\u202e", '"', "\\", "a", "/"]


def sizes(summary: RankSummary) -> tuple[int, int]:
    return len(pickle.dumps(summary)), len(json.dumps(to_builtins(summary)))


def hostile_snapshot(letter: str) -> dict[str, Any]:
    """Return a snapshot whose every name and number of names is far too large."""
    segments, events = [], []
    for i in range(200):
        stack = [builders.frame(f"{letter * 3000}{i}.py", 2**64 - 1, f"{letter * 3000}{i}")]
        address = builders.BASE + i * 64 * builders.MIB
        size = builders.MIB + 512 * i
        held = builders.block(size, "active_allocated", frames=stack)
        segments.append(builders.segment(address, held, builders.block(2**25 - size)))
        events.append(builders.alloc(address, size, frames=stack, time_us=2**62))
    events.append(builders.oom(2**40, 1, frames=stack, time_us=2**62))
    conf = builders.settings(
        PYTORCH_CUDA_ALLOC_CONF=letter * 100_000,
        max_split_size=2**62,
        garbage_collection_threshold=0.123456789,
        expandable_segments=True,
        roundup_power2_divisions={str(1 << i): 1 << (i % 7) for i in range(16)},
    )
    return builders.snapshot(*segments, events=events, conf=conf)


@pytest.mark.slow
@pytest.mark.parametrize("letter", HOSTILE)
@pytest.mark.parametrize("replays", [True, False])
def test_summary_of_a_hostile_snapshot_stays_small(
    tmp_path: Path, letter: str, replays: bool
) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(builders.pickled(hostile_snapshot(letter)))
    deep = "/".join(["x" * 200] * 15)
    (tmp_path / "oom.txt").write_text("CUDA out of memory. Tried to allocate 2.00 GiB. " * 500)
    what = RankInput(
        str(path),
        (str(tmp_path / "oom.txt"), *(f"{tmp_path}/{deep}{i}" for i in range(30))),
        rank=10**6,
        job=letter * 5000,
        host=letter * 5000,
    )

    summary = summarise(what, SummaryOptions(replays=replays))

    assert summary.is_read, summary.error
    assert len(summary.holders) > 10
    assert max(sizes(summary)) < MAX_SUMMARY_BYTES


@given(st.text(max_size=5000), st.text(max_size=5000), st.text(max_size=3000))
def test_row_of_an_unreadable_rank_stays_small(path: str, error: str, host: str) -> None:
    what = RankInput(path, (path, error), host=host, job=host)

    assert max(sizes(failed(what, error, "unreadable_input", hint=error))) < MAX_SUMMARY_BYTES


@given(st.text(alphabet=st.sampled_from(HOSTILE), max_size=4000), st.integers(0, 2**64 - 1))
def test_line_is_cut_to_its_share(text: str, number: int) -> None:
    cut = line(Location(text, number, text), 2**62, 3)

    assert weight(cut.filename) <= 160
    assert weight(cut.function) <= 80
    assert cut.line < 2**63


@given(st.text(max_size=400), st.integers(20, 200))
def test_clipped_text_fits_and_is_the_text_where_it_fits(text: str, limit: int) -> None:
    for cut in (clip(text, limit), clip(text, limit, is_name=True)):
        assert weight(cut) <= limit
        assert cut == text or weight(text) > limit


@settings(max_examples=30)
@given(st.text(min_size=300, max_size=400), st.text(min_size=300, max_size=400))
def test_clipped_names_of_different_paths_differ(a: str, b: str) -> None:
    assert (clip(a, 100, is_name=True) == clip(b, 100, is_name=True)) == (a == b)


def test_summary_says_what_the_snapshot_holds(tmp_path: Path) -> None:
    path = fleets.write_rank(
        tmp_path / "rank3.pickle", conf={"expandable_segments": True}, refused_mib=256
    )

    summary = summarise(
        RankInput(str(path), rank=3, source=RankSource.NAME), SummaryOptions(replays=True)
    )

    assert (summary.rank, summary.is_read, summary.is_replayed) == (3, True, True)
    assert [(h.line, h.n_bytes) for h in summary.holders] == [
        (10, 64 * builders.MIB),
        (20, 32 * builders.MIB),
        (30, 16 * builders.MIB),
    ]
    assert summary.peak_bytes == 112 * builders.MIB
    assert summary.settings == (("expandable_segments", "True"),)
    assert summary.has_failed
    assert summary.failed_us == fleets.WALL_US + 100
    assert summary.large_sizes[0] == (64 * builders.MIB, 1)


def test_rank_of_a_log_stands_in_for_a_name_without_one(tmp_path: Path) -> None:
    path = fleets.write_rank(tmp_path / "snapshot.pickle")
    log = tmp_path / "out.log"
    log.write_text(
        "[rank6]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 "
        "has a total capacity of 3.00 GiB of which 1.00 GiB is free.\n"
    )

    summary = summarise(RankInput(str(path), (str(log),)), SummaryOptions())

    assert (summary.rank, summary.rank_source) == (6, RankSource.LOG)
    assert summary.has_failed


def test_rank_and_host_of_a_manifest_win_over_the_name(tmp_path: Path) -> None:
    fleets.write_rank(tmp_path / "rank3" / "snapshot.pickle")
    manifest = {
        "format": "fragdoctor-bundle",
        "version": 1,
        "rank": 12,
        "local_rank": 4,
        "host": "gpu-b",
        "versions": {"torch": "2.12.1+cu130"},
    }
    (tmp_path / "rank3" / "bundle.json").write_text(json.dumps(manifest))

    row = summarise(
        RankInput(str(tmp_path / "rank3"), rank=3, source=RankSource.NAME), SummaryOptions()
    )

    assert (row.rank, row.rank_source, row.local_rank, row.host) == (
        12,
        RankSource.MANIFEST,
        4,
        "gpu-b",
    )


def test_quick_and_replayed_summary_agree_on_everything_but_the_advice(tmp_path: Path) -> None:
    path = fleets.write_rank(tmp_path / "rank0.pickle", refused_mib=64)
    what = RankInput(str(path))

    quick = to_builtins(summarise(what, SummaryOptions()))
    tested = to_builtins(summarise(what, SummaryOptions(replays=True)))

    for name in ("advice", "is_replayed"):
        quick.pop(name), tested.pop(name)
    assert quick == tested


def test_unreadable_ranks_are_rows_with_the_reason(tmp_path: Path) -> None:
    cut = tmp_path / "cut.pickle"
    cut.write_bytes(builders.pickled(builders.small())[:100])
    attack = tmp_path / "attack.pickle"
    attack.write_bytes(pickle.dumps(os.getcwd))

    rows = [
        summarise(RankInput(str(p)), SummaryOptions())
        for p in (cut, attack, tmp_path / "gone.pickle")
    ]

    assert [r.is_read for r in rows] == [False] * 3
    assert [r.error_code for r in rows] == [
        "truncated_snapshot",
        "refused_snapshot",
        "unreadable_input",
    ]
    assert [r.exit_code for r in rows] == [2, 3, 2]
    assert "does not exist" in rows[2].error


def test_bug_met_in_one_rank_is_a_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: Any, **_more: Any) -> None:
        raise KeyError("holders")

    monkeypatch.setattr("fragdoctor.diagnosis.pipeline.diagnose", broken)
    path = fleets.write_rank(tmp_path / "rank0.pickle")

    row = summarise(RankInput(str(path)), SummaryOptions())

    assert (row.is_read, row.error_code, row.cause) == (False, "internal_error", Cause.UNKNOWN)
    assert "KeyError" in row.error
