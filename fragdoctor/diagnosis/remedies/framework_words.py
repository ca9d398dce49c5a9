"""Advice in the words of the framework in the stacks, and with the tools of the GPU's vendor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from fragdoctor.diagnosis.remedies.leaks import is_evaluation
from fragdoctor.diagnosis.remedies.remedy import JudgedCase, Proposal
from fragdoctor.model.case import ToldSettings
from fragdoctor.model.frameworks import INTERFACES, SERVERS, Change, Framework, words_for
from fragdoctor.model.gpus import with_monitor_of
from fragdoctor.model.measures import MEASURES, options_named
from fragdoctor.rules.traceback_signs import server_start_in

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
    "compute-in-16-bits": Change.BF16,
    "copy-of-weights": Change.COPIES,
}
"""The change that each remedy proposes, by the remedy's code."""

ADDED: Final = (Change.BATCH, Change.EVALUATION_BATCH, Change.WEIGHTS, Change.COPIES)
"""Changes whose own text says more (how much, of what), so it is kept after the words."""

ROOM_FOR_STEPS: Final = "Leave more GPU memory outside the server's KV cache"


def in_own_words(case: JudgedCase, proposals: Iterable[Proposal]) -> Iterator[Proposal]:
    """Yield proposals in the words of the case's framework, without what is in use."""
    for one in _in_framework_words(case, proposals):
        yield one.saying(change=without_used(one.recommendation.change, case.told))


def _in_framework_words(case: JudgedCase, proposals: Iterable[Proposal]) -> Iterator[Proposal]:
    for proposal in proposals:
        # The tool that watches memory is the one of the GPU's vendor.
        own = with_monitor_of(case.backend, proposal.recommendation.change)
        one = proposal.saying(change=own)
        change = CHANGES.get(one.recommendation.code)
        is_told = change is Change.BATCH and case.told.batch_cannot_shrink
        if change is Change.CHECKPOINT and case.runs_only:
            continue
        if change is None or one.is_rejected or is_told:
            yield one
            continue
        found = _words(case, change)
        if found is None:
            yield one
            continue
        text = f"with {found[0]}: {found[1]}"
        if change is Change.BATCH and found[0] in INTERFACES:
            first = (Change.ATTENTION,) if case.asks_for_large_share else ()
            text = words_together(case, change, *first, Change.WEIGHTS)
        if change is Change.BATCH and less_of_counted(case):
            text = f"{own}; {text}"
        elif change in ADDED and own and own != one.remedy.change:
            text = f"{text}; {own}"
        told = one.saying(change=text)
        if found[0] in SERVERS and change is Change.BATCH:
            told = told.saying(title=ROOM_FOR_STEPS)
            sign = server_start_in([f.function for f in case.asking_frames])
            if sign is not None and (words := words_in(case, sign.name)):
                told = told.saying(title=sign.title, change=words)
        yield told


def words_in(case: JudgedCase, *changes: str | None) -> str:
    """Return the first of these changes that a framework has words for, in its words, or ""."""
    found = _words(case, *changes)
    return "" if found is None else f"with {found[0]}: {found[1]}"


def words_together(case: JudgedCase, *changes: str) -> str:
    """Return all of these changes that one framework has words for, if it has the first, or ""."""
    found = _words(case, changes[0])
    if found is None:
        return ""
    own = [f for f in case.frameworks if f.name == found[0]]
    more = (_words(case, change, among=own) for change in changes[1:])
    return f"with {found[0]}: {'; '.join([found[1], *(one[1] for one in more if one)])}"


def _words(
    case: JudgedCase, *changes: str | None, among: Sequence[Framework] | None = None
) -> tuple[str, str] | None:
    """Return (framework, words) for the first of these changes that a framework has words for.

    A program that only runs a model has another batch to change than training has.
    """
    runs_only = case.sign is not None and not case.sign.is_training
    runs_only |= case.context.failed_event is not None and is_evaluation(case.asking_stack)
    batch = (Change.EVALUATION_BATCH,) if Change.BATCH in changes and runs_only else ()
    # Who trains inside a user interface has other options than who draws pictures there.
    is_trained = case.trains and not runs_only and Change.BATCH in changes
    named = case.frameworks if among is None else among
    frameworks = [f for f in named if not (is_trained and f.name in INTERFACES)]
    return words_for(frameworks, *batch, *changes)


def without_used(change: str, told: ToldSettings) -> str:
    """Return a change without what the text has in use, or all of it if nothing is left.

    What can go further than a text goes is never in use.
    """

    def is_on(part: str) -> bool:
        named = options_named(part)
        measures = (m for m in told.in_use if MEASURES[m].advised)
        return not _BY_DEGREES.search(part) and (
            (bool(named) and told.options.issuperset(named))
            or any(re.search(MEASURES[m].advised, part) for m in measures)
        )

    def left_of(clause: str) -> str:
        return ", or ".join(way for way in _WAYS.split(clause) if not is_on(way))

    intro, words = _INTRO.fullmatch(change).groups()  # type: ignore[union-attr]  # matches any
    kept = [left for clause in _PARTS.split(words) if (left := left_of(clause))]
    if kept == _PARTS.split(words):
        return change
    first = "; ".join(kept).removeprefix("or ").removeprefix("then ")
    return intro + first if kept else change


_BY_DEGREES: Final = re.compile(
    r"\b(?:lower|raise|higher|smaller|fewer|shorter|less|more|further|no longer|another)\b"
    r"|--\S{2,60} \d"
)
"""Words of changes that can go further than a text already goes."""
_INTRO: Final = re.compile(r"(?s)(with [^:;]{1,40}: |)(.*)")
_PARTS: Final = re.compile(r"; (?![^()]{0,300}\))")
_WAYS: Final = re.compile(r", or (?![^()]{0,300}\))")


# ---- less of what a text counts: its points, boxes, edges or experiences -------------------------

FEWER: Final = {
    r"box|object|instance|anchor|proposal": "drop or split samples with hundreds of them; compare "
    "them on the CPU (gpu_assign_thr=100 of MMDetection's assigners) or in chunks",
    r"node|edge|neighbo|PyG$": "sample neighbors instead of using the whole graph (NeighborLoader "
    "of PyG, or DGL's); multiply by a sparse matrix (torch.sparse, SparseTensor) instead of "
    "making a message for each edge; use fewer features or heads",
    r"class|identit|vocab": "merge or drop rare ones (subwords instead of words), or score a "
    "sample of them (adaptive or sampled softmax, partial FC), since the last layer, its gradients "
    "and its results grow with them; keep the arg max before predictions are resized",
    r"experien|transition|trajector": "store them on the CPU (.cpu(), or NumPy arrays), and move "
    "only the sampled batch to the GPU",
    r"^fewer (?!frames)": "draw fewer of them (sample, merge or crop); where pairs of them are "
    "compared, work in chunks (for part in x.split(n)) and join the results, since a matrix of all "
    "pairs takes the square of their number",
}
"""What helps, by the words for what a text counts; the first pattern that matches decides."""


def less_of_counted(case: JudgedCase, noun: str = "") -> str:
    """Return how to make less of what the text counts, or "" if it counts nothing known."""
    counted = (noun,) if noun else case.told.smaller_samples
    less = " ".join((*counted, *(f.name for f in case.frameworks[:1])))
    return next((change for words, change in FEWER.items() if re.search(words, less)), "")
