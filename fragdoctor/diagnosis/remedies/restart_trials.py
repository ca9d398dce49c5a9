"""Long sweeps in one process: start afresh between trials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.diagnosis.remedies.plan import HELPS, MAY_HELP, Plan, Proposal, propose
from fragdoctor.diagnosis.remedies.sweeps import is_sweep
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.model.story import LogStory
from fragdoctor.story.trends import (
    accumulation,
    growing_cache,
    has_process_each,
    trials_before_failure,
)
from fragdoctor.units import plural

LONG_RUN_EVENTS: Final = 5_000
"""A trace this long, or cut, comes from a run in which history can have piled up."""


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose a restart where damage piles up over a long run."""
    story = plan.context.story
    if story is not None and plan.is_allocator_case and is_sweep(story):
        if not has_process_each(story):
            yield _every_few(story)
        return
    if not plan.is_allocator_case or plan.cause not in (Cause.FRAGMENTATION, Cause.LEAK):
        return
    analysis = plan.context.analysis
    if analysis is not None:
        is_long = analysis.n_events >= LONG_RUN_EVENTS or analysis.capture.is_truncated
        if not is_long:
            return
    yield propose(
        "restart-trials",
        "Restart the process between trials of a sweep",
        weight=MAY_HELP - 15,
        confidence=Confidence.POSSIBLE,
        change="one process per trial (subprocess, or the sweep tool's own process isolation)",
        why="A new process starts with an empty cache; what piled up is gone.",
        cost="Start-up time per trial.",
        caveats=("A workaround: it postpones the failure within one trial, no more.",),
        verify="Later trials fail no sooner than the first.",
    )


def _every_few(story: LogStory) -> Proposal:
    piles_up = accumulation(story) is not None or growing_cache(story) is not None
    n_before = trials_before_failure(story)
    n = max(1, (n_before or 0) // 2)
    often = "for every trial" if n == 1 else f"every {n} trials"
    title = f"Start a fresh process {often}"
    if n_before is None:
        title = "Start a fresh process every few trials"
    seen = (
        ""
        if n_before is None
        else "The first trial of the log failed already. "
        if n_before == 0
        else f"{plural(n_before, 'trial')} ran before the first that failed; half of that leaves "
        "a margin. "
    )
    return propose(
        "restart-trials",
        title,
        weight=HELPS if piles_up else MAY_HELP - 15,
        confidence=Confidence.LIKELY if piles_up else Confidence.POSSIBLE,
        change="run trials with subprocess or multiprocessing (spawn), or the sweep tool's own "
        "process isolation, and let the process end",
        why=f"{seen}A process that ends gives back everything: leaked tensors, holes in the cache, "
        "the CUDA context.",
        cost="Start-up and a new CUDA context for each process, some seconds.",
        caveats=(
            *(() if piles_up else ("Nothing in this log piles up from trial to trial.",)),
            "It does not help a trial that is too large by itself.",
        ),
        verify="The first memory_allocated() and the first 'reserved but unallocated' of each new "
        "process are those of the first trial; nvidia-smi shows the old process gone.",
    )
