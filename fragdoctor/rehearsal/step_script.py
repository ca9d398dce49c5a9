"""A small script that runs steps of one model, to be rehearsed like any other program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fragdoctor.errors import ConfigError
from fragdoctor.rehearsal.process import MOST_STEPS
from fragdoctor.rehearsal.programs import Program
from fragdoctor.rehearsal.sweep import PLACEHOLDER

PRECISIONS: Final[Mapping[str, tuple[str, str]]] = {
    "": ("", ""), "fp32": ("fp32", ""), "bf16": ("bf16", ""), "fp16": ("fp16", ""),
    "amp-bf16": ("", "bf16"), "amp-fp16": ("", "fp16"),
}  # fmt: skip
"""What each ``--dtype`` converts the model to, and its autocast setting."""
OPTIMIZERS: Final[Mapping[str, tuple[str, Mapping[str, float]]]] = {
    "adamw": ("AdamW", {}), "adamw-fused": ("AdamW", {"fused": True}), "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}), "rmsprop": ("RMSprop", {}),
    "adagrad": ("Adagrad", {}), "adamax": ("Adamax", {}), "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}), "adadelta": ("Adadelta", {}), "adafactor": ("Adafactor", {}),
}  # fmt: skip
"""Classes of ``torch.optim`` and their options, by their names for ``--optimizer``."""

_HEAD: Final = '''\
"""Written by fragdoctor estimate: steps of {title}."""

import os
import sys

sys.path[0] = os.getcwd()

import torch

from fragdoctor.rehearsal.engine import {module}
from fragdoctor.rehearsal.engine.model_step import ModelStep

batch = int(sys.argv[1]) if len(sys.argv) > 1 else None
step = ModelStep(*{build}, batch=batch, **{options})
'''
_TRAINING: Final = f'''

def train():
    """Forward and backward passes, then the optimizer."""
    for _ in step.passes:
        step.loss().backward()
    step.update()


for _ in range({MOST_STEPS} + 1):
    train()
'''
_INFERENCE: Final = """
with torch.no_grad():
    for _ in range(2):
        step.forward()
"""


def step_options(dtype: str, optimizer: str, **options: Any) -> dict[str, Any]:
    """Return the options of a :class:`~fragdoctor.rehearsal.engine.model_step.ModelStep`.

    Precision and optimizer are given by name.

    Raises:
        ConfigError: PyTorch itself has no such precision or optimizer.
    """
    if dtype not in PRECISIONS:
        raise ConfigError(
            f"A model cannot be rehearsed in {dtype}.",
            hint=f"Use one of {', '.join(filter(None, PRECISIONS))}.",
        )
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"Optimizer {optimizer!r} cannot be rehearsed: it is not one of torch.optim.",
            hint=f"Use one of {', '.join(OPTIMIZERS)}.",
        )
    converted, autocast = PRECISIONS[dtype]
    name, its_options = OPTIMIZERS[optimizer]
    return {
        "optimizer": name,
        "optimizer_options": dict(its_options),
        "dtype": converted,
        "autocast": autocast,
        **options,
    }


def own_model(spec: str) -> str:
    """Return the call of the engine that builds ``pkg.module:factory``.

    Raises:
        ConfigError: the name has another form.
    """
    module, colon, name = spec.partition(":")
    if not (colon and module and name):
        raise ConfigError(
            f"--model wants pkg.module:factory, not {spec!r}.",
            hint="Name a function without arguments that builds the model: my_project.model:build",
        )
    return f"model_step.own_model({spec!r})"


ATTENTION: Final = ("sdpa", "eager")
"""Kinds of attention that Transformers has without additional packages."""


def library_model(
    configuration: Mapping[str, object],
    *,
    attention: str,
    checkpointing: str,
    lora_targets: str,
    **options: Any,
) -> str:
    """Return the call of the engine that builds the model of a ``config.json``.

    The other options are those of :func:`~fragdoctor.rehearsal.engine.library_model.build`.

    Raises:
        ConfigError: an option that no library's own class has.
    """
    if attention not in ATTENTION:
        raise ConfigError(
            f"--attention {attention} cannot be rehearsed.",
            hint=f"Choose {' or '.join(ATTENTION)}, or leave --rehearse out.",
        )
    if checkpointing not in ("none", "full"):
        raise ConfigError(
            f"Transformers has no switch for --checkpointing {checkpointing}.",
            hint="Choose none or full, or leave --rehearse out.",
        )
    options |= {
        "attention": attention,
        "is_checkpointed": checkpointing == "full",
        "lora_targets": tuple(t.strip() for t in lora_targets.split(",") if t.strip()),
    }
    named = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"library_model.build({json.dumps(configuration)!r}, {named})"


def step_program(  # noqa: PLR0913 - the parts of one script
    title: str,
    build: str,
    options: Mapping[str, Any],
    pythons: Sequence[str],
    folder: Path,
    *,
    has_batch: bool,
) -> Program:
    """Write the script into a folder and return it as a program.

    With ``has_batch`` its arguments have a place for the batch size, else it is the model's own.

    ``title`` is its name in reports, ``build`` the call that builds the model.
    """
    head = _HEAD.format(
        title=title.encode("unicode_escape").decode("ascii").replace('"', "'"),
        module=build.partition(".")[0],
        build=build,
        options=dict(options),
    )
    script = folder / "step.py"
    script.write_text(
        head + (_INFERENCE if options.get("inference") else _TRAINING), encoding="utf-8"
    )
    args = (PLACEHOLDER,) if has_batch else ()
    return Program(str(script), False, args, pythons, title=title)
