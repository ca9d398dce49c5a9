"""Attention that materializes its scores, where a fused kernel would not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fragdoctor.diagnosis.remedies.outside_pytorch import one_tensor_text
from fragdoctor.diagnosis.remedies.remedy import FITS, HELPS, JudgedCase, Proposal, Remedy
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence, Location, line_text
from fragdoctor.rules.traceback_signs import ATTENTION_SCORES

ATTENTION: Final = re.compile(r"att(?:n|en[dt])|softmax|sdpa", re.IGNORECASE)
"""Names of functions and files that compute attention."""


class FusedAttention(Remedy):
    """Attention scores grow with the square of the length; a fused kernel never stores them."""

    code = "fused-attention"
    title = "If these are attention scores, never make them"
    change = (
        "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...), with its flash "
        "or memory-efficient kernel"
    )
    cost = "None; it is faster too."
    caveats = ("output_attentions=True, and some masks, bring the slow path back.",)

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose a fused kernel if one tensor exceeds the device, unless other code asked."""
        r = case.failed_request
        if r is None or not case.is_allocator_case or case.cause is not Cause.CAPACITY:
            return
        line = next((f for f in case.asking_frames if is_attention(f)), None)
        if not r.is_alone_too_large or (line is None and case.asking_frames):
            return
        if case.sign is not None and case.sign.name == ATTENTION_SCORES:
            return  # AtTheFailingCall says so already
        yield self.proposal(
            title="" if line is None else f"Never make the attention scores of {line_text(line)}",
            weight=HELPS if line is None else FITS,
            confidence=Confidence.POSSIBLE,
            why=one_tensor_text(r),
        )


def is_attention(frame: Location) -> bool:
    """Return whether a frame's function or file has a name like attention."""
    return any(ATTENTION.search(name) for name in (frame.function, frame.basename))
