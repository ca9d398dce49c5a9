"""The failed request that the verdict is about: who asked for how much.

Its stack comes from the event in the trace, or else from the traceback above the message.
"""

from __future__ import annotations

import numpy as np

from fragdoctor.diagnosis.moments import DecidingMoment
from fragdoctor.diagnosis.remedies.remedy import JudgedCase
from fragdoctor.model.diagnosis import SOUND, Cause, Failure
from fragdoctor.model.finding import Location
from fragdoctor.rules.rule import MAX_STACK, Context, from_user
from fragdoctor.trace import stacks


def find_failure(case: JudgedCase, moment: DecidingMoment | None) -> Failure | None:
    """Return the failure of a device, or None if nothing failed for lack of memory.

    If the host's memory ran out, the failure has the line that asked but no figures of the GPU.
    """
    context, request, message = case.context, case.failed_request, case.message
    stack, near = case.asking_stack, None
    code = {} if message is None else {f.location: f.code for f in message.frames}
    if case.cause is Cause.HOST_MEMORY:
        if message is None or message.is_device_oom or not message.frames:
            return None
        at = stack[0] if stack else None
        said = code.get(at, "") if at else ""
        return Failure(location=at, stack=stack, source_text=said, source="oom message")
    if case.cause in SOUND or (message is not None and message.is_warning):
        return None
    event = None if moment is None else moment.failed
    if event is None and (message is None or not message.is_device_oom):
        return None
    bundle = context.case.bundle
    if not stack and bundle is not None and bundle.oom_device == case.verdict.device:
        stack = from_user(tuple(bundle.traceback))[:MAX_STACK]
    if moment is not None and not (event is not None and context.python_stack(event.stack)):
        called, near = _in_backward(context, moment)
        stack = stack or called
    asked = None if message is None else message.requested_bytes
    free = None if message is None else message.free_bytes
    segment = limit = left = None
    if request is not None:
        if request.is_of_limit and request.limit_bytes is not None:
            limit = request.limit_bytes
            left = max(0, limit - (request.reserved_bytes or 0))
        asked, free = request.requested_bytes, request.free_bytes
        if request.block_bytes is not None and request.block_bytes != asked:
            asked, segment = request.block_bytes, asked
    return Failure(
        device=case.verdict.device,
        event=None if event is None or moment is None else moment.state,
        requested_bytes=asked,
        segment_bytes=segment,
        free_bytes=free,
        location=stack[0] if stack else None,
        stack=stack,
        source_text=code.get(stack[0], "") if stack else "",
        source="oom message" if request is None else request.source,
        is_caught=request is not None and request.is_caught,
        backward_of=near,
        limit_bytes=limit,
        left_bytes=left,
    )


def _in_backward(
    context: Context, moment: DecidingMoment
) -> tuple[tuple[Location, ...], Location | None]:
    """Return the stack that called the backward pass of the failure, and the forward line reached.

    The thread of the autograd engine has no Python frames. But a pass makes its first gradient
    where the program calls it, and a node frees what it saved as soon as it has run: what was freed
    last, after the pass began, was made by the forward line of that node. A pass that has freed
    nothing is at its first node, which belongs to the last result of the forward pass.
    """
    trace, failed = moment.analysis.trace, moment.failed
    lives, roles = trace.lives, trace.stacks.roles
    if failed is None or not roles.trains:
        return (), None
    role = roles.role[lives.stack]
    made = (lives.start >= 0) & (lives.start < moment.state)
    since = lives.start[made & ~stacks.is_backward(role)].max(initial=-1)
    in_pass = lives.start[made & (lives.start > since)]
    if not len(in_pass):
        return (), None
    begun = int(in_pass.min())
    is_result = (role == stacks.FORWARD) & (trace.stacks.lines_of(lives.stack) >= 0)
    is_freed = (lives.free > begun) & (lives.free < moment.state)
    if is_freed.any():
        rows, at = np.flatnonzero(is_result & is_freed), lives.free
    else:
        rows, at = np.flatnonzero(is_result & (lives.start < begun)), lives.start
    near = context.user_line(int(lives.stack[rows[at[rows].argmax()]])) if len(rows) else None
    return context.python_stack(int(trace.events.stack[begun])), near
