"""Which batch size a recording was made with: given, in its name, or told by its requests."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from fragdoctor.errors import ConfigError
from fragdoctor.estimate.recordings import Recording, stack_keys
from fragdoctor.model.batch_fit import BatchSource
from fragdoctor.model.snapshot import I64, Action

MAX_BATCH: Final = 1e9
_NAMED: Final = re.compile(
    r"(?<![a-z0-9])(?:(?:micro|mini|global|train|per[-_]?device)?[-_]?batch(?:[-_]?size)?|mbs|bs|b)"
    r"[-_=]?(\d{1,9})(?![a-z0-9])|(?<![a-z0-9])(\d{1,9})[-_]?(?:batch|bs)(?![a-z0-9])",
    re.IGNORECASE,
)
# Share of the bytes of growing requests that must agree on one ratio before it is believed.
AGREED_SHARE: Final = 0.6
RATIO_STEP: Final = 1.02
# Requests below this are counters, losses and the like.
MIN_REQUEST_BYTES: Final = 4096
HINT: Final = "Give them in the order of the files, as in: --batches 4,8,16"


def parse_batches(text: str) -> tuple[float, ...]:
    """Return the batch sizes of ``4,8,16``.

    Raises:
        ConfigError: the text is not a list of positive whole numbers.
    """
    parts = [p.strip() for p in text.replace(";", ",").split(",") if p.strip()]
    if not parts or not all(p.isascii() and p.isdigit() and 0 < int(p) < MAX_BATCH for p in parts):
        raise ConfigError(
            f"{text!r} is not a list of batch sizes.", hint="Write for example --batches 4,8,16."
        )
    return tuple(float(p) for p in parts)


def batch_in_name(source: str) -> float | None:
    """Return the batch size in a file name, or else in the name of its directory."""
    path = Path(source)
    for name in (path.name, path.parent.name):
        stem = re.sub(r"\.(?:pickle|pkl|json|html|gz|zst|zip)", "", name, flags=re.IGNORECASE)
        found = [int(m.group(1) or m.group(2)) for m in _NAMED.finditer(stem)]
        if len(set(found)) == 1 and found[0] > 0:
            return float(found[0])
    return None


def batches_of(
    recordings: Sequence[Recording], given: Sequence[float] | None
) -> tuple[tuple[float, ...], BatchSource]:
    """Return the batch size of each recording and where they come from.

    Raises:
        ConfigError: they are not known, not one for each recording, or all the same.
    """
    if given is not None:
        if len(given) != len(recordings):
            raise ConfigError(
                f"There are {len(recordings)} recordings and {len(given)} batch sizes.", hint=HINT
            )
        return _distinct(given, "given"), BatchSource.GIVEN
    named = [batch_in_name(r.source) for r in recordings]
    known = [b for b in named if b is not None]
    if len(known) == len(recordings):
        return _distinct(known, "in the file names"), BatchSource.NAME
    ratios = relative_batches(recordings)
    if ratios is None:
        missing = recordings[named.index(None)].source
        raise ConfigError(
            f"The batch size of {missing} is not known: neither its name nor the sizes of its "
            "requests say it.",
            hint=HINT,
        )
    return _distinct(ratios, "that the requests show"), BatchSource.TRACE


def _distinct(batches: Sequence[float], where: str) -> tuple[float, ...]:
    if len(set(batches)) < 2:
        raise ConfigError(
            f"All batch sizes {where} are the same: {batches[0]:g}.",
            hint="A trend needs recordings at two or more batch sizes.",
        )
    return tuple(batches)


def relative_batches(recordings: Sequence[Recording]) -> tuple[float, ...] | None:
    """Return each batch as a multiple of the smallest; None where requests do not agree on it.

    Requests of the same stack are compared by the largest size they ask for. Parameters and
    optimizer states keep their size; what grows does so by one ratio if only the batch changed.
    """
    tables = [_largest_requests(r) for r in recordings]
    totals = [sum(t.values()) for t in tables]
    base = tables[totals.index(min(totals))]
    ratios = [_ratio(base, table) for table in tables]
    known = [r for r in ratios if r is not None]
    if len(known) < len(ratios):
        return None
    low = min(known)
    return tuple(round(r / low, 4) for r in known)


def _largest_requests(recording: Recording) -> dict[int, int]:
    events = recording.snapshot.events
    rows = events.device_slice(recording.analysis.device)
    is_request = (events.action[rows] == Action.ALLOC) & (events.stack[rows] >= 0)
    stack = events.stack[rows][is_request].astype(np.int64)
    size: I64 = np.minimum(events.size_bytes[rows][is_request], 2**60).astype(np.int64)
    top = np.zeros(len(recording.snapshot.stacks), np.int64)
    np.maximum.at(top, stack, size)
    keys = stack_keys(recording.snapshot)
    table: dict[int, int] = {}
    for i in np.flatnonzero(top >= MIN_REQUEST_BYTES).tolist():
        table[keys[i]] = max(table.get(keys[i], 0), int(top[i]))
    return table


def _ratio(base: dict[int, int], table: dict[int, int]) -> float | None:
    """Return the ratio that most of the growing bytes agree on; 1 where nothing differs."""
    shared = base.keys() & table.keys()
    if not shared or len(shared) < 0.5 * len(base):
        return None
    old = np.array([base[k] for k in shared], np.float64)
    new = np.array([table[k] for k in shared], np.float64)
    changed = new != old
    if not changed.any():
        return 1.0
    ratio: npt.NDArray[np.float64] = new[changed] / old[changed]
    weight = new[changed]
    bins = np.rint(np.log(ratio) / math.log(RATIO_STEP)).astype(np.int64)
    bins -= bins.min()
    votes = np.bincount(bins, weights=weight)
    near = np.convolve(votes, np.ones(3), "same")
    best = int(near.argmax())
    if near[best] < AGREED_SHARE * weight.sum():
        return None
    chosen = np.abs(bins - best) <= 1
    return float(np.median(np.repeat(ratio[chosen], 1)))
