"""Writes plain values as a pickle of protocol 4, without the pickle module."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Any, Final


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


BATCH: Final = 1000
_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")
_DOUBLE: Final = struct.Struct(">d")
_NONE, _TRUE, _FALSE, _FLOAT, _INT, _INT2, _LONG1 = (
    bytes((op,)) for op in (Op.NONE, Op.TRUE, Op.FALSE, Op.FLOAT, Op.INT, Op.INT2, Op.LONG1)
)
_SMALL_INTEGERS: Final = tuple(bytes((Op.INT1, i)) for i in range(256))


class Shared:
    """A value that is written once and referred to afterwards; compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: list[Any] | dict[str, Any]) -> None:
        self.value = value


class PickleWriter:
    """Writes one value to a sink; see the module for what it may hold.

    Args:
        sink: called with pieces of bytes.
    """

    def __init__(self, sink: Callable[[bytes], object]) -> None:
        self._sink = sink
        self._out = bytearray()
        self._memo: dict[str, bytes] = {}
        self._shared: dict[int, tuple[bytes, Shared]] = {}
        self._n_memo = 0

    def write(self, value: Any) -> None:
        """Write the whole pickle.

        Raises:
            TypeError: the value holds something that no snapshot holds.
        """
        self._out += bytes((Op.PROTO, 4))
        self._put(value)
        self._out.append(Op.STOP)
        self._flush(0)

    def _put(self, value: Any) -> None:
        # The most frequent kinds first and by exact type: a million events go through here.
        kind = type(value)
        if kind is str:
            self._text(value)
        elif kind is int:
            self._integer(value)
        elif kind is Shared:
            self._share(value)
        elif kind is dict:
            self._mapping(value)
        elif kind is tuple:
            self._pair(value)
        elif kind is bool or value is None:
            self._out += _NONE if value is None else _TRUE if value else _FALSE
        elif kind is float:
            self._out += _FLOAT + _DOUBLE.pack(value)
        elif isinstance(value, list | Iterator):
            self._items(value)
        else:
            raise TypeError(f"no snapshot holds a {kind.__name__}")

    def _text(self, text: str) -> None:
        reference = self._memo.get(text)
        if reference is not None:
            self._out += reference
            return
        data = text.encode("utf-8", "surrogatepass")
        if len(data) < 256:
            self._out += bytes((Op.SHORT_TEXT, len(data)))
        else:
            self._out.append(Op.TEXT)
            self._out += _U32.pack(len(data))
        self._out += data
        self._memo[text] = self._remember()

    def _integer(self, value: int) -> None:
        if 0 <= value < 256:
            self._out += _SMALL_INTEGERS[value]
        elif 0 <= value < 65536:
            self._out += _INT2 + value.to_bytes(2, "little")
        elif -(1 << 31) <= value < 1 << 31:
            self._out += _INT + _I32.pack(value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self._out += _LONG1 + bytes((len(data),)) + data

    def _share(self, shared: Shared) -> None:
        known = self._shared.get(id(shared))
        if known is not None:
            self._out += known[0]
            return
        if isinstance(shared.value, dict):
            self._mapping(shared.value, shared)
        else:
            self._items(shared.value, shared)

    def _mapping(self, value: dict[str, Any], shared: Shared | None = None) -> None:
        self._out.append(Op.EMPTY_DICT)
        if shared is not None:
            # Kept, so that its id stays its own.
            self._shared[id(shared)] = (self._remember(), shared)
        if not value:
            return
        self._out.append(Op.MARK)
        known, out = self._memo, self._out
        for key, item in value.items():
            # Keys, and most texts, were written before.
            reference = known.get(key)
            if reference is None:
                self._text(key)
            else:
                out += reference
            reference = known.get(item) if type(item) is str else None
            if reference is None:
                self._put(item)
            else:
                out += reference
        self._out.append(Op.SETITEMS)
        self._flush(1 << 16)

    def _items(self, items: Iterable[Any], shared: Shared | None = None) -> None:
        self._out.append(Op.EMPTY_LIST)
        if shared is not None:
            # Kept, so that its id stays its own.
            self._shared[id(shared)] = (self._remember(), shared)
        n = 0
        for item in items:
            if n % BATCH == 0:
                self._out += bytes((Op.APPENDS, Op.MARK)) if n else bytes((Op.MARK,))
            self._put(item)
            n += 1
        if n:
            self._out.append(Op.APPENDS)

    def _pair(self, value: tuple[Any, ...]) -> None:
        if len(value) != 2:
            raise TypeError("no snapshot holds a tuple that is no pair")
        self._put(value[0])
        self._put(value[1])
        self._out.append(Op.TUPLE2)

    def _remember(self) -> bytes:
        """Put what was just written into the memo; return what refers to it."""
        self._out.append(Op.MEMOIZE)
        index = self._n_memo
        self._n_memo += 1
        return bytes((Op.GET, index)) if index < 256 else bytes((Op.LONG_GET,)) + _U32.pack(index)

    def _flush(self, above: int) -> None:
        if len(self._out) > above:
            self._sink(bytes(self._out))
            self._out.clear()
