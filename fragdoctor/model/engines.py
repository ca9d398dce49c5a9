"""Programs with allocators of their own, and how their options put less on the GPU.

PyTorch's settings and code do not apply to these programs, so advice on PyTorch must not be given.
The advice is in ``engines.txt``; option names are those of the stated version.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct

from fragdoctor.lazy import regex
from fragdoctor.model.case import OomMessage
from fragdoctor.model.frameworks import read_table


class Need(StrEnum):
    """What the requested memory was for, judging by the text."""

    STEP = "step"
    """A step's tensors, which grow with the batch and the input; also if nothing else is known."""
    WEIGHTS = "weights"
    CACHE = "cache"
    """A KV cache."""
    GRAPH = "graph"
    """The buffer of a computation, separate from weights and cache."""
    LIBRARY = "library"
    """A library's handle or workspace, for which the allocator left no room."""
    FULL = "full"
    """Next to nothing was requested: the device was already full."""
    LIMIT = "limit"
    """A limit that the program was given ran out, not the device."""
    POOL = "pool"
    """A pool whose virtual memory the driver refuses to map."""


class Advice(NamedTuple):
    """A way to put less on the GPU: in a few words, and as instructions with its options."""

    title: str
    change: str


class Engine(Struct, frozen=True):
    """A program and its advice.

    Attributes:
        name: name as people write it.
        source: version and file that the advice is from.
        words: advice by need; that for a step is for every need that has none of its own.
        speaks: kinds, backends and ``sub_kind``s of messages that only this program prints.
        logs: pattern to search for in a message and the lines above it.
    """

    name: str
    words: Mapping[Need, Advice]
    source: str = ""
    speaks: frozenset[str] = frozenset()
    logs: str = ""

    def advice(self, need: Need) -> Advice:
        """Return the advice for a need."""
        return self.words.get(need, self.words[Need.STEP])


def _engines() -> Iterator[Engine]:
    for name, lines in read_table("engines.txt"):
        source = " ".join(lines.pop("source", ()))
        speaks, logs = "".join(lines.pop("speaks", ())), "".join(lines.pop("logs", ()))
        words = {Need(need): Advice(title, " ".join(how)) for need, (title, *how) in lines.items()}
        yield Engine(name, words, source, frozenset(speaks.split()), logs)


*_KNOWN, ANY_PROGRAM = _engines()
ENGINES: Final = tuple(_KNOWN)
"""A program that runs another comes before it: Ollama runs llama.cpp."""


def engine_of(message: OomMessage) -> Engine | None:
    """Return the engine that printed a message; None for PyTorch and for an unknown program."""
    files = " ".join(frame.file for frame in message.frames)
    said = f"{message.said} {files}"
    told = {message.kind, message.backend, message.sub_kind}
    for engine in ENGINES:
        if told & engine.speaks and not (
            engine.name == "llama.cpp" and re.search(ENGINES[0].logs, said)
        ):
            return engine
    is_named = message.variant in ("told", "bare") and _TORCH.search(said) is None
    if (message.is_of_caching_allocator and not is_named) or message.kind == "kv-cache":
        return None
    return next((e for e in ENGINES if e.logs and re.search(e.logs, said)), None)


_NEEDS: Final = {
    "weights-buffer": Need.WEIGHTS,
    "kv-buffer": Need.CACHE,
    "compute-buffer": Need.GRAPH,
    "vmm": Need.POOL,
    "arena-limit": Need.LIMIT,
    "workspace-limit": Need.LIMIT,
    "buffer-too-large": Need.LIMIT,
    "buffer-count": Need.LIMIT,
}
"""Needs by the ``sub_kind`` of the message."""

_SHAPE: Final = regex(
    r"shape\s?\[\s?(\d{1,12})((?:\s?,\s?\d{1,12}){0,12})\s?\](?: and type (\w{1,20}))?"
)
_ELEMENT_BYTES: Final = {"half": 2, "bfloat16": 2, "double": 8, "int64": 8, "bool": 1, "uint8": 1}
"""Sizes of TensorFlow types that do not have 4 bytes (tensorflow/core/framework/types.cc)."""

NEXT_TO_NOTHING_BYTES: Final = 64 << 20
"""A request up to this size fails because the GPU is full, not because the request is large: JAX
and TensorFlow take most of a GPU at the start."""


def asked_bytes(message: OomMessage) -> int | None:
    """Return the requested bytes; TensorFlow prints the shape of the tensor instead."""
    shape = _SHAPE.search(message.text) if message.kind == "tf" else None
    if message.requested_bytes is not None or shape is None:
        return message.requested_bytes
    sizes = [int(shape[1]), *(int(n) for n in shape[2].split(",") if n.strip())]
    return math.prod(sizes) * _ELEMENT_BYTES.get(shape[3] or "float", 4)


def need_of(message: OomMessage) -> Need:
    """Return what the memory was for, judging by the message."""
    if message.sub_kind in _NEEDS:
        return _NEEDS[message.sub_kind]
    if message.kind in ("cudnn", "cublas") or message.variant == "tf-device":
        return Need.LIBRARY
    wanted = asked_bytes(message)
    if message.kind == "jax":
        needs, whole = message.program_bytes, message.total_bytes
        is_beyond = (
            bool(wanted and whole and wanted > whole) or (needs or 0) > NEXT_TO_NOTHING_BYTES
        )
        if is_beyond or message.variant in ("jax-program", "jax-reserve"):
            return Need.GRAPH
        wanted = wanted if needs is None else needs
    return Need.FULL if wanted is not None and wanted <= NEXT_TO_NOTHING_BYTES else Need.STEP


_TORCH: Final = regex(r"\btorch\b|PyTorch|\bTHC?\b|THCudaCheck|c10::|at::|/site-packages/")
_OF_TORCH: Final = frozenset(
    {"runtime-error", "driver-error", "device-count", "torch-0.4", "thc-check", "exception-name",
     "allocation-on-device", "bare", "ray-task"}
)  # fmt: skip
"""Variants of driver messages that PyTorch prints; llama.cpp says "CUDA error: out of memory" too,
but names itself around it."""

_IN_FILE: Final = regex(r"out of memory\W{1,3}(?:at )?\S{1,160}\.\w{1,3}:\d", re.IGNORECASE)
"""A program's own check prints its file and line right after the words; PyTorch's does not."""


def is_told_of_nobody(message: OomMessage) -> bool:
    """Return whether people tell of a failure in their own words, and name no program."""
    return message.variant == "told" and engine_of(message) is None


def is_of_other_program(message: OomMessage | None) -> bool:
    """Return whether a program other than PyTorch asked the device for memory."""
    if message is None or not message.is_device_oom:
        return False
    if engine_of(message) is not None:
        return True
    is_of_torch = message.variant in _OF_TORCH and not _IN_FILE.search(message.text)
    if message.kind != "driver-no-figures" or is_of_torch:
        return False
    files = " ".join(frame.file for frame in message.frames)
    return _TORCH.search(f"{message.said} {files}") is None and not message.sub_kind
