"""memory_stats() and memory_summary() in all their forms."""

from __future__ import annotations

import json
import pprint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.errors import InputError
from fragdoctor.inputs.stats_reader import has_printed_stats, looks_like_stats, read_stats

FLAT = {
    "allocated_bytes.all.current": 123,
    "reserved_bytes.all.current": 4096,
    "reserved_bytes.all.peak": 8192,
    "oversize_segments.current": 2,
    "num_alloc_retries": 5,
    "num_ooms": 1,
    "max_split_size": -1,
}
NESTED = {
    "allocated_bytes": {"all": {"current": 123}},
    "reserved_bytes": {"all": {"current": 4096, "peak": 8192}},
    "oversize_segments": {"current": 2},
    "num_alloc_retries": 5,
    "num_ooms": 1,
    "max_split_size": -1,
}


def table(device: int, unit: str = "MiB", figure: str = " 2980", retries: int = 7) -> str:
    row = f"| {figure} {unit} | {figure} {unit} |   3894 {unit} |    914 {unit} |\n"
    return (
        "|===========================================================================|\n"
        f"|                  PyTorch CUDA memory summary, device ID {device}                 |\n"
        "|---------------------------------------------------------------------------|\n"
        f"|            CUDA OOMs: 3            |        cudaMalloc retries: {retries}         |\n"
        "|===========================================================================|\n"
        "|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |\n"
        f"| Allocated memory      {row}"
        f"|       from large pool {row}"
        f"|       from small pool {row}"
        f"| GPU reserved memory   {row}"
        "| Allocations           |     155    |     750 K  |       2 M  |      14    |\n"
        "| Oversize allocations  |       1    |       0    |       0    |       0    |\n"
        "|===========================================================================|\n"
    )


@pytest.mark.parametrize("value", [FLAT, NESTED, {"stats": NESTED}, {"meta": 1, "cuda": FLAT}])
def test_one_device_flat_or_nested_gives_the_flat_form(value):
    text = json.dumps(value)

    series = read_stats(text.encode(), "run")

    assert looks_like_stats(text)
    (entry,) = series.entries
    assert dict(entry.values) == FLAT
    assert (entry.device, entry.label) == (None, "run")
    assert not series.is_series


@pytest.mark.parametrize(
    "value",
    [
        [FLAT, NESTED],
        {"0": FLAT, "1": NESTED},
        {"cuda:0": FLAT, "cuda:1": FLAT},
        {"devices": [FLAT, FLAT]},
        [{"device": 0, **FLAT}, {"device": "cuda:1", "stats": NESTED}],
    ],
)
def test_several_devices_are_told_apart(value):
    series = read_stats(json.dumps(value, indent=1))

    assert [entry.device for entry in series.entries] == [0, 1]
    assert all(dict(entry.values) == FLAT for entry in series.entries)
    assert not series.is_series


def test_json_lines_are_a_series_with_steps():
    lines = [json.dumps({"step": i, "device": 1, **FLAT, "num_alloc_retries": i}) for i in range(4)]

    series = read_stats("\n".join(lines) + "\n")

    assert series.is_series
    assert [entry.n_alloc_retries for entry in series.of_device(1)] == [0, 1, 2, 3]
    assert [entry.label for entry in series.entries] == ["step 0", "step 1", "step 2", "step 3"]


@pytest.mark.parametrize(("unit", "factor"), [("MB", 2**20), ("MiB", 2**20), ("KiB", 2**10)])
def test_summary_is_read_in_its_unit(unit, factor):
    text = table(1, unit)

    (entry,) = read_stats(text).entries

    assert has_printed_stats(text)
    assert entry.allocated_bytes == 2980 * factor
    assert entry.get("allocated_bytes.small_pool.freed") == 914 * factor
    assert entry.get("allocation.all.peak") == 750_000
    assert entry.get("allocation.all.allocated") == 2_000_000
    assert entry.get("oversize_allocations.current") == 1
    assert (entry.n_ooms, entry.n_alloc_retries, entry.device) == (3, 7, 1)
    assert entry.origin == "memory_summary"


def test_summaries_of_two_devices_in_a_log_are_both_read():
    log = "".join(f"[rank0]: {line}\n" for line in (table(0) + "loss 0.7\n" + table(1)).split("\n"))

    series = read_stats(log)

    assert [entry.device for entry in series.entries] == [0, 1]
    assert not series.is_series


def test_summaries_of_one_device_over_time_are_a_series():
    series = read_stats(table(0, retries=1) + table(0, retries=4))

    assert series.is_series
    assert [entry.n_alloc_retries for entry in series.entries] == [1, 4]


@pytest.mark.parametrize(
    "show",
    [
        lambda stats: f"OrderedDict({list(stats.items())})",  # before Python 3.12
        lambda stats: f"OrderedDict({stats})",
        pprint.pformat,
        lambda stats: f"INFO:train:{json.dumps(stats)}",
    ],
)
def test_printed_dictionaries_in_a_log_are_read(show):
    log = f"step 0\n{show(FLAT)}\nloss 0.7\n{show({**FLAT, 'num_ooms': 2})}\n"

    first, second = read_stats(log).entries

    assert has_printed_stats(log)
    assert dict(first.values) == FLAT
    assert (second.n_ooms, first.label) == (2, "line 2")


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", "hello", '{"segments": []}', "[" * 100_000])
def test_input_without_statistics_is_refused(text):
    with pytest.raises(InputError):
        read_stats(text)


def test_report_of_messages_does_not_look_like_statistics():
    assert not looks_like_stats('{"messages": [{"allocated_bytes": 12}]}')


@given(st.recursive(st.integers() | st.text() | st.none(), lambda c: st.lists(c) | st.dictionaries(
    st.sampled_from([*FLAT, *NESTED, "0", "device", "step"]), c), max_leaves=12))  # fmt: skip
def test_any_json_gives_integers_or_is_refused(value):
    try:
        series = read_stats(json.dumps(value))
    except InputError:
        return

    assert all(isinstance(v, int) for entry in series.entries for v in entry.values.values())


@pytest.mark.shared
def test_recorded_stats_and_summaries_agree(shared, has_all_recordings):
    n = 0
    for path in sorted((shared / "snapshots").glob("*/stats.json")):
        truth = json.loads(path.read_text())
        truth = truth if isinstance(truth, list) else [truth]

        exact = read_stats(path.read_bytes()).entries
        floors = read_stats((path.parent / "summary.txt").read_bytes()).entries

        assert [dict(entry.values) for entry in exact] == truth
        assert len(floors) == len(truth)
        for entry, values in zip(floors, truth, strict=True):
            assert len(entry.values) > 100
            for key, value in entry.values.items():
                # a size is rounded down to MiB, or to a larger unit with three digits before it
                most = value + max(2**20, value // 100) if "_bytes" in key else value
                assert value <= values[key] <= most, (path, key)
        n += 1
    assert n >= (50 if has_all_recordings else 31)
