"""What autograd keeps of one transformer layer, operation by operation.

The rules, each seen in PyTorch's ``derivatives.yaml`` and on recordings:

* a linear layer keeps its input (for the weight's gradient) and its weight (for the input's);
  a frozen one keeps only the weight;
* under autocast the input that is kept is the 16-bit copy, one for each linear layer;
* layer_norm keeps its input and two fp32 figures a token; fused RMSNorm keeps its input and one;
  written out in Python it keeps the fp32 input, and the normalised value as the weight's factor;
* a fused attention kernel keeps q, k, v, its output and one fp32 figure a row of scores; SDPA's
  math fallback and attention written out keep S x S probabilities;
* gelu, silu keep their input; relu its result (which the next linear layer keeps anyway);
* a product keeps both factors; dropout a mask of one byte; an addition keeps nothing.

Summed for a 16-bit GPT with dropout and attention written out this is Korthikanti et al. 2022,
s*b*h*(34 + 5*a*s/h), https://arxiv.org/abs/2205.05198; other settings change summands.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fragdoctor.estimation.operation_memory import (
    FP32,
    Op,
    Term,
    attention_used,
    dropout,
    is_adapted,
    linear_input,
    n_linears,
    norm_op,
)
from fragdoctor.estimation.training_choices import Precision
from fragdoctor.model.workload import Attention, ModelShape, Norm, Workload

KORTHIKANTI: Final = "Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198"


def layer_ops(workload: Workload, precision: Precision, *, slides: bool = False) -> list[Op]:
    """Return the operations of one layer in forward order.

    ``slides``: of a layer that looks back to a window only, which a mask cuts out.
    """
    shape = workload.shape
    trains = not workload.lora_rank
    first = norm_op(shape.norm, precision, "norm1", trains=trains)
    second = norm_op(shape.norm, precision, "norm2", trains=trains)
    if shape.norms_per_layer == 1:  # one norm feeds both branches
        second = replace(second, saved=(), passing=())
    elif shape.parallel_residual:  # both norms read the same residual
        second = replace(second, saved=tuple(t for t in second.saved if t.label != "input"))
    after = _branch_norm(first) if shape.norms_per_layer >= 4 else []
    ops = [
        first,
        *_attention_ops(workload, precision, slides=slides),
        *after,
        second,
        *_mlp_ops(workload, precision),
        *after,
    ]
    return [_with_magnitudes(op, workload, precision) for op in ops] if workload.dora else ops


def _with_magnitudes(op: Op, workload: Workload, precision: Precision) -> Op:
    """Return an operation of linear layers with what DoRA adds to each (PEFT's ``dora.py``).

    The magnitude of an output is a factor of what the layer and the adapter give, which both stay;
    the norms need the adapted weight as a whole for a moment.
    """
    if not op.slot:
        return op
    sizes = [
        group.shape
        for group in workload.shape.parameters
        if group.slot == op.slot and len(group.shape) == 2
        and is_adapted(workload, group.name, op.slot)
    ]  # fmt: skip
    if not sizes:
        return op
    each = precision.compute + (precision.compute if precision.is_autocast else FP32)
    widths = sum(rows for rows, _ in sizes)
    n_whole = 3 if precision.weight == FP32 else 4
    most = max(rows * columns for rows, columns in sizes)
    return replace(
        op,
        saved=(*op.saved, Term("B*S", widths * each, "outputs before the magnitude")),
        scratch=(*op.scratch, Term("1", n_whole * FP32 * most, "adapted weight")),
    )


def _branch_norm(norm: Op) -> list[Op]:
    """Return a norm of a branch's output, before it is added (Gemma 2)."""
    return [replace(norm, name="norm of the branch", slot="", ends_branch=False)]


def _attention_ops(workload: Workload, precision: Precision, *, slides: bool) -> list[Op]:
    """Return query, key and value, rotation, attention and the output projection."""
    shape, c = workload.shape, precision.compute
    back = FP32 if precision.is_autocast else 0.0
    n_qkv = n_linears(shape, "qkv")
    qkv = (Term("B*S*Q", c), Term("B*S*K", 2 * c))
    # Each of several linear layers on one input gives its own gradient of it.
    into_qkv = Op(
        "query, key and value", "qkv",
        saved=linear_input("B*S*H", precision, workload, "qkv", n_qkv),
        passing=qkv, grads=(Term("B*S*H", back or c),),
        back_scratch=(Term("B*S*H", c),) if n_qkv > 1 or back else (),
    )  # fmt: skip
    ops = [*_latents(workload, precision), into_qkv, *_head_norms(workload, precision)]
    if shape.has_rotary:
        rotated = FP32 if precision.is_autocast else c
        ops.append(
            Op(
                "rotary positions", passing=(Term("B*S*Q", rotated), Term("B*S*K", rotated + c)),
                scratch=(Term("B*S*Q", rotated),), grads=qkv,
                back_scratch=(Term("B*S*Q", 2 * rotated),),
            )
        )  # fmt: skip
    return [*ops, *_attended(workload, precision, slides=slides)]


def _latents(workload: Workload, precision: Precision) -> list[Op]:
    """Return the norms of the short vectors of latent attention, and what is made of them."""
    if not workload.shape.latent_width:
        return []
    c = precision.compute
    kept = FP32 + (0.0 if workload.lora_rank else 2 * c)
    return [
        Op(
            "latent vectors", "", (Term("B*S*R", kept, "fp32 input, normalised, output"),),
            (Term("B*S*R", c),), grads=(Term("B*S*R", c),), back_scratch=(Term("B*S*R", 2 * FP32),),
        )
    ]  # fmt: skip


def _head_norms(workload: Workload, precision: Precision) -> list[Op]:
    """Return the norms of queries and keys, written out as in Hugging Face's Qwen3."""
    shape, c = workload.shape, precision.compute
    if not any(g.name == "attention.qk_norm" for g in shape.parameters):
        return []
    factor = FP32 if shape.norm is Norm.RMSNORM_WIDE else c
    kept = FP32 + (0.0 if workload.lora_rank else factor)
    out = FP32 if precision.is_autocast else c
    return [
        Op(
            f"norm of the {what}", "",
            (Term(unit, kept, "fp32 input and normalised"),),
            (Term("B*S*Q", out), Term("B*S*K", out + c)),
            scratch=(Term(unit, FP32),), grads=(Term(unit, c),),
            back_scratch=(Term(unit, 2 * FP32),),
        )
        for what, unit in (("queries", "B*S*Q"), ("keys", "B*S*K"))
    ]  # fmt: skip


def _attended(workload: Workload, precision: Precision, *, slides: bool) -> list[Op]:
    """Return the attention itself, and the projection of its output."""
    shape, c = workload.shape, precision.compute
    kind = attention_used(workload, precision, slides=slides)
    repeats = slides or shape.repeats_keys or precision.compute == FP32
    keys = "B*S*Q" if kind is Attention.FLASH and repeats else "B*S*K"
    # The projection's input is the attention's output, which fused kernels keep anyway.
    kept: tuple[Term, ...] = ()
    if kind is not Attention.FLASH and not workload.lora_rank:
        kept = (Term("B*S*Q", c, "attention output"),)
    if workload.lora_rank:
        kept = linear_input("B*S*Q", precision, workload, "out", 1)
    return [
        _core_attention(workload, precision, kind, keys, slides=slides),
        Op("output projection", "out", kept, (Term("B*S*H", c),), grads=(Term("B*S*Q", c),)),
        *dropout(shape, c),
    ]


def _core_attention(
    workload: Workload, precision: Precision, kind: Attention, keys: str, *, slides: bool
) -> Op:
    shape, c = workload.shape, precision.compute
    grads = (Term("B*S*Q", c), Term(keys, 2 * c))
    # q, k and v cut from one tensor give their gradients back as one more tensor.
    packed = not shape.has_rotary and n_linears(shape, "qkv") == 1
    repack = grads if packed else ()
    saved: tuple[Term, ...]
    scores: tuple[Term, ...]
    if kind is Attention.FLASH:
        saved = (
            Term("B*S*Q", c, "query"),
            Term(keys, 2 * c, "key and value"),
            Term("B*S*Q", c, "attention output"),
            Term("B*a*S", FP32, "log-sum-exp of scores"),
        )
        if slides:
            saved = (*saved, Term("B*S*S", c, "mask of the window"))
        if shape.adds_slopes and precision.is_autocast:
            saved = (*saved, Term("B*a*S*S", c, "slopes, copied"))
        return Op("fused attention", "", saved, grads=grads, back_scratch=repack)
    if kind is Attention.MATH:
        # The fallback works in fp32, on keys and values repeated to the query heads.
        saved = (
            Term("B*S*Q", 3 * FP32, "query, key and value in fp32"),
            Term("B*a*S*S", FP32, "probabilities"),
        )
        if shape.attention_dropout:
            saved = (*saved, Term("B*a*S*S", FP32 + 1, "dropped probabilities and mask"))
        scores = (Term("B*a*S*S", 2 * FP32), Term("S*S", FP32))
        return Op(
            "attention by SDPA's fallback", "", saved, (Term("B*S*Q", FP32),), scores, grads, scores
        )
    saved = (Term("B*S*Q", 3 * c, "query, key and value"), *_written_out(workload, precision))
    scores = (Term("B*a*S*S", FP32 + c),)
    return Op("attention written out", "", saved, (Term("B*S*Q", c),), scores, grads, scores)


def _written_out(workload: Workload, precision: Precision) -> tuple[Term, ...]:
    """Return the S x S tensors of matmul, softmax, dropout, matmul."""
    shape, c = workload.shape, precision.compute
    in_fp32 = precision.is_autocast or shape.softmax_fp32
    softmax = FP32 if in_fp32 else c
    kept = [Term("B*a*S*S", softmax, "probabilities")]
    if shape.attention_softcap:
        kept.append(Term("B*a*S*S", c, "tanh of the scores"))
    if shape.attention_dropout:
        kept.append(Term("B*a*S*S", 1, "dropout mask"))
        kept.append(Term("B*a*S*S", c, "dropped probabilities"))
        if shape.softmax_fp32 and softmax != c and not precision.is_autocast:
            return tuple(kept)
    elif softmax != c:
        kept.append(Term("B*a*S*S", c, "16-bit copy of the probabilities"))
    return tuple(kept)


# Hugging Face's gelu_new is written out in Python: pow keeps its input (in fp32 under autocast),
# tanh its result, the last product both factors.
WRITTEN_OUT_GELU: Final = ("gelu_new", "gelu_fast", "gelu_python")


def _activation_saved(
    shape: ModelShape, precision: Precision, unit: str, c: float
) -> tuple[Term, ...]:
    if shape.activation in ("relu", "relu2", "leaky_relu"):
        return ()  # the next linear layer keeps the result anyway
    if shape.activation in WRITTEN_OUT_GELU:
        wide = FP32 if precision.is_autocast else c
        return (
            Term(unit, wide, "input of pow"),
            Term(unit, wide, "tanh"),
            Term(unit, wide, "1 + tanh"),
            Term(unit, c, "0.5 x"),
        )
    kept = Term(unit, c, "input of the activation")
    # x * sigmoid(1.702 x), written out
    is_quick = shape.activation == "quick_gelu"
    return (kept, Term(unit, c, "sigmoid")) if is_quick else (kept,)


def _mlp_ops(workload: Workload, precision: Precision) -> list[Op]:
    """Return the feed-forward part: one for all tokens, or experts and what they share."""
    shape, c = workload.shape, precision.compute
    kept = linear_input("B*S*H", precision, workload, "up", 2 if shape.is_gated else 1)
    if not shape.n_experts:
        if shape.norms_per_layer == 1 and not precision.is_autocast and not workload.lora_rank:
            kept = ()  # the tensor that query, key and value keep
        return [
            *_feed_forward(workload, precision, kept, c, slots=("up", "down")),
            *dropout(shape, c),
        ]
    router = Op(
        "router", "router", (Term("B*S*E", 2 * FP32, "routing weights"),), (Term("B*S*E", FP32),),
        grads=(Term("B*S*H", c),),
    )  # fmt: skip
    shared = []
    if shape.shared_ffn:
        shared = _feed_forward(workload, precision, kept, c, slots=("", ""), unit="B*S*W")
    # All experts work in one grouped product, which autocast does not know: in the weights' dtype.
    wide = precision.weight if precision.is_autocast else c
    gathered: tuple[Term, ...] = (Term("B*S*k*H", wide, "tokens by expert"),)
    if workload.lora_rank:
        gathered = linear_input("B*S*k*H", precision, workload, "up", 1)
    experts = _feed_forward(
        workload, precision, gathered, wide, slots=("up", "down"), inner="B*S*k*H"
    )
    weighted = Op("routing", saved=(Term("B*S*k*H", wide, "expert outputs"),),
                  grads=(Term("B*S*k*H", wide),))  # fmt: skip
    return [*shared, router, *experts, weighted, *dropout(shape, c)]


def _feed_forward(  # noqa: PLR0913 - what differs between experts and the rest, by keyword
    workload: Workload,
    precision: Precision,
    kept: tuple[Term, ...],
    c: float,
    *,
    slots: tuple[str, str],
    unit: str = "B*S*F",
    inner: str = "B*S*H",
) -> list[Op]:
    """Return the two or three matrices and the activation between them.

    ``kept`` is what is kept of the input, ``c`` the bytes of an element in between, ``slots`` whose
    parameters the ways in and out use; ``unit`` is that of the tensors in between, ``inner`` that
    of the input.
    """
    shape = workload.shape
    back = FP32 if precision.is_autocast else 0.0
    ops = [
        Op(
            "feed-forward in", slots[0], kept,
            (Term(unit, (2 if shape.is_gated else 1) * c),), grads=(Term("B*S*H", back or c),),
            back_scratch=(Term(inner, c),),
        ),
        Op(
            shape.activation, "", _activation_saved(shape, precision, unit, c),
            (Term(unit, c),), grads=(Term(unit, c),),
        ),
    ]  # fmt: skip
    if shape.is_gated:
        factors = [Term(unit, 2 * c, "both factors of the gate")]
        if shape.clamps_gate and unit == "B*S*F":
            factors.append(Term(unit, 3 * c, "clamped factors and the sigmoid"))
        ops.append(Op("gate", "", tuple(factors), (Term(unit, c),), grads=(Term(unit, 2 * c),)))
    into = linear_input(unit, precision, workload, "down", 1)
    if inner != "B*S*H" and not workload.lora_rank:
        into = (Term(unit, c, "input of linear layers"),)
    return [*ops, Op("feed-forward out", slots[1], into, (Term(inner, c),), grads=(Term(unit, c),))]
