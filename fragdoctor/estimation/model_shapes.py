"""Finds out what an input is and returns its model's shape, or a shape for a parameter count.

Well-known models can be given by name: for each, ``presets.json`` holds its repository on the
Hugging Face Hub, the parameter count published there, and the entries of ``config.json`` that
determine shapes. A test compares the counts.

For a parameter count alone, or for any dimensions that are given, a plausible transformer is made.
Llama-like decoders keep hidden / layers near 128 from 1 billion parameters up (7B: 4096 and 32,
13B: 5120 and 40) and near 64 below (GPT-2: 768 and 12); the feed-forward layer takes the rest.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.errors import ConfigError, InputError
from fragdoctor.estimation.architectures import GPT2, LLAMA, Dimensions, outside, parameters_of
from fragdoctor.estimation.config_json import (
    MAX_LAYERS,
    Config,
    UncoveredModelError,
    quantised_dtype,
    read_config,
    shape_of_config,
)
from fragdoctor.estimation.model_names import base_of, is_of_llama_cpp, stored_in
from fragdoctor.estimation.training_choices import PLAIN_DTYPES
from fragdoctor.inputs.classify import MODEL_INPUTS, InputKind, Wanted, open_input
from fragdoctor.model.memory_estimate import KnownModel
from fragdoctor.model.workload import LayerSizes, ModelShape, shared
from fragdoctor.units import format_count, format_size

_COUNT: Final = re.compile(
    r"\s*([0-9]{1,20}(?:\.[0-9]{1,12})?(?:[eE]\+?[0-9]{1,2})?)"
    r"\s*([KMBTG]?)\s*",
                           re.ASCII | re.IGNORECASE)  # fmt: skip
_FACTORS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
MAX_PARAMETERS: Final = 10**14
DEFAULT_VOCAB: Final = 32_000
MIN_LAYERS: Final = 2
MAX_WIDTH: Final = 2**24


class GivenSizes(Struct, frozen=True):
    """Dimensions given by hand; 0 and "" = not given."""

    vocab: int = 0
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    positions: int = 0
    family: str = ""
    dropout: float | None = None

    @property
    def any_given(self) -> bool:
        """Whether a dimension was given."""
        sizes = (self.vocab, self.layers, self.hidden, self.heads, self.kv_heads, self.ffn)
        return any((*sizes, self.positions))


def parse_count(text: str) -> int:
    """Return the number that ``7B``, ``350M`` or ``1.3e9`` means.

    Raises:
        ConfigError: the text is not a count, or not a possible one for a model.
    """
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is not a parameter count.", hint="Write for example 7B, 350M or 1.3e9."
        )
    value = float(match.group(1)) * _FACTORS[match.group(2).lower()]
    if not 1000 <= value <= MAX_PARAMETERS:
        raise ConfigError(
            f"A model of {text.strip()} parameters is out of range.",
            hint="Write a count from 1K to 100T, for example 7B or 350M.",
        )
    return round(value)


def guessed_shape(n_parameters: int, given: GivenSizes) -> ModelShape:
    """Return a shape with about this many parameters (0 = as many as the dimensions make).

    Raises:
        ConfigError: the dimensions contradict each other or do not add up to the count.
    """
    is_gpt = given.family == "gpt"
    # The embedding and the head must not use up all parameters of a small model.
    small = max(64, n_parameters // 1000 // 64 * 64) if n_parameters else DEFAULT_VOCAB
    vocab = given.vocab or min(DEFAULT_VOCAB, small)
    layers, hidden = _depth_and_width(n_parameters, vocab, given)
    heads = given.heads or max(1, hidden // (128 if hidden >= 2048 else 64))
    kv_heads = given.kv_heads or heads
    for flag, n, what, whole in (("--heads", heads, "a hidden size", hidden),
                                 ("--kv-heads", kv_heads, "heads", heads)):  # fmt: skip
        if whole % n:
            raise ConfigError(f"{flag} {n} does not divide {what} of {whole}.",
                              hint=f"Give {flag} that divide it.")  # fmt: skip
    base = replace(
        GPT2 if is_gpt else LLAMA, tied_head=False, softmax_fp32=False,
        vocab=vocab, hidden=hidden, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads,
        head_dim=hidden // heads, ffn=64, positions=given.positions if is_gpt else 0,
    )  # fmt: skip
    d = replace(base, ffn=given.ffn or _ffn_for(n_parameters, base))
    groups = parameters_of(d)
    total = sum(g.n_total for g in groups)
    rest = n_parameters - total
    if n_parameters and abs(rest) > 0.2 * n_parameters:
        raise ConfigError(
            f"These dimensions make {format_count(total)} parameters, not "
            f"{format_count(n_parameters)}.",
            hint="Leave out --params, or give fewer dimensions.",
        )
    kind = "GPT-like" if is_gpt else "Llama-like"
    said = f"A {kind} decoder of {format_count(total)} parameters."
    if n_parameters:
        groups += [outside("others", rest)] if rest > 0 else []
        said = (
            f"The shape is a guess from the parameter count: a {kind} decoder with {layers} "
            f"layers, hidden size {hidden}, {heads} heads, feed-forward {d.ffn}, vocabulary "
            f"{vocab}; give --layers, --hidden, --heads, --ffn, --vocab for yours."
        )
    return ModelShape(
        name=kind,
        source="--params" if n_parameters else "the dimensions given",
        parameters=tuple(groups),
        **shared(d, LayerSizes), max_positions=d.positions,
        hidden_dropout=0.1 * is_gpt if given.dropout is None else given.dropout,
        is_guess=bool(n_parameters), assumptions=(said,),
    )  # fmt: skip


def _depth_and_width(n: int, vocab: int, given: GivenSizes) -> tuple[int, int]:
    """Return layers and hidden size with about 12 L H^2 + 2 V H parameters."""
    for name, value, limit in (("--layers", given.layers, MAX_LAYERS),
                               ("--hidden", given.hidden, MAX_WIDTH)):  # fmt: skip
        if value > limit:
            raise ConfigError(f"{name} {value} is out of range.", hint=f"At most {limit}.")
    if not n and not (given.layers and given.hidden):
        raise ConfigError(
            "A shape needs --layers and --hidden, or --params.",
            hint="For example: fragdoctor estimate --params 7B",
        )
    ratio = 128 if n >= 10**9 else 64
    # Known models have an even number of layers, so take the nearest even number.
    layers = given.layers or max(MIN_LAYERS, 2 * round((n / (12 * ratio**2)) ** (1 / 3) / 2))
    if given.hidden:
        body = max(0, n - 2 * vocab * given.hidden)
        deep = max(MIN_LAYERS, round(body / (12 * given.hidden**2)))
        return given.layers or deep, given.hidden
    hidden = (-2 * vocab + math.sqrt(4 * vocab**2 + 48 * layers * n)) / (24 * layers)
    # Eight GPUs can share the heads of 66 of the 69 known models that are at least this wide.
    steps = {4096: 1024, 2048: 256, 1024: 128}
    step = next((step for width, step in steps.items() if hidden >= width), 64)
    return layers, max(step, round(hidden / step) * step)


def _ffn_for(n: int, d: Dimensions) -> int:
    """Return the feed-forward width that makes up the parameter count, or the usual one."""
    usual = 4 * d.hidden if not d.is_gated else round(8 * d.hidden / 3 / 64) * 64
    if not n:
        return max(64, usual)
    one, two = (sum(g.n_total for g in parameters_of(replace(d, ffn=w))) for w in (64, 128))
    return int(min(max(64, 64 * (1 + (n - one) // (two - one))), 2 * usual))


_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.: -]{0,95}", re.ASCII)


class Preset(KnownModel, frozen=True):
    """A model known by name, with the entries of its configuration that determine shapes.

    ``also`` holds other names that people use, and models of the same shape.
    """

    config: Mapping[str, Any]
    also: Sequence[str] = ()


@cache
def presets() -> Mapping[str, Preset]:
    """Return all presets by name."""
    text = files("fragdoctor.estimation").joinpath("presets.json").read_text(encoding="utf-8")
    return {name: Preset(name=name, **entry) for name, entry in json.loads(text).items()}


def known_models() -> tuple[KnownModel, ...]:
    """Return all presets without their configurations, in the order of the file."""
    return tuple(KnownModel(p.name, p.hub, p.n_parameters) for p in presets().values())


def preset_of(name: str) -> Preset | None:
    """Return the preset with this name or Hub repository, or the base of a tuned model."""
    own = _by_own_name().get(name.strip().lower())
    known = ((p.name, other) for p in presets().values() for other in (p.hub, *p.also))
    return own or presets().get(base_of(name, known))


@cache
def _by_own_name() -> Mapping[str, Preset]:
    """Return all presets by their names, repositories, and repositories without an owner."""
    places = ((p.hub.lower(), p) for p in presets().values())
    return {key: p for hub, p in places for key in (hub, hub.rpartition("/")[2], p.name)}


def is_model_name(name: str) -> bool:
    """Return whether an input that is not a file could be the name of a model."""
    has_suffix = name.lower().endswith((".json", ".safetensors", ".pickle", ".pkl", ".gz", ".txt"))
    return not has_suffix and (_HUB_ID.fullmatch(name) or _NAME.fullmatch(name)) is not None


def unknown_model(name: str) -> InputError:
    """Return the error for an unknown model, with a hint on how to get its configuration."""
    near = difflib.get_close_matches(name.lower(), presets(), cutoff=0.4)
    if is_of_llama_cpp(name):
        return InputError(
            f"{name} is for llama.cpp, whose memory is not estimated.",
            hint="The closest is: fragdoctor estimate "
            f"{(near or ['llama-3.1-8b'])[0]} --inference --dtype int4",
        )
    if re.fullmatch(r"[\d.]+[bm]", name.lower()):
        return InputError(
            f"{name} is a size, not the name of a model.",
            hint=f"Run: fragdoctor estimate --params {name.upper()}",
        )
    if _HUB_ID.fullmatch(name):
        folder = name.rsplit("/", maxsplit=1)[-1]
        return InputError(
            f"{name} is neither a local file nor a known model; nothing is downloaded.",
            hint=f"Fetch its configuration: hf download {name} config.json --local-dir {folder}; "
            f"then: fragdoctor estimate {folder}",
        )
    guess = f"Did you mean {', '.join(near)}? " if near else ""
    return InputError(
        f"{name} does not exist, and no model is known by that name.",
        hint=f"{guess}Check the path, or see: fragdoctor estimate --list-models",
    )


def _by_name(inputs: Sequence[str]) -> Preset | None:
    """Return the known model that the inputs name, or None if they are paths.

    Raises:
        InputError: a name that is not known.
    """
    text = " ".join(inputs)
    if any(Path(one).exists() for one in inputs):
        return None
    preset = preset_of(text) if is_model_name(text) else None
    if preset is None and len(inputs) == 1 and is_model_name(text):
        raise unknown_model(text)
    return preset


class FoundModel(Struct, frozen=True):
    """A shape, and the dtype that its file stores ("" = not stated)."""

    shape: ModelShape
    dtype: str = ""


def model_of(inputs: Sequence[str]) -> FoundModel:
    """Return the model that the inputs describe.

    Raises:
        ConfigError: inputs that do not belong together.
        InputError: an input cannot be read, or is something else.
    """
    preset = _by_name(inputs)
    if preset is None:
        path = _configuration_file(inputs)
        config = read_config(path)
        return FoundModel(shape_of_config(config, str(path)), _config_dtype(config))
    try:
        shape = shape_of_config(preset.config, f"config.json of {preset.hub}")
    except UncoveredModelError as e:
        alone = format_size(2 * preset.n_parameters)
        raise UncoveredModelError(
            f"Only the weights of {preset.name} can be counted here: {alone} in 16 bits.",
            hint=e.hint,
        ) from e
    name = " ".join(inputs)
    notes = list(shape.assumptions)
    if name.strip().lower() not in _by_own_name():
        notes.append(f"Going by its name, {name} is assumed to have the shape of {preset.hub}.")
    shape = replace(shape, name=preset.name, assumptions=tuple(notes))
    return FoundModel(shape, stored_in(name) or _config_dtype(preset.config))


def configuration_of(inputs: Sequence[str]) -> Config:
    """Return the configuration of the model that the inputs describe.

    Raises:
        ConfigError: inputs that do not belong together.
        InputError: an input cannot be read, or is something else.
    """
    preset = _by_name(inputs)
    if preset is None:
        return read_config(_configuration_file(inputs))
    if stored_in(inputs[-1]):
        raise unknown_model(inputs[-1])  # its own configuration says how it is quantized
    return preset.config


def _configuration_file(inputs: Sequence[str]) -> Path:
    """Return the ``config.json`` that the inputs are, or that lies in or beside them.

    Only a configuration says how layers work, so weights stand for the one beside them.
    """
    if "-" in inputs:
        raise ConfigError("Standard input is not read here.", hint=MODEL_INPUTS)
    paths = [Path(name) for name in inputs]
    found = list(dict.fromkeys(map(_beside, paths)))
    if len(found) > 1:
        raise ConfigError(f"{paths[0]} and {paths[1]} are two models.", hint="Give one at a time.")
    if not found[0].is_file() and found != paths:
        raise InputError(
            f"There is no {found[0]}, which says how the layers of {paths[0]} work.",
            hint=MODEL_INPUTS,
        )
    with open_input(str(found[0])) as opened:
        is_object = opened.stream.head.lstrip()[:1] == b"{" and not opened.stream.compression
        if not is_object or opened.kind is InputKind.SNAPSHOT_JSON:
            raise opened.is_not(Wanted.MODEL)
    return found[0]


def _beside(path: Path) -> Path:
    """Return the configuration of a folder or of weights; any other file is one itself."""
    if path.is_dir():
        return path / "config.json"
    is_weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
    return path.with_name("config.json") if is_weights else path


def _config_dtype(config: Config) -> str:
    if quantised := quantised_dtype(config):
        return quantised
    parts = [one for one in (config, config.get("text_config")) if isinstance(one, dict)]
    stated = (part.get(key) for part in parts for key in ("torch_dtype", "dtype"))
    return PLAIN_DTYPES.get(str(next(filter(None, stated), "")), "")
