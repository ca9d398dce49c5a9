"""Read XLA's report on a compiled program that does not fit: its parts, and its largest buffer.

The lines are those of XLA 2022 to 2026: on GPUs from xla/service/buffer_assignment.cc
(Stats::ToString and ToVerboseString), on TPUs the compiler's own table of high-bandwidth memory.
They are read as printed, because file names cannot be recovered from squeezed text.
"""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.inputs.wordings.wording import Fields, printed_bytes
from fragdoctor.model.case import ServerShare

MAX_CHARS: Final = 64 * 1024
"""Characters to read of a report: its largest buffers come first, and hundreds may follow."""

MAX_TEXT: Final = 200

_START: Final = re.compile(r"BufferAssignment stats:|Total hbm usage >= ?")
_SIZE: Final = r"(\d{1,9}(?:\.\d{1,6})?\s?(?:[KMGT]i?B?|B))(?![\w.])"
_TOTAL: Final = re.compile(rf"total allocation:\s{{0,40}}{_SIZE}|Total hbm usage >= ?{_SIZE}")
_PARTS: Final = tuple(
    (name, re.compile(rf"(?:^|[\s>|]){label}:?\s{{1,60}}{_SIZE}"))
    for name, label in (
        ("arguments", r"(?:parameter allocation|arguments)"),
        ("constants", r"constant allocation"),
        ("outputs", r"maybe_live_out allocation"),
        ("temporaries", r"(?:preallocated temp allocation|HLO temp)"),
        ("reserved by the system", r"reserved"),
    )
)
_BUFFERS: Final = re.compile(r"Peak buffers:|Largest program allocations in hbm:")
_BUFFER: Final = re.compile(
    rf"Size:\s{{0,4}}{_SIZE}(?P<about>.{{0,4000}}?)\bShape:\s{{0,4}}(?P<shape>[\w()\[\],]{{1,120}})",
    re.DOTALL,
)
_OPERATOR: Final = re.compile(r"op_name=\"([^\"]{1,2000})\"")
_PLACE: Final = re.compile(r"source_file=\"([^\"]{1,400})\"\s{0,4}source_line=(\d{1,7})")


def xla_program(text: str) -> tuple[Fields, tuple[ServerShare, ...]]:
    """Return what the first program that a text reports adds to its messages, and its parts.

    Both are empty if there is none.
    """
    start = _START.search(text)
    report = "" if start is None else text[start.start() : start.start() + MAX_CHARS]
    total = _TOTAL.search(report)
    if total is None:
        return {}, ()
    buffers = _BUFFERS.search(report)
    head = report[:4000] if buffers is None else report[: buffers.start()]
    found = ((name, p.search(head)) for name, p in _PARTS)
    parts = (ServerShare(name, _bytes(size[1])) for name, size in found if size is not None)
    fields: Fields = {"program_bytes": _bytes(total[1] or total[2])}
    largest = None if buffers is None else _BUFFER.search(report, buffers.end())
    if largest is not None:
        operator, place = (p.search(largest["about"]) for p in (_OPERATOR, _PLACE))
        told = largest["shape"]
        if operator is not None:
            # jit(f)/jit(main)/layer/dot_general[dimension_numbers=...]: the operation comes last
            told += " of " + operator[1].partition("[")[0].rpartition("/")[2]
        if place is not None:
            told += f" at {place[1].rpartition('/')[2]}:{place[2]}"
        fields["largest_buffer_bytes"] = _bytes(largest[1])
        fields["largest_buffer"] = " ".join(told.split())[:MAX_TEXT]
    return fields, tuple(part for part in parts if part.n_bytes)


def _bytes(printed: str) -> int:
    return printed_bytes("".join(printed.split()).lower())
