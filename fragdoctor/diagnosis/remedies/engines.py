"""Less memory on the device, in the words of programs that have allocators of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fragdoctor.diagnosis.remedies.host_memory import HOST_CHANGES
from fragdoctor.diagnosis.remedies.remedy import ASKS, CURES, HELPS, JudgedCase, Proposal, Remedy
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.engines import ANY_PROGRAM, Need, engine_of, need_of
from fragdoctor.model.finding import Confidence

WSL: Final = re.compile(r"\bWSL|/mnt/[a-z]/|microsoft-standard")

TOLD: Final = (Need.WEIGHTS, Need.CACHE, Need.GRAPH, Need.LIMIT, Need.POOL, Need.ONE_INPUT)
"""Needs that the text itself names, so that meeting them removes the cause."""

CLOSED: Final = (Cause.NOT_MEMORY, Cause.HOST_MEMORY, Cause.HEALTHY, Cause.SIZE_BUG)


class LessOnTheDevice(Remedy):
    """A program with its own allocator, or one that nothing names, needs too much."""

    code = "less-on-the-device"
    title = "Put less on the device"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose an option of the program, chosen by what the memory was for."""
        message = case.message
        if message is None or case.cause in CLOSED or not case.is_of_other_program:
            return
        engine, need = engine_of(message) or ANY_PROGRAM, need_of(message)
        title, change = engine.advice(need)
        if case.kind == "ggml" and message.requested_bytes is None and WSL.search(message.said):
            title = "Try without page-locked host memory first, then with fewer layers on the GPU"
            change = f"{HOST_CHANGES['ggml-pinned']}: {change}"
        yield self.proposal(
            title=title,
            # If so little was refused, the question is who else is on the device.
            weight=CURES
            if need in TOLD
            else ASKS
            if need is Need.FULL and case.cause is Cause.UNKNOWN
            else HELPS,
            confidence=Confidence.LIKELY if need in TOLD else Confidence.POSSIBLE,
            change=change,
            why=case.verdict.summary,
            cost="Less at a time, or slower." if need is not Need.LIMIT else "More memory in use.",
        )
