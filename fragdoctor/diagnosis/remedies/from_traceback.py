"""Remedies that the traceback of a message asks for: they outweigh advice that fits any failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.diagnosis.remedies.framework_words import frameworks_of
from fragdoctor.diagnosis.remedies.remedy import CURES, HELPS, JudgedCase, Proposal, Remedy
from fragdoctor.diagnosis.remedies.serving import smaller_cache
from fragdoctor.model.case import OomMessage
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence, Location
from fragdoctor.model.frameworks import words_for
from fragdoctor.rules.traceback_signs import SERVER_STEP

CLOSED: Final = (Cause.NOT_MEMORY, Cause.HOST_MEMORY, Cause.HEALTHY)
"""Causes to which the place of the failure adds nothing."""

ABOVE_GENERIC: Final = CURES - 2
"""Weight of what fits the place: below what removes the cause for certain, above the rest."""

NEEDS_NO_GPU: Final = CURES + 7
"""Weight of a call that can leave the GPU: it helps whatever fills the GPU, others included."""


class AtTheFailingCall(Remedy):
    """What helps at the call that failed."""

    code = "at-the-failing-call"
    title = "Change the call that failed"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose what the table of signs says about the traceback."""
        sign, message = case.sign, case.message
        if sign is None or message is None or case.cause in CLOSED or case.kind == "kv-cache":
            return
        said = "It goes on more slowly" if message.is_warning else "It failed"
        frameworks = frameworks_of(case)
        found = next(
            ((f.name, sign.words[f.name]) for f in frameworks if f.name in sign.words), None
        )
        if found is None and sign.spelled is not None:
            found = words_for(sign.spelled, frameworks)
        change = sign.change if found is None else f"with {found[0]}: {found[1]}"
        if sign.name == SERVER_STEP:
            change = "; ".join(filter(None, (smaller_cache(case), change)))
        yield self.proposal(
            title=sign.title,
            weight=NEEDS_NO_GPU
            if sign.can_leave_gpu and not case.has_only_begun
            else ABOVE_GENERIC,
            confidence=Confidence.LIKELY,
            change=change,
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

    code = "retry-outside-except"
    title = "Retry after the except block, not inside it"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it where a traceback was being handled."""
        message = case.message
        log = case.context.case.oom
        said = [message] if log is None else log.messages
        if case.cause in CLOSED or not any(m is not None and _is_retry(m) for m in said):
            return
        yield self.proposal(
            weight=ABOVE_GENERIC + 1 if case.sign is None else HELPS,
            confidence=Confidence.LIKELY,
            change="set a flag in the except block and try again after it; keep str(error), not "
            "the exception; gc.collect() and torch.cuda.empty_cache() before the next attempt",
            why="An exception's traceback holds the frames of its attempt, and these their "
            "tensors: the second attempt starts with a full device.",
            cost="None.",
            verify="memory_allocated() before the second attempt is what it was before the first.",
        )


def _is_retry(message: OomMessage) -> bool:
    """Return whether it failed in a handler by asking again, not by passing an error on."""
    is_passed_on = bool(message.frames) and message.frames[-1].code.startswith("raise")
    return message.is_in_handler and message.is_of_caching_allocator and not is_passed_on


CALLS: Final[tuple[Remedy, ...]] = (AtTheFailingCall(), RetryOutsideHandler())
