from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")
if sys.gettrace() is not None:
    pytest.skip("a debugger or a coverage tool traces the frames", allow_module_level=True)

from fragdoctor.rehearse.engine.loop import Loop


class Enough(Exception):  # noqa: N818
    """The next round began."""


def stop() -> None:
    raise Enough


def step(loop: Loop) -> None:
    loop.move_on(sys._getframe(1))


def test_the_next_round_ends_a_loop() -> None:
    loop, done = Loop(), []

    def train() -> None:
        for i in range(5):
            done.append(f"forward {i}")
            step(loop)
            if i == 2:
                loop.at_its_end(stop)
            done.append(f"after {i}")

    with pytest.raises(Enough):
        train()
    assert done[-1] == "after 2"
    assert sys.gettrace() is None


@pytest.mark.slow
def test_a_loop_that_is_over_lets_the_program_go_on() -> None:
    loop, done = Loop(), []

    def train() -> None:
        for i in range(3):
            step(loop)
            if i == 2:
                loop.at_its_end(stop)
        done.append("evaluated")

    train()
    assert done == ["evaluated"]
    assert sys.gettrace() is None


@pytest.mark.slow
def test_what_follows_the_optimizer_belongs_to_its_round() -> None:
    loop, seen = Loop(), []

    def one_step() -> None:
        seen.append(loop.is_in_same_round())
        step(loop)
        seen.append(loop.is_in_same_round())

    for _ in range(2):
        one_step()
        seen.append(loop.is_in_same_round())

    assert seen == [False, True, True, False, True, True]
