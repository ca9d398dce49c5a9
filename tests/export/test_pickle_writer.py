from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.export.pickle_writer import PickleWriter, Shared

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
