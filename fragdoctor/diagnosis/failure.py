"""The failed request that the verdict is about: who asked for how much.

Its stack comes from the event in the trace, or else from the traceback above the message.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fragdoctor.diagnosis.moments import DecidingMoment
from fragdoctor.model.case import OomMessage
from fragdoctor.model.diagnosis import Cause, Failure, Verdict
from fragdoctor.model.finding import Location
from fragdoctor.rules.rule import MAX_STACK, Context, from_user
from fragdoctor.trace import stacks

_NO_GPU: Final = (Cause.HEALTHY, Cause.NOT_MEMORY)


def find_failure(
    context: Context, verdict: Verdict, moment: DecidingMoment | None
) -> Failure | None:
    """Return the failure of a device, or None if nothing failed for lack of memory.

    If the host's memory ran out, the failure has the line that asked but no figures of the GPU.
    """
    request, message = context.failed_request, context.message
    if verdict.cause is Cause.HOST_MEMORY:
        return _of_host(message)
    if verdict.cause in _NO_GPU or (message is not None and message.is_warning):
        return None
    if request is not None and request.source == "user":
        return None
    event = None if moment is None else moment.failed
    if event is None and (message is None or not message.is_device_oom):
        return None
    stack = () if event is None else context.python_stack(event.stack)
    source_text, begun = "", None
    if not stack and moment is not None:
        begun = _backward_began(moment)
    if not stack and message is not None:
        stack, source_text = _told_stack(message)
    if not stack and begun is not None and moment is not None:
        # The program calls a backward pass where its first gradient is made.
        stack = context.python_stack(int(moment.analysis.trace.events.stack[begun]))
    asked = None if message is None else message.requested_bytes
    free = None if message is None else message.free_bytes
    segment = None
    if request is not None:
        asked, free = request.requested_bytes, request.free_bytes
        if request.block_bytes is not None and request.block_bytes != asked:
            asked, segment = request.block_bytes, asked
    return Failure(
        device=verdict.device,
        event=None if event is None or moment is None else moment.state,
        requested_bytes=asked,
        segment_bytes=segment,
        free_bytes=free,
        location=stack[0] if stack else None,
        stack=stack,
        source_text=source_text,
        source="oom message" if request is None else request.source,
        is_caught=request is not None and request.is_caught,
        backward_of=_backward_of(context, moment, begun),
    )


def _backward_began(moment: DecidingMoment) -> int | None:
    """Return the first row of the backward pass in which a request failed, or None."""
    trace, failed = moment.analysis.trace, moment.failed
    if failed is None or not trace.stacks.roles.trains:
        return None
    start = trace.lives.start
    in_pass = stacks.is_backward(trace.stacks.roles.role[trace.lives.stack])
    made = (start >= 0) & (start < moment.state)
    since = start[made & ~in_pass].max(initial=-1)
    rows = start[made & in_pass & (start > since)]
    return int(rows.min()) if len(rows) else None


def _backward_of(
    context: Context, moment: DecidingMoment | None, begun: int | None
) -> Location | None:
    """Return the forward line whose node of a backward pass made the request that failed.

    The thread of the autograd engine has no Python frames. But a node frees what it saved as soon
    as it has run: what was freed last, after the pass began, was made by the forward line of that
    node. A pass that has freed nothing is at its first node, which belongs to the last result of
    the forward pass. Returns None if neither shows.
    """
    if moment is None or begun is None:
        return None
    trace = moment.analysis.trace
    lives, roles = trace.lives, trace.stacks.roles
    is_result = (roles.role[lives.stack] == stacks.FORWARD) & (
        trace.stacks.lines_of(lives.stack) >= 0
    )
    in_pass = (lives.free > begun) & (lives.free < moment.state)
    rows, at = np.flatnonzero(is_result & in_pass), lives.free
    if not in_pass.any():
        rows, at = np.flatnonzero(is_result & (lives.start < begun)), lives.start
    return context.user_line(int(lives.stack[rows[at[rows].argmax()]])) if len(rows) else None


def _told_stack(message: OomMessage) -> tuple[tuple[Location, ...], str]:
    """Return the stack of a traceback from the user's line outward, and that line's source."""
    code = {
        Location(f.file, f.line or 0, f.function): f.code
        for f in reversed(message.frames)
        if f.file
    }
    stack = from_user(tuple(code))[:MAX_STACK]
    return stack, code[stack[0]] if stack else ""


def _of_host(message: OomMessage | None) -> Failure | None:
    """Return where the host's memory ran out, if a traceback says so."""
    if message is None or message.is_device_oom or not message.frames:
        return None
    stack, source_text = _told_stack(message)
    return Failure(
        device=None,
        event=None,
        requested_bytes=None,
        free_bytes=None,
        location=stack[0] if stack else None,
        stack=stack,
        source_text=source_text,
        source="oom message",
    )
