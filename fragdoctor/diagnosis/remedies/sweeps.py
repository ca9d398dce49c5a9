"""Long sweeps: free each trial's memory, and run fewer trials at a time."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import CURES, HELPS, MAY_HELP, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.model.story import LogStory
from fragdoctor.rules.growth.accumulating_trials import growth_sentence
from fragdoctor.story.trends import accumulation, has_process_each, memory_over_trials
from fragdoctor.units import format_size, plural

FREEING = (
    (
        "del frees nothing while another reference remains: a list of results, a callback, a "
        "closure, an exception's traceback."
    ),
    "gc.collect() frees what only reference cycles keep, nothing that is still in use.",
    (
        "empty_cache() gives unused cache back to the driver: reserved falls, allocated does not; "
        "it cures no leak, and the next trial pays for new segments."
    ),
)
"""What each of the three calls does not do."""


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose what a log of several trials calls for."""
    story = plan.context.story
    if story is None or not plan.is_allocator_case or not is_sweep(story):
        return
    if not has_process_each(story):  # a process that ends leaves nothing to free
        yield _free(plan, story)
    if story.n_parallel > 1:
        yield _fewer(plan, story)


def is_sweep(story: LogStory) -> bool:
    """Tell whether a log runs through several trials."""
    return len(story.trials) > 1


def _free(plan: Plan, story: LogStory) -> Proposal:
    grown = accumulation(story)
    told = memory_over_trials(story)
    if grown is not None:
        why = growth_sentence(grown)
        weight = CURES + 2 if plan.supports(Cause.LEAK) else HELPS
        now = f"; it rose by {format_size(grown.slope_bytes)} a trial"
    elif told is not None:
        why = "Memory does not grow over the trials of this log: this is order, not the cure."
        weight, now = MAY_HELP - 25, ""
    else:
        why = "The log does not print what is allocated between trials, so nothing rules it out."
        weight, now = MAY_HELP - 5, ""
    return propose(
        "free-between-trials",
        "Free each trial's memory before the next one starts",
        weight=weight,
        confidence=Confidence.LIKELY if grown is not None else Confidence.POSSIBLE,
        change="at the end of each trial: del model, optimizer, batch, loss; gc.collect(); "
        "torch.cuda.empty_cache()",
        why=why,
        cost="Milliseconds a trial.",
        caveats=FREEING,
        verify="torch.cuda.memory_allocated(), printed at the start of each trial, is the same "
        f"figure every time{now}.",
    )


def _fewer(plan: Plan, story: LogStory) -> Proposal:
    n = story.n_parallel
    is_main = plan.supports(Cause.OTHER_PROCESS)
    return propose(
        "fewer-parallel-trials",
        f"Run {n - 1} trials at a time on this device, not {n}",
        weight=HELPS + 5 if is_main else MAY_HELP,
        confidence=Confidence.LIKELY if is_main else Confidence.POSSIBLE,
        change="lower the number of concurrent trials, or raise the share of a GPU that each asks "
        "for",
        why=f"{plural(n, 'trial')} were at work at the same time; all processes on a device share "
        "its memory, each with a CUDA context of its own.",
        cost=f"At most 1/{n} of the trials per hour, less where they wait for each other already.",
        caveats=("Only trials on the same device count: several GPUs share nothing.",),
        verify="The sum over nvidia-smi's processes stays below the device's size; free memory in "
        "the message, or mem_get_info(), is higher by one trial's share.",
    )
