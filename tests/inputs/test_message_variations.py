"""Messages drawn at random, spoiled at random, must give their figures back."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from oom_variations import HEADS, disguises, messages, npu, one_cached, one_reserved, two

from fragdoctor.inputs.messages import find_messages

EXAMPLES = int(os.environ.get("FRAGDOCTOR_EXAMPLES", "150"))
# The same examples every time, so that a change is judged by itself; FRAGDOCTOR_EXAMPLES=5000 goes
# out to look for new ones.
IS_SEARCH = "FRAGDOCTOR_EXAMPLES" in os.environ


def assert_fields(message, truth):
    others = [(p.pid, p.n_bytes) for p in message.other_processes]
    for name, value in truth.items():
        got = others if name == "other_processes" else getattr(message, name)
        assert got == value, (name, got, value, message)


@settings(
    max_examples=EXAMPLES,
    derandomize=not IS_SEARCH,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=messages(), head=HEADS, spoil=disguises())
def test_message_spoiled_by_pasting_gives_its_figures(case, head, spoil):
    text, truth = case
    pasted = spoil(head + text)
    note(pasted)

    log = find_messages(pasted)

    assert len(log.messages) == 1
    assert log.messages[0].is_device_oom
    assert log.messages[0].kind == "pytorch-caching-allocator"
    assert_fields(log.messages[0], truth)


@settings(
    max_examples=EXAMPLES,
    derandomize=not IS_SEARCH,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data(), make=st.sampled_from([one_cached, one_reserved, two, npu]))
def test_message_cut_anywhere_gives_no_wrong_figure_and_keeps_those_before_the_cut(data, make):
    text, truth = make(data.draw)
    end = data.draw(st.integers(text.index("allocate") + 8, len(text)))
    ending = data.draw(st.sampled_from(["", "...", '"', "\nEpoch 3 of 9\n", " [truncated]"]))
    note(text[:end] + ending)

    (message,) = find_messages("RuntimeError: " + text[:end] + ending).messages
    (longer,) = find_messages("RuntimeError: " + text).messages

    for name, value in truth.items():
        if name.endswith("_bytes"):
            assert getattr(message, name) in (value, None), (name, value, message)
    # a figure whose label has begun is read; what "reserved" means takes two of them
    told = [n for n in truth if n.endswith("_bytes") and getattr(message, n) is not None]
    n_figures = sum(text[:end].count(unit) for unit in ("KiB ", "MiB ", "GiB ", " bytes "))
    assert message.kind == longer.kind
    assert len(told) + len(message.other_processes) >= min(n_figures, 1)


RETYPED = {
    "commas": lambda text: text.replace(";", ",").replace(". Tried", ", tried"),
    "full width": lambda text: text.translate(str.maketrans("();", "\uff08\uff09\uff1b")),
    "no blanks": lambda text: text.replace(" ", "").lower(),
    "a dash": lambda text: text.replace(". Tried", " - tried"),
    "no brackets": lambda text: text.translate(str.maketrans("();", "   ")),
}


@settings(max_examples=EXAMPLES, derandomize=not IS_SEARCH, deadline=None)
@given(data=st.data(), make=st.sampled_from([one_cached, one_reserved]))
@pytest.mark.parametrize("spoil", RETYPED.values(), ids=RETYPED)
def test_message_that_somebody_retypes_gives_its_figures(spoil, data, make):
    text, truth = make(data.draw)
    sums = {name: n for name, n in truth.items() if name.endswith("_bytes")}
    assume(spoil is not RETYPED["no brackets"] or truth["device_index"] < 10)

    (message,) = find_messages(spoil(text)).messages

    assert_fields(message, sums)
