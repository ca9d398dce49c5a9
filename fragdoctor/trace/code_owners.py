"""Whose code a stack runs through, and the user's own line of it.

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
from functools import lru_cache

import numpy as np

from fragdoctor.model.snapshot import I32, U8, Snapshot

USER, PACKAGE, TORCH, STDLIB, NATIVE = 0, 1, 2, 3, 4

_NATIVE = re.compile(
    r"\?\?|.*\.(?:so(?:\.[0-9.]+)?|dll|pyd|dylib|c|cc|cpp|cxx|cu|cuh|h|hpp|s|asm)|", re.IGNORECASE
)
_NOTEBOOK = re.compile(r"<ipython-input-|<stdin>|.*[/\\]ipykernel_\d+[/\\]")
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_TORCH = re.compile(
    r"(?:^|[/\\])torch[/\\](?:_\w+|amp|ao|autograd|backends|cuda|distributed|fx|func|functional"
    r"|jit|nn|onnx|optim|profiler|random|serialization|sparse|testing|utils)(?:\.py|[/\\])"
)
# Of packages what runs a program rather than being a part of its model.
_PLUMBING = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?:(?:accelerate|click|deepspeed|fire|hydra|ignite|lightning"
    r"|lightning_fabric|optuna|pytorch_lightning|ray|torchtnt|typer|wandb)[/\\]"
    r"|.*[/\\](?:hooks|trainer|trainer_\w+|\w+_trainer|training_loop|utils[/\\]\w+)\.py)"
)
_STDLIB = re.compile(
    r"[/\\](?:lib|Lib|lib64)[/\\]python[0-9.]*[/\\]|[/\\]Python\d+[/\\]Lib[/\\]|\.zip[/\\]"
)


def classify_file(filename: str) -> int:
    """Return whose code a file name of a frame is: ``USER`` .. ``NATIVE``."""
    return _classified(filename[:1000])


# A worker that reads thousands of ranks meets the same files again; 8 MB of names at most.
@lru_cache(maxsize=8192)
def _classified(name: str) -> int:
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


def is_plumbing(filename: str) -> bool:
    """Return whether a file of a package runs programs: a trainer, a launcher, hooks."""
    return _PLUMBING.search(filename[:1000]) is not None


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


def frames_of(stack: I32, lines: I32) -> I32:
    """Return the user frame of each stack id, -1 for the id -1."""
    if not len(lines):
        return np.full(len(stack), -1, np.int32)
    result: I32 = np.where(stack >= 0, lines[stack], np.int32(-1))
    return result
