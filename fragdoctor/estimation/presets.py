"""Well-known models by name: the shapes in their configurations, nothing else of them.

``presets.json`` holds for each the repository on the Hugging Face hub, the parameter count that is
published there, and the entries of ``config.json`` that decide shapes. A test compares the counts.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from fragdoctor.errors import InputError
from fragdoctor.model.estimate import KnownModel

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
N_NEAR: Final = 3


@dataclass(frozen=True, slots=True)
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
