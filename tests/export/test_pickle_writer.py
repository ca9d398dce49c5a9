from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.export.pickle_writer import PickledColumn, PickleWriter, Records, Shared

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=40,
)


def written(value: Any) -> bytes:
    out = bytearray()
    PickleWriter(out.extend).write(value)
    return bytes(out)


@pytest.mark.slow
@given(PLAIN)
def test_stock_unpickler_reads_the_same_value(value: Any) -> None:
    assert pickle.loads(written(value)) == value


@pytest.mark.parametrize("n", [0, 1, 999, 1000, 1001, 2500])
def test_iterator_is_a_list(n: int) -> None:
    assert pickle.loads(written(iter(range(n)))) == list(range(n))


@pytest.mark.parametrize("value", [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31) - 1])
def test_integers_at_the_bounds_of_their_opcodes(value: int) -> None:
    assert pickle.loads(written(value)) == value


def test_shared_value_is_one_object_after_reading() -> None:
    frame = Shared({"line": 1})
    stack = Shared([frame, frame])

    value = pickle.loads(written([stack, stack, [frame]]))

    assert value == [[{"line": 1}, {"line": 1}], [{"line": 1}, {"line": 1}], [{"line": 1}]]
    assert value[0] is value[1]
    assert value[0][0] is value[2][0]


def test_memo_beyond_one_byte_is_found_again() -> None:
    texts = [f"text {i}" for i in range(600)]

    assert pickle.loads(written([texts, texts])) == [texts, texts]


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object(), (1,), (1, 2, 3), 1j])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        written(value)


BOUNDS = [0, 255, 256, 65535, 65536, *(2**b + d for b in (31, 32, 39, 47, 55, 63) for d in (-1, 0))]


def test_columns_are_written_byte_for_byte_like_their_mappings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fragdoctor.export.pickle_writer._PIECE", 700)
    chance = np.random.default_rng(7)
    n = 2500
    frames = [Shared({"name": f"f{i}", "line": i}) for i in range(400)]
    choices: dict[str, list[Any]] = {
        "action": ["alloc", "free", "action"],
        "frames": [Shared([frames[i % 400], frames[i // 7]]) for i in range(900)],
        "note": ["alloc", "", "a" * 300],
        "pool": [(0, 0), (1, -5), (2**40, 3)],
    }
    numbers = np.append(np.array(BOUNDS, np.uint64), np.uint64(2**64 - 1))
    columns = [
        PickledColumn("action", chance.integers(0, 3, n), choices["action"]),
        PickledColumn("size", numbers[chance.integers(0, len(numbers), n)]),
        PickledColumn(
            "frames", chance.integers(0, 900, n), choices["frames"], chance.random(n) < 0.6
        ),
        PickledColumn("time", chance.integers(0, 300, n), None, chance.random(n) < 0.5),
        PickledColumn("note", chance.integers(0, 3, n), choices["note"], np.arange(n) > 1800),
        PickledColumn("pool", chance.integers(0, 3, n), choices["pool"], chance.random(n) < 0.1),
        PickledColumn("never", np.zeros(n, np.int64), None, np.zeros(n, bool)),
    ]

    def mapping(i: int) -> dict[str, Any]:
        return {
            c.key: int(c.values[i]) if c.choices is None else c.choices[c.values[i]]
            for c in columns
            if c.is_there is None or c.is_there[i]
        }

    def part(low: int, high: int) -> list[PickledColumn]:
        return [
            PickledColumn(
                c.key,
                c.values[low:high],
                c.choices,
                None if c.is_there is None else c.is_there[low:high],
            )
            for c in columns
        ]

    lists = [[mapping(i) for i in range(n)], [], [mapping(i) for i in range(1000)]]
    records = [Records(n, part), Records(0, part), Records(1000, part)]

    assert written(records) == written(lists)
    assert written(Records(n, part)) == written(lists[0])
