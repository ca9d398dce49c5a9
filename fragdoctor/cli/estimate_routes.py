"""Which way ``fragdoctor estimate`` goes, and which options have a meaning on it.

An option that the way does not use is refused, never silently ignored: the answer would look as if
it had been heeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fragdoctor.cli.estimate_options import Asked, EstimateOptions
from fragdoctor.cli.fit import FitOptions
from fragdoctor.cli.options import EstimateOutput
from fragdoctor.cli.pack import PackOptions
from fragdoctor.errors import ConfigError


class Route(StrEnum):
    """A way to an answer; the value is how sentences name it."""

    GPUS = "--list-gpus"
    MODELS = "--list-models"
    FIT = "recordings at several batch sizes"
    PACK = "the question how many processes fit"
    MODEL = "--model"
    MODEL_INFERENCE = "--model with --inference"
    FILE = "formulas for a model's file"
    FILE_INFERENCE = "formulas for a model's file with --inference"
    COUNT = "formulas for --params or dimensions"
    COUNT_INFERENCE = "formulas for --params or dimensions with --inference"


def _names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))


_OUTPUT: Final = _names(EstimateOutput)
_TRACE: Final = frozenset(
    {"model", "gpu", "dtype", "batch", "inference", "input_shape", "input_dtype", "explain",
     "verbose"}
)  # fmt: skip
_FORMULA: Final = frozenset(
    {"gpu", "dtype", "batch", "seq", "attention", "lora", "lora_targets", "zero", "fsdp",
     "world_size", "inference", "explain", "tensor_parallel", "context_parallel",
     "pipeline_parallel", "expert_parallel", "dora"}
)  # fmt: skip
_TRAINING: Final = frozenset(
    {"optimizer", "master_weights", "grad_dtype", "checkpointing", "grad_accumulation",
     "keep_logits", "sequence_parallel", "offload"}
)  # fmt: skip
_CACHE: Final = frozenset(
    {"new_tokens", "kv_dtype", "cache", "gpu_memory_utilization", "max_num_seqs",
     "max_num_batched_tokens"}
)  # fmt: skip
_SHAPE: Final = frozenset(
    {"params", "family", "vocab", "layers", "hidden", "heads", "kv_heads", "ffn", "positions"}
)

USED: Final[Mapping[Route, AbstractSet[str]]] = MappingProxyType(
    {
        Route.GPUS: _OUTPUT | {"list_gpus"},
        Route.MODELS: _OUTPUT | {"list_models"},
        Route.FIT: _names(FitOptions),
        Route.PACK: _names(PackOptions),
        Route.MODEL: _OUTPUT | _TRACE | {"optimizer", "grad_accumulation", "loss", "steps"},
        Route.MODEL_INFERENCE: _OUTPUT | _TRACE,
        Route.FILE: _OUTPUT | _FORMULA | _TRAINING | {"inputs"},
        Route.FILE_INFERENCE: _OUTPUT | _FORMULA | _CACHE | {"inputs"},
        Route.COUNT: _OUTPUT | _FORMULA | _TRAINING | _SHAPE | {"dropout"},
        Route.COUNT_INFERENCE: _OUTPUT | _FORMULA | _CACHE | _SHAPE,
    }
)
"""The parameters of the command that each route uses."""

PARAMETERS: Final = tuple(
    dict.fromkeys(
        field.name for kind in (EstimateOptions, FitOptions, PackOptions) for field in fields(kind)
    )
)
"""All parameters of the command, in their order."""

NEEDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "lora_targets": ("lora",),
        "dora": ("lora",),
        "input_dtype": ("input_shape",),
        "sequence_parallel": ("tensor_parallel",),
        "max_num_seqs": ("gpu_memory_utilization",),
        "max_num_batched_tokens": ("gpu_memory_utilization",),
    }
)
"""Options that mean nothing without another one."""

_NEEDS_OF_FIT: Final = MappingProxyType({"context": ("gpu",), "headroom": ("gpu",)})
_HINTS: Final[Mapping[Route, str]] = MappingProxyType(
    {
        Route.GPUS: "Leave it out.",
        Route.MODELS: "Leave it out.",
        Route.FIT: "Leave it out; a model before its first run is another question.",
        Route.PACK: "Leave it out; give one recording, or a model, not both.",
        Route.MODEL: "The traced code decides that: build it so in the factory.",
        Route.MODEL_INFERENCE: "One forward pass is traced: leave it out, or drop --inference.",
        Route.FILE: "The file describes the model; see fragdoctor estimate --help.",
        Route.FILE_INFERENCE: "Leave it out, or drop --inference.",
        Route.COUNT: "See fragdoctor estimate --help.",
        Route.COUNT_INFERENCE: "Leave it out, or drop --inference.",
    }
)
_BELONGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("input_shape", "input_dtype", "loss", "steps", "verbose"),
            "It belongs to --model MODULE:FACTORY.",
        ),
        **dict.fromkeys(
            (
                "kv_dtype",
                "new_tokens",
                "cache",
                "gpu_memory_utilization",
                "max_num_seqs",
                "max_num_batched_tokens",
            ),
            "It is about the KV cache: add --inference.",
        ),
        **dict.fromkeys(
            ("capacity", "headroom", "context"),
            "It belongs to fragdoctor fit or pack; for a model write the size of the GPU: "
            "--gpu 24GiB.",
        ),
    }
)
_FORMULAS: Final = (Route.FILE, Route.FILE_INFERENCE, Route.COUNT, Route.COUNT_INFERENCE)


def flag_of(parameter: str) -> str:
    """Return how the command line writes a parameter."""
    return "an input" if parameter == "inputs" else f"--{parameter.replace('_', '-')}"


def route_of(asked: Asked) -> Route:
    """Return the way that the options lead; what does not fit to it is refused afterwards."""
    from fragdoctor.estimation.shapes import is_capture

    values = asked.values
    if values["list_gpus"] or values["list_models"]:
        return Route.GPUS if values["list_gpus"] else Route.MODELS
    if values["model"] is not None:
        return Route.MODEL_INFERENCE if values["inference"] else Route.MODEL
    inputs = values["inputs"] or []
    has_recording = any(is_capture(Path(name)) for name in inputs)
    if values["batches"] is not None or (len(inputs) > 1 and has_recording):
        return Route.FIT
    if values["per_process"] is not None or values["processes"] is not None or has_recording:
        return Route.PACK
    if inputs:
        return Route.FILE_INFERENCE if values["inference"] else Route.FILE
    return Route.COUNT_INFERENCE if values["inference"] else Route.COUNT


def refuse_unused(route: Route, given: AbstractSet[str]) -> None:
    """Refuse options on the command line that would change nothing.

    Args:
        route: the way taken.
        given: the parameters on the command line.

    Raises:
        ConfigError: one sentence with the options and the route.
    """
    order = dict.fromkeys(
        f.name for k in (EstimateOptions, FitOptions, PackOptions) for f in fields(k)
    )
    unused = [name for name in order if name in given and name not in USED[route]]
    if unused:
        verb = "does" if len(unused) == 1 else "do"
        hint = _HINTS[route]
        if route in _FORMULAS:
            hint = _BELONGS.get(unused[0], hint)
        raise ConfigError(
            f"{', '.join(map(flag_of, unused))} {verb} not go with {route.value}.", hint=hint
        )
    needs = {**NEEDS, **_NEEDS_OF_FIT} if route is Route.FIT else NEEDS
    for name, others in needs.items():
        if name in given and not given & set(others):
            raise ConfigError(
                f"{flag_of(name)} means nothing without {' or '.join(map(flag_of, others))}.",
                hint=f"Add {flag_of(others[0])}, or leave it out.",
            )
