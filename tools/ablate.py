"""Take out one case, rule or constant at a time and print what changes in the table of truth.

    python tools/ablate.py              # all of them; about four minutes each on two cores
    python tools/ablate.py NAME ...     # some of them
    python tools/ablate.py --list

Each line of the result is for one part of fragdoctor that guesses. It shows how many rows of the
table (``truth_table.py``) change in each half of the programs, *will* and *likely* separately, and
how many verdicts; late and cut recordings count with their half. A part that moves no row on
programs that it was not written for gets deleted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from truth_table import Answers, answers, counts

from fragdoctor.analysis import growth, kept
from fragdoctor.diagnosis import decision, verdict
from fragdoctor.diagnosis.bench import Bench
from fragdoctor.future import (
    alignment,
    outlook,
    passes,
    repetition,
    simulator,
    steps,
)
from fragdoctor.future.outlook import Outlooks
from fragdoctor.future.repetition import AlignedSteps
from fragdoctor.future.steps import _ModelCalls
from fragdoctor.model import turns

Ablation = Callable[[], None]
"""Takes a part out, in the process that calls it."""


def _set(place: Any, name: str, value: Any) -> Ablation:
    return lambda: setattr(place, name, value)


def _set_everywhere(place: Any, name: str, value: Any) -> Ablation:
    """Set a constant in its module and in all that import it by name."""
    was = getattr(place, name)

    def ablate() -> None:
        for module in list(sys.modules.values()):
            if module.__name__.startswith("fragdoctor.") and vars(module).get(name) is was:
                setattr(module, name, value)

    return ablate


def _without_row(place: Any, row: Any) -> Ablation:
    return lambda: setattr(place, "ROWS", tuple(one for one in place.ROWS if one is not row))


def _name(row: Callable[..., Any]) -> str:
    return row.__name__.strip("_").replace("_", "-")


def _always(value: Any) -> Callable[..., Any]:
    """Return a function that returns the same value for all arguments."""
    return lambda *_asked, **_by_name: value


def _ablations() -> dict[str, Ablation]:
    nothing = np.zeros(0, np.int64)

    def no_growth(aligned: Any) -> Any:
        return np.zeros(aligned.size.shape[1], np.int64)

    def rest_as_it_is(_steps: Any, rest: Any) -> Any:
        return rest

    # The parts that guess the future.
    result: dict[str, Ablation] = {
        "marks of PyTorch": _set(steps, "find_optimizer_steps", _always(None)),
        "turns of optimizers": _set(steps, "period_of", _always(1)),
        "evaluation as a step of its own": _set(_ModelCalls, "evaluated_until", _always(None)),
        "even growth": _set(AlignedSteps, "_growths", no_growth),
        "doubt: spread of steps": _set(AlignedSteps, "_spread", _always(0.0)),
        "doubt: success that larger steps would have too": _set(AlignedSteps, "may_exceed", None),
        "doubt: unexplained memory": _set(AlignedSteps, "_unexplained", _always(0.0)),
        "what a first step makes once": _set(repetition, "_without_first_time", rest_as_it_is),
        "least of a first step": _set(Outlooks, "_first_step_takes", 0.0),
        "anchors of an alignment": _set(alignment, "_anchors", _always((nothing, nothing))),
        "growth to the end of memory": _set(outlook, "FORESEEN_STEPS", 0),
        "growing buffers": _set(kept, "buffers_of", _always(())),
        "leak refuted by a replay": _set(Bench, "refutes_leak", False),
    }
    # Rows of the verdict; the last row of each table decides the cases that the others leave.
    result |= {f"verdict: {_name(r)}": _without_row(verdict, r) for r in verdict.ROWS[:-1]}
    result |= {f"figures: {_name(r)}": _without_row(decision, r) for r in decision.ROWS}
    # Constants, halved and doubled.
    for place, name in (
        (outlook, "SURE"),
        (outlook, "ENOUGH"),
        (outlook, "FORWARD_TAKES"),
        (outlook, "BACKWARD_TAKES"),
        (repetition, "MIN_EVEN"),
        (repetition, "MAX_KINDS"),
        (steps, "MIN_STEPS"),
        (steps, "MIN_COVERED"),
        (turns, "TURNS"),
        (alignment, "LEFT_OUT"),
        (outlook, "FORESEEN_STEPS"),
        (passes, "KEPT_SHARE"),
        (passes, "STILL_READ"),
        (simulator, "REPLAY_SHARE"),
        (growth, "ALL_AT_ONCE"),
        (kept, "LARGE_SHARE"),
        (kept, "GRAPH_LINES"),
        (kept, "MOST"),
        (decision, "SLIM_MARGIN_SHARE"),
        (decision, "NORMAL_OUTSIDE_SHARE"),
        (verdict, "FAR_SHARE"),
    ):
        value = getattr(place, name)
        for factor in (0.5, 2):
            changed = 1 + (value - 1) * factor if name.endswith("_TAKES") else value * factor
            result[f"{name} x {factor:g}"] = _set_everywhere(place, name, type(value)(changed))
    return result


ABLATIONS: Final = _ablations()


def _answers_without(name: str) -> Answers:
    if name:
        ABLATIONS[name]()
    return answers()


def row_of(name: str, before: Answers, now: Answers) -> str:
    """Return a line of the result, with the changes in each half."""
    cells = []
    then, here = counts(before), counts(now)
    for half in ("looked", "held-out"):
        change = here[half] + here[f"{half}-late"] + here[f"{half}-cut"]
        change.subtract(then[half] + then[f"{half}-late"] + then[f"{half}-cut"])
        words = [f"{n:+d} {word}" for word, n in sorted(change.items()) if n]
        cells.append(", ".join(words) or "nothing")
    return f"| {name} | {cells[0]} | {cells[1]} |"


def main(argv: Sequence[str]) -> None:
    """Print the table of ablations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(ABLATIONS))
        return
    names = options.names or list(ABLATIONS)
    unknown = [name for name in names if name not in ABLATIONS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; --list shows all")
    # One process for each part, because a part that was taken out stays out.
    context = multiprocessing.get_context("fork")
    with context.Pool(options.jobs, maxtasksperchild=1) as pool:
        before = pool.apply(_answers_without, ("",))
        print("| taken out | looked at | held out |\n|---|---|---|", flush=True)
        for name, now in zip(names, pool.imap(_answers_without, names), strict=True):
            print(row_of(name, before, now), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
