"""The manifest of a bundle. Anyone may have written it, so it is checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fragdoctor.errors import InputError, NotASnapshot
from fragdoctor.model.case import BundleDevice, BundleFacts
from fragdoctor.model.oom import OtherProcess

FORMAT: Final = "fragdoctor-bundle"
VERSION: Final = 1
REASONS: Final = ("oom", "exit", "signal", "block")

_MAX_TEXT: Final = 4096
_MAX_WORDS: Final = 1000
_MAX_DEVICES: Final = 1024
_MAX_NUMBER: Final = 1 << 60


def read_manifest(data: bytes, name: str) -> BundleFacts:
    """Return the facts of a manifest; a field that makes no sense counts as not known.

    Raises:
        NotASnapshot: it is no manifest of a bundle.
        InputError: it is of a later version of fragdoctor.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise NotASnapshot(
            f"The manifest of {name} is no JSON.", hint="Give the snapshot in it by name."
        ) from e
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise NotASnapshot(
            f"The manifest of {name} is not one of fragdoctor.",
            hint="Give the snapshot in it by name.",
        )
    if value.get("version") != VERSION:
        raise InputError(
            f"{name} was written by another version of fragdoctor.",
            hint="Update fragdoctor, or give the snapshot in it by name.",
        )
    return _facts(value)


def _facts(value: Mapping[str, Any]) -> BundleFacts:
    oom, exception = _mapping(value.get("oom")), _mapping(value.get("exception"))
    reason = _text(value.get("reason"))
    return BundleFacts(
        reason=reason if reason in REASONS else "",
        time=_text(value.get("time")),
        pid=_number(value.get("pid")),
        rank=_number(value.get("rank")),
        local_rank=_number(value.get("local_rank")),
        world_size=_number(value.get("world_size")),
        host=_text(value.get("host")),
        command=_texts(value.get("command")) or _texts(value.get("argv")),
        versions=_table(value.get("versions")),
        environment=_table(value.get("environment")),
        devices=_devices(value.get("devices")),
        n_ooms=_number(value.get("n_ooms")) or 0,
        n_skipped=_number(value.get("n_skipped")) or 0,
        max_entries=_number(value.get("max_entries")),
        stacks=_text(value.get("stacks")),
        signal=_text(value.get("signal")),
        exception=_text(exception.get("type")),
        oom_device=_number(oom.get("device")),
        ended_program=value.get("ended_program") is True,
        problems=_texts(value.get("problems")),
    )


def _devices(value: Any) -> tuple[BundleDevice, ...]:
    found: dict[int, BundleDevice] = {}
    for entry in value[:_MAX_DEVICES] if isinstance(value, list) else ():
        fields = _mapping(entry)
        index = _number(fields.get("index"))
        if index is not None and index not in found:
            found[index] = _device(index, fields)
    return tuple(found.values())


def _device(index: int, fields: Mapping[str, Any]) -> BundleDevice:
    total = _number(fields.get("total_bytes"))
    fraction = fields.get("memory_fraction")
    is_fraction = isinstance(fraction, float) and 0.0 < fraction < 1.0  # 1 is "not set"
    return BundleDevice(
        index=index,
        name=_text(fields.get("name")),
        total_bytes=total or None,
        free_bytes=_number(fields.get("free_bytes")),
        reserved_bytes=_number(fields.get("reserved_bytes")),
        process_bytes=_number(fields.get("process_bytes")),
        other_processes=_processes(fields.get("other_processes")),
        memory_fraction=fraction if is_fraction else None,
    )


def _processes(value: Any) -> tuple[OtherProcess, ...]:
    found = []
    for entry in value[:_MAX_WORDS] if isinstance(value, list) else ():
        fields = _mapping(entry)
        pid, n_bytes = _number(fields.get("pid")), _number(fields.get("bytes"))
        if pid is not None and n_bytes is not None:
            found.append(OtherProcess(pid, n_bytes))
    return tuple(found)


def _number(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _MAX_NUMBER else None


def _text(value: Any) -> str:
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    words = value[:_MAX_WORDS] if isinstance(value, list) else ()
    return tuple(_text(word) for word in words if isinstance(word, str))


def _table(value: Any) -> dict[str, str]:
    pairs = list(_mapping(value).items())[:_MAX_WORDS]
    return {_text(k): _text(v) for k, v in pairs if isinstance(v, str)}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
