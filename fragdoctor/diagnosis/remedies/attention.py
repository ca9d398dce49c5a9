"""Attention that materializes its scores, where a fused kernel would not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from fragdoctor.diagnosis.remedies.capacity import SavingRemedy
from fragdoctor.diagnosis.remedies.outside_pytorch import one_tensor_text
from fragdoctor.diagnosis.remedies.remedy import Burden, JudgedCase, Proposal, Weight
from fragdoctor.future.edits import Edit
from fragdoctor.future.training_edits import requests_removed
from fragdoctor.model.diagnosis import SHORT_OF_MEMORY, Cause
from fragdoctor.model.finding import Confidence, Location, line_text
from fragdoctor.rules.traceback_signs import ATTENTION_SCORES
from fragdoctor.trace.stacks import PACKAGE, USER, classify_file

ATTENTION: Final = re.compile(r"att(?:n|en[dt])|softmax|sdpa", re.IGNORECASE)
"""Names of functions and files that compute attention."""


class FusedAttention(SavingRemedy):
    """Attention scores grow with the square of the length; a fused kernel never stores them."""

    code = "fused-attention"
    title = "If these are attention scores, use attention that never stores them"
    burden = Burden.NONE
    acts_on = "attention scores"
    doing = "fused attention"
    change = (
        "call torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...), which has "
        "flash and memory-efficient kernels"
    )
    cost = "None; it is faster too."
    caveats = ("output_attentions=True, and some masks, bring the slow path back.",)
    effort = 1

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose a fused kernel if scores are seen, or if one tensor exceeds the device."""
        r = case.failed_request
        if r is None or not case.is_allocator_case or case.cause not in SHORT_OF_MEMORY:
            return
        line = scores_line(case)
        asking = attention_frame(case.asking_frames)
        is_alone = r.is_alone_too_large and case.cause is Cause.CAPACITY
        if line is None and not (is_alone and (asking is not None or not case.asking_frames)):
            return
        if line is None and case.sign is not None and case.sign.name == ATTENTION_SCORES:
            return  # at_the_failing_call says so already
        if any("kv_cache" in frame.function for frame in case.asking_frames):
            return  # a server's cache, set aside in a file of its attention
        where = asking or line
        yield self.proposal(
            title=""
            if where is None
            else f"Never store the attention scores of {line_text(where)}",
            weight=Weight.HELPS if where is None else Weight.FITS,
            confidence=Confidence.POSSIBLE,
            why=one_tensor_text(r) if is_alone else "Scores and their softmax are kept.",
            attempts=self.attempts(case),
        )

    def edits(self, case: JudgedCase) -> Sequence[Edit]:
        """Return the edits that remove scores, attention weights and their gradients."""
        bench = case.bench
        if bench is None or not len(bench.attention_scores):
            return ()
        return (requests_removed(bench.attention_scores),)


def attention_frame(frames: Sequence[Location]) -> Location | None:
    """Return the innermost frame that computes attention, rather outside PyTorch than inside."""
    found = [f for f in frames if is_attention(f)]
    outside = (f for f in found if classify_file(f.filename) in (USER, PACKAGE))
    return next(outside, found[0] if found else None)


def scores_line(case: JudgedCase) -> Location | None:
    """Return the line of the first scores that are seen to be made, or None."""
    bench = case.bench
    if bench is None:
        return None
    stacks = bench.reproduction.trace.events.stack[bench.attention_scores].tolist()
    return next((line for s in stacks if (line := case.context.user_line(s)) is not None), None)


def is_attention(frame: Location) -> bool:
    """Return whether a frame's function or file has a name like attention."""
    return any(ATTENTION.search(name) for name in (frame.function, frame.basename))
