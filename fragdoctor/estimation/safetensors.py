"""Reads the header of safetensors files (never the data), and derives the model's shape."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from io import BufferedReader
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import replace

from fragdoctor.errors import InputError, LimitExceeded, RefusedSnapshot, TruncatedSnapshot
from fragdoctor.estimation.architectures import outside
from fragdoctor.inputs.classify import MAX_HEADER_BYTES
from fragdoctor.model.workload import ModelShape, ParameterGroup, Role
from fragdoctor.opening import open_readable
from fragdoctor.units import format_count

MAX_TENSORS: Final = 1_000_000
MAX_FILES: Final = 10_000
MAX_RANK: Final = 16
MAX_ELEMENTS: Final = 2**53

# Bits per element.
DTYPE_BITS: Final = MappingProxyType(
    {
        "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16,
        "BF16": 16, "I16": 16, "U16": 16, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I8": 8,
        "U8": 8, "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    }
)  # fmt: skip


class TensorEntry(Struct, frozen=True):
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def read_header(path: Path) -> list[TensorEntry]:
    """Return the tensors of one file.

    Raises:
        InputError: unreadable or not safetensors.
        TruncatedSnapshot: the file ends inside its header or data.
        RefusedSnapshot: an entry contradicts itself or the file.
        LimitExceeded: the header is larger than the format allows.
    """
    try:
        size = path.stat().st_size
        with BufferedReader(open_readable(path)) as file:
            start = file.read(8)
            if len(start) < 8:
                raise _not(path)
            length = int.from_bytes(start, "little")
            if length > MAX_HEADER_BYTES:
                raise LimitExceeded(
                    f"{path}: a header of {length} bytes is beyond the format's limit of 100 MB.",
                    hint="Check that the file is a safetensors file.",
                )
            if length > size - 8:
                raise TruncatedSnapshot(
                    f"{path} ends inside its header.", hint="Download the file again."
                )
            header = file.read(length)
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror or e}.") from e
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as e:
        raise _not(path) from e
    if not isinstance(entries, dict):
        raise _not(path)
    if len(entries) > MAX_TENSORS:
        raise LimitExceeded(f"{path} lists {len(entries)} tensors; at most a million are read.")
    return [
        _entry(path, name, entry, size - 8 - length)
        for name, entry in entries.items()
        if name != "__metadata__"
    ]


def _not(path: Path) -> InputError:
    return InputError(
        f"{path} is not a safetensors file.", hint="Download it again, or give its config.json."
    )


_Size = Annotated[int, Meta(ge=0)]


class _Written(Struct):
    """An entry of a header, as the format defines it."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=MAX_RANK)]
    data_offsets: tuple[_Size, _Size]


def _entry(path: Path, name: str, entry: Any, data_bytes: int) -> TensorEntry:
    begin, end, why = 0, 0, "contradicts itself"
    try:
        found = convert(entry, _Written)
        begin, end = found.data_offsets
        bits = prod(found.shape) * DTYPE_BITS[found.dtype]
        is_genuine = prod(found.shape) <= MAX_ELEMENTS and end - begin == (bits + 7) // 8
    except (ValidationError, KeyError):
        is_genuine, why = False, "is not in the format"
    if not is_genuine:
        said = f"{path}: the entry {name[:80]!r} {why}; no genuine file has that."
        raise RefusedSnapshot(said)
    if end > data_bytes:
        raise TruncatedSnapshot(
            f"{path} ends before the data of its tensors.", hint="Download the file again."
        )
    return TensorEntry(name, found.dtype, found.shape)


def read_index(path: Path) -> list[Path]:
    """Return the files beside an index (``model.safetensors.index.json``) that it names.

    Raises:
        InputError: not an index, or it names files outside its directory.
    """
    from fragdoctor.estimation.config_json import read_config

    weights = read_config(path).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise InputError(
            f"{path} is not a safetensors index: it lacks weight_map.",
            hint="Give the directory, or model.safetensors.index.json.",
        )
    names = {name for name in weights.values() if isinstance(name, str)}
    if len(names) > MAX_FILES:
        raise LimitExceeded(f"{path} names {len(names)} files.")
    wrong = [n for n in names if n in ("", ".", "..") or "/" in n or "\\" in n or "\0" in n]
    if wrong:
        raise RefusedSnapshot(f"{path} names a file outside its directory: {wrong[0][:80]!r}.")
    return [path.parent / name for name in sorted(names)]


def read_files(paths: Sequence[Path]) -> list[TensorEntry]:
    """Return the tensors of all files.

    Raises:
        InputError: as in :func:`read_header`, or a part of a sharded model is missing.
    """
    found: list[TensorEntry] = []
    for path in paths:
        if not path.is_file():
            raise InputError(
                f"{path} does not exist.", hint="A part of the sharded model is missing."
            )
        found += read_header(path)
    return found


_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "F32": "fp32",
        "BF16": "bf16",
        "F16": "fp16",
        "F8_E4M3": "fp8-weights",
        "F8_E5M2": "fp8-weights",
    }
)


def shape_of_tensors(entries: Sequence[TensorEntry], source: str) -> ModelShape:
    """Return what the tensors alone say: how many parameters there are, but nothing on layers."""
    sizes = Counter(e.shape for e in entries if all(e.shape))
    groups = (ParameterGroup("tensors", s, n, Role.OTHER, layered=False) for s, n in sizes.items())
    note = "Tensors alone do not show how layers work, so activations are not estimated. "
    return ModelShape(
        name="safetensors", source=source, parameters=tuple(groups),
        assumptions=(f"{note}Put config.json beside the file.",),
    )  # fmt: skip


def with_exact_counts(shape: ModelShape, entries: Sequence[TensorEntry], source: str) -> ModelShape:
    """Return a configuration's shape plus the parameters that only the files have."""
    counted, stated = sum(e.n_elements for e in entries), shape.n_parameters
    if counted == stated:
        return replace(shape, source=source)
    note = (
        f"The files hold {format_count(counted)} elements, but the configuration makes "
        f"{format_count(stated)} parameters; the larger number is used."
    )
    rest = [outside("others", counted - stated)] if counted > stated else []
    return replace(
        shape, source=source, parameters=(*shape.parameters, *rest),
        assumptions=(*shape.assumptions, note),
    )  # fmt: skip


def stored_dtype(entries: Sequence[TensorEntry]) -> str:
    """Return our name for the dtype that most elements have, or "" if we have no name for it."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[entry.dtype] += entry.n_elements
    return _DTYPES.get(max(sizes, key=lambda dtype: sizes[dtype], default=""), "")
