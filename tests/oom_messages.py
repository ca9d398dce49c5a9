"""Out-of-memory messages made from PyTorch's templates, with our own figures."""

from __future__ import annotations

from typing import Any

from fragdoctor.inputs.messages import find_messages
from fragdoctor.model.case import Case, OomLog, OomMessage, OtherProcess

GIB = 1 << 30
MIB = 1 << 20
HINT = (
    " If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
    "for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)


def new_style(
    asked: str,
    total: str,
    free: str,
    allocated: str,
    unallocated: str,
    *,
    processes: str = "",
    own: str = "",
    allowed: str = "",
    pools: str = "",
    device: int = 0,
) -> str:
    """Return a message in the form of PyTorch 2.2 and later."""
    own_sentence = (
        f"Including non-PyTorch memory, this process has {own} memory in use. " if own else ""
    )
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU {device} has "
        f"a total capacity of {total} of which {free} is free. {processes}{own_sentence}"
        f"{allowed + ' allowed; ' if allowed else ''}Of the allocated memory {allocated} is "
        f"allocated by PyTorch, "
        f"{f'with {pools} allocated in private pools (e.g., CUDA Graphs), ' if pools else ''}and "
        f"{unallocated} is reserved by PyTorch but unallocated.{HINT}"
    )


def old_style(asked: str, total: str, allocated: str, free: str, reserved: str) -> str:
    """Return a message in the form of PyTorch 1.4 to 1.9."""
    return (
        f"RuntimeError: CUDA out of memory. Tried to allocate {asked} (GPU 0; {total} total "
        f"capacity; {allocated} already allocated; {free} free; {reserved} reserved in total by "
        "PyTorch)"
    )


def process(pid: int, size: str) -> str:
    """Return the sentence about another process."""
    return f"Process {pid} has {size} memory in use. "


def case_of(text: str, **more: Any) -> Case:
    """Return a case that holds the messages of a text."""
    return Case(oom=find_messages(text), **more)


def message(**fields: Any) -> OomMessage:
    """Return an allocator message on CUDA with the given fields."""
    given: dict[str, Any] = {
        "kind": "pytorch-caching-allocator",
        "backend": "cuda",
        "is_device_oom": True,
        "device_index": 0,
        **fields,
    }
    if "other_processes" in given:
        given["other_processes"] = tuple(OtherProcess(*p) for p in given["other_processes"])
    return OomMessage(**given)


def log_of(*messages: OomMessage) -> OomLog:
    """Return a log that holds these messages, with the first one as the primary one."""
    return OomLog(messages=messages, n_lines=len(messages))
