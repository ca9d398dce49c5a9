"""Computes a footprint from a model's shape, each row with its formula and source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from fragdoctor.estimation.bounds import Needs, most_of_each, needs_of, phases_of, reserved_of
from fragdoctor.estimation.calibration import published_range
from fragdoctor.estimation.layer import KORTHIKANTI, attention_used, bytes_of, layer_ops, units
from fragdoctor.estimation.states import GroupState, gathered_layers, local_part, states_of
from fragdoctor.estimation.step import Instant, bucket_bytes, loss_of, moments_of, segment_layers
from fragdoctor.estimation.training_choices import (
    AUTOCAST_DOC,
    CHECKPOINTING,
    DEEPSPEED,
    MIXED_PRECISION,
    ZERO,
    optimizer_of,
    precision_of,
)
from fragdoctor.model.gpu_table import GENERATIONS
from fragdoctor.model.memory_estimate import Doubt, Footprint, Item, KeptTensor
from fragdoctor.model.workload import Attention, FsdpKind, Loss, Workload
from fragdoctor.units import MIB, format_count

FOREACH_SOURCE: Final = "torch.optim, foreach implementation, default on CUDA"
KV_SOURCE: Final = "Pope et al. 2022, https://arxiv.org/abs/2211.05102"
DDP_SOURCE: Final = "DistributedDataParallel without gradient_as_bucket_view=True"
AUTOGRAD: Final = "PyTorch autograd: one gradient for each parameter, in its dtype"
WORKSPACE_SOURCE: Final = (
    "aten/src/ATen/cuda/CublasHandlePool.cpp: one per handle and stream; forward and autograd's "
    "thread have one each; CUBLAS_WORKSPACE_CONFIG changes it"
)
FORMULA_ERROR: Final = (
    "How sure: on 64 recorded runs of GPT- and Llama-like models, the peak was within 7% and "
    "reserved memory within 15%; on PyTorch's own allocator, with steps of 74 models of "
    "Transformers, most in 3 precisions, the peak was within 5% for 9 of 10 and within 10% for "
    "all. Code that keeps other tensors differs more. --rehearse runs the model's own class if its "
    "library is installed; --model runs your own code."
)
INFERENCE_ERROR: Final = (
    "How sure: 3 recorded prefills of Llama-like models were within 5%; a server such as vLLM "
    "takes the rest of the GPU for its cache."
)
NCCL_BYTES: Final = 490 * MIB
"""What an NCCL communicator takes on top of the CUDA context; see ``model.gpu_table``."""


def formula_footprint(workload: Workload) -> Footprint:
    """Return the memory of a workload whose shape is known."""
    whole = workload
    stages = [(*_bounds(stage), stage) for stage in stages_of(workload)]
    needs, moments, workload = max(stages, key=lambda stage: stage[0].high_bytes)
    local = local_part(workload)
    most = defaultdict(int, most_of_each(moments))
    items = (item for item in _items(local, states_of(local), most) if item.n_bytes > 0)
    published_low, published_high = published_range(needs, workload)
    every = states_of(whole)
    return Footprint(
        items=tuple(items),
        phases=tuple(phases_of(moments)),
        reserved_bytes=reserved_of(moments, workload),
        n_parameters=sum(g.n_total for g in every),
        n_trainable=sum(g.n_total for g in every if g.is_trained and not workload.inference),
        notes=tuple(_notes(whole)),
        layer=tuple(kept_tensors(local)),
        needs_low_bytes=needs.low_bytes,
        needs_high_bytes=needs.high_bytes,
        published_low_bytes=published_low,
        published_high_bytes=published_high,
        doubts=needs.doubts,
    )


def stages_of(workload: Workload) -> list[Workload]:
    """Return a workload's pipeline stages, or the workload itself if it has no pipeline."""
    if workload.pipeline_parallel == 1 or workload.stage or workload.inference:
        return [workload]
    names = ("first", "middle", "last") if workload.pipeline_parallel > 2 else ("first", "last")
    return [replace(workload, stage=name) for name in names]


def formula_needs(workload: Workload) -> Needs:
    """Return the bounds of a workload's memory, without the rest of its footprint.

    For a pipeline, they are the bounds of the stage that needs the most.
    """
    found = (_bounds(stage)[0] for stage in stages_of(workload))
    return max(found, key=lambda needs: needs.high_bytes)


def _bounds(workload: Workload) -> tuple[Needs, Sequence[Instant]]:
    """Return the bounds of what one GPU needs, and the moments they were computed from."""
    moments = moments_of(workload)
    needs = needs_of(moments, workload)
    more = _of_sharing(workload)
    for name, reason, option, ways in _unstated(workload):
        most = max(needs_of(moments_of(way), way).high_bytes for way in ways)
        more.append(Doubt(name, reason, max(0, most - needs.high_bytes), option))
    high = needs.high_bytes + sum(doubt.n_bytes for doubt in more)
    return replace(needs, high_bytes=high, doubts=(*needs.doubts, *more)), moments


def _unstated(w: Workload) -> Iterator[tuple[str, str, str, Sequence[Workload]]]:
    """Yield doubts about what was not said: the option that says it, and what it may be."""
    if w.shape.may_have_head:
        headed = replace(w, shape=w.shape.with_head())
        option = "" if w.inference else "--logits"
        yield "head", "a head over the vocabulary, if there is one", option, [headed]
    if w.is_fsdp and w.lora_rank and w.fsdp_kind is None:
        firsts = [replace(w, fsdp_kind=kind) for kind in (FsdpKind.FIRST, FsdpKind.MIXED)]
        reason = "what FSDP 1 keeps for layers with frozen weights"
        yield "frozen_weights", reason, "--fsdp-kind", firsts


def _of_sharing(workload: Workload) -> list[Doubt]:
    more = []
    if n := len(workload.degrees) + (workload.world_size > 1):
        more.append(Doubt("nccl", "NCCL communicators, outside PyTorch", n * NCCL_BYTES))
    if workload.zero_stage == 3 and (bucket := bucket_bytes(workload)):
        more.append(Doubt("bucket", "DeepSpeed's reduce_bucket_size, at most its default", bucket))
    return more


def kept_tensors(workload: Workload) -> list[KeptTensor]:
    """Return what each operation of a layer keeps, for ``--explain``."""
    if workload.inference:
        return []
    sizes = units(workload)
    return [
        KeptTensor(op.name, t.label, f"{t.unit} x {t.bytes_per:g} B", bytes_of([t], sizes))
        for op in layer_ops(workload, precision_of(workload.dtype))
        for t in op.saved
        if t.bytes_per
    ]


def _items(workload: Workload, states: Sequence[GroupState], most: Mapping[str, int]) -> list[Item]:
    """Return the rows of a footprint, each with its formula and its source."""
    precision, optimizer = precision_of(workload.dtype), optimizer_of(workload.optimizer)
    trained = [g for g in states if g.is_trained]
    own = "P_adapters" if workload.lora_rank else "P"
    sizes = {
        **units(workload),
        "B*V": workload.batch * workload.shape.vocab,
        "P": sum(g.n_total for g in states),
        own: sum(g.n_total for g in trained),
        "P_largest": max((g.n_each for g in trained), default=0),
    }
    is_whole = not workload.inference or workload.keeps_logits or workload.shape.prompt_logits

    def each(name: str, symbol: str, stage: int = 4) -> str:
        """Return what an item takes for each of a unit; from a stage of ZeRO on, GPUs share it."""
        shares = workload.world_size if workload.zero_stage >= stage else 1
        n_bytes = most[name] * shares / max(1, sizes[symbol])
        return f"{symbol} x {n_bytes:.3g} B{' / N' if shares > 1 else ''}"

    def shared_by(stage: int, source: str) -> str:
        is_shared = workload.world_size > 1 and workload.zero_stage >= stage
        return f"{source}; {ZERO}" if is_shared else source

    segment, kept = segment_layers(workload), "L x what one layer keeps"
    if segment:
        kept = f"ceil(L / n) x B*S*H x {precision.residual:g} B + n x what one layer keeps"
    recomputed = f", checkpointed every {'layer' if segment == 1 else f'{segment} layers'}"
    title = "Activations kept for backward" + (recomputed if segment else "")
    if workload.inference:
        title, kept = "Activations of the largest operation", "inputs, results and other memory"
    operations = f"PyTorch derivatives.yaml, operation by operation; compare {KORTHIKANTI}"
    n_workspaces = 1 if workload.inference else 2
    blas = format_count(GENERATIONS[workload.compute].blas_workspace_bytes)

    def row(name: str, title: str, formula: str, source: str, **more: Any) -> Item:
        return Item(name, title, most[name], formula, source, **more)

    return [
        row("parameters", "Parameters", each("parameters", "P", 3),
            shared_by(3, workload.shape.source)),
        row("gathered_parameters", "Parameters gathered while in use",
            f"({gathered_layers(workload)} x P_layer + P_outside) x bytes",
            f"{ZERO}; FSDP forward prefetch"),
        row("master_weights", "fp32 master weights", each("master_weights", own, 1),
            MIXED_PRECISION),
        row("gradients", "Gradients", each("gradients", own, 2), shared_by(2, AUTOGRAD),
            note="They live from backward to zero_grad(set_to_none=True), the default"),
        row("buckets", "Buckets of data parallelism",
            "reduce_bucket_size x 2 B, and a copy" if workload.zero_stage else each("buckets", own),
            DEEPSPEED if workload.zero_stage else DDP_SOURCE),
        row("optimizer_states", f"Optimizer states ({optimizer.title})",
            each("optimizer_states", own, 1), shared_by(1, optimizer.source),
            note="They appear in the first step()"),
        row("weight_copies", "Copies of weights (16-bit or fp8)", each("weight_copies", "P"),
            precision.source or AUTOCAST_DOC),
        row("kv_cache", "KV cache", "L x B x T x elements of a token x bytes", KV_SOURCE),
        row("activations", title, kept,
            f"{CHECKPOINTING}; {operations}" if segment else operations),
        row("logits", "Logits and loss", each("logits", "B*S*V" if is_whole else "B*V"),
            "PyTorch cross_entropy = log_softmax + nll_loss, both backwards"),
        row("temporaries", "Temporary tensors", "largest sum within one operation",
            "operation by operation"),
        row("communication", "Buffers of parallelism", "what one layer sends and receives",
            "Megatron-LM, ring attention, GShard"),
        row("optimizer_temporaries", "Temporaries of the optimizer step",
            each("optimizer_temporaries", "P_largest" if optimizer.step_of_largest else own, 1),
            FOREACH_SOURCE),
        row("inputs", "Token ids and labels", each("inputs", "B*S"), "torch.int64"),
        row("workspaces", "cuBLAS workspaces", f"{n_workspaces} x {blas} B", WORKSPACE_SOURCE),
    ]  # fmt: skip


def _notes(workload: Workload) -> list[str]:
    notes, shape = list(workload.shape.assumptions), workload.shape
    if not shape.has_lm_head:
        allowed = " The upper bound allows for masked language modeling." * shape.may_have_head
        notes.append(f"Counted as a classifier: its loss is over a few classes.{allowed}")
    if workload.inference:
        return [*notes, INFERENCE_ERROR]
    precision = precision_of(workload.dtype)
    falls_back = attention_used(workload, precision) is Attention.MATH
    if falls_back and workload.attention is Attention.SDPA:
        notes.append(
            "In fp32, no fused attention takes fewer key-value than query heads, so the S x S "
            "scores of PyTorch's fallback are counted. If the code repeats keys and values first, "
            "use --attention flash."
        )
    if precision.compute < 4 and workload.loss is None and shape.has_lm_head:
        notes.append(
            f"The loss is computed from {'fp32' if loss_of(workload) is Loss.FP32 else '16-bit'} "
            "logits; --logits changes that (16-bit, fp32, chunked, or fused as in Liger)."
        )
    if workload.grad_accumulation > 1:
        notes.append(
            "Gradient accumulation keeps the gradients during the forward passes; only a smaller "
            "micro batch saves memory."
        )
    return [*notes, FORMULA_ERROR]
