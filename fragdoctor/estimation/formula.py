"""The formula route: a footprint from a model's shape, each row with its formula and source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from fragdoctor.estimation.calibration import published_range
from fragdoctor.estimation.inference import cache_parts, kv_element_bytes, play_inference
from fragdoctor.estimation.judge import Estimator, judged
from fragdoctor.estimation.layer_operations import KORTHIKANTI, layer_ops
from fragdoctor.estimation.operation_memory import attention_used, term_bytes, units
from fragdoctor.estimation.request import Request, error_of, workload_of
from fragdoctor.estimation.states import (
    WORKSPACE_SOURCE,
    States,
    communication_elements,
    local_part,
    states_of,
)
from fragdoctor.estimation.step import StepPlayer, segment_layers
from fragdoctor.estimation.tape import Needs, Tape, most_of_each, needs_of, phases_of, reserved_of
from fragdoctor.estimation.training_choices import AUTOCAST_DOC, ZERO, optimizer_of, precision_of
from fragdoctor.model.gpus import GpuModel, generation_of
from fragdoctor.model.memory_estimate import (
    Doubt,
    Estimate,
    Footprint,
    Item,
    KeptTensor,
    Sureness,
)
from fragdoctor.model.workload import Attention, Workload
from fragdoctor.units import format_count


def layer_terms(workload: Workload, *, crosses: bool = False) -> dict[str, float]:
    """Return bytes kept for each element of each unit, in one layer."""
    total: defaultdict[str, float] = defaultdict(float)
    precision = precision_of(workload.dtype)
    ops = layer_ops(workload, precision, crosses=crosses)
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
        for op in layer_ops(
            workload, precision_of(workload.dtype), crosses=workload.shape.n_cross_layers > 0
        )
        for t in op.saved
    ]


def activation_formula(workload: Workload) -> tuple[str, str]:
    """Return the activations' formula in symbols and in numbers."""
    if not workload.shape.has_layers or workload.seq <= 0:
        return "", ""
    sizes, terms = units(workload), layer_terms(workload)
    symbols = " + ".join(f"{unit} x {each:g}" for unit, each in terms.items())
    numbers = " + ".join(f"{format_count(sizes[unit])} x {each:g}" for unit, each in terms.items())
    n_layers, segment = workload.shape.n_layers, segment_layers(workload)
    if not segment and (n_cross := workload.shape.n_cross_layers):
        whole = layer_terms(workload, crosses=True)
        more = {u: n - terms.get(u, 0) for u, n in whole.items() if n > terms.get(u, 0)}
        symbols_x = " + ".join(f"{unit} x {each:g}" for unit, each in more.items())
        numbers_x = " + ".join(f"{format_count(sizes[u])} x {each:g}" for u, each in more.items())
        return (
            f"L x ({symbols}) B + L_decoder x ({symbols_x}) B",
            f"{n_layers} x ({numbers}) B + {n_cross} x ({numbers_x}) B",
        )
    if not segment:
        return f"L x ({symbols}) B", f"{n_layers} x ({numbers}) B"
    residual = precision_of(workload.dtype).residual
    n_segments = ceil(n_layers / segment)
    inputs = f"{format_count(sizes['B*S*H'])} x {residual:g}"
    return (
        f"ceil(L / n) x B*S*H x {residual:g} B + n x ({symbols}) B",
        f"{n_segments} x {inputs} B + {segment} x ({numbers}) B",
    )


def logits_formula(workload: Workload, most_bytes: int) -> tuple[str, str]:
    """Return the logits' formula; the bytes an element follow from what the loss makes."""
    elements = units(workload)["B*S*V"]
    if not elements:
        return "", ""
    if workload.inference and not workload.keeps_logits:
        return "B x V x 4 B", f"{workload.batch} x {format_count(workload.shape.vocab)} x 4 B"
    each = f"{round(most_bytes / elements, 1):g}"
    return f"B*S*V x {each} B", f"{format_count(elements)} x {each} B"


CHECKPOINT_PAPER = "Chen et al. 2016, https://arxiv.org/abs/1604.06174"
FOREACH_SOURCE = "torch.optim, foreach implementation, default on CUDA"
KV_SOURCE = "Pope et al. 2022, https://arxiv.org/abs/2211.05102"
TRAINER_SOURCE = "PyTorch autograd: one gradient for each parameter, in its dtype"


def formula_footprint(workload: Workload) -> Footprint:
    """Return the memory of a workload whose shape is known."""
    whole, tape = workload, play(workload)
    workload = local_part(workload)
    states = states_of(workload)
    most = most_of_each(tape)
    items = [item for item in _items(workload, states, most) if item.n_bytes > 0]
    needs = formula_needs(whole)
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


def formula_needs(workload: Workload) -> Needs:
    """Return the bounds of a workload's memory, without the rest of its footprint.

    In fp32 a window that the sequence outgrows takes attention off PyTorch's fallback, and memory
    falls: there the bounds hold for both ways, so that they grow with the sequence.
    """
    needs = needs_of(play(workload, bounds=True), workload)
    falls_back = attention_used(workload, precision_of(workload.dtype)) is Attention.MATH
    if not (
        falls_back and workload.shape.n_sliding_layers and workload.attention is Attention.SDPA
    ):
        return needs
    fused = needs_of(play(replace(workload, attention=Attention.FLASH), bounds=True), workload)
    lower, higher = sorted((needs, fused), key=lambda n: n.low_bytes)
    either = Doubt(
        "attention", "whether PyTorch's fallback serves attention, which a window decides",
        max(0, higher.low_bytes - lower.low_bytes),
    )  # fmt: skip
    high = None if needs.high_bytes is None else max(needs.high_bytes, fused.high_bytes or 0)
    return replace(lower, high_bytes=high, doubts=(*higher.doubts, either))


def play(workload: Workload, *, bounds: bool = False) -> Tape:
    """Return the allocations of a workload; for bounds with buffers that grow with all sizes."""
    workspace = generation_of(workload.compute).blas_workspace_bytes
    local = local_part(workload)
    buffers = communication_elements(workload) * precision_of(workload.dtype).compute
    if workload.inference:
        return play_inference(local, workspace, buffers)
    return StepPlayer(local, bounds=bounds).play(workspace, buffers)


def _items(workload: Workload, states: States, most: Mapping[str, int]) -> list[Item]:
    return [
        _parameters(workload, states, most),
        _gathered(states, most),
        _master(workload, states, most),
        _gradients(workload, states, most),
        _buckets(states, most),
        _optimizer_states(workload, states, most),
        _weight_copies(workload, states, most),
        _kv_cache(workload, most),
        _activations(workload, most),
        _logits(workload, most),
        _temporaries(most),
        _communication(most),
        _optimizer_temporaries(workload, states, most),
        Item(
            "inputs", "Token ids and labels", most["inputs"], "2 x B x S x 8 B",
            f"2 x {workload.batch} x {workload.seq} x 8 B", "torch.int64", Sureness.EXACT,
        ),
        Item(
            "workspaces", "cuBLAS workspaces", most["workspaces"],
            "threads x workspace", _workspace_numbers(workload), WORKSPACE_SOURCE,
            Sureness.DERIVED,
        ),
    ]  # fmt: skip


def _workspace_numbers(workload: Workload) -> str:
    each = generation_of(workload.compute).blas_workspace_bytes
    return f"{1 if workload.inference else 2} x {format_count(each)} B"


def _shard(workload: Workload, from_stage: int) -> tuple[str, str]:
    if workload.zero_stage >= from_stage and workload.world_size > 1:
        return " / N", f" / {workload.world_size}"
    return "", ""


def _plain(n_bytes: float) -> str:
    return f"{n_bytes:g} B"


def _parameters(workload: Workload, states: States, most: Mapping[str, int]) -> Item:
    precision = precision_of(workload.dtype)
    n = sum(g.n_each * g.count for g in states.groups)
    symbol, number = _shard(workload, 3)
    size = _plain(precision.weight)
    mixed = precision.linear_weight != precision.weight or workload.lora_rank
    formula = f"P x {size}{symbol}"
    numbers = f"{format_count(n)} x {size}{number}"
    if mixed:
        linear = sum(
            g.n_each * g.count
            for g in states.groups
            if g.role.value in ("linear", "expert") and ".lora_" not in g.name
        )
        adapters = sum(g.n_each * g.count for g in states.groups if ".lora_" in g.name)
        rest = n - linear - adapters
        formula = f"P_linear x {_plain(precision.linear_weight)} + P_rest x {size}"
        numbers = (
            f"{format_count(linear)} x {_plain(precision.linear_weight)} + "
            f"{format_count(rest)} x {size}"
        )
        if adapters:
            formula += " + P_adapters x 4 B"
            numbers += f" + {format_count(adapters)} x 4 B"
        formula, numbers = f"({formula}){symbol}", f"({numbers}){number}"
    sure = Sureness.ASSUMED if workload.shape.is_guess else Sureness.EXACT
    source = ZERO if symbol else workload.shape.source
    return Item("parameters", "Parameters", most["parameters"], formula, numbers, source, sure)


def _trained(states: States) -> int:
    return sum(g.n_each * g.count for g in states.groups if g.is_trained)


def _gathered(states: States, most: Mapping[str, int]) -> Item:
    layer = sum(g.gathered_bytes * g.per_layer for g in states.groups if g.layered)
    outside = sum(g.gathered_bytes * g.count for g in states.groups if not g.layered)
    return Item(
        "gathered_parameters",
        "Parameters collected while in use",
        most["gathered_parameters"],
        "2 layers + embedding and head, in full",
        f"2 x {format_count(layer)} B + {format_count(outside)} B",
        f"{ZERO}; FSDP forward prefetch",
        Sureness.ESTIMATE,
    )


def _master(workload: Workload, states: States, most: Mapping[str, int]) -> Item:
    symbol, number = _shard(workload, 1)
    return Item(
        "master_weights", "fp32 master weights", most["master_weights"],
        f"P x 4 B{symbol}", f"{format_count(_trained(states))} x 4 B{number}",
        "Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740", Sureness.DERIVED,
    )  # fmt: skip


def _gradients(workload: Workload, states: States, most: Mapping[str, int]) -> Item:
    symbol, number = _shard(workload, 2)
    each = next((g.gradient_bytes / g.n_each for g in states.groups if g.is_trained), 0.0)
    which = "P_adapters" if workload.lora_rank else "P"
    return Item(
        "gradients", "Gradients", most["gradients"], f"{which} x {_plain(each)}{symbol}",
        f"{format_count(_trained(states))} x {_plain(each)}{number}",
        ZERO if symbol else TRAINER_SOURCE, Sureness.DERIVED,
        note="They live from backward to zero_grad(set_to_none=True), the default",
    )  # fmt: skip


def _buckets(states: States, most: Mapping[str, int]) -> Item:
    each = next((g.gradient_bytes / g.n_each for g in states.groups if g.is_trained), 0.0)
    return Item(
        "buckets",
        "Buckets of data parallelism",
        most["buckets"],
        f"P x {_plain(each)}",
        f"{format_count(_trained(states))} x {_plain(each)}",
        "DistributedDataParallel without gradient_as_bucket_view=True, "
        "https://docs.pytorch.org/docs/stable/generated/"
        "torch.nn.parallel.DistributedDataParallel.html",
        Sureness.DERIVED,
    )


def _optimizer_states(workload: Workload, states: States, most: Mapping[str, int]) -> Item:
    optimizer = optimizer_of(workload.optimizer)
    symbol, number = _shard(workload, 1)
    which = "P_adapters" if workload.lora_rank else "P"
    trained = next((g for g in states.groups if g.is_trained), None)
    element = trained.step_bytes * trained.shard / trained.n_each if trained else 4.0
    n = format_count(_trained(states))
    if optimizer.factored:
        formula, numbers = "sum of (rows + columns) x bytes", "one row and one column a matrix"
    elif optimizer.fixed:
        formula = f"{which} x {optimizer.fixed:g} B{symbol}"
        numbers = f"{n} x {optimizer.fixed:g} B{number}"
    else:
        copies = f"{optimizer.copies:g}"
        formula = f"{copies} x {which} x {round(element):g} B{symbol}"
        numbers = f"{copies} x {n} x {round(element):g} B{number}"
    source = f"{optimizer.source}; {ZERO}" if symbol else optimizer.source
    return Item(
        "optimizer_states", f"Optimizer states ({optimizer.title})", most["optimizer_states"],
        formula, numbers, source, Sureness.DERIVED,
        note="They appear in the first step()",
    )  # fmt: skip


def _weight_copies(workload: Workload, states: States, most: Mapping[str, int]) -> Item:
    precision = precision_of(workload.dtype)
    copied = ("linear", "head") if precision.is_autocast else ("linear", "expert", "head")
    n = sum(
        g.n_each * g.count
        for g in states.groups
        if g.role.value in copied and ".lora_" not in g.name
    )
    what = "autocast's copies" if precision.is_autocast else "fp8 copies"
    return Item(
        "weight_copies", f"Weights once more ({what})", most["weight_copies"],
        f"P_linear x {_plain(precision.copies)}",
        f"{format_count(n)} x {_plain(precision.copies)}",
        precision.source or AUTOCAST_DOC, Sureness.DERIVED,
    )  # fmt: skip


def _kv_cache(workload: Workload, most: Mapping[str, int]) -> Item:
    shape = workload.shape
    each = _plain(kv_element_bytes(workload))
    if shape.kv_elements:
        formula = "L x B x T x (latent + rotated) x bytes"
    else:
        formula = "L x B x T x 2 x n_kv x d x bytes"
    numbers = " + ".join(
        f"{p.n_layers} x {workload.batch} x {format_count(p.tokens)} x {p.elements} x {each}"
        for p in cache_parts(workload)
    )
    return Item(
        "kv_cache", "KV cache", most["kv_cache"], formula, numbers, KV_SOURCE, Sureness.DERIVED
    )


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


def _logits(workload: Workload, most: Mapping[str, int]) -> Item:
    formula, numbers = logits_formula(workload, most["logits"])
    return Item(
        "logits", "Logits and loss", most["logits"], formula, numbers,
        "PyTorch cross_entropy = log_softmax + nll_loss, both backwards", Sureness.DERIVED,
    )  # fmt: skip


def _temporaries(most: Mapping[str, int]) -> Item:
    return Item(
        "temporaries", "Temporary tensors", most["temporaries"],
        "largest sum within one operation", "gradients of activations, outputs that are not kept",
        "played operation by operation", Sureness.ESTIMATE,
    )  # fmt: skip


def _communication(most: Mapping[str, int]) -> Item:
    return Item(
        "communication", "Buffers of parallelism", most["communication"],
        "what one layer sends and receives", "of the residual stream, keys, values, experts",
        "Megatron-LM, ring attention, GShard", Sureness.ESTIMATE,
    )  # fmt: skip


def _optimizer_temporaries(workload: Workload, states: States, most: Mapping[str, int]) -> Item:
    optimizer = optimizer_of(workload.optimizer)
    trained = [g for g in states.groups if g.is_trained]
    sized = max(trained, key=lambda g: g.n_each, default=None)
    each = sized.step_bytes * sized.shard / sized.n_each if sized else 0
    n, what = _trained(states), "P"
    if optimizer.step_of_largest and sized:
        n, what = sized.n_each, "P_largest"
    symbol, number = _shard(workload, 1)
    copies = f"{optimizer.step_copies:g}"
    return Item(
        "optimizer_temporaries",
        "Temporaries of the optimizer step",
        most["optimizer_temporaries"],
        f"{copies} x {what} x {round(each)} B{symbol}",
        f"{copies} x {format_count(n)} x {round(each)} B{number}",
        FOREACH_SOURCE,
        Sureness.DERIVED,
    )


def _notes(workload: Workload) -> list[str]:
    notes = list(workload.shape.assumptions)
    falls_back = attention_used(workload, precision_of(workload.dtype)) is Attention.MATH
    if falls_back and workload.attention is Attention.SDPA and not workload.inference:
        notes.append(
            "In fp32 no fused attention takes fewer key-value heads than query heads: PyTorch's "
            "fallback with its S x S scores is counted. Where the code repeats keys and values "
            "first, write --attention flash."
        )
    if workload.shape.position_bias and workload.attention is not Attention.EAGER:
        notes.append(
            "Before version 5 Transformers writes T5's attention out, with S x S scores that are "
            "not counted here: --attention eager counts them."
        )
    if workload.grad_accumulation > 1:
        notes.append(
            "Gradient accumulation keeps the gradients through the forward passes; a smaller "
            "micro batch is what saves memory."
        )
    if not workload.shape.has_layers and not workload.inference:
        notes.append("The shape of the layers is not known: activations are left out.")
    return notes


def estimate_of(request: Request, gpus: Sequence[GpuModel]) -> Estimate:
    """Return what the formulas say of a request, on each of the GPUs.

    Raises:
        ConfigError: an option has no such value.
        InputError: an input is no model.
    """
    workload = workload_of(request)
    estimator = Estimator(formula_footprint, formula_needs, error_of(workload))
    return judged(workload, estimator, gpus)
