"""Pickles from named opcodes, so that a hostile file reads as what it does."""

from __future__ import annotations

import pickletools
import struct

CODE = {o.name: o.code.encode("latin-1") for o in pickletools.opcodes}
ALLOWED = frozenset(
    [
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "EMPTY_DICT",
        "EMPTY_LIST",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "SETITEM",
        "SETITEMS",
        "APPEND",
        "APPENDS",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "MEMOIZE",
        "BINPUT",
        "LONG_BINPUT",
        "BINGET",
        "LONG_BINGET",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "NEWTRUE",
        "NEWFALSE",
        "NONE",
    ]
)


def op(name: str, argument: bytes = b"") -> bytes:
    return CODE[name] + argument


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return op("SHORT_BINUNICODE", bytes([len(raw)]) + raw)


def integer(value: int) -> bytes:
    if 0 <= value < 256:
        return op("BININT1", bytes([value]))
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return op("LONG1", bytes([len(raw)]) + raw)


def program(*parts: bytes, protocol: int = 4, stop: bool = True) -> bytes:
    return op("PROTO", bytes([protocol])) + b"".join(parts) + (op("STOP") if stop else b"")


def mapping(*pairs: bytes) -> bytes:
    """Return a dict of the given key and value programs."""
    return op("EMPTY_DICT") + op("MARK") + b"".join(pairs) + op("SETITEMS")


def listing(*items: bytes) -> bytes:
    return op("EMPTY_LIST") + op("MARK") + b"".join(items) + op("APPENDS")


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)
