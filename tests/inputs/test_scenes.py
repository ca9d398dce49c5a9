"""Which lines of a long log are looked at, and at what cost."""

from __future__ import annotations

import time

import pytest
from story_logs import message, traceback

from fragdoctor.inputs.messages import find_messages
from fragdoctor.inputs.scenes import scan
from fragdoctor.model.story import SceneKind

STEP = "2024-06-01 10:22:17,413 INFO train.py:88] epoch 3 step {n} loss 0.713 mem 12345 MB\n"


def test_long_log_is_thinned_but_keeps_trials_and_what_stands_above_a_failure():
    blocks = [
        f"=== Trial {t} ===\n" + "".join(STEP.format(n=n) for n in range(6000)) for t in range(8)
    ]
    text = "".join(blocks) + traceback(message(20, 1))

    scenes = find_messages(text).scenes

    assert len(scenes) < 25_000  # of 96,000 lines that tell something
    assert [s.trial for s in scenes if s.kind is SceneKind.TRIAL_START] == list("01234567")
    oom = next(s for s in scenes if s.kind is SceneKind.OOM)
    last = [s for s in scenes if s.kind is SceneKind.PROGRESS and s.line < oom.line][-1]
    assert last.place == "epoch 3, step 5999"


def test_line_numbers_are_those_of_the_text():
    text = "x\n" * 500 + "Epoch 1/3\n" + "y\n" * 10 + "Restarting worker group\n"

    assert [(s.kind, s.line) for s in scan(text, (), ())] == [
        (SceneKind.PROGRESS, 501),
        (SceneKind.RESTART, 512),
    ]


def seconds(text):
    start = time.process_time()
    scan(text, (), ())
    return time.process_time() - start


@pytest.mark.parametrize(
    "unit",
    ["trial 1 ", "epoch ", "alloc 1 ", "mem\r", "a" * 60 + "mem: ", "\x1b[31;epoch", "mib /"],
)
def test_pathological_line_takes_time_in_proportion_to_its_size(unit):
    small = seconds(unit * (100_000 // len(unit)))
    large = seconds(unit * (400_000 // len(unit)))

    assert large < 12 * small + 0.5


@pytest.mark.slow
def test_line_with_every_literal_is_looked_at_once_for_all_of_them():
    line = "[trial 3] run epoch 1 step 9 alloc=4 MiB batch size 8 retry fold experiment sweep\n"
    text = line * 100_000

    scenes = scan(text, (), ())

    assert len({s.line for s in scenes}) <= 20_000  # the budget of one literal, not the sum of all
    assert max(s.line for s in scenes) > 99_000
