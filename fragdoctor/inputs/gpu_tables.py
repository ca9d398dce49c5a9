"""Find the fullest GPU in a pasted table of nvidia-smi or gpustat."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from fragdoctor.inputs.told_failures import MAX_CHARS, SHORTAGE
from fragdoctor.model.case import GPU_TABLE, OomMessage
from fragdoctor.units import MIB

_ROWS: Final = re.compile(
    # memory in use on a GPU: gpustat prints the GPU's number, nvidia-smi one row per GPU
    r"(?:^\[(?P<index>\d{1,3})\][^|\n]{1,80}\|[^|\n]{1,60})?"
    r"\|\s{0,8}(?P<used>\d{1,7})(?:MiB)?\s?/\s{0,4}(?P<total>\d{1,7})\s?M(?:iB|B)\b"
    # nvidia-smi, one row per process
    r"|^\|\s{1,6}(?P<gpu>\d{1,3})\s{1,6}(?:\S{1,6}\s{1,6}){0,2}\d{1,9}\s[^|\n]{1,100}?"
    r"(?P<held>\d{1,7})MiB",
    re.MULTILINE,
)
_MIN_USED: Final = 512
"""MiB; more than a desktop and a context use. Less than this is not a program that filled a GPU."""

_GONE: Final = (
    r"\b(?:zombie|(?:crash|kill|terminat|interrupt|stopp?|finish|exit|abort|end)(?:s|e[sd]|ing)?)\b"
)
_KEPT: Final = (
    r"(?:(?:\bnot|n't|\bnever|\bwithout)\s(?:be(?:en|ing)?\s)?(?:releas|free[ds]?\b|dealloc)"
    r"|\b(?:still|keeps?|remains?)\s(?:occup|hold|held|us(?:es|ed|ing)\b|in use|tak))"
)
_OUTLIVES: Final = re.compile(
    rf"{_GONE}[^\n]{{0,200}}?\b(?:memory|vram)\b[^\n]{{0,60}}?{_KEPT}"
    rf"|{_GONE}[^\n]{{0,200}}?{_KEPT}[^\n]{{0,60}}?\b(?:memory|vram)\b"
    rf"|\b(?:memory|vram)\b[^\n]{{0,60}}?{_KEPT}[^\n]{{0,60}}?\bafter\b[^\n]{{0,60}}?{_GONE}",
    re.IGNORECASE,
)
"""A program that is gone while its memory is not: enough by itself to report a shortage."""


def _gpus(head: str) -> Iterator[tuple[float, int, int, int | None, re.Match[str]]]:
    """Yield (share in use, MiB in use, GPU, MiB in all, row) of each row."""
    for n, row in enumerate(_ROWS.finditer(head)):
        total = None if row["total"] is None else max(1, int(row["total"]))
        used, index = int(row["used"] or row["held"]), row["index"] or row["gpu"]
        yield (0.0 if total is None else used / total, used, n if index is None else int(index),
               total, row)  # fmt: skip


_SAID_EMPTY: Final = re.compile(
    r"(?i)\bnvidia-smi\b[^.\n]{0,80}\b(?:0 ?MiB|nothing|no (?:running )?process(?:es)?|empty|idle"
    r"|unused|not (?:in use|used))\b"
)


def is_empty(text: str) -> bool:
    """Return whether a text, by its tables or else its words, shows GPUs with nothing on them."""
    head = text[:MAX_CHARS]
    used = [gpu[1] for gpu in _gpus(head)]
    return max(used) < _MIN_USED if used else _SAID_EMPTY.search(head) is not None


def free_gpu(text: str) -> int | None:
    """Return a GPU that a table shows with no program on it, or None."""
    gpus = (gpu for gpu in _gpus(text[:MAX_CHARS]) if gpu[3] is not None)
    return next((index for _, used, index, _, _ in gpus if used < _MIN_USED), None)


def fullest_gpu(text: str, *, has_failed: bool = False) -> OomMessage | None:
    """Return a table's fullest GPU, if the text says that memory ran out or was not released.

    ``has_failed`` says that an error which a full GPU causes is known already.
    """
    head = text[:MAX_CHARS]
    outlives = _OUTLIVES.search(head)
    if outlives is None and not has_failed and not SHORTAGE.search(head):
        return None
    found = list(_gpus(head))
    if not found:
        return None if outlives is None else _table(head, outlives)
    _share, used, index, total, row = max(found, key=lambda one: one[:2])
    if used < _MIN_USED or (total is not None and used > total):
        return None
    whole = None if total is None else total * MIB
    return _table(head, row, device_index=index, total_bytes=whole, process_bytes=used * MIB)


def _table(head: str, said: re.Match[str], **figures: int | None) -> OomMessage:
    message = OomMessage(
        kind="driver-no-figures",
        backend="cuda",
        is_device_oom=True,
        sub_kind=GPU_TABLE,
        variant=GPU_TABLE,
        line=head.count("\n", 0, said.start()) + 1,
        text=" ".join(said.group().split()),
    )
    return replace(message, **figures)
