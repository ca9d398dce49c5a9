"""Finds the fewest GPUs that a run needs, and the ways to lay it out on them, by time per token.

The time is a roofline estimate for comparing layouts with one another, not a promise of speed:

* compute: 6 operations per parameter and token, 8 if layers are computed twice, 4 if the base is
  frozen (Kaplan et al. 2020, https://arxiv.org/abs/2001.08361; Chen et al. 2016), and 6 for each
  layer, unit of width and token that a token looks back to; at the card's peak;
* between replicas: gradients out and back, plus parameters again at stage 3 (Rajbhandari et al.
  2020, ZeRO, section 7); compute hides traffic that takes no longer than it does;
* within a layer: the residual stream out and back four times for tensor parallelism, six times
  with recomputation (Narayanan et al. 2021, section 3.2); keys and values for context parallelism;
  each token to its experts and back, twice (GShard);
* between stages: the residual stream, and a bubble of stages minus one, divided by the number of
  micro batches (Narayanan et al. 2021, section 2.2.1);
* to the host and back: gradients and weights (ZeRO-Offload).

Groups of up to 8 GPUs use the card's own links, larger groups a network of 400 Gbit/s per GPU.
A server's step reads the weights and the cache once for all its sequences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice, product
from math import ceil
from typing import Final

from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.formula import formula_needs, stages_of
from fragdoctor.estimation.kv_cache import cache_bytes_per_sequence
from fragdoctor.estimation.measures import FUSED, options_of
from fragdoctor.estimation.serving import UTILIZATION, serving_of
from fragdoctor.estimation.states import communication_elements, local_part, n_gpus, states_of
from fragdoctor.estimation.training_choices import precision_of
from fragdoctor.model.gpu_table import SPEEDS, Speeds
from fragdoctor.model.gpus import GpuModel
from fragdoctor.model.memory_estimate import MOST_GPUS, FitState, Plan, state_on
from fragdoctor.model.workload import Role, Workload

HOST: Final = 8
"""GPUs per host, as in DGX and HGX machines."""
NETWORK: Final = 50e9
HOST_LINK: Final = 32e9
"""Both in bytes per second: 400 Gbit/s per GPU; one direction of 16 lanes of PCIe 4."""
N_PLANS: Final = 5


_REHEARSED: Final = frozenset({"checkpointing", "optimizer", "grad-accumulation", "world-size"})
_OPTION: Final = re.compile(r"--([a-z-]{1,40})(?: ([a-z0-9][a-z0-9.-]{0,40}))?")


def rehearsed_with(plan: Plan) -> dict[str, str] | None:
    """Return the options of a plan that ``--rehearse`` can run: one GPU, or all states shared."""
    options = {"world-size": "1", **dict(_OPTION.findall(plan.option))}
    shares = options.pop("zero", "") == "3" or options["world-size"] == "1"
    return options if shares and not plan.sequences and options.keys() <= _REHEARSED else None


def plans_of(
    workload: Workload, gpu: GpuModel, price: float | None, n_rehearsed: int = 0
) -> Sequence[Plan]:
    """Return the ways to run a workload on the fewest GPUs that surely hold it, and on twice those.

    The fastest are listed, and slower ones until ``n_rehearsed`` of them can be rehearsed.

    Raises:
        ConfigError: the peak speed of the card is not known.
    """
    speeds = SPEEDS.get(gpu.name)
    if speeds is None:
        raise ConfigError(
            f"The speed of {gpu.name} is not known, so plans cannot be compared.",
            hint="Name a card such as h100, a100-80g, l40s or rtx-4090.",
        )
    found = _listed(_fewest(workload, gpu, speeds, price), n_rehearsed)
    if not workload.inference and not workload.lora_rank and "optimizer" not in workload.offload:
        away = replace(workload, offload=(*workload.offload, "optimizer"))
        on_host = _fewest(away, gpu, speeds, price, most=found[0].n_gpus // 2 if found else None)
        found += on_host[:1]
    return tuple(found)


def _fewest(
    workload: Workload, gpu: GpuModel, speeds: Speeds, price: float | None, most: int | None = None
) -> list[Plan]:
    """Return the ways on the fewest GPUs that are enough, and on twice as many, fastest first."""
    ways_of = _serving_ways if workload.inference else _training_ways
    found: list[Plan] = []
    for n in _degrees(MOST_GPUS if most is None else most):
        plans = (_plan(way, gpu, speeds, price) for way in ways_of(workload, n, gpu))
        found += sorted((plan for plan in plans if plan), key=lambda p: p.seconds_per_token)
        if found and n > found[0].n_gpus:
            break
    return found


def _listed(plans: Sequence[Plan], n_rehearsed: int) -> list[Plan]:
    """Return the fastest plans on each number of GPUs, and as many that can be rehearsed."""
    found: list[Plan] = []
    for n in dict.fromkeys(plan.n_gpus for plan in plans):
        ways = [plan for plan in plans if plan.n_gpus == n]
        found += ways[:N_PLANS]
        missing = n_rehearsed - sum(rehearsed_with(plan) is not None for plan in found)
        slower = (plan for plan in ways[N_PLANS:] if rehearsed_with(plan))
        found += islice(slower, max(0, missing))
    return found


def _degrees(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _serving_ways(workload: Workload, n: int, _gpu: GpuModel) -> Iterator[Workload]:
    """Yield each combination of replicas and tensor parallelism."""
    for degree in _degrees(n):
        if workload.shape.n_heads % degree == 0:
            yield replace(workload, tensor_parallel=degree, world_size=n // degree)


def _training_ways(workload: Workload, n: int, gpu: GpuModel) -> Iterator[Workload]:
    shape = workload.shape
    stages = (0, 1, 2, 3) if not workload.lora_rank else (0, 3)
    optimizers = [workload.optimizer]
    if workload.optimizer == "adamw":
        optimizers.append(FUSED)
    for tensor, pipeline, context, expert in product(
        _degrees(min(n, HOST)), _degrees(min(n, shape.n_layers // 2)),
        _degrees(max(1, workload.seq // LONG_TOKENS)), _degrees(max(1, shape.n_experts)),
    ):  # fmt: skip
        rest, left = divmod(n, tensor * pipeline * context)
        if left or not rest or shape.n_heads % tensor or (expert > 1 and rest % expert):
            continue
        layout = replace(
            workload, tensor_parallel=tensor, pipeline_parallel=pipeline,
            context_parallel=context, expert_parallel=expert, world_size=rest,
            sequence_parallel=tensor > 1,
            # Four micro batches per stage keep a pipeline busy.
            grad_accumulation=max(workload.grad_accumulation, 4 * pipeline if pipeline > 1 else 1),
        )  # fmt: skip
        smallest = replace(
            layout, zero_stage=3 if rest > 1 else 0, checkpointing="full",
            optimizer=optimizers[-1],
        )  # fmt: skip
        if not _fits(smallest, gpu):
            continue
        kinds = product(
            stages if rest > 1 else (0,), dict.fromkeys((workload.checkpointing, "full"))
        )
        for stage, checkpointing in kinds:
            way = replace(
                layout, zero_stage=stage, checkpointing=checkpointing,
                is_fsdp=workload.is_fsdp and stage == 3,
            )  # fmt: skip
            if stage == 2 and pipeline > 1:
                continue  # it scatters gradients that a pipeline sums over its micro batches
            ways = (replace(way, optimizer=optimizer) for optimizer in optimizers)
            yield from islice((one for one in ways if _fits(one, gpu)), 1)


LONG_TOKENS: Final = 16_384
"""A split sequence keeps at least this many tokens per GPU; fewer would leave kernels idle."""


def _fits(way: Workload, gpu: GpuModel) -> bool:
    needs = formula_needs(way)
    return state_on(needs.low_bytes, needs.high_bytes, gpu.usable_bytes) is FitState.FITS


def _plan(way: Workload, gpu: GpuModel, speeds: Speeds, price: float | None) -> Plan | None:
    """Return a way as a plan, or None for a server that has no room for even one sequence."""
    n = n_gpus(way)
    sequences = 0
    if way.inference:
        serving = serving_of(way, gpu, utilization=UTILIZATION)
        sequences = serving.sequences * way.world_size
        if not sequences:
            return None
        compute, traffic = _serving_seconds(way, serving.sequences, speeds)
        low = high = serving.weights_bytes + serving.activations_bytes + serving.bytes_per_sequence
    else:
        compute, traffic = _training_seconds(way, speeds)
        needs = formula_needs(way)
        low, high = needs.low_bytes, needs.high_bytes
    seconds = compute + traffic
    hourly = None if price is None else n * price
    return Plan(
        n_gpus=n,
        layout=_layout(way),
        option=_option(way),
        needs_low_bytes=low,
        needs_high_bytes=high,
        ranks={one.stage: formula_needs(one).high_bytes for one in stages_of(way) if one.stage},
        seconds_per_token=seconds,
        communication_share=traffic / seconds,
        sequences=sequences,
        price_per_hour=hourly,
        price_per_million_tokens=None if hourly is None else hourly * seconds * 1e6 / 3600,
    )


def _link(degree: int, inside: int, speeds: Speeds) -> float:
    """Return the bytes per second within a group; each member stands for ``inside`` GPUs."""
    return speeds.link_bytes / 2 if degree * inside <= HOST else NETWORK


def _training_seconds(way: Workload, speeds: Speeds) -> tuple[float, float]:
    """Return the seconds of compute and of communication per token of the whole run."""
    shape, precision = way.shape, precision_of(way.dtype)
    tokens = way.batch * way.seq * way.grad_accumulation  # of one replica
    active = sum(
        g.n_total * (max(1, shape.experts_per_token) / max(1, shape.n_experts)
                              if g.role is Role.EXPERT else 1)
        for g in shape.parameters if g.role is not Role.EMBEDDING
    )  # fmt: skip
    each = (4 if way.lora_rank else 6) + (2 if way.checkpointing != "none" else 0)
    looked_back = 6 * shape.n_layers * shape.n_heads * shape.head_dim * way.seq / 2
    n = way.tensor_parallel * way.context_parallel * way.pipeline_parallel
    compute = tokens * (each * active + each / 6 * looked_back) / (n * speeds.operations)

    local = local_part(way)
    trained = [g for g in states_of(local) if g.is_trained]
    held = local.shape.n_parameters * precision.compute
    world, layers = way.world_size, local.shape.n_layers
    traffic = 0.0
    if world > 1:
        gradients = sum(g.gradient_bytes * g.count for g in trained)
        passes = way.grad_accumulation if way.zero_stage >= 2 else 1
        moved: float = 2 * gradients * passes
        if way.zero_stage == 3:  # parameters gathered in both passes, and gradients scattered
            moved = passes * (2 * held + gradients)
        between = moved / _link(world, n, speeds)
        traffic += max(0.0, between - compute)  # the rest is hidden behind the layers' work
    stream = way.batch * ceil(way.seq / way.context_parallel) * shape.hidden * precision.compute
    times = (6 if way.checkpointing != "none" else 4) * way.grad_accumulation * layers
    if way.tensor_parallel > 1:
        traffic += 2 * times * stream / _link(way.tensor_parallel, 1, speeds)
    rest = replace(way, tensor_parallel=1, pipeline_parallel=1)
    others = communication_elements(rest) * precision.compute  # of context and of experts
    traffic += times / 2 * others / _link(way.context_parallel * way.expert_parallel,
                                          way.tensor_parallel, speeds)  # fmt: skip
    if way.pipeline_parallel > 1:
        traffic += 2 * way.grad_accumulation * stream / NETWORK
        traffic += (compute + traffic) * (way.pipeline_parallel - 1) / way.grad_accumulation
    if "optimizer" in way.offload:
        share = world if way.zero_stage else 1
        traffic += 2 * sum(g.gradient_bytes * g.count for g in trained) / share / HOST_LINK
    return compute / (tokens * world), traffic / (tokens * world)


def _serving_seconds(way: Workload, sequences: int, speeds: Speeds) -> tuple[float, float]:
    """Return the seconds of reading or compute, and of communication, per token of all replicas."""
    local, precision = local_part(way), precision_of(way.dtype)
    weights = sum(g.stored_bytes * g.count for g in states_of(local))
    read = weights + sequences * cache_bytes_per_sequence(replace(local, cache="paged"))
    computed = 2 * sequences * way.shape.n_parameters / way.tensor_parallel / speeds.operations
    stream = sequences * way.shape.hidden * precision.compute
    moved = 4 * local.shape.n_layers * stream if way.tensor_parallel > 1 else 0.0
    n_tokens = sequences * way.world_size
    return (
        max(read / speeds.memory_bytes, computed) / n_tokens,
        moved / _link(way.tensor_parallel, 1, speeds) / n_tokens,
    )


def _layout(way: Workload) -> str:
    sharing = "replicas" if not way.zero_stage else f"ZeRO-{way.zero_stage}"
    parts = [
        f"{sharing} {way.world_size}" if way.world_size > 1 else "",
        *(f"{kind} {degree}" for kind, degree in way.degrees.items()),
        f"checkpointing {way.checkpointing}" if way.checkpointing != "none" else "",
        "fused AdamW" if way.optimizer == FUSED else "",
        f"{' and '.join(way.offload)} on the host" if way.offload else "",
    ]  # fmt: skip
    return ", ".join(part for part in parts if part) or "one GPU"


_LAYOUT: Final = (
    "zero_stage", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel",
    "sequence_parallel", "world_size", "checkpointing", "grad_accumulation", "optimizer", "offload",
)  # fmt: skip


def _option(way: Workload) -> str:
    """Return the command line options for a way; a server's replicas are all alike."""
    names = _LAYOUT[:5] if way.inference else _LAYOUT
    options = options_of({name: getattr(way, name) for name in names})
    return f"{options} --gpu-memory-utilization {UTILIZATION}".strip() if way.inference else options
