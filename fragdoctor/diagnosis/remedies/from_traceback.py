"""Remedies that the traceback of a message asks for: they outweigh advice that fits any failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

from fragdoctor.diagnosis.remedies.remedy import CURES, HELPS, JudgedCase, Proposal, Remedy
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence, Location

CLOSED: Final = (Cause.NOT_MEMORY, Cause.HOST_MEMORY, Cause.HEALTHY)
"""Causes to which the place of the failure adds nothing."""

ABOVE_GENERIC: Final = CURES - 2
"""Weight of what fits the place: below what removes the cause for certain, above the rest."""

NEEDS_NO_GPU: Final = CURES + 7
"""Weight of a call that can leave the GPU: it helps whatever fills the GPU, others included."""


class AtTheFailingCall(Remedy):
    """What helps at the call that failed."""

    code: ClassVar[str] = "at-the-failing-call"
    title: ClassVar[str] = "Change the call that failed"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose what the table of signs says about the traceback."""
        sign, message = case.sign, case.message
        if sign is None or message is None or case.cause in CLOSED or case.kind == "kv-cache":
            return
        said = "It goes on more slowly" if message.is_warning else "It failed"
        yield self.proposal(
            title=sign.title,
            weight=NEEDS_NO_GPU if sign.can_leave_gpu else ABOVE_GENERIC,
            confidence=Confidence.LIKELY,
            change=sign.change,
            why=f"{said} {sign.doing}. {sign.why}",
            locations=tuple(
                Location(frame.file, frame.line, frame.function)
                for frame in message.frames
                if frame.file and frame.line is not None and sign.matches(frame)
            )[-1:],
            cost="Another place, or less at a time; the result is the same.",
            verify="The call that failed succeeds.",
        )


class RetryOutsideHandler(Remedy):
    """A retry inside an except block, where the exception still holds the failed attempt."""

    code: ClassVar[str] = "retry-outside-except"
    title: ClassVar[str] = "Retry after the except block, not inside it"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it where the traceback says that another exception was being handled."""
        message = case.message
        if message is None or not message.is_in_handler or case.cause in CLOSED:
            return
        yield self.proposal(
            weight=ABOVE_GENERIC + 1 if case.sign is None else HELPS,
            confidence=Confidence.LIKELY,
            change="set a flag in the except block and try again after it; gc.collect() and "
            "torch.cuda.empty_cache() before the second attempt",
            why="Inside an except block the exception's traceback holds the frames of the first "
            "attempt, and with them its tensors: the second attempt starts with a full device.",
            cost="None.",
            verify="memory_allocated() before the second attempt is what it was before the first.",
        )
