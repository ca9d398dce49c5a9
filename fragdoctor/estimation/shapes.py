"""Finds out what an input is, and returns the shape of the model in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fragdoctor.errors import ConfigError, InputError, NotASnapshot
from fragdoctor.estimation.config_json import Config, quantised_dtype, read_config, shape_of_config
from fragdoctor.estimation.safetensors import (
    TensorEntry,
    looks_like_safetensors,
    read_files,
    read_index,
    shape_of_tensors,
    stored_dtype,
    with_exact_counts,
)
from fragdoctor.inputs.bundles import is_bundle
from fragdoctor.inputs.kinds import Kind, kind_of
from fragdoctor.inputs.source import open_source
from fragdoctor.model.workload import ModelShape

HEAD_BYTES: Final = 8192
INDEX_NAMES: Final = (
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
)
MODEL_SUFFIXES: Final = (".json", ".safetensors")
# Files of a directory that are looked at.
MAX_FILES: Final = 200
WANTED: Final = (
    "Give a Hugging Face config.json, a model directory, safetensors files, or --params."
)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A shape, and the dtype that its file stores ("" = not said)."""

    shape: ModelShape
    dtype: str = ""


def is_capture(path: Path) -> bool:
    """Return whether a path is a snapshot, message, statistics, log or bundle, not a model.

    So is a directory that holds a snapshot, and nothing of a model.
    """
    if path.is_dir():
        return is_bundle(path) or _is_recording(path)
    if not path.is_file() or looks_like_safetensors(_head(path)):
        return False
    head = _unpacked_head(path)
    kinds = [Kind.SNAPSHOT, Kind.STATS]
    if head.lstrip()[:1] != b"{":
        kinds.append(Kind.ARCHIVE)
        if path.suffix.lower() not in MODEL_SUFFIXES:  # else a damaged file of a model
            kinds.append(Kind.TEXT)
    return kind_of(head) in kinds


def _is_recording(path: Path) -> bool:
    try:
        files = [p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")]
        names = {p.name for p in files}
        if "config.json" in names or any(p.suffix == ".safetensors" for p in files):
            return False
        return any(kind_of(_unpacked_head(p)) is Kind.SNAPSHOT for p in sorted(files)[:MAX_FILES])
    except (OSError, InputError):
        return False


def _unpacked_head(path: Path) -> bytes:
    try:
        with open_source(path) as stream:
            return stream.head
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror or e}.") from e


def model_of(inputs: Sequence[str]) -> FoundModel:
    """Return the model that the inputs describe.

    Raises:
        ConfigError: no input, or inputs that do not belong together.
        InputError: an input cannot be read, or is something else.
    """
    paths = [Path(name) for name in inputs]
    for path in paths:
        if str(path) == "-":
            raise ConfigError("Standard input is not read here.", hint=WANTED)
        if not path.exists():
            raise InputError(f"{path} does not exist.", hint=WANTED)
    if len(paths) == 1 and paths[0].is_dir():
        return _of_directory(paths[0])
    tensors = [p for p in paths if p.is_file() and looks_like_safetensors(_head(p))]
    others = [p for p in paths if p not in tensors]
    if not others:
        return _of_tensors(read_files(tensors), str(tensors[0]), _config_beside(tensors[0]))
    if len(others) > 1:
        raise ConfigError(
            f"{others[0]} and {others[1]} are two models.", hint="Give one model at a time."
        )
    return _of_file(others[0], tensors)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as e:
        raise InputError(f"{path} cannot be read: {e.strerror or e}.") from e


def _of_file(path: Path, tensors: Sequence[Path]) -> FoundModel:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory.", hint="Give it alone.")
    head = _head(path)
    if path.suffix == ".safetensors":
        read_files([path])  # says what is wrong with it
    if head.lstrip()[:1] != b"{":
        raise NotASnapshot(f"{path} is neither a model configuration nor safetensors.", hint=WANTED)
    config = read_config(path)
    if isinstance(config.get("weight_map"), dict):
        return _of_tensors(read_files(read_index(path)), str(path), _config_beside(path))
    if tensors:
        return _of_tensors(read_files(tensors), str(tensors[0]), config)
    if "segments" in config or "device_traces" in config:
        raise NotASnapshot(f"{path} is a memory snapshot, not a model.", hint=WANTED)
    return FoundModel(shape_of_config(config, str(path)), _config_dtype(config))


def _of_directory(path: Path) -> FoundModel:
    config = read_config(path / "config.json") if (path / "config.json").is_file() else None
    for name in INDEX_NAMES:
        if (path / name).is_file():
            return _of_tensors(read_files(read_index(path / name)), str(path), config)
    tensors = sorted(p for p in path.glob("*.safetensors") if p.is_file())
    if tensors:
        return _of_tensors(read_files(tensors), str(path), config)
    if config is None:
        raise InputError(f"{path} holds neither config.json nor safetensors files.", hint=WANTED)
    return FoundModel(shape_of_config(config, str(path / "config.json")), _config_dtype(config))


def _of_tensors(entries: Sequence[TensorEntry], source: str, config: Config | None) -> FoundModel:
    if not entries:
        raise InputError(f"{source} lists no tensors.", hint=WANTED)
    dtype = stored_dtype(entries)
    if config is None:
        return FoundModel(shape_of_tensors(entries, source), dtype)
    return FoundModel(with_exact_counts(shape_of_config(config, source), entries, source), dtype)


def _config_beside(path: Path) -> Config | None:
    beside = path.parent / "config.json"
    return read_config(beside) if beside.is_file() else None


def _config_dtype(config: Config) -> str:
    quantised, _ = quantised_dtype(config)
    if quantised:
        return quantised
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else {}
    stated = config.get("torch_dtype") or config.get("dtype")
    stated = stated or inner.get("torch_dtype") or inner.get("dtype")
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return names.get(stated, "") if isinstance(stated, str) else ""
