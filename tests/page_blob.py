"""Read what ``BlobWriter`` wrote, in the same way as the page's script."""

from __future__ import annotations

import base64
import json
import zlib

import numpy as np


def decode(encoded):
    """Return (JSON part, bytes of the arrays) of a blob; the inverse of ``encode``."""
    whole = zlib.decompress(base64.b64decode(encoded))
    n = int.from_bytes(whole[:4], "little")
    return json.loads(whole[4 : 4 + n]), whole[4 + n :]


def decode_array(body, where):
    """Return the integers that ``add`` stored."""
    offset, count, width, unit = where
    folded = np.zeros(count, np.uint64)
    for plane in range(width):
        start = offset + plane * count
        byte = np.frombuffer(body, np.uint8, count, start).astype(np.uint64)
        folded |= byte << np.uint64(8 * plane)
    signed = (folded >> np.uint64(1)).astype(np.int64) ^ -(folded & np.uint64(1)).astype(np.int64)
    return np.cumsum(signed, dtype=np.int64) * unit
