"""Writes plain values as a pickle of protocol 4, without the pickle module."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from fragdoctor.frozen import frozen


class Opcode(IntEnum):
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
_PIECE: Final = 1 << 14
_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")
_DOUBLE: Final = struct.Struct(">d")
_NONE, _TRUE, _FALSE, _FLOAT, _INT, _INT2, _LONG1 = (
    bytes((op,))
    for op in (
        Opcode.NONE,
        Opcode.TRUE,
        Opcode.FALSE,
        Opcode.FLOAT,
        Opcode.INT,
        Opcode.INT2,
        Opcode.LONG1,
    )
)
_SMALL_INTEGERS: Final = tuple(bytes((Opcode.INT1, i)) for i in range(256))


class Shared:
    """A value that is written once and referred to afterwards; compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: list[Any] | dict[str, Any]) -> None:
        self.value = value


U8: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]


@frozen
class PickledColumn:
    """A key of many mappings: which of them have it, and its value in each.

    Attributes:
        key: the key.
        values: unsigned numbers, one a row; positions in ``choices`` where that is given.
        choices: the values that may occur: texts, ``Shared`` ones and pairs of numbers.
        is_there: which rows have the key; None for all.
    """

    key: str
    values: npt.NDArray[Any]
    choices: Sequence[Any] | None = None
    is_there: Bools | None = None


@frozen
class Records:
    """A list of mappings as columns, which are written many at a time.

    Attributes:
        n: rows.
        columns: returns the columns of the rows ``low:high``, in the order of their keys.
    """

    n: int
    columns: Callable[[int, int], Sequence[PickledColumn]]


class PickleWriter:
    """Writes one value to a sink; see the module for what it may hold.

    The sink is called with pieces of bytes.
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
        self._out += bytes((Opcode.PROTO, 4))
        self._put(value)
        self._out.append(Opcode.STOP)
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
        elif kind is Records:
            self._records(value)
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
            self._out += bytes((Opcode.SHORT_TEXT, len(data)))
        else:
            self._out.append(Opcode.TEXT)
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

    def _mapping(
        self, value: dict[str, Any], shared: Shared | None = None, *, is_alone: bool = False
    ) -> None:
        self._out.append(Opcode.EMPTY_DICT)
        if shared is not None:
            # Kept, so that its id stays its own.
            self._shared[id(shared)] = (self._remember(), shared)
        if not value:
            return
        self._out.append(Opcode.MARK)
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
        self._out.append(Opcode.SETITEMS)
        if not is_alone:
            self._flush(1 << 16)

    def _items(self, items: Iterable[Any], shared: Shared | None = None) -> None:
        self._out.append(Opcode.EMPTY_LIST)
        if shared is not None:
            # Kept, so that its id stays its own.
            self._shared[id(shared)] = (self._remember(), shared)
        n = 0
        for item in items:
            if n % BATCH == 0:
                self._out += bytes((Opcode.APPENDS, Opcode.MARK)) if n else bytes((Opcode.MARK,))
            self._put(item)
            n += 1
        if n:
            self._out.append(Opcode.APPENDS)

    def _records(self, records: Records) -> None:
        self._out.append(Opcode.EMPTY_LIST)
        for low in range(0, records.n, _PIECE):
            high = min(low + _PIECE, records.n)
            self._piece(low, high - low, records.columns(low, high))
            self._flush(0)
        if records.n:
            self._out.append(Opcode.APPENDS)

    def _piece(self, low: int, n: int, columns: Sequence[PickledColumn]) -> None:
        """Write rows; those that hold something for the first time one by one."""
        main, written = self._out, {}
        for row in sorted(self._first_uses(columns, n)):
            self._out = written[row] = bytearray()
            self._mapping(
                {
                    c.key: int(c.values[row])
                    if c.choices is None
                    else c.choices[int(c.values[row])]
                    for c in columns
                    if c.is_there is None or c.is_there[row]
                },
                is_alone=True,
            )
        self._out = main
        regular = np.ones(n, bool)
        regular[list(written)] = False
        batch = np.arange(low, low + n) % BATCH == 0
        fields = _Fields(n)
        fields.add(np.array([Opcode.APPENDS], np.uint8), batch & (np.arange(low, low + n) > 0))
        fields.add(np.array([Opcode.MARK], np.uint8), batch)
        fields.add(np.array([Opcode.EMPTY_DICT, Opcode.MARK], np.uint8), regular)
        for column in columns:
            there = regular if column.is_there is None else regular & column.is_there
            if not there.any():
                continue
            fields.add(np.frombuffer(self._memo[column.key], np.uint8), there)
            if column.choices is None:
                fields.add_lengths(*_integers(column.values), there)
            else:
                fields.add_lengths(*self._references(column, there), there)
        fields.add(np.array([Opcode.SETITEMS], np.uint8), regular)
        data, ends = fields.joined()
        position = 0
        for row, text in written.items():
            self._out += data[position : ends[row]]
            self._out += text
            position = ends[row]
        self._out += data[position:]

    def _first_uses(self, columns: Sequence[PickledColumn], n: int) -> set[int]:
        """Return the rows at which a key or a choice stands that has no reference yet."""
        rows: set[int] = set()
        for column in columns:
            at = np.arange(n) if column.is_there is None else np.flatnonzero(column.is_there)
            if not len(at):
                continue
            if column.key not in self._memo:
                rows.add(int(at[0]))
            if column.choices is not None:
                used, first = np.unique(column.values[at], return_index=True)
                new = [
                    i for i, c in enumerate(used.tolist()) if not self._reference(column.choices[c])
                ]
                rows.update(at[first[new]].tolist())
        return rows

    def _reference(self, choice: Any) -> bytes:
        """Return what stands for a value that was written before; b"" if it was not."""
        if type(choice) is str:
            return self._memo.get(choice, b"")
        if type(choice) is Shared:
            known = self._shared.get(id(choice))
            return b"" if known is None else known[0]
        main, self._out = self._out, bytearray()
        self._pair(choice)  # of numbers: nothing in it is remembered
        written, self._out = self._out, main
        return bytes(written)

    def _references(self, column: PickledColumn, there: Bools) -> tuple[U8, npt.NDArray[np.int64]]:
        """Return the bytes that stand for the choices of a column, and how many they are."""
        used, position = np.unique(column.values[there], return_inverse=True)
        texts = [self._reference((column.choices or ())[c]) for c in used.tolist()]
        lengths = np.array([len(t) for t in texts], np.int64)
        width = int(lengths.max())
        table = np.frombuffer(b"".join(t.ljust(width, b"\0") for t in texts), np.uint8)
        rows = np.zeros(len(there), np.int64)
        rows[there] = position.reshape(-1)
        return table.reshape(-1, width)[rows], lengths[rows]

    def _pair(self, value: tuple[Any, ...]) -> None:
        if len(value) != 2:
            raise TypeError("no snapshot holds a tuple that is no pair")
        self._put(value[0])
        self._put(value[1])
        self._out.append(Opcode.TUPLE2)

    def _remember(self) -> bytes:
        """Put what was just written into the memo; return what refers to it."""
        self._out.append(Opcode.MEMOIZE)
        index = self._n_memo
        self._n_memo += 1
        return (
            bytes((Opcode.GET, index))
            if index < 256
            else bytes((Opcode.LONG_GET,)) + _U32.pack(index)
        )

    def _flush(self, above: int) -> None:
        if len(self._out) > above:
            self._sink(bytes(self._out))
            self._out.clear()


class _Fields:
    """Parts of rows, side by side; each row takes its own number of bytes of a part."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._parts: list[U8] = []
        self._used: list[Bools] = []

    def add(self, data: U8, there: Bools) -> None:
        """Add the same bytes to the rows that have them."""
        shape = (self._n, len(data))
        self._parts.append(np.broadcast_to(data, shape))
        self._used.append(np.broadcast_to(there[:, None], shape))

    def add_lengths(self, data: U8, lengths: npt.NDArray[np.int64], there: Bools) -> None:
        """Add bytes of each row's own: the first ``lengths`` of ``data``."""
        lengths = np.where(there, lengths, 0)
        self._parts.append(data)
        self._used.append(np.arange(data.shape[1]) < lengths[:, None])

    def joined(self) -> tuple[bytes, list[int]]:
        """Return all rows one behind the other, and where each ends."""
        used = np.concatenate(self._used, axis=1)
        data = np.concatenate(self._parts, axis=1)
        return data[used].tobytes(), np.cumsum(used.sum(axis=1)).tolist()


def _integers(values: npt.NDArray[Any]) -> tuple[U8, npt.NDArray[np.int64]]:
    """Return the opcodes of unsigned numbers with their bytes, shape ``(n, 11)``, and how many."""
    v = values.astype("<u8")
    data = np.zeros((len(v), 11), np.uint8)
    little = v.view(np.uint8).reshape(-1, 8)
    is_long = v >= 1 << 31
    limits = np.array([1 << bits for bits in (39, 47, 55, 63)], np.uint64)
    n_bytes = 5 + np.searchsorted(limits, v, side="right")
    small, middle = v < 256, (v >= 256) & (v < 65536)
    data[:, 0] = np.select(
        [small, middle, is_long], [Opcode.INT1, Opcode.INT2, Opcode.LONG1], Opcode.INT
    )
    data[:, 1:9] = little
    data[is_long, 1] = n_bytes[is_long]
    data[is_long, 2:10] = little[is_long]
    return data, np.select([small, middle, is_long], [2, 3, 2 + n_bytes], 5)
