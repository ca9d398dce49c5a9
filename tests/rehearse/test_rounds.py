from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from textwrap import dedent
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("torch")

from fragdoctor.rehearse.engine.rounds import Rounds

HERE = "/home/user/train.py"
PPO = """
for update in range(2):
    for _ in range(9): product()
    for x in range(3): product(); step()
    look()
"""


def run(code: str, **names: Any) -> tuple[Rounds, list[int]]:
    """Run a program that calls ``step()`` as optimizers do and ``look()`` where it would fail."""
    rounds, seen = Rounds(), []

    def called(what: Callable[[FrameType], Any]) -> Callable[[], None]:
        return lambda: what(sys._getframe(1))

    names |= {
        "step": called(rounds.mark),
        "look": called(lambda frame: seen.append(rounds.n_complete(frame))),
        "product": called(lambda _: setattr(rounds, "n_products", rounds.n_products + 1)),
        "rounds": rounds,
    }
    with ExitStack() as undo:
        rounds.install(undo)
        exec(rounds.compiled(dedent(code).encode(), HERE), names)
    return rounds, seen


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("for i in range(3):\n look()\n step()\n look()\nlook()", [0, 0, 1, 1, 2, 2, 3]),
        ("i = 0\nwhile i < 3:\n step()\n look()\n i += 1\nlook()", [0, 1, 2, 3]),
        ("for i in range(6):\n if i % 3 == 2: step()\n look()", [0, 1, 2, 3, 4, 5]),
        ("for epoch in range(2):\n for x in 'ab':\n  step()\n look()", [2, 4]),
        ("for epoch in range(3):\n step()\n look()", [0, 1, 2]),
        ("for i in range(4):\n for _ in range(3): step()\n step()\n look()", [0, 1, 2, 3]),
        ("for i in range(4):\n if i == 2: break\n step()\nlook()", [3]),
        ("def one():\n step()\n look()\nfor _ in range(3): one()", [0, 1, 2]),
        ("def loader():\n for i in range(3):\n  look()\n  yield i\nfor x in loader(): step()",
         [0, 1, 2]),
        ("for i in range(2): step()\nfor i in range(2):\n step()\n look()", [2, 3]),
        ("for i in range(9): pass\nwhile True:\n look()\n break", [0]),
        ("class Net:\n def __init__(self):\n  for i in range(3): look()\nNet()", [0, 0, 0]),
        ("for fold in range(2):\n for x in range(3): step()\n look()", [3, 6]),
        (PPO, [0, 1]),
        ("for i in range(2): step()\nrounds.end_warm_up()\nfor i in range(3):\n step()\n look()",
         [0, 1, 2]),
    ],
)  # fmt: skip
def test_steps_are_counted_as_the_programs_author_does(code: str, expected: list[int]) -> None:
    assert run(code)[1] == expected


class Optimizer:
    """What :class:`Rounds` learns of an optimizer: that it is there, and is called."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        rounds.uncalled.add(self)

    def step(self) -> None:
        self._rounds.mark(sys._getframe(1), self)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("for i in range(3):\n for x in (a, b): x.step()\n look()", [0, 1, 2]),
        ("for i in range(3):\n for x in (a, b):\n  look()\n  x.step()", [0, 0, 1, 1, 2, 2]),
        ("for e in range(2):\n for x in range(2):\n  a.step()\n  b.step()\n  look()", [0, 1, 2, 3]),
        ("for i in range(2):\n for x in range(2):\n  a.step()\n  look()\n b.step()", [0, 0, 1, 1]),
        ("for fold in range(2):\n for x in range(2):\n  a.step()\n look()", [0, 4]),
        ("for i in range(4):\n (a, b)[i % 2].step()\n look()", [0, 1, 2, 3]),
        ("for run in range(2):\n for made in (a, b):\n  for x in range(2): made.step()\n  look()",
         [0, 4, 6, 8]),
        ("for epoch in range(2):\n for x in range(2):\n  a.step()\n  look()", [0, 1, 2, 3]),
    ],
)  # fmt: skip
def test_optimizers_that_are_called_in_turns_make_one_step(code: str, expected: list[int]) -> None:
    assert run(f"a, b = Optimizer(rounds), Optimizer(rounds)\n{code}", Optimizer=Optimizer)[1] == (
        expected
    )


def test_items_die_when_they_always_did() -> None:
    class Item:
        n_alive = 0

        def __init__(self) -> None:
            Item.n_alive += 1

        def __del__(self) -> None:
            Item.n_alive -= 1

    alive: list[int] = []
    code = "for x in (Item() for _ in range(3)):\n alive.append(Item.n_alive)\n del x"
    run(code, Item=Item, alive=alive)

    assert alive == [1, 1, 1]
    assert Item.n_alive == 0


def test_a_loop_of_a_library_takes_no_rounds_of_the_users() -> None:
    library = "def fit(step):\n    for _ in range(3):\n        step()\n"
    names: dict[str, Any] = {}
    exec(compile(library, "/x/site-packages/trainer.py", "exec"), names)

    rounds, _ = run("for fold in range(2): fit(lambda: step())", fit=names["fit"])

    assert rounds.n_taken == 0


def test_else_clauses_lines_and_errors_stay() -> None:
    code = """
    said = []
    for x in []:
        pass
    else:
        said.append("for")
    while False:
        pass
    else:
        said.append("while")
    try:
        for x in 5:
            pass
    except TypeError as error:
        said.append((str(error), error.__traceback__.tb_lineno))
    """
    said: dict[str, Any] = {}
    run(code + "\n    out.update(said=said)", out=said)

    assert said["said"] == ["for", "while", ("'int' object is not iterable", 12)]
