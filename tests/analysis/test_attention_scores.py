"""Attention scores are told by the softmax of their function."""

from __future__ import annotations

import numpy as np
from analysis.training_loop import CALL, ENGINE, MAIN, TORCH, TrainingLoop
from builders import MIB, frame

from fragdoctor.analysis.attention_scores import find_attention_scores
from fragdoctor.analysis.training_run import NO_ROW, TrainingRequests
from fragdoctor.trace.trace import Trace

SCORES = (frame("model.py", 7, "attend"), CALL, MAIN)
MLP = (frame("model.py", 20, "feed"), CALL, MAIN)


def softmax(function: str):
    return (
        frame(f"{TORCH}/nn/functional.py", 5, function),
        frame("model.py", 8, "attend"),
        *SCORES[1:],
    )


def found(*blocks) -> list[int]:
    """Return the sizes in MiB of what is found among requests (size, stack)."""
    loop = TrainingLoop()
    for size, stack in blocks:
        loop.new(size * MIB, stack)
    trace = Trace.of(loop.snapshot(), 0)
    lives = trace.lives
    row = lives.start.astype(np.int64)
    requests = TrainingRequests(row, np.full(len(row), NO_ROW), lives.requested_bytes, lives.stack)
    rows = find_attention_scores(trace, requests)
    return [int(lives.size_bytes[row == r][0]) // MIB for r in rows]


def test_scores_are_what_the_function_of_a_softmax_makes_in_its_size():
    sizes = found((8, SCORES), (8, softmax("softmax")), (2, SCORES), (8, MLP), (3, SCORES))

    assert sizes == [8, 8, 2]  # 2: the mask of a dropout has a byte for each score


def test_gradients_of_scores_are_found_by_their_size():
    assert found((8, softmax("softmax")), (8, ENGINE), (5, ENGINE)) == [8, 8]


def test_softmax_of_a_loss_makes_no_scores():
    assert found((8, softmax("log_softmax")), (8, SCORES)) == []
