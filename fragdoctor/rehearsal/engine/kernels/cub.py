"""Scratch memory of CUB, the library behind sorts, scans and selections.

A call of CUB requests one buffer that holds several, each rounded up to 256 bytes, with room to
align the first. How much a call processes at a time (its tile) depends on the sizes of keys and
values and on the GPU; the figures are those of CUB for compute capability 9.0, as reported by the
library itself.
"""

from __future__ import annotations

from typing import Final

ALIGNMENT: Final = 256
NOTHING: Final = 1  # CUB never requests 0 bytes
RADIX_BITS: Final = 8
RADIX_DIGITS: Final = 1 << RADIX_BITS
OFFSET_BYTES: Final = 4
PASS_BYTES: Final = 2048
EXTRA_TILES: Final = 32
STATUS_BYTES: Final = 8
# Items that one block sorts in one pass, by bytes of key and value.
_SORT_TILE: Final = {
    (1, 8): 5632, (2, 8): 5632, (4, 8): 5376, (8, 8): 4608, (4, 4): 6528, (8, 4): 5760,
    (2, 4): 6528, (1, 4): 6528, (8, 0): 5760, (4, 0): 7296, (2, 0): 8448, (1, 0): 8448,
}  # fmt: skip
_MERGE_TILE: Final = 4096  # for 8-byte keys and values
_UNIQUE_TILE: Final = 4864
_UNIQUE_FIXED: Final = 768
_ONE_BLOCK: Final = 256  # threads of a sort that fits into one block
_ONE_BLOCK_ITEMS: Final = 19


def buffers(*sizes: int) -> int:
    """Return the bytes that a call requests if it needs buffers of these sizes."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) + ALIGNMENT - 1


def radix_sort(n: int, key_bytes: int, value_bytes: int = 0, bits: int | None = None) -> int:
    """Return the scratch memory of a radix sort.

    The sort looks at this many bits of each of n keys; None = all bits.
    """
    largest = max(key_bytes, value_bytes)
    in_one_block = _ONE_BLOCK * max(1, min(_ONE_BLOCK_ITEMS, _ONE_BLOCK_ITEMS * 4 // largest))
    if n <= in_one_block:
        return NOTHING
    tile = _SORT_TILE.get((key_bytes, value_bytes), 4608)
    passes = -(-(8 * key_bytes if bits is None else bits) // RADIX_BITS)
    lookback = -(-n // tile) * RADIX_DIGITS * OFFSET_BYTES
    between = [n * key_bytes, n * value_bytes] if passes > 1 else []
    return buffers(*between, lookback + passes * PASS_BYTES, 1)


def radix_sort_in_place(n: int) -> int:
    """Return the scratch memory of one pass of a radix sort between two buffers of the caller."""
    return buffers(-(-n // 5760) * RADIX_DIGITS * OFFSET_BYTES + PASS_BYTES, 1)


def merge_sort(n: int, key_bytes: int, value_bytes: int) -> int:
    """Return the scratch memory of a merge sort of keys with values, as Thrust calls it."""
    return buffers(n * key_bytes, n * value_bytes, (-(-n // _MERGE_TILE) + 1) * STATUS_BYTES)


def thrust_unique_by_key(n: int) -> int:
    """Return the scratch memory of keeping the first of equal keys, as Thrust calls it."""
    return buffers(_UNIQUE_FIXED, (-(-n // _UNIQUE_TILE) + EXTRA_TILES) * STATUS_BYTES)


def scan(n: int, item_bytes: int) -> int:
    """Return the scratch memory of a prefix sum."""
    if item_bytes > OFFSET_BYTES:
        return _tiles(n, 896, 2 * STATUS_BYTES)
    return _tiles(n, 1920, STATUS_BYTES)


def select(n: int) -> int:
    """Return the scratch memory of picking flagged items, or one of each run."""
    return _tiles(n, 4224, STATUS_BYTES)


def unique_by_key(n: int, key_bytes: int) -> int:
    """Return the scratch memory of picking the first value of each run of keys."""
    tile = 2240 if key_bytes > OFFSET_BYTES else 3584
    return _tiles(n, tile, STATUS_BYTES) + ALIGNMENT


def _tiles(n: int, tile: int, status_bytes: int) -> int:
    return buffers((-(-n // tile) + EXTRA_TILES) * status_bytes, 1)


def count(n: int, n_multiprocessors: int) -> int:
    """Return the scratch memory of counting flags."""
    if n <= 256 * 16:
        return NOTHING
    return buffers(n_multiprocessors * 40 * OFFSET_BYTES)
