"""Read XLA's report on a compiled program that does not fit: its parts, and its largest buffer.

The lines are those of XLA 2022 to 2026: on GPUs from xla/service/buffer_assignment.cc
(Stats::ToString and ToVerboseString), on TPUs the compiler's own table of high-bandwidth memory.
They are read as printed, because file names cannot be recovered from squeezed text.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from fragdoctor.inputs.wordings.wording import printed_bytes
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


class XlaProgram(Struct, frozen=True):
    """A compiled program as XLA printed it.

    Attributes:
        total_bytes: everything that the program needs at once.
        parts: the parts of this total.
        largest_bytes, largest: the size of the largest buffer, and its shape, operation and source
            line; hostile text.
    """

    total_bytes: int
    parts: tuple[ServerShare, ...] = ()
    largest_bytes: int | None = None
    largest: str = ""


def xla_program(text: str) -> XlaProgram | None:
    """Return the first program that a text reports, or None if there is none."""
    start = _START.search(text)
    if start is None:
        return None
    report = text[start.start() : start.start() + MAX_CHARS]
    total = _TOTAL.search(report)
    if total is None:
        return None
    head = report[: buffers.start()] if (buffers := _BUFFERS.search(report)) else report[:4000]
    parts = [ServerShare(name, _bytes(found[1])) for name, p in _PARTS if (found := p.search(head))]
    program = XlaProgram(
        _bytes(total[1] or total[2]), tuple(part for part in parts if part.n_bytes)
    )
    largest = _BUFFER.search(report, buffers.end()) if buffers is not None else None
    if largest is None:
        return program
    operator, place = (p.search(largest["about"]) for p in (_OPERATOR, _PLACE))
    told = largest["shape"]
    if operator is not None:
        # jit(f)/jit(main)/layer/dot_general[dimension_numbers=...]: the operation comes last
        told += " of " + operator[1].partition("[")[0].rpartition("/")[2]
    if place is not None:
        file = place[1].rpartition("/")[2]
        told += f" at {file}:{place[2]}"
    return XlaProgram(
        program.total_bytes, program.parts, _bytes(largest[1]), " ".join(told.split())[:MAX_TEXT]
    )


def _bytes(printed: str) -> int:
    return printed_bytes("".join(printed.split()).lower())
