"""The formula route: a footprint from a model's shape, each row with its formula and source."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any, Final

from fragdoctor.estimation.calibration import published_range
from fragdoctor.estimation.inference import cache_parts, kv_element_bytes, play_inference
from fragdoctor.estimation.layer_operations import KORTHIKANTI, layer_ops
from fragdoctor.estimation.operation_memory import attention_used, term_bytes, units
from fragdoctor.estimation.states import (
    WORKSPACE_SOURCE,
    GroupState,
    States,
    communication_elements,
    local_part,
    n_gpus,
    states_of,
)
from fragdoctor.estimation.step import StepPlayer, segment_layers
from fragdoctor.estimation.tape import (
    Needs,
    Tape,
    most_of_each,
    needs_of,
    phases_of,
    reserved_of,
    served_bytes,
)
from fragdoctor.estimation.training_choices import (
    AUTOCAST_DOC,
    ZERO,
    OptimizerSpec,
    optimizer_of,
    precision_of,
)
from fragdoctor.model.gpus import generation_of
from fragdoctor.model.memory_estimate import (
    Doubt,
    Footprint,
    Item,
    KeptTensor,
    Sureness,
)
from fragdoctor.model.workload import Attention, FsdpKind, Role, Workload
from fragdoctor.units import MIB, format_count


def layer_terms(workload: Workload) -> dict[str, float]:
    """Return bytes kept for each element of each unit, in one layer."""
    total: defaultdict[str, float] = defaultdict(float)
    precision = precision_of(workload.dtype)
    ops = layer_ops(workload, precision)
    for op in ops:
        for term in op.saved:
            total[term.unit] += term.bytes_per
    return {unit: total[unit] for unit in units(workload) if total.get(unit)}


def kept_tensors(workload: Workload) -> list[KeptTensor]:
    """Return what each operation of a layer keeps, for ``--explain``."""
    shape = workload.shape
    if not shape.has_layers or workload.seq <= 0 or workload.inference:
        return []
    sizes = units(workload)
    return [
        KeptTensor(op.name, t.label, f"{t.unit} x {t.bytes_per:g} B", term_bytes(t, sizes))
        for op in layer_ops(workload, precision_of(workload.dtype))
        for t in op.saved
    ]


def activation_formula(workload: Workload) -> tuple[str, str]:
    """Return the activations' formula in symbols and in numbers."""
    if not workload.shape.has_layers or workload.seq <= 0:
        return "", ""
    layer = " + ".join(f"{unit} x {each:g}" for unit, each in layer_terms(workload).items())
    n_layers, segment = workload.shape.n_layers, segment_layers(workload)
    values = {unit: format_count(n) for unit, n in units(workload).items()}
    if not segment:
        return _both(f"L x ({layer}) B", values | {"L": str(n_layers)})
    residual = precision_of(workload.dtype).residual
    n_segments = ceil(n_layers / segment)
    return _both(
        f"ceil(L / n) x B*S*H x {residual:g} B + n x ({layer}) B",
        values | {"ceil(L / n)": str(n_segments), "n": str(segment)},
    )


def _both(formula: str, values: Mapping[str, str]) -> tuple[str, str]:
    """Return a formula in symbols, and with their values in their places."""
    symbols = "|".join(map(re.escape, sorted(values, key=len, reverse=True)))
    return formula, re.sub(
        rf"(?<![\w*])(?:{symbols})(?![\w*])", lambda found: values[found[0]], formula
    )


def logits_formula(workload: Workload, most_bytes: int) -> tuple[str, str]:
    """Return the logits' formula; the bytes an element follow from what the loss makes."""
    elements = units(workload)["B*S*V"]
    if not elements:
        return "", ""
    if workload.inference and not workload.keeps_logits:
        return "B x V x 4 B", f"{workload.batch} x {format_count(workload.shape.vocab)} x 4 B"
    each = f"{round(most_bytes / elements, 1):g}"
    return _both(f"B*S*V x {each} B", {"B*S*V": format_count(elements)})


CHECKPOINT_PAPER = "Chen et al. 2016, https://arxiv.org/abs/1604.06174"
FOREACH_SOURCE = "torch.optim, foreach implementation, default on CUDA"
KV_SOURCE = "Pope et al. 2022, https://arxiv.org/abs/2211.05102"
MIXED_PRECISION = "Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740"
DDP_SOURCE = (
    "DistributedDataParallel without gradient_as_bucket_view=True, "
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
)
TRAINER_SOURCE = "PyTorch autograd: one gradient for each parameter, in its dtype"


def formula_footprint(workload: Workload, *, is_whole: bool = True) -> Footprint:
    """Return the memory of a workload whose shape is known."""
    whole, workload = workload, _fullest(workload)
    tape, needs = play(workload, is_whole=is_whole), formula_needs(workload)
    workload = local_part(workload)
    states = states_of(workload)
    most = most_of_each(tape)
    items = [item for item in _items(workload, states, most) if item.n_bytes > 0]
    published_low, published_high = published_range(needs)
    every = states.groups if whole is workload else states_of(whole).groups
    trained = sum(g.n_each * g.count for g in every if g.is_trained)
    return Footprint(
        items=tuple(items),
        phases=tuple(phases_of(tape)),
        reserved_bytes=reserved_of(tape),
        n_parameters=sum(g.n_each * g.count for g in every),
        n_trainable=0 if workload.inference else trained,
        notes=tuple(_notes(whole)),
        layer=tuple(kept_tensors(workload)),
        needs_low_bytes=needs.low_bytes,
        needs_high_bytes=needs.high_bytes,
        published_low_bytes=published_low,
        published_high_bytes=published_high,
        doubts=needs.doubts,
    )


def settled(workload: Workload, footprint: Footprint) -> Footprint:
    """Return a footprint whose upper bound the exact allocator has lowered where it can."""
    workload = _fullest(workload)
    tape, needs = play(workload), formula_needs(workload)
    unsettled = needs_of(tape, workload)
    high = served_bytes(tape, workload, unsettled)
    if high is None or unsettled.high_bytes is None or needs.high_bytes is None:
        return footprint
    spared = unsettled.high_bytes - high
    doubts = tuple(
        replace(d, n_bytes=max(0, d.n_bytes - spared)) if d.id == "allocator" else d
        for d in needs.doubts
    )
    needs = replace(needs, high_bytes=needs.high_bytes - spared, doubts=doubts)
    return replace(
        footprint,
        needs_high_bytes=needs.high_bytes,
        published_high_bytes=published_range(needs)[1],
        doubts=doubts,
    )


NCCL_BYTES: Final = 490 * MIB
"""What a communicator of NCCL takes beside the CUDA context; see ``model.gpu_table``."""


def stages_of(workload: Workload) -> list[Workload]:
    """Return a workload as the stages of its pipeline have it; itself without a pipeline."""
    if workload.pipeline_parallel == 1 or workload.stage or workload.inference:
        return [workload]
    names = ("first", "middle", "last") if workload.pipeline_parallel > 2 else ("first", "last")
    return [replace(workload, stage=name) for name in names]


def _fullest(workload: Workload) -> Workload:
    """Return a workload at the stage of its pipeline that needs the most."""
    stages = stages_of(workload)
    if len(stages) == 1:
        return stages[0]
    return max(stages, key=lambda stage: formula_needs(stage).high_bytes or 0)


def formula_needs(workload: Workload) -> Needs:
    """Return the bounds of a workload's memory, without the rest of its footprint.

    Of a pipeline they are those of the stage that needs the most.
    """
    stages = stages_of(workload)
    if len(stages) > 1:
        return max(map(formula_needs, stages), key=lambda needs: needs.high_bytes or 0)
    needs = _either_attention(workload)
    if n_gpus(workload) == 1 or needs.high_bytes is None:
        return needs
    degrees = (
        workload.world_size, workload.tensor_parallel, workload.context_parallel,
        workload.pipeline_parallel, workload.expert_parallel,
    )  # fmt: skip
    n_bytes = NCCL_BYTES * sum(degree > 1 for degree in degrees)
    more = [Doubt("nccl", "communicators of NCCL, outside of PyTorch", n_bytes)]
    if workload.is_fsdp and workload.lora_rank and workload.fsdp_kind is None:
        more += _doubt_of_fsdp(workload, needs.high_bytes)
    high = needs.high_bytes + sum(doubt.n_bytes for doubt in more)
    return replace(needs, high_bytes=high, doubts=(*needs.doubts, *more))


def _doubt_of_fsdp(workload: Workload, high_bytes: int) -> list[Doubt]:
    """Return what FSDP 1 would take beyond ``fully_shard`` where weights are frozen."""
    firsts = (replace(workload, fsdp_kind=kind) for kind in (FsdpKind.FIRST, FsdpKind.MIXED))
    high = max(_either_attention(first).high_bytes or 0 for first in firsts)
    reason = "what FSDP 1 holds of layers with frozen weights; --fsdp-kind says which it is"
    return [Doubt("frozen_weights", reason, max(0, high - high_bytes))]


def _either_attention(workload: Workload) -> Needs:
    """Return the bounds for both ways in which attention may be computed.

    In fp32 a window that the sequence outgrows takes attention off PyTorch's fallback, and memory
    falls: there the bounds hold for both ways, so that they grow with the sequence.
    """
    needs = needs_of(play(workload, is_whole=False), workload)
    falls_back = attention_used(workload, precision_of(workload.dtype)) is Attention.MATH
    if not (
        falls_back and workload.shape.n_sliding_layers and workload.attention is Attention.SDPA
    ):
        return needs
    fused = needs_of(play(replace(workload, attention=Attention.FLASH), is_whole=False), workload)
    lower, higher = sorted((needs, fused), key=lambda n: n.low_bytes)
    either = Doubt(
        "attention", "whether PyTorch's fallback serves attention, which a window decides",
        max(0, higher.low_bytes - lower.low_bytes),
    )  # fmt: skip
    high = None if needs.high_bytes is None else max(needs.high_bytes, fused.high_bytes or 0)
    return replace(lower, high_bytes=high, doubts=(*higher.doubts, either))


def play(workload: Workload, *, is_whole: bool = True) -> Tape:
    """Return the allocations of a workload; bounds follow from fewer, ``is_whole=False``."""
    workspace = generation_of(workload.compute).blas_workspace_bytes
    local = local_part(workload)
    buffers = communication_elements(workload) * precision_of(workload.dtype).compute
    if workload.inference:
        return play_inference(local, workspace, buffers)
    return StepPlayer(local, is_whole=is_whole).play(workspace, buffers)


def _items(workload: Workload, states: States, most: Mapping[str, int]) -> list[Item]:
    """Return the rows of a footprint, each with its formula, its numbers and its source."""
    precision, optimizer = precision_of(workload.dtype), optimizer_of(workload.optimizer)
    groups = states.groups
    trained = [g for g in groups if g.is_trained]
    first, largest = next(iter(trained), None), max(trained, key=lambda g: g.n_each, default=None)
    which = "P_adapters" if workload.lora_rank else "P"
    gradient = f"{first.gradient_bytes / first.n_each if first else 0.0:g} B"
    sharded = [
        " / N" if workload.zero_stage >= stage and workload.world_size > 1 else ""
        for stage in range(4)
    ]
    copies = "autocast's copies" if precision.is_autocast else "fp8 copies"
    stepped, temporary = _optimizer_formulas(optimizer, which, first, largest)
    values = {
        "P": sum(g.n_each * g.count for g in groups if ".lora_" not in g.name),
        "P_adapters": sum(g.n_each * g.count for g in groups if ".lora_" in g.name),
        "P_linear": _n_linear(states, *_LINEAR),
        "P_largest": largest.n_each if largest else 0,
    }
    values["P_rest"] = values["P"] - values["P_linear"]
    # What is copied: under autocast experts work in the weights' dtype.
    roles = (Role.LINEAR, Role.HEAD) if precision.is_autocast else (*_LINEAR, Role.HEAD)
    copied = values | {"P_linear": _n_linear(states, *roles)}

    def figures(formula: str, of: Mapping[str, int] = values) -> tuple[str, str]:
        counts = {symbol: format_count(n) for symbol, n in of.items()}
        return _both(formula, counts | {"N": str(workload.world_size)})

    def row(name: str, title: str, formula: str, numbers: str, source: str, **more: Any) -> Item:
        return Item(name, title, most[name], formula, numbers, source, **more)

    sure = Sureness.ASSUMED if workload.shape.is_guess else Sureness.EXACT
    return [
        row("parameters", "Parameters", *figures(_parameters(workload) + sharded[3]),
            ZERO if sharded[3] else workload.shape.source, sureness=sure),
        row("gathered_parameters", "Parameters collected while in use",
            "2 layers + embedding and head, in full", _gathered(states),
            f"{ZERO}; FSDP forward prefetch", sureness=Sureness.ESTIMATE),
        row("master_weights", "fp32 master weights", *figures(f"P x 4 B{sharded[1]}"),
            MIXED_PRECISION),
        row("gradients", "Gradients", *figures(f"{which} x {gradient}{sharded[2]}"),
            ZERO if sharded[2] else TRAINER_SOURCE,
            note="They live from backward to zero_grad(set_to_none=True), the default"),
        row("buckets", "Buckets of data parallelism", *figures(f"P x {gradient}"), DDP_SOURCE),
        row("optimizer_states", f"Optimizer states ({optimizer.title})",
            *(_FACTORED if optimizer.factored else figures(stepped + sharded[1])),
            f"{optimizer.source}; {ZERO}" if sharded[1] else optimizer.source,
            note="They appear in the first step()"),
        row("weight_copies", f"Weights once more ({copies})",
            *figures(f"P_linear x {precision.copies:g} B", copied),
            precision.source or AUTOCAST_DOC),
        row("kv_cache", "KV cache", *_cache_formula(workload), KV_SOURCE),
        _activations(workload, most),
        row("logits", "Logits and loss", *logits_formula(workload, most["logits"]),
            "PyTorch cross_entropy = log_softmax + nll_loss, both backwards"),
        row("temporaries", "Temporary tensors", "largest sum within one operation",
            "gradients of activations, outputs that are not kept",
            "played operation by operation", sureness=Sureness.ESTIMATE),
        row("communication", "Buffers of parallelism", "what one layer sends and receives",
            "of the residual stream, keys, values, experts", "Megatron-LM, ring attention, GShard",
            sureness=Sureness.ESTIMATE),
        row("optimizer_temporaries", "Temporaries of the optimizer step",
            *figures(temporary + sharded[1]), FOREACH_SOURCE),
        row("inputs", "Token ids and labels", "2 x B x S x 8 B",
            f"2 x {workload.batch} x {workload.seq} x 8 B", "torch.int64", sureness=Sureness.EXACT),
        row("workspaces", "cuBLAS workspaces", "threads x workspace",
            f"{1 if workload.inference else 2} x "
            f"{format_count(generation_of(workload.compute).blas_workspace_bytes)} B",
            WORKSPACE_SOURCE),
    ]  # fmt: skip


_LINEAR: Final = (Role.LINEAR, Role.EXPERT)
_FACTORED: Final = ("sum of (rows + columns) x bytes", "one row and one column a matrix")


def _n_linear(states: States, *roles: Role) -> int:
    return sum(
        g.n_each * g.count for g in states.groups if g.role in roles and ".lora_" not in g.name
    )


def _parameters(workload: Workload) -> str:
    precision = precision_of(workload.dtype)
    if precision.linear_weight == precision.weight and not workload.lora_rank:
        return f"P x {precision.weight:g} B"
    linear = f"P_linear x {precision.linear_weight:g} B + P_rest x {precision.weight:g} B"
    return f"({linear}{' + P_adapters x 4 B' if workload.lora_rank else ''})"


def _gathered(states: States) -> str:
    layer = sum(g.gathered_bytes * g.per_layer for g in states.groups if g.layered)
    outside = sum(g.gathered_bytes * g.count for g in states.groups if not g.layered)
    return f"2 x {format_count(layer)} B + {format_count(outside)} B"


def _optimizer_formulas(
    optimizer: OptimizerSpec, which: str, first: GroupState | None, largest: GroupState | None
) -> tuple[str, str]:
    """Return the formulas of an optimizer's states, and of the temporaries of its step."""

    def each(group: GroupState | None, otherwise: int) -> int:
        return round(group.step_bytes * group.shard / group.n_each) if group else otherwise

    what = "P_largest" if optimizer.step_of_largest and largest else which
    temporary = f"{optimizer.step_copies:g} x {what} x {each(largest, 0)} B"
    if optimizer.fixed:
        return f"{which} x {optimizer.fixed:g} B", temporary
    return f"{optimizer.copies:g} x {which} x {each(first, 4):g} B", temporary


def _cache_formula(workload: Workload) -> tuple[str, str]:
    each = f"{kv_element_bytes(workload):g} B"
    elements = "(latent + rotated)" if workload.shape.kv_elements else "2 x n_kv x d"
    numbers = " + ".join(
        f"{p.n_layers} x {workload.batch} x {format_count(p.tokens)} x {p.elements} x {each}"
        for p in cache_parts(workload)
    )
    return f"L x B x T x {elements} x bytes", numbers


def _activations(workload: Workload, most: Mapping[str, int]) -> Item:
    formula, numbers = activation_formula(workload)
    segment = segment_layers(workload)
    source = "PyTorch derivatives.yaml, operation by operation; compare " + KORTHIKANTI
    title = "Activations kept for backward"
    if segment:
        title += f", checkpointed every {'layer' if segment == 1 else f'{segment} layers'}"
        source = f"{CHECKPOINT_PAPER}; {source}"
    sure = Sureness.ASSUMED if workload.shape.is_guess else Sureness.DERIVED
    if workload.inference:
        title, formula, numbers = "Activations of the largest operation", "", ""
    return Item("activations", title, most["activations"], formula, numbers, source, sure)


def _notes(workload: Workload) -> list[str]:
    notes = list(workload.shape.assumptions)
    falls_back = attention_used(workload, precision_of(workload.dtype)) is Attention.MATH
    if falls_back and workload.attention is Attention.SDPA and not workload.inference:
        notes.append(
            "In fp32 no fused attention takes fewer key-value heads than query heads: PyTorch's "
            "fallback with its S x S scores is counted. Where the code repeats keys and values "
            "first, write --attention flash."
        )
    narrow = precision_of(workload.dtype).compute < 4 and not workload.inference
    if narrow and workload.loss is None and workload.shape.has_lm_head:
        upcasts = workload.shape.upcasts_logits
        notes.append(
            f"The loss is taken of {'fp32' if upcasts else '16-bit'} logits; --logits says "
            "otherwise (16-bit, fp32, chunked, or fused as by Liger)."
        )
    if workload.grad_accumulation > 1:
        notes.append(
            "Gradient accumulation keeps the gradients through the forward passes; a smaller "
            "micro batch is what saves memory."
        )
    if not workload.shape.has_layers and not workload.inference:
        notes.append("The shape of the layers is not known: activations are left out.")
    return notes
