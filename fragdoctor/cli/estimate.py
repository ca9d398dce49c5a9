"""``fragdoctor estimate``: whether it will fit, and what would make it fit."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from inspect import Parameter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, cast

import typer
from msgspec.structs import replace

from fragdoctor.cli import console
from fragdoctor.cli.estimate_options import (
    FORMULAS,
    PARAMETERS,
    EstimateOptions,
    Route,
    refuse_unused,
    route_of,
)
from fragdoctor.cli.estimate_recipes import with_recipes
from fragdoctor.cli.exit import OK
from fragdoctor.cli.options import command_with, parameters_of
from fragdoctor.errors import ConfigError, FragdoctorError
from fragdoctor.units import format_size

if TYPE_CHECKING:
    from fragdoctor.estimation.config_json import UncoveredModelError
    from fragdoctor.model.gpus import GpuModel
    from fragdoctor.model.memory_estimate import Estimate
    from fragdoctor.model.recipe import RecipeUse
    from fragdoctor.model.rehearsal import RehearsalResult, RehearsalSweep
    from fragdoctor.model.workload import Workload


def estimate(chosen: EstimateOptions, given: frozenset[str]) -> int:
    """Estimate the memory of a run and print whether it fits.

    ``given`` names the options that are on the command line: only those are refused, never a
    default or a value from the configuration.
    """
    if route_of(chosen) not in FORMULAS:
        refuse_unused(route_of(chosen), given, inference=chosen.inference)
    asked, (chosen, files) = chosen, with_recipes(chosen, given)
    route = route_of(chosen)
    refuse_unused(route, given - {"inputs"} if files else given, inference=chosen.inference)
    look = console.prepared(chosen, asked.inputs or ())
    view, found = _answer(route, chosen, given, files)
    more = {"explain": chosen.explain} if view == "estimate" else {}
    console.give(chosen, view, found, look, **more)
    return OK


def _answer(
    route: Route, chosen: EstimateOptions, given: frozenset[str], files: RecipeUse | None
) -> tuple[str, Any]:
    """Return the kind of report that answers, and its content; loads modules of this route only."""
    if route is Route.GPUS:
        from fragdoctor.model.gpus import GPUS

        return "gpus", tuple(GPUS.values())
    if route is Route.MODELS:
        from fragdoctor.estimation.model_shapes import known_models

        return "models", known_models()
    if route is Route.MODEL:
        from fragdoctor.rehearsal.step_script import own_model

        spec = chosen.model or ""
        return "rehearse", _rehearsal(spec, own_model(spec), chosen.dtype or "", chosen)
    if route is Route.LIBRARY:
        return "rehearse", _library_rehearsal(chosen)
    from fragdoctor.estimation.config_json import UncoveredModelError

    try:
        return "estimate", _of_formulas(chosen, files)
    except UncoveredModelError as refused:
        from fragdoctor.model.gpus import gpu_of

        for gpu in map(gpu_of, dict.fromkeys(chosen.gpu or ())):
            refused.message += f" {gpu.name} has {format_size(gpu.usable_bytes)} usable."
        if files:  # a rehearsal could not use what the files say
            raise
        return "rehearse", _uncovered_rehearsal(refused, chosen, given)


def _uncovered_rehearsal(
    refused: UncoveredModelError, chosen: EstimateOptions, given: frozenset[str]
) -> RehearsalResult | RehearsalSweep:
    """Return the rehearsal of a model that no formula covers, if its library can be imported.

    Raises:
        UncoveredModelError: the model cannot be rehearsed either; the hint says why.
    """
    try:
        refuse_unused(Route.LIBRARY, given, inference=chosen.inference)
        return _library_rehearsal(chosen)
    except ConfigError as error:
        refused.hint = f"{error.message} {error.hint}".strip()
        raise refused from error


def _of_formulas(chosen: EstimateOptions, files: RecipeUse | None) -> Estimate:
    """Return the estimate of a model with a known or assumed shape.

    Raises:
        ConfigError: options exclude each other.
        InputError: an input is not a model.
    """
    from fragdoctor.estimation.judge import judged
    from fragdoctor.model.gpus import gpu_of

    if chosen.fsdp and chosen.zero is not None:
        raise ConfigError("--fsdp and --zero exclude each other.", hint="FSDP is stage 3.")
    gpus = [gpu_of(name) for name in dict.fromkeys(chosen.gpu or ())]
    if chosen.plan and not gpus:
        raise ConfigError(
            "--plan asks how many GPUs of a kind.", hint="Add for example --gpu h100."
        )
    with console.Progress("Estimating"):
        found = judged(_workload(chosen, gpus), gpus)
        if chosen.plan:
            from fragdoctor.estimation.plans import plans_of

            price = _price(chosen.price, gpus[0]) if chosen.price else None
            plans = plans_of(found.workload, gpus[0], price, N_VERIFIED * chosen.verify)
            found = replace(found, plans=plans)
    if chosen.verify:
        found = _with_rehearsals(found, chosen)
    if chosen.gpu_memory_utilization:
        if not gpus:
            raise ConfigError(
                "A server's cache depends on the GPU, but none is named.", hint="Add --gpu h100."
            )
        from fragdoctor.estimation.serving import serving_of

        serving = serving_of(
            found.workload,
            gpus[0],
            utilization=chosen.gpu_memory_utilization,
            max_seqs=chosen.max_num_seqs,
            max_batched_tokens=chosen.max_num_batched_tokens,
        )
        found = replace(found, serving=serving)
    return replace(found, recipe=files)


def _workload(chosen: EstimateOptions, gpus: Sequence[GpuModel]) -> Workload:
    from fragdoctor.estimation.model_shapes import GivenSizes
    from fragdoctor.estimation.request import OPTIONS, workload_of

    sizes = GivenSizes(**_shared(chosen, set(GivenSizes.__struct_fields__)))
    options = _shared(chosen, OPTIONS) | {
        "batch": _one_batch(str(chosen.batch or 1)),
        "checkpointing": chosen.checkpointing.strip().lower(),
        "lora_rank": chosen.lora or 0,
        "zero_stage": 3 if chosen.fsdp else chosen.zero or 0,
        "is_fsdp": chosen.fsdp,
        "cache": "paged" if chosen.gpu_memory_utilization else chosen.cache,
        "keeps_logits": chosen.keep_logits,
        "loss": chosen.logits,
        "compute": gpus[0].compute if gpus else "",
    }
    return workload_of(chosen.inputs or (), chosen.params or "", sizes, **options)


def _price(given: str, gpu: GpuModel) -> float:
    """Return the price of the planned GPU in dollars per hour.

    Raises:
        ConfigError: the text is not a price, or is the price of another GPU.
    """
    from fragdoctor.model.gpus import gpu_of

    name, _, price = given.partition("=")
    try:
        dollars = float(price)
    except ValueError:
        raise ConfigError(
            f"--price {given} is not a price.", hint="Write for example --price h100=2.5."
        ) from None
    if gpu_of(name).name != gpu.name:
        raise ConfigError(
            f"--price {given} is for a different GPU than the planned one, --gpu {gpu.name}.",
            hint=f"Write --price {gpu.name}=DOLLARS, or plan for the other GPU.",
        )
    return dollars


def _shared(chosen: EstimateOptions, names: AbstractSet[str]) -> dict[str, Any]:
    """Return the values of the options with these names."""
    values = {name: getattr(chosen, name) for name in names & {*PARAMETERS}}
    return {name: value for name, value in values.items() if value is not None}


def _one_batch(text: str) -> int:
    """Return a single batch size: formulas find the largest batch by themselves.

    Raises:
        ConfigError: the text is not a batch size, or holds several.
    """
    from fragdoctor.rehearsal.sweep import parse_batches

    sizes = parse_batches(text).sizes
    if len(sizes) > 1:
        raise ConfigError(
            "Formulas take one --batch, and find the largest with --gpu.",
            hint="Lists and searches of batch sizes need --model MODULE:FACTORY.",
        )
    return sizes[0]


def _library_rehearsal(chosen: EstimateOptions) -> RehearsalResult | RehearsalSweep:
    """Rehearse some steps of a model with its class in Transformers or Diffusers.

    Raises:
        ConfigError: options exclude each other, or the model cannot be rehearsed.
        InputError: the input is not a configuration.
    """
    from fragdoctor.estimation.model_shapes import configuration_of
    from fragdoctor.rehearsal.step_script import library_model

    if chosen.fsdp != (chosen.world_size > 1):
        raise ConfigError(
            "Of several GPUs, only one that shares all states by FSDP can be rehearsed.",
            hint="Add for example --fsdp --world-size 8.",
        )
    inputs = chosen.inputs or []
    configuration = configuration_of(inputs)
    build = library_model(
        configuration,
        seq=chosen.seq or 0,
        attention=str(chosen.attention),
        checkpointing=chosen.checkpointing.strip().lower(),
        lora_rank=chosen.lora or 0,
        lora_targets=chosen.lora_targets,
        inference=chosen.inference,
    )
    dtype = chosen.dtype or ("bf16" if chosen.inference else "fp32")
    return _rehearsal(inputs[0], build, dtype, chosen)


N_VERIFIED: Final = 2


def _with_rehearsals(found: Estimate, chosen: EstimateOptions) -> Estimate:
    """Return an estimate with one rank rehearsed of the first plans that can be.

    Raises:
        ConfigError: no plan can be rehearsed.
    """
    from fragdoctor.estimation.plans import rehearsed_with
    from fragdoctor.model.memory_estimate import PlanRehearsal

    plans = list(found.plans or ())
    ways = [(i, way) for i, plan in enumerate(plans) if (way := rehearsed_with(plan))]
    if not ways:
        raise ConfigError(
            "None of the plans can be rehearsed.",
            hint="Leave --verify out: only one GPU, or one that shares all states, can be.",
        )
    for i, way in ways[:N_VERIFIED]:
        world = int(way["world-size"])
        asked = dataclasses.replace(
            chosen,
            gpu=(chosen.gpu or [])[:1],
            seq=found.workload.seq,
            dtype=found.workload.dtype,
            fsdp=world > 1,
            world_size=world,
            checkpointing=way.get("checkpointing", "none"),
            optimizer=way.get("optimizer", chosen.optimizer),
        )
        try:
            one = cast("RehearsalResult", _library_rehearsal(asked)).rehearsal
            rehearsal = PlanRehearsal(one.fits, one.peak_allocated_bytes)
        except FragdoctorError as refused:
            rehearsal = PlanRehearsal(None, reason=refused.message)
        plans[i] = replace(plans[i], rehearsal=rehearsal)
    return replace(found, plans=tuple(plans))


def _rehearsal(
    title: str, build: str, dtype: str, chosen: EstimateOptions
) -> RehearsalResult | RehearsalSweep:
    """Rehearse some steps of the model that ``build`` makes, on each GPU and at each batch."""
    from fragdoctor.cli.rehearse import diagnosed, swept
    from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
    from fragdoctor.rehearsal.programs import pythons
    from fragdoctor.rehearsal.step_script import step_options, step_program
    from fragdoctor.rehearsal.sweep import Sweep, parse_batches

    options = step_options(
        dtype,
        chosen.optimizer,
        grad_accumulation=chosen.grad_accumulation,
        inference=chosen.inference,
    )
    names: list[str | None] = [*dict.fromkeys(chosen.gpu or ())]
    gpus = [rehearsed_gpu(name, None, is_unlimited=name is None) for name in names or [None]]
    base = RehearsalConditions(gpu=gpus[0], n_steps=chosen.steps)
    if chosen.fsdp:
        n = chosen.world_size
        shard = ("fully-shard:1",)  # --batch is per GPU
        base = replace(base, rank=0, world_size=n, n_devices=min(n, 8), treatments=shard)
    batches = None if chosen.batch is None else parse_batches(chosen.batch)
    with TemporaryDirectory(prefix="fragdoctor-") as folder:
        program = step_program(
            title, build, options, pythons(None), Path(folder), has_batch=batches is not None
        )
        asked = Sweep(program, base, gpus, [None], batches)
        return diagnosed(asked) if asked.is_one else swept(asked)


_HUB_PAGE: Final = re.compile(
    r"https?://(?:www\.)?huggingface\.co/([\w.-]{1,96}/[\w.-]{1,96})(?:[/?#].*)?", re.ASCII
)


def _command(context_of_command: typer.Context, **values: Any) -> int:
    sources = {n: context_of_command.get_parameter_source(n) for n in context_of_command.params}
    given = frozenset(n for n, s in sources.items() if s and s.name == "COMMANDLINE")
    values["inputs"] = [_HUB_PAGE.sub(r"\1", name) for name in values["inputs"] or ()]
    return estimate(EstimateOptions(**values), given)


_CONTEXT: Final = Parameter("context_of_command", Parameter.KEYWORD_ONLY, annotation=typer.Context)
command = command_with([*parameters_of(EstimateOptions), _CONTEXT], _command)
