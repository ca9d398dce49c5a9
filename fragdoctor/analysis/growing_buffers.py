"""Buffers that grow by being copied: a new, larger buffer is made, then the old one is freed.

Examples are a KV cache grown with ``torch.cat``, a replay buffer, or a list that is concatenated
again in every step. The line asks for n buffers at a time (one per layer, say), their sizes hardly
ever shrink, and all but the last n are freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor.analysis.training_run import NO_ROW, TrainingRequests
from fragdoctor.model.arrays import median
from fragdoctor.model.snapshot import I64
from fragdoctor.trace.lives import NEVER
from fragdoctor.trace.trace import Trace

MIN_BUFFER_GROWTH: Final = 4  # times a buffer must grow; fewer are the steps of a warm-up
MIN_BUFFER_BYTES: Final = 1 << 20
INPUT_SHARE: Final = 0.3  # the rest of a step grows by at least this share of an input's growth
MAX_LAPS: Final = 2  # generations that are live at once: the new and the old


class GrowingBuffers(Struct, frozen=True):
    """The buffers of one line that grow by copies.

    Attributes:
        stack: the stack that makes them.
        row: events that make them, ascending.
        n_buffers: buffers that live side by side; request i replaces request i - ``n_buffers``.
        last_bytes: size of one buffer at the end of the recording.
        step_bytes: how much one buffer typically grows at a time.
    """

    stack: int
    row: I64
    n_buffers: int
    last_bytes: int
    step_bytes: int

    @property
    def total_bytes(self) -> int:
        """The bytes of all buffers at the end of the recording."""
        return self.n_buffers * self.last_bytes


def requests_of(trace: Trace) -> TrainingRequests:
    """Return the requests that a program made before its last failure let go of its memory."""
    lives = trace.lives_of_program
    made = np.flatnonzero(lives.start >= 0)
    free = lives.free[made].astype(np.int64)
    return TrainingRequests(
        lives.start[made].astype(np.int64),
        np.where(free == NEVER, NO_ROW, free),
        lives.requested_bytes[made],
        lives.stack[made],
    )


def buffers_of(trace: Trace) -> tuple[GrowingBuffers, ...]:
    """Return the lines of a trace whose buffers grow by copies; worked out once per trace."""
    return trace.once(_buffers_of)


def _buffers_of(trace: Trace) -> tuple[GrowingBuffers, ...]:
    return find_growing_buffers(requests_of(trace))


def find_growing_buffers(requests: TrainingRequests) -> tuple[GrowingBuffers, ...]:
    """Return the lines whose buffers grow by copies, largest total first."""
    order = np.argsort(requests.stack, kind="stable")
    order = order[requests.stack[order] >= 0]
    if not len(order):
        return ()
    stack = requests.stack[order]
    heads = np.flatnonzero(np.append(True, stack[1:] != stack[:-1]))
    found = []
    for low, high in zip(heads.tolist(), [*heads[1:].tolist(), len(order)], strict=True):
        rows = order[low:high]  # the requests of one stack, in the order of the trace
        size = requests.size_bytes[rows]
        if len(rows) <= MIN_BUFFER_GROWTH or size[-1] < MIN_BUFFER_BYTES or size[-1] <= size[0]:
            continue
        buffers = _judged(requests, rows, size)
        if buffers is not None:
            found.append(buffers)
    return tuple(sorted(found, key=lambda b: -b.total_bytes))


def is_input(
    requests: TrainingRequests, buffers: GrowingBuffers, kept: Sequence[GrowingBuffers]
) -> bool:
    """Return whether the rest of each step grows along with the buffers: they are inputs.

    If images become larger or rollouts longer, the rest of each step grows too, and the buffer is
    simply made again. A buffer that is kept and added to leaves the rest as it is.

    ``kept`` are all buffers that outlive a step; they do not count as the rest.
    """
    starts = buffers.row[:: buffers.n_buffers]
    if len(starts) < MIN_BUFFER_GROWTH:
        return False
    step = np.searchsorted(starts, requests.row, side="right") - 1
    rest = (step >= 0) & ~np.isin(requests.stack, [b.stack for b in (buffers, *kept)])
    asked = np.bincount(step[rest], requests.size_bytes[rest], minlength=len(starts))
    own = requests.size_bytes[np.searchsorted(requests.row, starts)]
    # The first step makes what all steps share; the last may be cut.
    low, high = 1, len(starts) - 2
    grown = float(own[high]) / float(own[low]) - 1
    return bool(asked[high] >= (1 + INPUT_SHARE * grown) * asked[low])


def _judged(requests: TrainingRequests, rows: I64, size: I64) -> GrowingBuffers | None:
    grows = np.diff(size)
    if (grows < 0).any():
        return None
    _, count = np.unique(size, return_counts=True)
    n = int(median(count))
    if len(count) < MIN_BUFFER_GROWTH or len(rows) < MIN_BUFFER_GROWTH * n:
        return None
    # Each buffer is live until its successor has been copied from it, and freed soon after.
    freed, made = requests.freed_row[rows], requests.row[rows]
    late = min(len(rows), MAX_LAPS * n)
    if (freed[:-n] < made[n:]).any() or (freed[: len(rows) - late] > made[late:]).any():
        return None
    return GrowingBuffers(
        stack=int(requests.stack[rows[0]]),
        row=made,
        n_buffers=n,
        last_bytes=int(size[-1]),
        step_bytes=int(median(grows[grows > 0])),
    )
