"""Remedies that a message's traceback calls for; they outweigh advice that fits any failure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fragdoctor.diagnosis.bench import Attempt
from fragdoctor.diagnosis.remedies.framework_words import (
    ROOM_FOR_STEPS,
    less_of_counted,
    words_in,
)
from fragdoctor.diagnosis.remedies.less_at_once import (
    fewer_bytes,
    less_of_batch,
    less_to_run,
)
from fragdoctor.diagnosis.remedies.remedy import JudgedCase, Proposal, Remedy, Weight, proposes
from fragdoctor.diagnosis.remedies.serving import smaller_cache
from fragdoctor.diagnosis.verdict_ledger import RANKS
from fragdoctor.future.training_edits import requests_removed
from fragdoctor.model.case import OomMessage
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.model.frameworks import OWN_LOOPS, SERVERS, Change
from fragdoctor.model.measures import NUMBERS, TILED
from fragdoctor.rules.traceback_signs import (
    EVALUATION,
    FIRST_GPU,
    GROWTH,
    INFERENCE,
    KEPT_BY_REQUESTS,
    LATE,
    SERVER_STEP,
    VAE,
    TracebackSign,
    is_in_training_step,
    only_runs,
)
from fragdoctor.units import format_size

CLOSED: Final = (Cause.NOT_MEMORY, Cause.HOST_MEMORY, Cause.HEALTHY)
"""Causes for which the place of the failure adds nothing."""


STEPS: Final = r"\b(?:batch|epoch|iteration)"
"""What only loops over a data set have; what serves has requests, runs and hours."""


def _said(case: JudgedCase, sign: TracebackSign, message: OomMessage) -> tuple[str, str]:
    """Return title and change of a sign, with what the text tells besides."""
    own = words_in(case, sign.name, sign.spelled)
    change = own or sign.change
    if sign.name == INFERENCE:
        is_served = any(f.name in SERVERS for f in case.frameworks)
        return (ROOM_FOR_STEPS, change) if is_served else less_to_run(case)
    if sign.name == LATE:
        return _of_later_step(case, sign, message)
    if sign.name == GROWTH:
        return _of_growth(case, sign, message)
    if sign.name == EVALUATION and not own:
        return _of_evaluation(case, sign, message)
    title = sign.title_in_framework if own and sign.title_in_framework else sign.title
    if sign.name == FIRST_GPU and not RANKS.search(message.said):
        change = "; ".join(reversed(change.split("; ")))  # DataParallel first
    elif sign.name == VAE and TILED in case.told.in_use:
        title = "Use smaller tiles, or fewer pixels at once"
    cache = smaller_cache(case) if sign.name == SERVER_STEP else ""
    return title, "; ".join(filter(None, (cache, change)))


def _of_growth(case: JudgedCase, sign: TracebackSign, message: OomMessage) -> tuple[str, str]:
    """Return what keeps memory from step to step, by whose loop it is."""
    batch = words_in(case, Change.BATCH)
    if message.code.kept:
        numbers = "keep x.item() for a number, and x.detach().cpu() for a tensor"
        loop = "put torch.no_grad() around the loop if nothing in it goes backward"
        return f"Keep {message.code.kept} without the graph of each step", f"{numbers}; {loop}"
    if only_runs(message):
        if batch and any(f.name in SERVERS for f in case.frameworks):
            return ROOM_FOR_STEPS, batch  # its users cannot change what it keeps
        return "Keep nothing on the GPU from one input to the next", KEPT_BY_REQUESTS
    if batch and any(f.name in OWN_LOOPS for f in case.frameworks):
        change = CAPPED if case.told.batch_cannot_shrink else f"{batch}; {CAPPED}"
        return "Cap the largest batch, and keep nothing in your own callbacks", change
    if NUMBERS in case.told.in_use:
        return "Find what else is kept from step to step", sign.change
    return sign.title, sign.change


_ON_PARTS: Final = (
    r"(?i)\b(?:crop|patch|segment|super.?res|nerf\b|rays?\b|render|denois|deblur|dehaz|inpaint"
    r"|whole image|full.?(?:size|resolution))"
)
"""Words of programs that train on parts of an image and evaluate on whole ones."""


def _of_evaluation(case: JudgedCase, sign: TracebackSign, message: OomMessage) -> tuple[str, str]:
    """Return what an evaluation needs more for than training, whose batch is not all."""
    no_graph, less, numbers = sign.change.split("; ")
    is_part = re.search(_ON_PARTS, message.said) and "volatile" not in message.said
    if is_part or (case.told.batch_cannot_shrink and case.asks_for_large_share):
        parts = "run it on crops, tiles or chunks of that size, and join the results"
        title = "Evaluate on inputs no larger than in training"
        return title, f"{parts}; keep the arg max of classes before resizing; {no_graph}; {numbers}"
    if case.told.batch_cannot_shrink:
        return sign.title.replace("in smaller batches", NO_BATCH), f"{no_graph}; {numbers}"
    return sign.title, f"{no_graph}; {less}; {numbers}"


NO_BATCH: Final = "keep no results on the GPU"
CAPPED: Final = (
    "sort or cap what differs from batch to batch (lengths, boxes, nodes); store only .item() or "
    ".detach().cpu() in your own metrics, hooks and callbacks"
)
"""What grows in a loop that keeps no losses: the largest batch so far, whose memory PyTorch caches,
or what the user's own code keeps."""


def _of_later_step(case: JudgedCase, sign: TracebackSign, message: OomMessage) -> tuple[str, str]:
    if not (case.trains or re.search(STEPS, message.said)):
        title = "Keep nothing on the GPU from one input to the next, and limit its length"
        return title, f"{KEPT_BY_REQUESTS}; {fewer_bytes(case)}"
    if is_in_training_step(message) and less_of_counted(case):
        return less_of_batch(case)
    batch = words_in(case, Change.BATCH) or "a lower batch size makes room for all of these"
    tests, kept, larger = sign.change.split("; ")
    if case.told.smaller_samples:
        less = " or ".join(case.told.smaller_samples)
        larger = f"the samples differ: cap the largest ones ({less})"
    parts = [tests, kept, larger, "" if case.told.batch_cannot_shrink else batch]
    title = sign.title
    if is_in_training_step(message):
        title = "Limit the largest samples, since earlier steps fit"
        parts = [*parts[2:], kept]
    return title, "; ".join(filter(None, parts))


@proposes("Change the call that failed")
def at_the_failing_call(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose what the table of signs says about the traceback of the call that failed."""
    sign, message = case.sign, case.message
    if sign is None or message is None or case.cause in CLOSED or case.kind == "kv-cache":
        return
    r = case.failed_request
    had_room = case.cause is Cause.UNKNOWN and r is not None and r.is_covered_by_free
    if had_room and sign.name != SERVER_STEP and not message.code.unused_graph:
        return  # a limit refused the request; but a server can reserve less
    if sign.name == FIRST_GPU and (case.ledger.is_shared or case.ledger.uses_first):
        return  # there is no other, or one process uses both
    said = "It goes on more slowly" if message.is_warning else "It failed"
    title, change = _said(case, sign, message)
    is_of_others = sign.name == FIRST_GPU and case.cause is Cause.OTHER_PROCESS
    yield remedy.proposal(
        title=title,
        # A call that can leave the GPU helps whatever fills the GPU.
        weight=Weight.CURES
        if is_of_others or (sign.can_leave_gpu and not case.has_only_begun)
        else Weight.HELPS
        if sign.name == INFERENCE and (case.cause is Cause.FRAGMENTATION or case.backend == "mps")
        else Weight.FITS,
        change=change,
        why=f"{said} {sign.doing}. {sign.why}",
        locations=tuple(
            frame.location
            for frame in message.frames
            if frame.file and frame.line is not None and sign.matches(frame)
        )[-1:],
        cost="Another place, or less at a time; the result is the same.",
    )


@proposes("Retry after the except block, not inside it")
def retry_outside_except(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose it if a traceback was being handled, or an earlier attempt is still held."""
    message = case.message
    log = case.context.case.oom
    said = [message] if log is None else log.messages
    # A retry failed in a handler, where an error is not just passed on.
    is_in_handler = any(
        m is not None
        and m.is_in_handler
        and m.is_of_caching_allocator
        and not (m.frames and m.frames[-1].code.startswith("raise"))
        for m in said
    )
    attempts = case.context.left_of_attempts
    left = 0 if attempts is None else attempts.n_bytes
    if not (is_in_handler or left) or case.cause in CLOSED:
        return
    why = "An exception's traceback keeps the frames of its attempt, and they keep its tensors"
    yield remedy.proposal(
        weight=Weight.FITS if case.sign is None else Weight.HELPS,
        confidence=Confidence.LIKELY,
        change="set a flag in the except block and try again after it; keep str(error), not the "
        "exception; call gc.collect() and torch.cuda.empty_cache() before the next attempt",
        why=f"{why}: {format_size(left)} of a failed attempt were still held."
        if left
        else f"{why}: the second attempt starts with a full device.",
        saves_bytes=left or None,
        # The last attempt as if those before it, which it begins without, had not been.
        attempts=[] if attempts is None else [Attempt.of_edit(requests_removed(attempts.rows))],
    )
