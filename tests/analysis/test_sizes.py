from __future__ import annotations

import pytest
from analysis.recordings import recording
from builders import MIB
from stock import from_python
from toy_allocator import ToyAllocator

from fragdoctor.analysis.device import analyze_device


def sizes_of(make):
    toy = ToyAllocator()
    for i in range(16):
        for line in (1, 2):
            toy.free(toy.malloc(make(i, line), line=line))
    return analyze_device(from_python(toy.data()), 0).sizes


def test_size_diversity_constant_shapes_do_not_drift():
    got = sizes_of(lambda i, line: line * 2 * MIB)

    assert (
        got.n_large_allocs,
        got.n_distinct_large,
        got.drifting,
    ) == (32, 2, False)


def test_size_diversity_a_few_buckets_do_not_drift():
    assert not sizes_of(lambda i, line: (2 + i % 3) * MIB).drifting


def test_size_diversity_new_size_each_step_drifts():
    assert sizes_of(lambda i, line: 2 * MIB + i * 4096).drifting


def test_size_diversity_new_sizes_that_are_only_kept_do_not_drift():
    toy = ToyAllocator()
    for i in range(32):
        toy.malloc(2 * MIB + i * 4096, line=1)

    got = analyze_device(from_python(toy.data()), 0).sizes

    assert (got.n_distinct_large, got.drifting) == (32, False)


def test_size_diversity_small_requests_are_not_looked_at():
    got = sizes_of(lambda i, line: 512 * (i + 1))

    assert (got.n_large_allocs, got.drifting) == (0, False)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "expected"),
    [("healthy_gpt", False), ("frag_gpt_varlen", True), ("convnet_varsize", True)],
)
def test_size_diversity_recording_is_judged_right(shared, name, expected):
    result = recording(shared / "snapshots" / name)[1][0]

    assert expected == result.sizes.drifting
