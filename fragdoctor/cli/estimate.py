"""``fragdoctor estimate``: will it fit, and what would make it fit.

An option that the way taken does not use is refused, never silently ignored: the answer would look
as if it had been heeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, replace
from enum import StrEnum
from inspect import Parameter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import typer

from fragdoctor.cli import console
from fragdoctor.cli.estimate_options import EstimateOptions
from fragdoctor.cli.estimate_recipes import with_recipes
from fragdoctor.cli.exit import OK
from fragdoctor.cli.options import EstimateOutput, command_with, parameters_of
from fragdoctor.errors import ConfigError


class Route(StrEnum):
    """A way to an answer; the value is how sentences name it."""

    GPUS = "--list-gpus"
    MODELS = "--list-models"
    MODEL = "--model"
    MODEL_INFERENCE = "--model with --inference"
    LIBRARY = "--rehearse"
    LIBRARY_INFERENCE = "--rehearse with --inference"
    FILE = "formulas for a model's file"
    FILE_INFERENCE = "formulas for a model's file with --inference"
    COUNT = "formulas for --params or dimensions"
    COUNT_INFERENCE = "formulas for --params or dimensions with --inference"


def _names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))


_OUTPUT: Final = _names(EstimateOutput)
_REHEARSAL: Final = frozenset(
    {"model", "gpu", "dtype", "batch", "inference", "input_shape", "input_dtype"}
)
_LIBRARY: Final = frozenset(
    {"inputs", "rehearse", "gpu", "dtype", "batch", "seq", "attention", "inference"}
)
_ADAPTED: Final = frozenset({"lora", "lora_targets"})
_FORMULA: Final = frozenset(
    {"args", "gpu", "dtype", "batch", "seq", "attention", "lora", "lora_targets", "zero", "fsdp",
     "world_size", "inference", "explain", "tensor_parallel", "context_parallel",
     "pipeline_parallel", "expert_parallel", "dora", "keep_logits"}
)  # fmt: skip
_TRAINING: Final = frozenset(
    {"optimizer", "master_weights", "grad_dtype", "checkpointing", "grad_accumulation",
     "sequence_parallel", "offload", "logits"}
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
        Route.MODEL: _OUTPUT | _REHEARSAL | {"optimizer", "grad_accumulation", "loss", "steps"},
        Route.MODEL_INFERENCE: _OUTPUT | _REHEARSAL,
        Route.LIBRARY: _OUTPUT
        | _LIBRARY
        | _ADAPTED
        | {"optimizer", "checkpointing", "grad_accumulation", "steps"},
        Route.LIBRARY_INFERENCE: _OUTPUT | _LIBRARY | _ADAPTED,
        Route.FILE: _OUTPUT | _FORMULA | _TRAINING | {"inputs"},
        Route.FILE_INFERENCE: _OUTPUT | _FORMULA | _CACHE | {"inputs"},
        Route.COUNT: _OUTPUT | _FORMULA | _TRAINING | _SHAPE | {"dropout"},
        Route.COUNT_INFERENCE: _OUTPUT | _FORMULA | _CACHE | _SHAPE,
    }
)
"""The parameters of the command that each route uses."""

_FORMULA_PARAMETERS: Final = {
    False: USED[Route.FILE] | USED[Route.COUNT],
    True: USED[Route.FILE_INFERENCE] | USED[Route.COUNT_INFERENCE],
}
"""What configuration files may become, with ``--inference`` and without it."""

PARAMETERS: Final = tuple(field.name for field in fields(EstimateOptions))
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

_HINTS: Final[Mapping[Route, str]] = MappingProxyType(
    {
        Route.GPUS: "Leave it out.",
        Route.MODELS: "Leave it out.",
        Route.MODEL: "Your code decides that: build it so in the factory.",
        Route.MODEL_INFERENCE: "Only forward passes run: leave it out, or drop --inference.",
        Route.LIBRARY: "Leave it out, or leave --rehearse out: formulas know it.",
        Route.LIBRARY_INFERENCE: "Leave it out, or drop --rehearse or --inference.",
        Route.FILE: "The file describes the model; see fragdoctor estimate --help.",
        Route.FILE_INFERENCE: "Leave it out, or drop --inference.",
        Route.COUNT: "See fragdoctor estimate --help.",
        Route.COUNT_INFERENCE: "Leave it out, or drop --inference.",
    }
)
_BELONGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("input_shape", "input_dtype", "loss"),
            "It belongs to --model MODULE:FACTORY.",
        ),
        "steps": "It belongs to --rehearse and to --model MODULE:FACTORY.",
        "rehearse": "It takes a config.json, or the name of a model.",
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
    }
)
_FORMULAS: Final = (Route.FILE, Route.FILE_INFERENCE, Route.COUNT, Route.COUNT_INFERENCE)


def flag_of(parameter: str) -> str:
    """Return how the command line writes a parameter."""
    return "an input" if parameter == "inputs" else f"--{parameter.replace('_', '-')}"


def route_of(chosen: EstimateOptions) -> Route:
    """Return the way that the options lead; what does not fit to it is refused afterwards."""
    if chosen.list_gpus or chosen.list_models:
        return Route.GPUS if chosen.list_gpus else Route.MODELS
    if chosen.model is not None:
        return Route.MODEL_INFERENCE if chosen.inference else Route.MODEL
    if chosen.inputs and chosen.rehearse:
        return Route.LIBRARY_INFERENCE if chosen.inference else Route.LIBRARY
    if chosen.inputs:
        return Route.FILE_INFERENCE if chosen.inference else Route.FILE
    return Route.COUNT_INFERENCE if chosen.inference else Route.COUNT


def refuse_unused(route: Route, given: AbstractSet[str]) -> None:
    """Refuse options on the command line that would change nothing.

    Raises:
        ConfigError: one sentence with the options and the route.
    """
    unused = [name for name in PARAMETERS if name in given and name not in USED[route]]
    if unused:
        verb = "does" if len(unused) == 1 else "do"
        hint = _HINTS[route]
        if route in _FORMULAS:
            hint = _BELONGS.get(unused[0], hint)
        raise ConfigError(
            f"{', '.join(map(flag_of, unused))} {verb} not go with {route.value}.", hint=hint
        )
    for name, others in NEEDS.items():
        if name in given and not given & set(others):
            raise ConfigError(
                f"{flag_of(name)} means nothing without {' or '.join(map(flag_of, others))}.",
                hint=f"Add {flag_of(others[0])}, or leave it out.",
            )


if TYPE_CHECKING:
    from fragdoctor.estimation.families import UncoveredModelError
    from fragdoctor.estimation.request import Request
    from fragdoctor.model.gpus import GpuModel
    from fragdoctor.model.memory_estimate import Estimate
    from fragdoctor.model.recipe import RecipeUse
    from fragdoctor.model.rehearsal import RehearsalResult, RehearsalSweep
    from fragdoctor.rehearsal.step_script import Build, StepOptions
    from fragdoctor.report.base import RenderOptions


def estimate(chosen: EstimateOptions, given: frozenset[str]) -> int:
    """Estimate the memory of a run and print whether it fits.

    ``given`` names the options that stand on the command line: a default, or a value of the
    configuration, is nothing to refuse.
    """
    if route_of(chosen) not in _FORMULAS:
        refuse_unused(route_of(chosen), given)
    asked, (chosen, files) = chosen, with_recipes(chosen, given, _FORMULA_PARAMETERS)
    route = route_of(chosen)
    refuse_unused(route, given - {"inputs"} if files else given)
    console.answer(chosen, asked.inputs, lambda look: _answer(route, chosen, look, given, files))
    return OK


def _answer(
    route: Route,
    chosen: EstimateOptions,
    look: RenderOptions,
    given: frozenset[str],
    files: RecipeUse | None,
) -> str:
    """Return the report of a route; its modules are loaded only when it is taken."""
    if route is Route.GPUS:
        from fragdoctor.model.gpus import known_gpus
        from fragdoctor.report.base import render

        return render("gpus", chosen.output_format.value, known_gpus(), look)
    if route is Route.MODELS:
        from fragdoctor.estimation.model_shapes import known_models
        from fragdoctor.report.base import render

        return render("models", chosen.output_format.value, known_models(), look)
    if route in (Route.MODEL, Route.MODEL_INFERENCE):
        return _of_own_model(chosen, look, given)
    if route in (Route.LIBRARY, Route.LIBRARY_INFERENCE):
        return _of_library(chosen, look, given)
    from fragdoctor.estimation.families import UncoveredModelError

    try:
        return _of_formulas(chosen, look, files)
    except UncoveredModelError as refused:
        if files:  # a rehearsal has no place for what was used of them
            raise
        return _of_uncovered(refused, chosen, look, given)


def _of_uncovered(
    refused: UncoveredModelError,
    chosen: EstimateOptions,
    look: RenderOptions,
    given: frozenset[str],
) -> str:
    """Return the rehearsal of a model that no formula covers, where its library can be imported.

    Raises:
        UncoveredModelError: it cannot be rehearsed either; its hint says why.
    """
    route = Route.LIBRARY_INFERENCE if chosen.inference else Route.LIBRARY
    try:
        refuse_unused(route, given)
        return _of_library(chosen, look, given)
    except ConfigError as error:
        refused.hint = f"{error.message} {error.hint}".strip()
        raise refused from error


def _of_formulas(chosen: EstimateOptions, look: RenderOptions, files: RecipeUse | None) -> str:
    """Return the report on a model whose shape is known or assumed.

    Raises:
        ConfigError: options that exclude each other.
        InputError: an input is no model.
    """
    from fragdoctor.estimation.judge import estimate_of
    from fragdoctor.model.gpus import gpu_of
    from fragdoctor.report.base import render

    if chosen.fsdp and chosen.zero is not None:
        raise ConfigError("--fsdp and --zero exclude each other.", hint="FSDP is stage 3.")
    gpus = [gpu_of(name) for name in dict.fromkeys(chosen.gpu or ())]
    with console.Progress("Estimating"):
        found = estimate_of(_request(chosen, gpus), gpus)
    if chosen.gpu_memory_utilization:
        found = _with_server(found, chosen, gpus)
    found = replace(found, recipe=files)
    return render("estimate", chosen.output_format.value, found, look, explain=chosen.explain)


def _request(chosen: EstimateOptions, gpus: Sequence[GpuModel]) -> Request:
    from fragdoctor.estimation.model_shapes import Overrides
    from fragdoctor.estimation.request import Request

    return Request(
        inputs=tuple(chosen.inputs or ()),
        params=chosen.params or "",
        dtype=chosen.dtype or "",
        optimizer=chosen.optimizer,
        master_weights=chosen.master_weights,
        grad_dtype=chosen.grad_dtype or "",
        batch=_one_batch(chosen.batch or "1"),
        seq=chosen.seq or 0,
        attention=chosen.attention.value,
        checkpointing=chosen.checkpointing.strip().lower(),
        lora_rank=chosen.lora or 0,
        lora_targets=chosen.lora_targets,
        zero_stage=3 if chosen.fsdp else chosen.zero or 0,
        is_fsdp=chosen.fsdp,
        world_size=chosen.world_size,
        grad_accumulation=chosen.grad_accumulation,
        inference=chosen.inference,
        new_tokens=chosen.new_tokens,
        kv_dtype=chosen.kv_dtype or "",
        cache="paged" if chosen.gpu_memory_utilization else chosen.cache.value,
        tensor_parallel=chosen.tensor_parallel,
        context_parallel=chosen.context_parallel,
        pipeline_parallel=chosen.pipeline_parallel,
        expert_parallel=chosen.expert_parallel,
        sequence_parallel=chosen.sequence_parallel,
        offload=chosen.offload or "",
        dora=chosen.dora,
        keeps_logits=chosen.keep_logits,
        logits=chosen.logits.value if chosen.logits else "",
        compute=gpus[0].compute if gpus else "",
        overrides=Overrides(
            vocab=chosen.vocab,
            n_layers=chosen.layers,
            hidden=chosen.hidden,
            n_heads=chosen.heads,
            n_kv_heads=chosen.kv_heads,
            ffn=chosen.ffn,
            positions=chosen.positions,
            family=chosen.family.value,
            dropout=chosen.dropout,
        ),
    )


def _one_batch(text: str) -> int:
    """Return a batch size for formulas, which say by themselves which is the largest.

    Raises:
        ConfigError: it is none, or several.
    """
    from fragdoctor.rehearsal.sweep import parse_batches

    sizes = parse_batches(text).sizes
    if len(sizes) > 1:
        raise ConfigError(
            "Formulas take one --batch, and say with --gpu which is the largest.",
            hint="Lists and searches of batch sizes belong to --model MODULE:FACTORY.",
        )
    return sizes[0]


def _with_server(found: Estimate, chosen: EstimateOptions, gpus: Sequence[GpuModel]) -> Estimate:
    """Return an estimate with what a server holds on the first GPU.

    Raises:
        ConfigError: no GPU is named.
    """
    from fragdoctor.estimation.serving import serving_of

    if not gpus:
        raise ConfigError(
            "A server's cache depends on the GPU, and none is named.", hint="Add --gpu h100."
        )
    serving = serving_of(
        found.workload,
        gpus[0],
        utilization=chosen.gpu_memory_utilization,
        max_seqs=chosen.max_num_seqs,
        max_batched_tokens=chosen.max_num_batched_tokens,
    )
    return replace(found, serving=serving)


def _of_own_model(chosen: EstimateOptions, look: RenderOptions, given: frozenset[str]) -> str:
    """Return the rehearsal of steps of the user's own model.

    Of the options given on the command line those are refused that the factory decides by itself.

    Raises:
        ConfigError: the model cannot be rehearsed.
    """
    from fragdoctor.rehearsal.step_script import own_model, parse_shape, step_options

    spec = chosen.model or ""
    build = own_model(spec)
    options = step_options(
        chosen.dtype or "",
        chosen.optimizer,
        input_shape=parse_shape(chosen.input_shape or ""),
        input_dtype=chosen.input_dtype,
        loss=chosen.loss,
        grad_accumulation=chosen.grad_accumulation,
        inference=chosen.inference,
        given=tuple(sorted(given)),
    )
    return _rehearsed(spec, build, options, chosen, look)


def _of_library(chosen: EstimateOptions, look: RenderOptions, given: frozenset[str]) -> str:
    """Return the rehearsal of steps of a model by its own class in Transformers or Diffusers.

    Raises:
        ConfigError: options that exclude each other, or a model that cannot be rehearsed.
        InputError: the input is no configuration.
    """
    from fragdoctor.estimation.model_shapes import configuration_of
    from fragdoctor.rehearsal.step_script import library_model, step_options

    inputs = chosen.inputs or []
    configuration = configuration_of(inputs)
    build = library_model(
        configuration,
        seq=chosen.seq or 0,
        attention=chosen.attention.value,
        checkpointing=chosen.checkpointing.strip().lower(),
        lora_rank=chosen.lora or 0,
        lora_targets=chosen.lora_targets,
        inference=chosen.inference,
    )
    options = step_options(
        chosen.dtype or ("bf16" if chosen.inference else "fp32"),
        chosen.optimizer,
        grad_accumulation=chosen.grad_accumulation,
        inference=chosen.inference,
        given=tuple(sorted(given)),
    )
    return _rehearsed(inputs[0], build, options, chosen, look)


def _rehearsed(
    title: str, build: Build, options: StepOptions, chosen: EstimateOptions, look: RenderOptions
) -> str:
    from fragdoctor.cli.rehearse import Asked, diagnosed, swept
    from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
    from fragdoctor.rehearsal.programs import pythons
    from fragdoctor.rehearsal.step_script import step_program
    from fragdoctor.rehearsal.sweep import parse_batches
    from fragdoctor.report.base import render

    names: list[str | None] = [*dict.fromkeys(chosen.gpu or ())]
    gpus = [rehearsed_gpu(name, None, is_unlimited=name is None) for name in names or [None]]
    base = RehearsalConditions(gpu=gpus[0], n_steps=chosen.steps)
    batches = None if chosen.batch is None else parse_batches(chosen.batch)
    with TemporaryDirectory(prefix="fragdoctor-") as folder:
        program = step_program(
            title, build, options, pythons(None), Path(folder), has_batch=batches is not None
        )
        asked = Asked(program, base, gpus, [None], batches)
        found: RehearsalResult | RehearsalSweep
        found = diagnosed(asked) if asked.is_one else swept(asked)
        return render("rehearse", chosen.output_format.value, found, look)


def _command(context_of_command: typer.Context, **values: Any) -> int:
    sources = {n: context_of_command.get_parameter_source(n) for n in context_of_command.params}
    given = frozenset(n for n, s in sources.items() if s and s.name == "COMMANDLINE")
    return estimate(EstimateOptions(**values), given)


_CONTEXT: Final = Parameter("context_of_command", Parameter.KEYWORD_ONLY, annotation=typer.Context)
command = command_with([*parameters_of(EstimateOptions), _CONTEXT], _command)
