from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from fragdoctor.rehearsal.engine import step_watch
from fragdoctor.rehearsal.engine.loops import Loops
from fragdoctor.rehearsal.engine.memory_history import ALLOC
from fragdoctor.rehearsal.engine.skipping import MANY_EQUAL_ROUNDS
from fragdoctor.rehearsal.engine.step_watch import RUNS_BEFORE_A_TURN, Steps, StopConditions


@pytest.fixture(autouse=True)
def going_on_for_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "LIBRARY_S", 0.0)


class EndedError(Exception):
    """The program was ended."""


class Program:
    """A program that is told by its letters, on a GPU that counts its requests.

    ``b`` is a backward pass, ``n`` a call of the model that keeps nothing, ``m`` a larger request,
    and each capital a run of the optimizer of that name.
    """

    def __init__(
        self, optimizers: str, limit: int | None = None, most: int | None = None, **asked: int
    ) -> None:
        self.requests: list[int] = []
        self.told: list[int] = []
        gpus = SimpleNamespace(
            figures=lambda _: {
                "events": len(self.requests),
                "allocated": 1,
                "reserved": 2,
                "peak_allocated": max(self.requests, default=0),
            },
            trace=lambda _, first: [
                SimpleNamespace(size=size, action=ALLOC) for size in self.requests[first:]
            ],
            digest=lambda _, first, end: hash(tuple(self.requests[first:end])),
        )
        now: Any = SimpleNamespace(
            gpus=gpus, n_devices=1, is_started=True, captures=[], loops=Loops()
        )
        conditions = StopConditions(limit, most, **asked)
        self.steps = Steps(now, conditions, self.told.append, self._stop)
        self.optimizers = {name: SimpleOptimizer() for name in optimizers}
        self.steps._has_optimizer = bool(optimizers)
        self.steps._uncalled.update(self.optimizers.values())

    def run(self, program: str) -> list[int]:
        """Return the steps that are complete before each letter, and those at the end."""
        seen = []
        for letter in program:
            seen.append(self.steps.n_complete)
            if letter == "b":
                self.steps.begin_call(self, keeps=True)
                self.requests.append(8)
                self.steps.begin_backward()
                self.requests.append(4)
                self.steps.end_backward()
            elif letter == "n":
                self.steps.begin_call(self, keeps=False)
                self.requests.append(16)
            elif letter == "m":
                self.requests.append(1000)
            else:
                self.requests.append(2)
                self.steps._after_optimizer(self.optimizers[letter], (), {})
                self.steps.end_range()
        return [*seen, self.steps.n_taken]

    def _stop(self, reason: str) -> None:
        raise EndedError(reason)


class SimpleOptimizer:
    """What :class:`Steps` learns of an optimizer: that it is called."""


@pytest.mark.parametrize(
    ("program", "n_steps"),
    [
        ("bA" * 9, 9),
        ("bbbbA" * 9, 9),  # micro-batches
        ("bbbbA" * 9 + "bb", 9),
        ("bDbG" * 9, 9),  # a discriminator and a generator take turns
        ("bDbG" * 9 + "bD", 9),
        ("bDG" * 9, 9),  # two optimizers after one backward pass
        ("bDbDbDbDbDbG" * 9, 9),  # five updates of the critic
        ("bDbDbDbDbDbG" * 2 + "bDbDbD", 2),
        ("bbDbbG" * 9, 9),
        ("bA" * 5 + "nnn" + "bA" * 5, 10),  # evaluation
        (("n" * 10 + "bA" * 8) * 3, 24),  # a collector of reinforcement learning, then updates
        ("bA" * 9 + "bC" * 9, 18),  # one after the other
        ("A" * 9, 9),  # gradients that no backward pass makes
        ("bbbb", 4),  # no optimizer
        ("bnbnbnbn", 4),
        ("nnnnn", 5),  # inference
    ],
)
def test_a_step_lasts_from_one_run_of_the_optimizer_to_the_next(program: str, n_steps: int) -> None:
    made = Program("".join(sorted(set(program) - set("bn"))), limit=1000)

    assert n_steps == made.run(program)[-1]


def test_steps_before_a_place_are_those_that_are_over() -> None:
    assert [0, 0, 0, 1, 1, 1, 2] == Program("A").run("bbAbbA")
    assert [0, 0, 0, 0, 1, 1, 1, 1, 2] == Program("DG").run("bDbGbDbG")
    assert [0, 0, 0, 1, 1, 3] == Program("").run("nmnmn")


def test_an_optimizer_that_is_never_called_takes_no_turn() -> None:
    seen = Program("AU").run("bA" * 19)

    assert RUNS_BEFORE_A_TURN + 1 == seen[2 * (RUNS_BEFORE_A_TURN + 1)]
    assert 19 == seen[-1]


@pytest.mark.parametrize(
    ("optimizers", "program", "limit", "n_done"),
    [
        ("A", "bA" * 9, 3, 6),
        ("A", "bbA" * 9, 3, 9),
        ("DG", "bDbG" * 9, 1, 4),  # not after the discriminator's first run
        ("A", "bAnn" * 9, 2, 8),  # what follows without gradients is seen
        ("", "b" * 9, 3, 3),
        ("", "n" * 9, 3, 3),
    ],
)
def test_it_ends_as_the_step_after_those_asked_for_begins(
    optimizers: str, program: str, limit: int, n_done: int
) -> None:
    made = Program(optimizers, limit)

    with pytest.raises(EndedError, match=f"{limit} steps were asked for"):
        made.run(program)
    done = Program(optimizers)
    done.run(program[:n_done])
    assert done.requests == made.requests


def test_it_ends_after_equal_steps_which_hold_their_micro_batches() -> None:
    made = Program("A")

    with pytest.raises(EndedError, match="steps 2 to 21 asked for the same memory"):
        made.run("m" + "bbbA" * 50)

    assert MANY_EQUAL_ROUNDS + 1 == len(made.steps.found)
    assert 2 == made.requests[-1]  # with the optimizer, before the next step begins
    assert list(range(1, MANY_EQUAL_ROUNDS + 2)) == made.told


def test_loops_of_libraries_go_on_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after an epoch of a trainer counts."""
    monkeypatch.setattr(step_watch, "LIBRARY_S", 10.0)
    made = Program("A")
    made.steps._began -= 60.0

    made.run("bA" * 200 + "m")

    assert 200 == made.steps.n_taken


def test_it_goes_on_as_far_as_it_must_although_steps_repeat() -> None:
    made = Program("A", least=30)

    with pytest.raises(EndedError, match="steps 11 to 30 asked for the same memory"):
        made.run("bA" * 50)


def test_it_ends_at_once_where_the_steps_that_follow_are_known_to_repeat() -> None:
    made = Program("A", least=30, known=4)
    with pytest.raises(EndedError, match="steps 2 to 4 asked for the same memory"):
        made.run("m" + "bbA" * 50)


def test_what_the_last_step_lets_go_of_is_seen_where_the_others_are_known() -> None:
    """Without it, a replay would go on with its gradients in memory."""
    made = Program("A", least=30, known=4)

    made.run("m" + "bbA" * 4)

    with pytest.raises(EndedError, match="steps 2 to 4 asked for the same memory"):
        made.run("b")


@pytest.mark.parametrize(("after", "known_from"), [("", 2), ("n", 2), ("mmm", None)])
def test_a_program_is_known_where_nothing_large_follows_its_steps(
    after: str, known_from: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_watch, "LITTLE_BYTES", 2000)
    made = Program("A")

    made.run("m" + "bA" * 9 + after)

    assert made.steps.traits(is_stopped=False)["known_from"] == known_from
    assert made.steps.traits(is_stopped=True)["known_from"] == 2


@pytest.mark.parametrize(("fitting_bytes", "n_steps"), [(999, 4), (1000, 30)])
def test_it_ends_as_soon_as_steps_repeat_that_need_too_much(
    fitting_bytes: int, n_steps: int
) -> None:
    made = Program("A", least=30, fitting_bytes=fitting_bytes)

    with pytest.raises(EndedError, match="asked for the same memory"):
        made.run("m" + "bA" * 50)

    assert made.steps.n_taken == n_steps


def test_micro_batches_that_differ_make_no_step_differ() -> None:
    # One of four is larger, in every step.
    with pytest.raises(EndedError, match="steps 1 to 20 asked for the same memory"):
        Program("A").run("bbmbbA" * 50)


def test_it_ends_after_steps_that_never_repeat() -> None:
    made = Program("A", most=7)

    with pytest.raises(EndedError, match="7 steps did not repeat in memory"):
        made.run("".join("m" * i + "bA" for i in range(50)))


def test_inference_goes_on_to_its_end() -> None:
    assert 100 == Program("", most=7).run("n" * 100)[-1]


def test_replays_of_a_captured_optimizer_are_runs_of_their_own() -> None:
    made = Program("A")
    made.run("bA" * 3)
    graph = SimpleOptimizer()
    for _ in range(4):
        made.steps.replayed(graph)

    assert 7 == made.steps.n_complete


def test_two_optimizers_of_one_run_are_told_apart_from_turns() -> None:
    made = Program("DG")
    made.run("bDG" * 4 + "b")

    assert len(made.steps.found) == 4
    assert [4, 8, 12, 16] == [step.n_events[0] for step in made.steps.found]
