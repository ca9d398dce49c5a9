"""Pickles of protocols 0 and 1 are recognised, and nothing else is taken for one."""

from __future__ import annotations

import collections
import pickle

import pytest
from builders import small
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.inputs.classify import is_old_pickle

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([0, 1]))
def test_any_value_is_recognised(value, protocol):
    assert is_old_pickle(pickle.dumps(value, protocol))


@pytest.mark.parametrize("protocol", [0, 1])
@pytest.mark.parametrize("n_bytes", [100, 1000, 4096])
def test_its_first_bytes_are_enough(protocol, n_bytes):
    data = pickle.dumps([small()] * 20 + [collections.OrderedDict(a=1)], protocol)

    assert is_old_pickle(data[:n_bytes])


@given(st.text(max_size=200))
def test_text_without_the_end_of_a_pickle_is_none(text):
    assert not is_old_pickle(text.replace(".", "").encode())


@pytest.mark.parametrize(
    "text",
    [
        b"N.Y. has it",
        b"Notes.",
        b"cat\ndog\n",
        b"Version 1.2\nVendor x\nNone of it.\n",
        b"I0812 10:11:12 step 5\n",
        b"(a list of things)",
        b"]).",
        b"(.",
        b".",
        b"t.",
        b"(lp7\nI1\na.",  # the memo counts from 0
    ],
)
def test_what_only_looks_like_one_is_none(text):
    assert not is_old_pickle(text)
