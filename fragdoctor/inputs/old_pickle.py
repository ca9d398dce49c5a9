"""Recognises pickles of protocols 0 and 1, which have no header, by their first opcodes.

Such a pickle is never read: PyTorch does not write it. But it must not be taken for text, nor text
for it, so the opcodes are followed as far as the first bytes go, with what they do to the stack.
"""

from __future__ import annotations

import re
from typing import Final

_NAME: Final = rb"[A-Za-z_][\w.]{0,200}\n"
# Arguments that end with a line, as the pickle module writes them.
_LINES: Final = {
    ord(op): re.compile(pattern)
    for op, pattern in {
        "I": rb"-?\d{1,40}\n",
        "L": rb"-?\d{1,400}L?\n",
        "F": rb"[-+0-9.einfa]{1,40}\n",
        "S": rb"(?:'[^\n]*'|\"[^\n]*\")\n",
        "V": rb"[^\n]*\n",
        "P": rb"[^\n]+\n",
        "c": _NAME + _NAME,
        "i": _NAME + _NAME,
        "p": rb"\d{1,10}\n",
        "g": rb"\d{1,10}\n",
    }.items()
}
_N_BYTES: Final = {ord(op): n for op, n in zip("JKMGqrhj", (4, 1, 2, 8, 1, 4, 1, 4), strict=True)}
_LENGTH_BYTES: Final = {ord("U"): 1, ord("T"): 4, ord("X"): 4}
# What an opcode adds to the stack; one of the second table first takes all down to the last mark.
_ADDS: Final = {
    **dict.fromkeys(b"ILFSVcPgJKMGhjUTXN2]})", 1),
    **dict.fromkeys(b"pqrQ", 0),
    **dict.fromkeys(b"0Rab", -1),
    ord("s"): -2,
}
_ADDS_AFTER_MARK: Final = {**dict.fromkeys(b"dloti", 1), **dict.fromkeys(b"1eu", 0)}
_MARK, _STOP = b"(."
_PUTS: Final = b"pqr"
_MAX_DEPTH: Final = 40
"""Values on the stack that no mark explains: two for each container around the innermost."""

_MIN_OPCODES: Final = 6
"""What has to be read to believe in a pickle that does not end with its first bytes."""


def is_old_pickle(head: bytes) -> bool:
    """Return whether these bytes are a pickle of protocol 0 or 1, or the beginning of one."""
    place, n_opcodes, n_puts = 0, 0, 0
    depths = [0]  # values on the stack: before the first mark, and after each one
    while place < len(head):
        op, end = head[place], _end(head, place)
        if end is None:
            return False
        if op == _STOP:
            is_long = n_opcodes >= _MIN_OPCODES
            return depths == [1] and (end == len(head) or is_long)
        if end > len(head):
            break
        if op in _PUTS:
            if _memo_index(head[place:end]) > n_puts:
                return False  # the pickle module counts
            n_puts += 1
        if not _moved(depths, op):
            return False
        n_opcodes += 1
        place = end
    return n_opcodes >= _MIN_OPCODES and n_puts > 0


def _end(head: bytes, place: int) -> int | None:
    """Return where the opcode at ``place`` ends, maybe beyond the bytes; None for no opcode."""
    op, start = head[place], place + 1
    if op in _LINES:
        match = _LINES[op].match(head, start)
        if match is not None:
            return match.end()
        is_cut = head.count(b"\n", start) < (2 if op in b"ci" else 1)
        return len(head) + 1 if is_cut else None
    if op in _LENGTH_BYTES:
        width = _LENGTH_BYTES[op]
        return start + width + int.from_bytes(head[start : start + width], "little")
    is_known = op in _ADDS or op in _ADDS_AFTER_MARK or op in (_MARK, _STOP)
    return start + _N_BYTES.get(op, 0) if is_known else None


def _memo_index(opcode: bytes) -> int:
    return int(opcode[1:]) if opcode[:1] == b"p" else int.from_bytes(opcode[1:], "little")


def _moved(depths: list[int], op: int) -> bool:
    """Move the stack as the opcode does; return False where it cannot."""
    if op == _MARK:
        depths.append(0)
    elif op in _ADDS:
        depths[-1] += _ADDS[op]
    elif len(depths) > 1:
        depths.pop()
        depths[-1] += _ADDS_AFTER_MARK[op]
    else:
        return False
    return depths[-1] >= 0 and (len(depths) > 1 or depths[0] <= _MAX_DEPTH)
