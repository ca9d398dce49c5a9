"""The same text by any way in: ``oom TEXT``, ``oom FILE``, ``analyze FILE`` and plain ``FILE``."""

from __future__ import annotations

import gzip

import pytest
import story_logs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oom_messages import new_style
from oom_variations import disguises, messages

FULL = new_style("1.00 GiB", "23.69 GiB", "412.00 MiB", "22.10 GiB", "300.00 MiB")
TEXTS = {
    "nothing": "hello",
    "about the GPU": "loading the model on cuda:0, all fine",
    "message": FULL,
    "negative": "RuntimeError: CUDA error: device-side assert triggered",
    "cut": FULL[:120],
    "host": "RuntimeError: [enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 4096 bytes.",
    "server": "reserved for KV Cache is -1.00GiB",
    "trials": story_logs.optuna(3),
    "ranks": story_logs.ranks(),
    "trainer": story_logs.trainer(fails=True),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_way_in_says_the_same(run, tmp_path, name):
    assert len(set(every_way(run, tmp_path / "text.txt", TEXTS[name]))) == 1


@given(st.tuples(messages(), disguises()))
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_message_says_the_same_by_every_way(run, tmp_path, drawn):
    (text, _), spoil = drawn

    assert len(set(every_way(run, tmp_path / "text.txt", spoil(text)))) == 1


def every_way(run, path, text):
    """Return exit code and report of each command that a text can be given to."""
    path.write_text(text + "\n", newline="")
    ways = (["oom", text], ["oom", str(path)], ["analyze", str(path)], [str(path)])
    return [(r.code, r.out) for r in (run(*words) for words in ways)]


def test_text_without_a_failure_says_that_none_was_found(run):
    result = run("oom", "hello")

    assert result.out.startswith("No memory failure found.")
    assert result.code == 0


@pytest.mark.parametrize("command", [["analyze"], ["oom"], []])
def test_damaged_text_is_read_as_far_as_it_goes(run, tmp_path, command):
    lines = (f"{i} {FULL}" for i in range(3000))
    packed = gzip.compress("\n".join(lines).encode())
    path = tmp_path / "run.log.gz"
    path.write_bytes(packed[: len(packed) // 2])

    result = run(*command, str(path))

    assert "Not enough capacity" in result.out
    assert "as far as possible" in result.out


def test_message_that_is_cut_says_what_it_lacks(run):
    result = run("oom", FULL[: FULL.index("Of the allocated")])

    assert "The message is cut off; missing: allocated." in result.out
