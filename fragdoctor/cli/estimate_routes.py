"""The routes to an estimate, and the options that each of them uses.

An option that the chosen route does not use is refused, never silently ignored: the answer would
look as if the option had been taken into account.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from fragdoctor.cli.estimate_options import EstimateOptions
from fragdoctor.cli.options import DECLARED, INFERENCE, SHAPE, TRAINING, EstimateOutput
from fragdoctor.errors import ConfigError


class Route(StrEnum):
    """A route to an answer; the value is its name in sentences."""

    GPUS = "--list-gpus"
    MODELS = "--list-models"
    MODEL = "--model"
    LIBRARY = "--rehearse"
    FILE = "formulas for a model's file"
    COUNT = "formulas for --params or dimensions"


PARAMETERS: Final = tuple(field.name for field in fields(EstimateOptions))
"""All parameters of the command, in order."""

FORMULAS: Final = (Route.FILE, Route.COUNT)
_OUTPUT: Final = frozenset(field.name for field in fields(EstimateOutput))
_REHEARSED: Final = frozenset({"gpu", "dtype", "batch", "inference"})
_FORMULA: Final = frozenset(
    {"args", "gpu", "dtype", "batch", "seq", "attention", "lora", "lora_targets", "zero", "fsdp",
     "fsdp_kind", "plan", "price", "verify", "world_size", "inference", "explain",
     "tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel", "dora",
     "keep_logits", "expandable_segments"}
)  # fmt: skip


def _group(name: str) -> frozenset[str]:
    """Return the parameters under a heading of the help."""
    found = ((field.name, field.metadata[DECLARED]) for field in fields(EstimateOptions))
    return frozenset(n for n, one in found if one.more.get("rich_help_panel") == name) - _FORMULA


_TRAINING: Final = _group(TRAINING) - {"dropout"} | {"sequence_parallel", "cache"}
_CACHE: Final = _group(INFERENCE)
_SHAPE: Final = _group(SHAPE) | {"params"}
_USED: Final[Mapping[Route, tuple[AbstractSet[str], AbstractSet[str]]]] = MappingProxyType(
    {
        Route.GPUS: ({"list_gpus"}, set()),
        Route.MODELS: ({"list_models"}, set()),
        Route.MODEL: (
            _REHEARSED | {"model"},
            {"optimizer", "grad_accumulation", "steps"},
        ),
        Route.LIBRARY: (
            _REHEARSED | {"inputs", "rehearse", "seq", "attention", "lora", "lora_targets"},
            {"optimizer", "checkpointing", "grad_accumulation", "steps", "fsdp", "world_size"},
        ),
        Route.FILE: (_FORMULA | {"inputs"}, _TRAINING),
        Route.COUNT: (_FORMULA | _SHAPE, _TRAINING | {"dropout"}),
    }
)
"""Route -> (parameters that it always uses, parameters that it uses without ``--inference``)."""

NEEDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lora_targets": "lora",
        "dora": "lora",
        "fsdp_kind": "fsdp",
        **dict.fromkeys(("price", "verify"), "plan"),
        "sequence_parallel": "tensor_parallel",
        "max_num_seqs": "gpu_memory_utilization",
        "max_num_batched_tokens": "gpu_memory_utilization",
    }
)
"""Option -> another one without which it has no meaning."""

_HINTS: Final[Mapping[Route, str]] = MappingProxyType(
    {
        Route.MODEL: "Your code decides that: set it in the factory.",
        Route.LIBRARY: "Leave it out, or leave --rehearse out: formulas support it.",
        Route.FILE: "The file describes the model; see fragdoctor estimate --help.",
        Route.COUNT: "See fragdoctor estimate --help.",
    }
)
_BELONGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "steps": "It needs --rehearse or --model MODULE:FACTORY.",
        "rehearse": "It needs a config.json, or the name of a model.",
        **dict.fromkeys(_CACHE, "It is about the KV cache: add --inference."),
    }
)


def used(route: Route, *, inference: bool) -> AbstractSet[str]:
    """Return the parameters that a route uses, with ``--inference`` or without it."""
    always, in_training = _USED[route]
    in_inference = _CACHE if route in FORMULAS else frozenset()
    return _OUTPUT | always | (in_inference if inference else in_training)


def used_by_formulas(*, inference: bool) -> AbstractSet[str]:
    """Return the parameters that formulas use, which configuration files may set."""
    return used(Route.FILE, inference=inference) | used(Route.COUNT, inference=inference)


def flag_of(parameter: str) -> str:
    """Return a parameter as it is written on the command line."""
    return "an input" if parameter == "inputs" else f"--{parameter.replace('_', '-')}"


def route_of(chosen: EstimateOptions) -> Route:
    """Return the route that the options choose; options that do not fit it are refused later."""
    if chosen.list_gpus or chosen.list_models:
        return Route.GPUS if chosen.list_gpus else Route.MODELS
    if chosen.model is not None:
        return Route.MODEL
    if chosen.inputs:
        return Route.LIBRARY if chosen.rehearse else Route.FILE
    return Route.COUNT


def refuse_unused(route: Route, given: AbstractSet[str], *, inference: bool) -> None:
    """Refuse options on the command line that would have no effect.

    Raises:
        ConfigError: one sentence with the options and the route.
    """
    unused = [n for n in PARAMETERS if n in given and n not in used(route, inference=inference)]
    if unused:
        verb = "does" if len(unused) == 1 else "do"
        way = f"{route} with --inference" if inference else str(route)
        hint = _HINTS.get(route, "Leave it out.")
        if unused[0] in used(route, inference=not inference):
            hint = "Leave it out, or drop --inference."
        if route in FORMULAS:
            hint = _BELONGS.get(unused[0], hint)
        raise ConfigError(f"{', '.join(map(flag_of, unused))} {verb} not go with {way}.", hint=hint)
    for name, other in NEEDS.items():
        if name in given and other not in given:
            raise ConfigError(
                f"{flag_of(name)} means nothing without {flag_of(other)}.",
                hint=f"Add {flag_of(other)}, or leave it out.",
            )
