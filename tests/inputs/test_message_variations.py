"""Messages drawn at random, spoiled at random, must give their figures back."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, note, settings
from oom_variations import HEADS, disguises, messages

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
