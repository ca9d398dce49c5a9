"""Arrays and text for the page in one compressed blob, so that a million events fit a small file.

The page's script holds the reverse (``templates/report/decode.js``). Integers are stored as
differences, folded to unsigned (zigzag), split into byte planes and deflated together with the
JSON part; base64 carries the whole. Hostile text is inside the blob and so never markup.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fragdoctor.report import escape

I64 = npt.NDArray[np.int64]

# JavaScript's numbers are exact up to here; every figure of a device is far below.
MAX_EXACT: Final = 2**53 - 1


def byte_planes(values: npt.ArrayLike) -> tuple[bytes, int, int]:
    """Return (planes, bytes per value, unit) of the integers given.

    ``unit`` is the largest power of two that divides all of them: sizes are multiples of 512.
    """
    numbers = np.asarray(values, np.int64)
    if len(numbers) == 0:
        return b"", 0, 1
    bits = int(np.bitwise_or.reduce(numbers))
    shift = (bits & -bits).bit_length() - 1 if bits else 0
    deltas = np.diff(numbers >> shift, prepend=np.int64(0))
    folded = ((deltas << 1) ^ (deltas >> 63)).astype("<u8")
    width = (int(folded.max()).bit_length() + 7) // 8
    planes = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, 8)[:, :width].T)
    return planes.tobytes(), width, 1 << shift


class BlobWriter:
    """Collects arrays; ``add`` returns what the page's script needs to find one again."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._n_bytes = 0

    def add(self, values: npt.ArrayLike) -> list[int]:
        """Store integers below 2**53 and return ``[offset, count, width, unit]``."""
        planes, width, unit = byte_planes(values)
        offset = self._n_bytes
        self._parts.append(planes)
        self._n_bytes += len(planes)
        return [offset, len(np.asarray(values)), width, unit]

    def encode(self, head: dict[str, Any]) -> str:
        """Return base64 of the deflated blob: length of the JSON, the JSON, the arrays."""
        text = escape.json_text(json.dumps(head, ensure_ascii=False, separators=(",", ":")))
        packed = text.encode()
        whole = b"".join([len(packed).to_bytes(4, "little"), packed, *self._parts])
        return base64.b64encode(zlib.compress(whole, 6)).decode("ascii")


def compressed_size(arrays: Sequence[npt.ArrayLike]) -> int:
    """Return about how many bytes the arrays will take in the blob (fast compression)."""
    return sum(len(zlib.compress(byte_planes(a)[0], 1)) for a in arrays)
