"""Read the start-up lines of vLLM and SGLang about their memory as shares of the card.

The lines are those of vLLM 0.4 to 0.33 (worker/worker.py, v1/worker/gpu_worker.py,
gpu_model_runner.py, gpu/model_runner.py) and SGLang 0.4 to 0.5.23 (srt/model_executor
and srt/mem_cache/memory_pool.py). If several ranks print the same line, the largest figure counts.
"""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.inputs.wordings.wording import printed_bytes
from fragdoctor.model.case import ServerShare

MAX_CHARS: Final = 8 * 1024 * 1024
"""Characters to search: a server prints its budget once, before it starts serving."""

_SIZE: Final = r"(\d{1,9}(?:\.\d{1,9})?)\s?([GM]i?B)"
_LEFT: Final = "(-?)" + _SIZE
"""What the limit leaves for the cache: less than nothing if weights and a step exceed it."""
_LINES: Final = tuple(
    (share, re.compile(pattern))
    for share, pattern in (
        ("whole GPU", rf"total_gpu_memory \({_SIZE}\)"),
        ("limit", rf"gpu_memory_utilization \([\d.]{{1,9}}\) = {_SIZE}"),
        ("limit", rf"Desired GPU memory utilization is \([\d.]{{1,9}}, {_SIZE}\)"),
        ("weights", rf"[Mm]odel (?:weights take|weights took|loading took) {_SIZE}"),
        ("weights", rf"Actual usage is {_SIZE} for (?:weight|consumed memory)"),
        ("weights", rf"Load weight end\..{{0,400}}?mem usage={_SIZE}"),
        ("outside PyTorch", rf"non_torch_memory takes {_SIZE}"),
        ("outside PyTorch", rf"{_SIZE} for non-torch memory"),
        ("peak of a step", rf"activation peak memory takes {_SIZE}"),
        ("peak of a step", rf"{_SIZE} for peak activation"),
        ("KV cache", rf"(?:reserved for KV Cache is|Available KV cache memory:) {_LEFT}"),
        ("KV cache", rf"reserved {_SIZE} memory for KV Cache"),
        ("KV cache", r"kv cache memory in use is (\d{1,15}(?:\.\d{1,9})?)\s?([GM]i?B|bytes)"),
        ("KV cache", rf"KV [Cc]ache (?:is )?allocated\..{{0,80}}?\bKV size: {_SIZE}"),
        ("K of the cache", rf"KV Cache is allocated\..{{0,80}}?\bK size: {_SIZE}"),
        ("V of the cache", rf"KV Cache is allocated\..{{0,120}}?\bV size: {_SIZE}"),
        ("CUDA graphs", rf"Graph capturing finished in .{{1,40}}?took {_SIZE}"),
        ("CUDA graphs", rf"and {_SIZE} for CUDAGraph memory"),
        ("CUDA graphs", rf"Capture [\w ]{{0,40}}(?i:cuda) graph end\..{{0,200}}?mem usage={_SIZE}"),
    )
)
_ORDER: Final = tuple(dict.fromkeys(share for share, _ in _LINES))


def server_budget(text: str) -> tuple[ServerShare, ...]:
    """Return the shares in a server's start-up lines, in the order of a budget; may be empty."""
    head = text[:MAX_CHARS]
    largest: dict[str, int] = {}
    for share, pattern in _LINES:
        for match in pattern.finditer(head):
            *minus, number, unit = match.groups()
            n_bytes = printed_bytes(f"{number}{unit}".lower()) * (-1 if minus == ["-"] else 1)
            largest[share] = max(n_bytes, largest.get(share, n_bytes))
    return tuple(ServerShare(name, largest[name]) for name in _ORDER if name in largest)
