"""Finds out what an input is, and returns the shape of the model in it.

Well-known models go by name: ``presets.json`` holds for each its repository on Hugging Face's hub,
the parameter count published there, and the entries of ``config.json`` that decide shapes. A
test compares the counts.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from fragdoctor.errors import ConfigError, InputError
from fragdoctor.estimation.config_json import Config, quantised_dtype, read_config, shape_of_config
from fragdoctor.estimation.safetensors import (
    TensorEntry,
    read_files,
    read_index,
    shape_of_tensors,
    stored_dtype,
    with_exact_counts,
)
from fragdoctor.frozen import frozen
from fragdoctor.inputs.classify import (
    MODEL_INPUTS,
    Kind,
    Wanted,
    kind_of,
    open_input,
    something_else,
)
from fragdoctor.model.memory_estimate import KnownModel
from fragdoctor.model.workload import ModelShape

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
N_NEAR: Final = 3


@frozen
class Preset:
    """A well-known model.

    Attributes:
        hub: its repository on the hub.
        n_parameters: as published there.
        config: what of its configuration decides shapes.
    """

    name: str
    hub: str
    n_parameters: int
    config: Mapping[str, Any]


@cache
def presets() -> Mapping[str, Preset]:
    """Return all of them, by name."""
    text = files("fragdoctor.estimation").joinpath("presets.json").read_text(encoding="utf-8")
    return {name: Preset(name=name, **entry) for name, entry in json.loads(text).items()}


def known_models() -> tuple[KnownModel, ...]:
    """Return all of them without their configurations, in the order of the file."""
    return tuple(KnownModel(p.name, p.hub, p.n_parameters) for p in presets().values())


def preset_of(name: str) -> Preset | None:
    """Return the model of this name, or of this repository on the hub."""
    key = name.strip().lower()
    for preset in presets().values():
        if key in (preset.name, preset.hub.lower(), preset.hub.lower().split("/")[-1]):
            return preset
    return None


def is_model_name(name: str) -> bool:
    """Return whether an input that is no file can be meant as the name of a model."""
    has_suffix = name.lower().endswith((".json", ".safetensors", ".pickle", ".pkl", ".gz", ".txt"))
    return not has_suffix and (_HUB_ID.fullmatch(name) or _NAME.fullmatch(name)) is not None


def unknown_model(name: str) -> InputError:
    """Return what to say of a model that is not known here: how to get its configuration."""
    if _HUB_ID.fullmatch(name):
        folder = name.rsplit("/", maxsplit=1)[-1]
        return InputError(
            f"{name} is no file here and no model that is known by name; nothing is downloaded.",
            hint=f"Fetch its configuration: hf download {name} config.json --local-dir {folder}; "
            f"then: fragdoctor estimate {folder}",
        )
    near = difflib.get_close_matches(name.lower(), presets(), n=N_NEAR, cutoff=0.4)
    guess = f"Did you mean {', '.join(near)}? " if near else ""
    return InputError(
        f"{name} does not exist, and no model is known by that name.",
        hint=f"{guess}Check the path, or see: fragdoctor estimate --list-models",
    )


INDEX_NAMES: Final = (
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
)
MODEL_SUFFIXES: Final = (".json", ".safetensors")
# Files of a directory that are looked at.
MAX_FILES: Final = 200


@frozen
class FoundModel:
    """A shape, and the dtype that its file stores ("" = not said)."""

    shape: ModelShape
    dtype: str = ""


def is_capture(path: Path) -> bool:
    """Return whether a path is a snapshot, message, statistics, log or bundle, not a model.

    So is a directory that holds a snapshot, and nothing of a model.

    Raises:
        InputError: it is there and cannot be read.
    """
    if not path.exists():
        return False
    with open_input(str(path)) as found:
        kind = found.kind
    if kind is Kind.FOLDER:
        return _is_recording(path)
    if kind in (Kind.TEXT, Kind.JSON):  # a file of a model may be damaged
        return path.suffix.lower() not in MODEL_SUFFIXES
    return kind in (Kind.BUNDLE, Kind.STATS, Kind.ARCHIVE) or kind.may_be_snapshot


def _is_recording(folder: Path) -> bool:
    try:
        files = [p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")]
    except OSError:
        return False
    if any(p.name == "config.json" or p.suffix == ".safetensors" for p in files):
        return False
    kinds = (kind_of(str(p)) for p in sorted(files)[:MAX_FILES])
    return any(kind is not None and kind.may_be_snapshot for kind in kinds)


def model_of(inputs: Sequence[str]) -> FoundModel:
    """Return the model that the inputs describe.

    Raises:
        ConfigError: no input, or inputs that do not belong together.
        InputError: an input cannot be read, or is something else.
    """
    if "-" in inputs:
        raise ConfigError("Standard input is not read here.", hint=MODEL_INPUTS)
    paths = [Path(name) for name in inputs]
    if len(paths) == 1 and not paths[0].exists() and is_model_name(inputs[0]):
        preset = preset_of(inputs[0])
        if preset is None:
            raise unknown_model(inputs[0])
        shape = shape_of_config(preset.config, f"config.json of {preset.hub}")
        return FoundModel(replace(shape, name=preset.name), _config_dtype(preset.config))
    if len(paths) == 1 and paths[0].is_dir():
        return _of_directory(paths[0])
    tensors: list[Path] = []
    others: list[Path] = []
    for path in paths:
        with open_input(str(path)) as found:
            (tensors if found.kind is Kind.SAFETENSORS else others).append(path)
    if not others:
        return _of_tensors(read_files(tensors), str(tensors[0]), _config_beside(tensors[0]))
    if len(others) > 1:
        raise ConfigError(
            f"{others[0]} and {others[1]} are two models.", hint="Give one model at a time."
        )
    return _of_file(others[0], tensors)


def _of_file(path: Path, tensors: Sequence[Path]) -> FoundModel:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory.", hint="Give it alone.")
    if path.suffix == ".safetensors":
        read_files([path])  # says what is wrong with it
    with open_input(str(path)) as found:
        if found.stream.compression or found.stream.head.lstrip()[:1] != b"{":
            raise found.is_not(Wanted.MODEL)
    config = read_config(path)
    if isinstance(config.get("weight_map"), dict):
        return _of_tensors(read_files(read_index(path)), str(path), _config_beside(path))
    if tensors:
        return _of_tensors(read_files(tensors), str(tensors[0]), config)
    if "segments" in config or "device_traces" in config:
        raise something_else(str(path), Kind.SNAPSHOT_JSON, Wanted.MODEL)
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
        raise InputError(
            f"{path} holds neither config.json nor safetensors files.", hint=MODEL_INPUTS
        )
    return FoundModel(shape_of_config(config, str(path / "config.json")), _config_dtype(config))


def _of_tensors(entries: Sequence[TensorEntry], source: str, config: Config | None) -> FoundModel:
    if not entries:
        raise InputError(f"{source} lists no tensors.", hint=MODEL_INPUTS)
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
