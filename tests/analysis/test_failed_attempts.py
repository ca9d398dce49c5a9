"""What an attempt that failed leaves to the next."""

from __future__ import annotations

from collections.abc import Callable

from analysis.training_loop import BATCH, LINEAR, MAIN, TrainingLoop
from builders import MIB, frame, oom
from stock import from_python

from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.failed_attempts import left_of_attempts

AttemptEnds = Callable[[TrainingLoop, list], None]


def left_bytes(ends: AttemptEnds) -> int:
    loop = TrainingLoop()
    loop.build()
    held = [loop.new(2 * MIB, BATCH), loop.new(10 * MIB, LINEAR)]
    first = len(loop.toy.events)
    ends(loop, held)
    loop.new(MIB, BATCH)
    loop.new(5 * MIB, LINEAR)
    data = loop.recording()
    events = data["device_traces"][0]
    events.append(oom(40 * MIB, 0, time_us=9000))
    events.insert(first, oom(40 * MIB, 0, time_us=1000 + first))
    a = analyze_device(from_python(data), 0)
    left = left_of_attempts(a.trace, a.ooms, a.ooms[-1])
    return 0 if left is None else left.n_bytes


def test_left_of_an_attempt_is_all_that_it_made_and_nobody_freed():
    assert left_bytes(lambda _loop, _held: None) == 12 * MIB


def test_left_of_an_attempt_is_nothing_once_its_frames_are_gone():
    def let_go(loop: TrainingLoop, held: list) -> None:
        for block in held:
            loop.free(block, (MAIN,))

    assert left_bytes(let_go) == 0


def test_left_of_an_attempt_is_found_where_the_handler_calls_the_model_from_its_own_line():
    loop = TrainingLoop()
    loop.build()
    first = len(loop.toy.events)
    loop.new(10 * MIB, LINEAR)
    in_handler = (*LINEAR[:2], frame("train.py", 7, "main"), MAIN)
    data = loop.recording()
    events = data["device_traces"][0]
    events.insert(first + 1, oom(40 * MIB, 0, time_us=1000 + first))
    events.append(oom(40 * MIB, 0, time_us=9000, frames=in_handler))
    a = analyze_device(from_python(data), 0)
    left = left_of_attempts(a.trace, a.ooms, a.ooms[-1])
    assert left is not None
    assert left.n_bytes == 10 * MIB
