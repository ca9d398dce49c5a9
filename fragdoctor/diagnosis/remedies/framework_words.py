"""Advice in the words of the framework whose code the stacks run through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from fragdoctor.diagnosis.remedies.leaks import is_evaluation
from fragdoctor.diagnosis.remedies.remedy import JudgedCase, Proposal
from fragdoctor.model.case import BATCH_OF_ONE
from fragdoctor.model.frameworks import Change, Framework, frameworks_in, words_for

CHANGES: Final = {
    "limit-batch": Change.BATCH,
    "smaller-batch": Change.BATCH,
    "less-on-metal": Change.BATCH,
    "gradient-checkpointing": Change.CHECKPOINT,
    "fused-optimizer": Change.FUSED,
    "smaller-optimizer-state": Change.STATE_8BIT,
    "offload-optimizer": Change.OFFLOAD_STATE,
    "chunked-loss": Change.LOSS,
    "gather-on-host": Change.GATHER,
    "fused-attention": Change.ATTENTION,
    "less-model-memory": Change.WEIGHTS,
    "copy-of-weights": Change.COPIES,
}
"""What the remedies propose, by their codes."""

ADDED: Final = (Change.BATCH, Change.EVALUATION_BATCH, Change.WEIGHTS, Change.COPIES)
"""Changes whose own text says more (how much, of what), so that it stays behind the words."""


def in_framework_words(case: JudgedCase, proposals: Iterable[Proposal]) -> Iterator[Proposal]:
    """Yield proposals, their changes as the framework of the case spells them where it does."""
    frameworks = frameworks_of(case)
    for one in proposals:
        change = CHANGES.get(one.recommendation.code)
        is_told = change is Change.BATCH and case.has_marker(BATCH_OF_ONE)
        if change is None or one.is_rejected or is_told:
            yield one
            continue
        if change is Change.BATCH and is_evaluation(case.asking_stack):
            change = Change.EVALUATION_BATCH
        found = words_for(change, frameworks)
        if found is None:
            yield one
            continue
        text = f"with {found[0]}: {found[1]}"
        own = one.recommendation.change
        if change in ADDED and own and own != getattr(one.remedy, "change", ""):
            text = f"{text}; {own}"
        yield replace(one, recommendation=replace(one.recommendation, change=text))


def frameworks_of(case: JudgedCase) -> tuple[Framework, ...]:
    """Return the frameworks of a recording's stacks, else of the traceback of a message."""
    message = case.message
    if message is None:
        return frameworks_in(case.files)
    files = (frame.file for frame in message.frames)
    return frameworks_in((*files, *case.files), f"{message.above} {message.intro} {message.text}")
