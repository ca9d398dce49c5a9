"""The short cut for plain events says what the stack machine says, and leaves the rest to it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
from builders import BASE, MIB, alloc, cpp_pickled, event, frame, oom, pickled, snapshot
from stock import assert_same, from_python

from fragdoctor.errors import InputError
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.limits import Limits
from fragdoctor.model.snapshot import Snapshot

FRAMES = [frame("train.py", i, f"f{i}") for i in range(70)]
WRITERS = {
    "python 2": lambda data: pickled(data, 2),
    "python 4": lambda data: pickled(data, 4),
    "c++": cpp_pickled,
}


class Dribble:
    """Gives pieces so small that the short cut, which needs some bytes ahead, never applies."""

    def __init__(self, raw: bytes) -> None:
        self._pieces: Iterator[bytes] = (raw[i : i + 31] for i in range(0, len(raw), 31))

    def read(self, n: int = -1) -> bytes:
        return next(self._pieces, b"")


def without_short_cut(raw: bytes) -> Snapshot:
    return read_snapshot(Dribble(raw))  # type: ignore[arg-type]


def trace(**changes: object) -> list[dict[str, object]]:
    """Return a trace whose events all have the change, among plain ones."""
    plain = [alloc(BASE + i * 512, i, frames=FRAMES[:2], time_us=i) for i in range(40)]
    odd = [alloc(BASE + i, i) | changes for i in range(4)]
    return [*plain[:20], *odd[:3], *plain[20:], odd[3]]


VARIATIONS = {
    "a stack of one frame": {"frames": FRAMES[:1]},
    "a long stack": {"frames": FRAMES},
    "an empty stack": {"frames": []},
    "no stack": {"frames": None},
    "no pool": {"pool_id": None},
    "another pool": {"pool_id": (7, -3)},
    "a pool as a list": {"pool_id": [3, 4]},
    "no texts": {"compile_context": None, "user_metadata": None},
    "a long text": {"user_metadata": "x" * 300},
    "a text that is no ASCII": {"compile_context": "\u00fc\u4e2d"},
    "negative address": {"addr": -(2**62)},
    "large address": {"addr": 2**64 - 1},
    "large size": {"size": 2**63 - 1},
    "large stream": {"stream": 2**40},
    "known keys without a column": {"category": "weights", "internal_metadata": "x"},
    "forward frames": {"forward_frames": FRAMES[3:5]},
    "an unknown key": {"brand_new": [1, (2, {"a": None})]},
    "an unknown action": {"action": "brand_new"},
    "an annotation": {"action": "annotate"},
    "many keys": {f"key {i}": i for i in range(30)},
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("change", VARIATIONS)
def test_events_equal_stock_unpickler_and_stack_machine(writer, change):
    raw = WRITERS[writer](snapshot(events=trace(**VARIATIONS[change])))

    result = read_snapshot(raw)

    assert_same(from_python(pickle.loads(raw)), result)
    assert_same(without_short_cut(raw), result)
    assert without_short_cut(raw).provenance.unknown_keys == result.provenance.unknown_keys
    assert without_short_cut(raw).provenance.writer == result.provenance.writer


@pytest.mark.parametrize("writer", WRITERS)
def test_keys_whose_order_changes_are_read(writer):
    rows = trace()
    shuffled = [dict(list(row.items())[i % 5 :] + list(row.items())[: i % 5])
                for i, row in enumerate(rows)]  # fmt: skip
    raw = WRITERS[writer](snapshot(events=shuffled))

    assert_same(from_python(pickle.loads(raw)), read_snapshot(raw))


@pytest.mark.parametrize("writer", WRITERS)
def test_ooms_among_plain_events_keep_their_row(writer):
    rows = trace()
    rows.insert(17, oom(64 * MIB, 5 * MIB, frames=FRAMES[:2]))

    result = read_snapshot(WRITERS[writer](snapshot(events=rows)))

    assert result.oom_free_bytes == {17: 5 * MIB}


def test_lone_surrogates_are_replaced_as_by_the_stack_machine():
    raw = pickled(snapshot(events=trace(user_metadata="\ud800")))

    result = read_snapshot(raw)

    assert_same(without_short_cut(raw), result)
    assert (
        result.provenance.n_replaced_strings
        == without_short_cut(raw).provenance.n_replaced_strings
        > 0
    )


def test_event_outside_of_the_traces_is_no_row():
    data = snapshot(events=trace(), extra=trace()[:5], other={"a": event("alloc", 1, 2)})

    result = read_snapshot(pickled(data))

    assert_same(from_python(data), result)


def test_list_that_is_shared_with_an_event_is_recalled():
    stack = FRAMES[:3]
    rows = [*trace(frames=stack), event("free_completed", BASE, 1, frames=stack)]
    data = snapshot(events=rows, more=stack)

    assert_same(from_python(data), read_snapshot(pickled(data)))


BAD = {
    "size is negative": {"size": -1},
    "size is a fraction": {"size": 1.5},
    "size is text": {"size": "1"},
    "time is negative": {"time_us": -1},
    "address is a list": {"addr": [1]},
    "stack is a number": {"frames": 5},
    "stack of numbers": {"frames": [1, 2]},
    "stack of stacks": {"frames": [FRAMES[:2]]},
    "pool of three": {"pool_id": (1, 2, 3)},
    "pool of texts": {"pool_id": ("a", "b")},
    "text is a number": {"user_metadata": 5},
    "action is a number": {"action": 5},
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("change", BAD)
def test_bad_event_gives_the_error_of_the_stack_machine(writer, change):
    raw = WRITERS[writer](snapshot(events=trace(**BAD[change])))

    with pytest.raises(InputError) as fast:
        read_snapshot(raw)
    with pytest.raises(InputError) as slow:
        without_short_cut(raw)

    assert type(fast.value) is type(slow.value)
    assert fast.value.message == slow.value.message
    assert fast.value.offset == slow.value.offset


@pytest.mark.parametrize("max_depth", range(1, 8))
def test_depth_limit_is_the_same(max_depth):
    raw = pickled(snapshot(events=trace(), conf={}))
    limits = Limits(max_depth=max_depth)

    def outcome(source):
        try:
            return read_snapshot(source, limits=limits).events.size_bytes.tolist()
        except InputError as error:
            return error.message, error.offset

    assert outcome(raw) == outcome(Dribble(raw))


def test_every_truncation_within_plain_events_is_told_at_its_offset():
    raw = pickled(snapshot(events=trace()))

    for n in range(len(raw) - 400, len(raw)):
        with pytest.raises(InputError) as caught:
            read_snapshot(raw[:n])
        assert caught.value.offset == n
