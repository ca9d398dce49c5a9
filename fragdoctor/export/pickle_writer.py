"""Writes plain values as a pickle of protocol 4, without the pickle module.

Only what a memory snapshot holds: dicts with text keys, lists, pairs, text, integers, floats,
booleans and None. A list may be an iterator, so that a million events need not be in memory.
Texts are memoised, and so is what is wrapped in ``Shared``, as Python's pickler does with objects
that occur more than once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from fragdoctor.export.opcodes import Op

BATCH: Final = 1000
MAX_MEMO: Final = 2**32 - 1
_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")
_DOUBLE: Final = struct.Struct(">d")


class Shared:
    """A value that is written once and referred to afterwards; told apart by identity."""

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
        self._memo: dict[str, int] = {}
        self._shared: dict[int, tuple[int, Shared]] = {}
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
        # The most frequent kinds first: a million events go through here.
        if isinstance(value, str):
            self._text(value)
        elif isinstance(value, bool) or value is None:
            self._out.append(Op.NONE if value is None else Op.TRUE if value else Op.FALSE)
        elif isinstance(value, int):
            self._integer(value)
        elif isinstance(value, Shared):
            self._share(value)
        elif isinstance(value, Mapping):
            self._mapping(value, is_shared=False)
        elif isinstance(value, tuple):
            self._pair(value)
        elif isinstance(value, list | Iterator):
            self._items(value, is_shared=False)
        elif isinstance(value, float):
            self._out.append(Op.FLOAT)
            self._out += _DOUBLE.pack(value)
        else:
            raise TypeError(f"no snapshot holds a {type(value).__name__}")

    def _text(self, text: str) -> None:
        index = self._memo.get(text)
        if index is not None:
            self._get(index)
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
            self._out += bytes((Op.INT1, value))
        elif 0 <= value < 65536:
            self._out.append(Op.INT2)
            self._out += value.to_bytes(2, "little")
        elif -(1 << 31) <= value < 1 << 31:
            self._out.append(Op.INT)
            self._out += _I32.pack(value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self._out += bytes((Op.LONG1, len(data)))
            self._out += data

    def _share(self, shared: Shared) -> None:
        known = self._shared.get(id(shared))
        if known is not None:
            self._get(known[0])
            return
        self._shared[id(shared)] = (self._n_memo, shared)  # keeps it alive, so that its id is its
        if isinstance(shared.value, dict):
            self._mapping(shared.value, is_shared=True)
        else:
            self._items(shared.value, is_shared=True)

    def _mapping(self, value: Mapping[str, Any], *, is_shared: bool) -> None:
        self._out.append(Op.EMPTY_DICT)
        if is_shared:
            self._remember()
        if not value:
            return
        self._out.append(Op.MARK)
        for key, item in value.items():
            self._text(key)
            self._put(item)
        self._out.append(Op.SETITEMS)
        self._flush(1 << 16)

    def _items(self, items: Iterable[Any], *, is_shared: bool) -> None:
        self._out.append(Op.EMPTY_LIST)
        if is_shared:
            self._remember()
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

    def _remember(self) -> int:
        self._out.append(Op.MEMOIZE)
        self._n_memo += 1
        return self._n_memo - 1

    def _get(self, index: int) -> None:
        if index < 256:
            self._out += bytes((Op.GET, index))
        else:
            self._out.append(Op.LONG_GET)
            self._out += _U32.pack(index)

    def _flush(self, above: int) -> None:
        if len(self._out) > above:
            self._sink(bytes(self._out))
            self._out.clear()
