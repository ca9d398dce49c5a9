"""Read ``memory_stats()`` as JSON or printed, and ``memory_summary()``, alone or within a log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from msgspec import Struct, field

from fragdoctor.errors import InputError, LimitExceeded, NotASnapshot
from fragdoctor.lazy import regex
from fragdoctor.limits import DEFAULT_LIMITS
from fragdoctor.model.case import MemoryStats, StatsSeries
from fragdoctor.units import format_size

_SCALARS: Final = frozenset(
    {
        "num_alloc_retries",
        "num_ooms",
        "max_split_size",
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
        "num_oom_rejections",
    }
)
_ROWS: Final = {  # of memory_summary(), by their titles
    "allocated memory": "allocated_bytes",
    "active memory": "active_bytes",
    "requested memory": "requested_bytes",
    "gpu reserved memory": "reserved_bytes",
    "non-releasable memory": "inactive_split_bytes",
    "allocations": "allocation",
    "active allocs": "active",
    "gpu reserved segments": "segment",
    "non-releasable allocs": "inactive_split",
    "oversize allocations": "oversize_allocations",
    "oversize gpu segments": "oversize_segments",
}
_FAMILIES: Final = frozenset(_ROWS.values())
_MARK: Final = regex(
    r"\"(?:(?:allocated|reserved|active)_bytes(?:\.|\"\s{0,20}:\s{0,20}\{)"
    r"|num_alloc_retries\"|num_ooms\")"
)
_PAIR: Final = regex(
    rf"['\"]((?:(?:{'|'.join(sorted(_FAMILIES))})\.[a-z_.]{{1,40}})|{'|'.join(sorted(_SCALARS))})['\"]"
    r"\s{0,9}[:,]\s{0,40}(-?\d{1,18})\b"
)
_DEVICE_NAME: Final = regex(
    r"(?:(?:cuda|gpu|xpu|hip|npu|device|rank)?[ :_-]?)(\d{1,6})", re.IGNORECASE
)
_DEVICE_KEYS: Final = ("device", "device_index", "device_id", "gpu", "local_rank")
_LABEL_KEYS: Final = ("step", "global_step", "iteration", "iter", "epoch", "batch", "time", "ts")
_HEAD: Final = 64 * 1024
_MAX_DEPTH: Final = 8


def looks_like_stats(data: bytes | str) -> bool:
    """Return whether an input looks like ``memory_stats()`` as JSON or JSON lines."""
    head = _decoded(data[:_HEAD]).lstrip("\ufeff \t\r\n")
    return head[:1] in {"{", "["} and bool(_MARK.search(head))


def read_stats(data: bytes | str, label: str = "") -> StatsSeries:
    """Read statistics in any of their forms.

    Accepted forms: ``memory_stats()`` flat or nested; for one device, or for several as a list or
    as an object keyed by device (``0``, ``"cuda:0"``); wrapped once in an object (``{"stats":
    ...}``); JSON lines, one object per line, in time order; what ``print(memory_stats())`` writes,
    and the tables of ``memory_summary()``, once or more often, also inside a log.

    Bytes are decoded as UTF-8 with replacement. ``label`` becomes ``MemoryStats.label`` if the
    input has no better one.

    Raises:
        InputError: the input holds no statistics.
        LimitExceeded: the input is one JSON document that is too long to be parsed whole, or has
            more devices than a process can have.
    """
    text = _decoded(data).lstrip("\ufeff")
    entries, is_series = _read_json(text, label)
    if not entries:
        entries = [*_read_printed(text, label), *read_summaries(text, label)]
        is_series = _repeats(entries)
    if not entries:
        raise NotASnapshot(
            "The input holds neither memory_stats() nor memory_summary().",
            hint="Save json.dumps(torch.cuda.memory_stats()) or torch.cuda.memory_summary().",
        )
    series = StatsSeries(tuple(entries), is_series)
    if len(series.devices) > DEFAULT_LIMITS.max_devices:
        raise LimitExceeded(
            f"The statistics cover {len(series.devices)} devices.",
            hint=f"A process has at most {DEFAULT_LIMITS.max_devices}. Give one process at a time.",
        )
    return series


def _decoded(data: bytes | str) -> str:
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else data


def _repeats(entries: Iterable[MemoryStats]) -> bool:
    """Return whether a device appears more than once, which makes the entries a time series."""
    devices = [entry.device for entry in entries]
    return len(set(devices)) < len(devices)


def _read_json(text: str, label: str) -> tuple[list[MemoryStats], bool]:
    stripped, limit = text.strip(), DEFAULT_LIMITS.max_json_bytes
    is_of_lines = len(stripped) > limit and "\n" in stripped[:limit]  # too long to parse whole
    if stripped[:1] not in {"{", "["} or is_of_lines:
        return _read_json_lines(text, label)
    try:
        value = _loads(stripped)
    except ValueError:
        return _read_json_lines(text, label)
    entries = list(_entries(value, None, label, 0))
    return entries, _repeats(entries)


def _loads(text: str) -> Any:
    if len(text) > DEFAULT_LIMITS.max_json_bytes:
        raise LimitExceeded(
            f"The JSON is longer than {format_size(DEFAULT_LIMITS.max_json_bytes)}.",
            hint="Write each json.dumps(torch.cuda.memory_stats()) to a line of its own.",
        )
    import json

    try:
        return json.loads(text)
    except RecursionError as error:
        raise InputError("The JSON nests too deeply for statistics.") from error


def _read_json_lines(text: str, label: str) -> tuple[list[MemoryStats], bool]:
    """Read the lines that hold one object each, and skip the other lines of a log."""
    entries: list[MemoryStats] = []
    for number, line in enumerate(text.splitlines(), start=1):
        start = line.find("{")
        if start < 0 or not _MARK.search(line, start):
            continue
        try:
            value = _loads(line[start:].strip().rstrip(","))
        except ValueError:
            continue
        entries.extend(_entries(value, None, f"{label}:{number}" if label else f"line {number}", 0))
    return entries, len(entries) > 1


def _entries(value: Any, device: int | None, label: str, depth: int) -> Iterator[MemoryStats]:
    """Yield the statistics inside a parsed JSON value, each with its device."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, list):
        # a list that is longer than the number of possible devices has one entry per moment
        is_devices = depth == 0 and 1 < len(value) <= DEFAULT_LIMITS.max_devices
        is_devices = is_devices and not any(_device_in(v) is not None for v in value)
        is_devices = is_devices and not any(isinstance(v, dict) and _label_in(v) for v in value)
        for index, item in enumerate(value):
            own = index if is_devices and device is None else device
            yield from _entries(item, own, label, depth + 1)
        return
    if not isinstance(value, dict):
        return
    device = _device_in(value) if _device_in(value) is not None else device
    label = _label_in(value) or label
    flat = _flat(value)
    if flat:
        yield MemoryStats(values=flat, device=device, label=label)
        return
    for key, item in value.items():
        match = _DEVICE_NAME.fullmatch(str(key))
        own = int(match.group(1)) if match else device
        # a list inside a wrapper such as "devices" has one entry per device, like a bare list
        yield from _entries(item, own, label, depth if isinstance(item, list) else depth + 1)


def _flat(value: Mapping[str, Any]) -> dict[str, int]:
    """Return the statistics of an object in flat form, or an empty dict if it has none."""
    flat: dict[str, int] = {}
    for key, item in value.items():
        root = str(key).partition(".")[0]
        if root in _SCALARS or (root in _FAMILIES and "." in str(key)):
            if _is_number(item):
                flat[str(key)] = int(item)
        elif (root in _FAMILIES or root.startswith("reserved_bytes_by")) and isinstance(item, dict):
            _flatten(root, item, flat, 0)
    return flat


def _flatten(prefix: str, value: Mapping[str, Any], flat: dict[str, int], depth: int) -> None:
    for key, item in value.items():
        name = f"{prefix}.{key}"
        if isinstance(item, dict) and depth < _MAX_DEPTH:
            _flatten(name, item, flat, depth + 1)
        elif _is_number(item):
            flat[name] = int(item)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and value == value  # noqa: PLR0124 - NaN
        and abs(value) < 2**70
    )


def _device_in(value: Any) -> int | None:
    if not isinstance(value, dict):
        return None
    for key in _DEVICE_KEYS:
        given: Any = value.get(key)
        if _is_number(given):
            return int(given)
        match = _DEVICE_NAME.fullmatch(given) if isinstance(given, str) else None
        if match:
            return int(match.group(1))
    return None


def _label_in(value: Mapping[str, Any]) -> str:
    for key in _LABEL_KEYS:
        if key in value and isinstance(value[key], int | float | str):
            return f"{key} {value[key]}"
    return ""


_TITLE: Final = regex(
    r"memory summary\s{0,9},\s{0,9}device(?:\s{1,9}id)?\s{0,9}:?\s{0,9}(?:cuda:)?(\d{1,6})",
    re.IGNORECASE,
)
_OOMS: Final = regex(r"(?:CUDA|HIP|XPU)\s{1,9}OOMs\s{0,40}:\s{0,40}(\d{1,18})", re.IGNORECASE)
_RETRIES: Final = regex(
    r"(?:cuda|hip)?Malloc\s{1,9}retries\s{0,40}:\s{0,40}(\d{1,18})", re.IGNORECASE
)
_CELL: Final = regex(r"(\d{1,18})\s{0,9}([KMGTP]i?B|B|[KM])?", re.IGNORECASE)
_SUB_ROWS: Final = {"from large pool": "large_pool", "from small pool": "small_pool"}
_COLUMNS: Final = ("current", "peak", "allocated", "freed")
_POWERS: Final = {"K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_WITHOUT_POOLS: Final = frozenset({"oversize_allocations", "oversize_segments"})


def has_printed_stats(text: str) -> bool:
    """Return whether a text holds a table of ``memory_summary()`` or a printed dictionary."""
    return _looks_like_summary(text) or next(_printed_pairs(text), None) is not None


def _printed_pairs(text: str) -> Iterator[re.Match[str]]:
    return _PAIR.finditer(text) if "allocated_bytes.all." in text else iter(())


def _read_printed(text: str, label: str) -> Iterator[MemoryStats]:
    """Yield what each ``print(memory_stats())`` shows, of any version of Python and with pprint."""
    values: dict[str, int] = {}
    n_lines = end = 0
    for pair in _printed_pairs(text):
        if pair[1] in values or not values:  # a name that comes again begins another dictionary
            n_lines, end = n_lines + text.count("\n", end, pair.start()), pair.start()
            at = f"{label}:{n_lines + 1}" if label else f"line {n_lines + 1}"
            values = {}
            yield MemoryStats(values=values, label=at)
        values[pair[1]] = int(pair[2])


def _looks_like_summary(text: str) -> bool:
    return ("Cur Usage" in text and "Peak Usage" in text) or (
        "memory summary" in text and "device ID" in text
    )


class _Table(Struct):
    values: dict[str, int] = field(default_factory=dict)
    family: str = ""


def read_summaries(text: str, label: str = "") -> Iterator[MemoryStats]:
    """Yield one ``MemoryStats`` for each table, in the order of the text."""
    if not _looks_like_summary(text):
        return
    from fragdoctor.inputs.log_cleaning import plain_lines

    found: list[MemoryStats] = []
    table = _Table()
    for number, raw in enumerate(text.split("\n"), start=1):
        if "|" not in raw and "memory summary" not in raw:
            continue
        for line in plain_lines(raw[:2000]):
            title = _TITLE.search(line)
            if title or ("Cur Usage" in line and (not found or table.values.keys() - _HEADER)):
                table = _Table()
                device = int(title.group(1)) if title else None
                at = f"{label}:{number}" if label else f"line {number}"
                found.append(MemoryStats(table.values, device, "memory_summary", at))
            if found:
                _read_line(table, line)
    yield from (stats for stats in found if stats.values)


_HEADER: Final = frozenset({"num_ooms", "num_alloc_retries"})


def _read_line(table: _Table, line: str) -> None:
    for pattern, name in ((_OOMS, "num_ooms"), (_RETRIES, "num_alloc_retries")):
        match = pattern.search(line)
        if match:
            table.values[name] = int(match.group(1))
    cells = [cell.strip() for cell in line.split("|")]
    cells = cells[:-1] if cells and not cells[-1] else cells
    if len(cells) < 5:
        return
    name, figures = " ".join(cells[-5].lower().split()), cells[-4:]
    family, pool = _ROWS.get(name), "all"
    if family is not None:
        table.family = family
    elif name in _SUB_ROWS and table.family:
        family, pool = table.family, _SUB_ROWS[name]
    if family is None:
        return
    for column, cell in zip(_COLUMNS, figures, strict=True):
        match = _CELL.fullmatch(cell)
        if match is None:
            continue
        unit = (match.group(2) or "").upper()
        thousand = 1024 if unit.endswith("B") else 1000
        key = f"{family}.{column}" if family in _WITHOUT_POOLS else f"{family}.{pool}.{column}"
        table.values[key] = int(match.group(1)) * thousand ** _POWERS.get(unit[:1], 0)
