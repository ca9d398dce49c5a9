"""Whose line is it: the user's own source line of a stack, and what each such line holds.

The line of a stack is its innermost frame that is not library code. Library code is what lies in
``site-packages`` or ``dist-packages``, a source tree of torch, Python's standard library, code
without a file (``<frozen ...>``, ``<string>``) and C++ frames. Notebook cells
(``<ipython-input-...>``, ``ipykernel_*``) are the user's. Where every frame is library code (a
server started by a console script), the innermost frame of a package that is neither torch nor the
standard library stands for it, then the outermost torch frame, then the outermost Python frame.
A stack of C++ frames alone, an empty one and a missing one have no line: -1.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from fragdoctor.analysis.layout import Layout
from fragdoctor.analysis.lifetimes import Lifetimes
from fragdoctor.analysis.result import Holder
from fragdoctor.model.snapshot import I32, I64, U8, Snapshot

USER, PACKAGE, TORCH, STDLIB, NATIVE = 0, 1, 2, 3, 4
MAX_HOLDERS: Final = 100

_NATIVE = re.compile(
    r"\?\?|.*\.(?:so(?:\.[0-9.]+)?|dll|pyd|dylib|c|cc|cpp|cxx|cu|cuh|h|hpp|s)|", re.IGNORECASE
)
_NOTEBOOK = re.compile(r"<ipython-input-|<stdin>|.*[/\\]ipykernel_\d+[/\\]")
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_TORCH = re.compile(
    r"(?:^|[/\\])torch[/\\](?:_\w+|amp|ao|autograd|backends|cuda|distributed|fx|func|functional"
    r"|jit|nn|onnx|optim|profiler|random|serialization|sparse|testing|utils)(?:\.py|[/\\])"
)
_STDLIB = re.compile(
    r"[/\\](?:lib|Lib|lib64)[/\\]python[0-9.]*[/\\]|[/\\]Python\d+[/\\]Lib[/\\]|\.zip[/\\]"
)


def classify_file(filename: str) -> int:
    """Return whose code a file name of a frame is: ``USER`` .. ``NATIVE``."""
    name = filename[:1000]
    if _NOTEBOOK.match(name):
        return USER
    if name.startswith("<"):
        return STDLIB
    if _NATIVE.fullmatch(name):
        return NATIVE
    if _PACKAGES.search(name):
        rest = _PACKAGES.split(name)[-1]
        return TORCH if rest.startswith(("torch/", "torch\\", "torch.py")) else PACKAGE
    if _TORCH.search(name):
        return TORCH
    return STDLIB if _STDLIB.search(name) else USER


def frame_classes(snapshot: Snapshot) -> U8:
    """Return the class of each frame of the snapshot (``uint8``)."""
    names, of_frame = np.unique(snapshot.frames.filename, return_inverse=True)
    classes = np.array(
        [NATIVE if i < 0 else classify_file(snapshot.strings[int(i)]) for i in names], np.uint8
    )
    return classes[of_frame.reshape(-1)] if len(names) else np.zeros(0, np.uint8)


def user_frames(snapshot: Snapshot, classes: U8 | None = None) -> I32:
    """Return the frame id of the user's own line for each stack, -1 where it has none."""
    offsets, frames = snapshot.stacks.offsets, snapshot.stacks.frames
    classes = frame_classes(snapshot) if classes is None else classes
    kind = classes[frames]
    result = np.full(len(snapshot.stacks), -1, np.int32)
    # The later choices are written first and overwritten by the better ones.
    for wanted, innermost in ((STDLIB, False), (TORCH, False), (PACKAGE, True), (USER, True)):
        hits = np.flatnonzero(kind == wanted)
        if not len(hits):
            continue
        if innermost:
            at = np.searchsorted(hits, offsets[:-1])
            position = hits[np.minimum(at, len(hits) - 1)]
        else:
            at = np.searchsorted(hits, offsets[1:]) - 1
            position = hits[np.maximum(at, 0)]
        inside = (position >= offsets[:-1]) & (position < offsets[1:])
        result[inside] = frames[position[inside]]
    return result


def find_holders(
    layout: Layout, lifetimes: Lifetimes, peak_k: int | None, lines: I32
) -> tuple[Holder, ...]:
    """Return live memory by user line now and at the peak, largest of both first.

    Args:
        layout: the final layout.
        lifetimes: all blocks.
        peak_k: the state (number of events) of highest allocated bytes, None without a trace.
        lines: user frame of each stack (``user_frames``).
    """
    now = np.flatnonzero(~layout.live_is_pending)
    stack, size = layout.live_stack[now], layout.live_size[now]
    is_peak = np.zeros(len(now), np.bool_)
    if peak_k is not None:
        peak = lifetimes.allocated_at(peak_k)
        stack = np.concatenate([stack, lifetimes.stack[peak]])
        size = np.concatenate([size, lifetimes.size[peak]])
        is_peak = np.concatenate([is_peak, np.ones(len(peak), np.bool_)])
    if not len(stack):
        return ()
    line = frames_of(stack, lines)
    groups, member = np.unique(line, return_inverse=True)
    member = member.reshape(-1)
    n = len(groups)
    table = np.zeros((2, n), np.int64)
    np.add.at(table, (is_peak.astype(np.int64), member), size)
    counts = np.zeros((2, n), np.int64)
    np.add.at(counts, (is_peak.astype(np.int64), member), 1)
    main = _main_stacks(member, stack, size, n)
    order = np.argsort(-np.maximum(table[0], table[1]), kind="stable")[:MAX_HOLDERS]
    return tuple(
        Holder(
            frame=int(groups[g]),
            stack=int(main[g]),
            now_bytes=int(table[0, g]),
            n_now=int(counts[0, g]),
            peak_bytes=None if peak_k is None else int(table[1, g]),
            n_peak=None if peak_k is None else int(counts[1, g]),
        )
        for g in order
    )


def frames_of(stack: I32, lines: I32) -> I32:
    """Return the user frame of each stack id, -1 for the id -1."""
    if not len(lines):
        return np.full(len(stack), -1, np.int32)
    result: I32 = np.where(stack >= 0, lines[stack], np.int32(-1))
    return result


def _main_stacks(group: I64, stack: I32, size: I64, n_groups: int) -> I64:
    """Return for each group the stack with the most bytes."""
    width = int(stack.max(initial=0)) + 2
    keys, member = np.unique(group * width + stack + 1, return_inverse=True)
    total = np.zeros(len(keys), np.int64)
    np.add.at(total, member.reshape(-1), size)
    order = np.argsort(total, kind="stable")  # the largest is written last
    result = np.full(n_groups, -1, np.int64)
    result[keys[order] // width] = keys[order] % width - 1
    return result
