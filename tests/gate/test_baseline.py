from __future__ import annotations

import json

import diagnoses
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.gate.baseline import (
    Baseline,
    Entry,
    KnownFinding,
    entry_of,
    read_baseline,
    what_got_worse,
    write_baseline,
)
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Finding, Severity
from fragdoctor.units import GIB, MIB, Amount

SIZES = st.integers(0, 2**50)


def grown(diagnosis: Diagnosis, **figures: int) -> Diagnosis:
    return replace(diagnosis, devices=(replace(diagnosis.devices[0], **figures),))


def worse_codes(
    now: Diagnosis, before: Diagnosis, tolerance: Amount | None = None, **options: Severity
) -> list[str]:
    entry = entry_of(before, before.findings)
    more = {} if tolerance is None else {"tolerance": tolerance}
    return [w.code for w in what_got_worse(now, now.findings, entry, **more, **options)]


def test_same_case_is_not_worse() -> None:
    case = diagnoses.fragmentation()

    assert worse_codes(case, case, Amount(n_bytes=0), fail_on=Severity.WARNING) == []


def test_peak_within_the_tolerance_is_not_worse() -> None:
    before = grown(diagnoses.healthy(), peak_active_bytes=10 * GIB)
    now = grown(before, peak_active_bytes=int(10.4 * GIB))

    assert worse_codes(now, before) == []


def test_peak_beyond_the_tolerance_is_worse() -> None:
    before = grown(diagnoses.healthy(), peak_active_bytes=10 * GIB)
    now = grown(before, peak_active_bytes=int(10.6 * GIB))

    assert worse_codes(now, before) == ["peak"]


def test_small_figures_within_one_segment_are_not_worse() -> None:
    before = grown(diagnoses.healthy(), stranded_free_bytes=2 * MIB)
    now = grown(before, stranded_free_bytes=12 * MIB)

    assert worse_codes(now, before) == []
    assert worse_codes(now, before, Amount(n_bytes=0)) == ["stranded"]


def test_one_retry_more_is_worse() -> None:
    before = diagnoses.healthy()

    assert worse_codes(grown(before, alloc_retries=1), before) == ["retries"]


def test_reserved_memory_alone_is_never_worse() -> None:
    before = diagnoses.healthy()
    now = grown(before, reserved_bytes=60 * GIB, peak_reserved_bytes=70 * GIB)

    assert worse_codes(now, before) == []


def test_new_finding_is_worse_only_from_fail_on_up() -> None:
    before, now = replace(diagnoses.fragmentation(), findings=()), diagnoses.fragmentation()

    assert worse_codes(now, before, fail_on=Severity.ERROR) == []
    assert worse_codes(now, before, fail_on=Severity.WARNING) == ["FD101"]


def test_finding_that_rose_to_an_error_is_worse() -> None:
    before = diagnoses.fragmentation()
    rose = replace(before.findings[0], severity=Severity.ERROR)

    assert worse_codes(replace(before, findings=(rose,)), before) == ["FD101"]


def test_finding_that_grew_is_worse() -> None:
    before = diagnoses.fragmentation()
    more = replace(before.findings[0], n_bytes=2 * before.findings[0].n_bytes)
    now = replace(before, findings=(more,))

    assert worse_codes(now, before, fail_on=Severity.WARNING) == ["FD101"]


def test_moved_line_and_other_addresses_are_not_worse() -> None:
    from fragdoctor.rules.rule import fingerprint

    before = diagnoses.fragmentation()
    old = replace(
        before.findings[0], fingerprint=fingerprint("FD101", (diagnoses.CACHE, diagnoses.STEP))
    )
    moved = tuple(
        replace(place, filename=f"/elsewhere/{place.filename}", line=place.line + 40)
        for place in (diagnoses.CACHE, diagnoses.STEP)
    )
    new = replace(old, locations=moved, fingerprint=fingerprint("FD101", moved))

    entry = entry_of(before, [old])

    assert what_got_worse(before, [new], entry, fail_on=Severity.WARNING) == []


def test_baseline_text_holds_no_address_and_no_message() -> None:
    case = diagnoses.fragmentation()

    text = write_baseline(Baseline({"a.pickle": entry_of(case, case.findings)}))

    assert "0x" not in text
    assert case.findings[0].message not in text


@given(
    st.dictionaries(
        st.text(min_size=1),
        st.builds(
            Entry,
            st.dictionaries(
                st.integers(0, 64),
                st.fixed_dictionaries(
                    {
                        name: st.none() | SIZES
                        for name in ("peak_bytes", "stranded_bytes", "retries", "ooms")
                    }
                ),
            ),
            st.dictionaries(
                st.text(min_size=1),
                st.builds(
                    KnownFinding, st.text(), SIZES, st.sampled_from(["info", "warning", "error"])
                ),
            ),
        ),
        max_size=3,
    )
)
def test_baseline_written_and_read_is_the_same(files: dict[str, Entry]) -> None:
    baseline = Baseline(files)

    assert baseline == read_baseline(write_baseline(baseline), "b.json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"fragdoctor_baseline": 1, "files": {}}',
        '{"fragdoctor_baseline": "2.0", "files": {}}',
        '{"fragdoctor_baseline": "1.0"}',
        '{"fragdoctor_baseline": "1.0", "files": []}',
        '{"fragdoctor_baseline": "1.0", "files": {"a": {}}}',
        '{"fragdoctor_baseline": "1.0", "files": {"a": {"devices": {"x": {}}, "findings": {}}}}',
        '{"fragdoctor_baseline":"1.0","files":{"a":{"devices":{"0":{"ooms":-1}},"findings":{}}}}',
        '{"fragdoctor_baseline":"1.0","files":{"a":{"devices":{},"findings":{"f":{"code":1}}}}}',
        "[" * 100_000,
        b"\x80\x04\x95a recording",
    ],
)
def test_damaged_baseline_is_a_sentence(text: str | bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        read_baseline(text, "b.json")

    assert "b.json" in caught.value.message


def entry(n: int) -> Entry:
    return Entry({0: {"peak_bytes": n}}, {})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("runs/a/snapshot.pickle", 1),
        ("/ci/build-77/runs/b/snapshot.pickle", 2),
        ("b/snapshot.pickle", 2),
        ("other.pickle", None),
        ("snapshot.pickle", None),  # fits both equally well
        (r"C:\ci\runs\a\snapshot.pickle", 1),
    ],
)
def test_entry_is_found_by_the_end_of_its_path(name: str, expected: int | None) -> None:
    baseline = Baseline({"runs/a/snapshot.pickle": entry(1), "runs/b/snapshot.pickle": entry(2)})

    found = baseline.find(name, 2)

    assert (None if expected is None else entry(expected)) == found


def test_one_file_against_a_baseline_of_one_needs_no_name() -> None:
    baseline = Baseline({"run-1.pickle": entry(1)})

    assert entry(1) == baseline.find("run-2.pickle", 1)
    assert baseline.find("run-2.pickle", 2) is None


def test_entry_of_findings_with_one_fingerprint_adds_their_bytes() -> None:
    one: Finding = diagnoses.fragmentation().findings[0]

    known = entry_of(diagnoses.healthy(), [one, replace(one, device=1)]).findings

    assert [2 * one.n_bytes] == [k.n_bytes for k in known.values()]
    assert "devices" in json.loads(write_baseline(Baseline({"a": Entry({}, {})})))["files"]["a"]
