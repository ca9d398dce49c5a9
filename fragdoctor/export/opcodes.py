"""The opcodes of pickle protocol 4 that a memory snapshot is written with."""

from __future__ import annotations

from enum import IntEnum


class Op(IntEnum):
    """One byte each; names as far as possible those of Python's ``pickletools``."""

    PROTO = 0x80
    STOP = 0x2E
    MARK = 0x28
    EMPTY_DICT = 0x7D
    SETITEMS = 0x75
    EMPTY_LIST = 0x5D
    APPENDS = 0x65
    TUPLE2 = 0x86
    SHORT_TEXT = 0x8C
    TEXT = 0x58
    INT = 0x4A
    INT1 = 0x4B
    INT2 = 0x4D
    LONG1 = 0x8A
    FLOAT = 0x47
    TRUE = 0x88
    FALSE = 0x89
    NONE = 0x4E
    MEMOIZE = 0x94
    GET = 0x68
    LONG_GET = 0x6A
