"""What autograd keeps for one transformer layer, operation by operation, and its temporaries.

The rules, each found in PyTorch's ``derivatives.yaml`` and seen in recordings:

* a linear layer keeps its input (for the weight's gradient) and its weight (for the input's);
  a frozen linear layer keeps only the weight;
* under autocast, the input is kept as a 16-bit copy, one for each linear layer;
* layer_norm keeps its input and two fp32 values per token; fused RMSNorm keeps its input and one;
  RMSNorm written out in Python keeps the fp32 input, and the normalized value (for the weight);
* a fused attention kernel keeps q, k, v, its output and one fp32 value per row of scores; SDPA's
  math fallback and attention written out in Python keep S x S probabilities;
* gelu and silu keep their input; relu its result (which the next linear layer keeps anyway);
* a product keeps both factors; dropout a mask of one byte each; an addition keeps nothing.

For a 16-bit GPT with dropout and attention written out, these sum to Korthikanti et al. 2022,
s*b*h*(34 + 5*a*s/h), https://arxiv.org/abs/2205.05198; other settings change some of the terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from fragdoctor.estimation.training_choices import Precision
from fragdoctor.model.workload import Attention, ModelShape, Norm, ParameterGroup, Role, Workload

FP32: Final = 4.0
KORTHIKANTI: Final = "Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198"


class Term(NamedTuple):
    """``bytes_per`` for each element of ``unit``, such as ``B*S*H``."""

    unit: str
    bytes_per: float
    label: str = ""


class Op(NamedTuple):
    """One operation of a layer.

    Attributes:
        slot: the slot whose parameters it uses (``ParameterGroup.slot``), or "".
        saved: tensors kept for backward.
        inputs: tensors that it reads. They live until it has run in the forward pass; in the
            backward pass it computes their gradients.
        scratch: other memory that its backward pass uses while it runs.
        forward: other memory that it uses while it runs without gradients.
    """

    name: str
    slot: str = ""
    saved: tuple[Term, ...] = ()
    inputs: tuple[Term, ...] = ()
    scratch: tuple[Term, ...] = ()
    forward: tuple[Term, ...] = ()


def units(workload: Workload) -> Mapping[str, int]:
    """Return the size of each unit in elements, for one layer."""
    shape, seq = workload.shape, workload.seq
    tokens = workload.batch * seq
    routed = max(1, shape.experts_per_token) if shape.n_experts else 0
    return {
        "B*S": tokens,
        "B*S*H": -(-tokens * shape.hidden // workload.stream_shards),
        "B*S*Q": tokens * shape.n_heads * shape.head_dim,
        "B*S*K": tokens * shape.n_kv_heads * shape.head_dim,
        "B*S*F": tokens * shape.ffn * max(1, routed),
        "B*S*W": tokens * shape.shared_ffn,
        "B*S*k*H": tokens * shape.hidden * routed,
        "B*S*V": tokens * shape.vocab if shape.has_lm_head else 0,
        "B*a*S": tokens * shape.n_heads,
        "B*a*S*S": tokens * shape.n_heads * seq,
        "B*S*S": tokens * seq,
    }


def bytes_of(terms: Sequence[Term], sizes: Mapping[str, int]) -> int:
    """Return the total bytes of the terms."""
    return sum(int(term.bytes_per * sizes[term.unit]) for term in terms)


def has_window(workload: Workload) -> bool:
    """Return whether a mask cuts a window out of the scores of most layers."""
    shape = workload.shape
    is_longer = 0 < shape.sliding_window < workload.seq
    return is_longer and 2 * shape.n_sliding_layers >= shape.n_layers


def makes_mask(workload: Workload) -> bool:
    """Return whether the model makes that mask: a fused kernel asked for by name needs none."""
    return workload.attention is Attention.SDPA and has_window(workload)


def attention_used(workload: Workload, precision: Precision) -> Attention:
    """Return how attention is really computed: which kernel SDPA chooses.

    No fused kernel takes fp32 with fewer key heads than query heads, so the fallback runs. Users
    who ask for a fused kernel by name have code that repeats keys and values first; Transformers
    does so too if a mask cuts a window out of the scores.
    """
    shape = workload.shape
    if workload.attention_in_code is not Attention.SDPA:
        return workload.attention_in_code
    is_grouped = shape.n_kv_heads < shape.n_heads
    falls_back = is_grouped and precision.compute == FP32 and not has_window(workload)
    return Attention.MATH if falls_back else Attention.FLASH


def layer_ops(workload: Workload, precision: Precision) -> list[Op]:
    """Return the operations of one layer in forward order."""
    shape = workload.shape
    trains = not workload.lora_rank
    first = norm_op(shape.norm, precision, "norm1", trains=trains)
    second = norm_op(shape.norm, precision, "norm2", trains=trains)
    of_branch = first._replace(name="norm of the branch", slot="")
    after = [of_branch] if shape.norms_per_layer >= 4 else []  # Gemma 2
    attention, mlp = _attention_ops(workload, precision), _mlp_ops(workload, precision)
    ops = [first, *attention, *after, second, *mlp, *after]
    return [_with_magnitudes(op, workload, precision) for op in ops] if workload.dora else ops


def norm_op(norm: Norm, precision: Precision, slot: str, *, trains: bool) -> Op:
    """Return the operation that normalizes the residual stream."""
    residual = precision.residual
    inputs = (Term("B*S*H", residual),)
    source = Term("B*S*H", residual, "input")
    if norm is not Norm.RMSNORM_WRITTEN_OUT:
        has_mean = norm is Norm.LAYERNORM
        kept_too = (2 * FP32, "mean and deviation") if has_mean else (FP32, "deviation")
        return Op(slot, slot, (source, Term("B*S", *kept_too)), inputs)
    kept = [Term("B*S*H", FP32, "input" if residual == FP32 else "fp32 input")]
    if trains:
        kept.append(Term("B*S*H", residual, "normalized"))
    saved = (*kept, Term("B*S", FP32, "deviation"))
    return Op(f"{slot} (written out)", slot, saved, inputs)


def _with_magnitudes(op: Op, workload: Workload, precision: Precision) -> Op:
    """Return an operation plus what DoRA keeps for its linear layers (PEFT's ``dora.py``).

    DoRA multiplies the outputs of the layer and of the adapter by a magnitude, so both are kept.
    """
    sizes = [g.shape for g in adapted(workload, op.slot)] if op.slot else []
    each = precision.compute + (precision.compute if precision.is_autocast else FP32)
    kept = Term("B*S", sum(rows for rows, _ in sizes) * each, "outputs before the magnitude")
    return op._replace(saved=(*op.saved, kept)) if sizes else op


def _attention_ops(workload: Workload, precision: Precision) -> list[Op]:
    """Return the operations of attention: query, key, value, their norms, scores, projection."""
    shape, c = workload.shape, precision.compute
    back = FP32 if precision.is_autocast else 0.0
    n_qkv = sum(g.slot == "qkv" and len(g.shape) == 2 for g in shape.parameters) or 1
    ops = [
        Op(
            "query, key and value", "qkv",
            linear_input("B*S*H", precision, workload, "qkv", n_qkv), (Term("B*S*H", back or c),),
        )
    ]  # fmt: skip
    if any(g.name == "attention.qk_norm" for g in shape.parameters):
        kept = FP32 + (0.0 if workload.lora_rank else c)
        ops += [
            Op(f"norm of the {what}", "", (Term(unit, kept, "fp32 input and normalized"),),
               (Term(unit, c),), (Term(unit, 2 * FP32),), (Term(unit, FP32),))
            for what, unit in (("queries", "B*S*Q"), ("keys", "B*S*K"))
        ]  # fmt: skip
    kind = attention_used(workload, precision)
    # The projection's input is the output of attention, which fused kernels keep anyway.
    into: tuple[Term, ...] = (
        (Term("B*S*Q", c, "attention output"),) if kind is not Attention.FLASH else ()
    )
    if workload.lora_rank:
        into = linear_input("B*S*Q", precision, workload, "out", 1)
    projection = Op("output projection", "out", into, (Term("B*S*Q", c),))
    return [*ops, _core_attention(workload, precision, kind), projection, *_dropout(shape, c)]


def _core_attention(workload: Workload, precision: Precision, kind: Attention) -> Op:
    shape, c = workload.shape, precision.compute
    # Code that asks for a fused kernel in fp32, or has a mask, repeats keys and values.
    masks = makes_mask(workload)
    keys = "B*S*Q" if kind is Attention.FLASH and (c == FP32 or masks) else "B*S*K"
    inputs = (Term("B*S*Q", c), Term(keys, 2 * c))
    if kind is Attention.FLASH:
        saved: tuple[Term, ...] = (
            Term("B*S*Q", c, "query"),
            Term(keys, 2 * c, "key and value"),
            Term("B*S*Q", c, "attention output"),
            Term("B*a*S", FP32, "log-sum-exp of scores"),
            Term("B*S*S", c * masks, "mask of the window"),
            *(packed_result(workload, c) if workload.cache == "tuple" else ()),
        )
        return Op("fused attention", "", saved, inputs, (), (Term("B*S*S", c * masks),))
    dropped = bool(shape.attention_dropout)
    if kind is Attention.MATH:  # the fallback works in fp32, on repeated keys and values
        saved = (
            Term("B*S*Q", 3 * FP32, "query, key and value in fp32"),
            Term("B*a*S*S", FP32, "probabilities"),
            Term("B*a*S*S", (FP32 + 1) * dropped, "dropped probabilities and mask"),
        )
        # Scaled queries and keys, repeated keys and values; scores, softmax, and a byte that says
        # which scores are masked.
        forward = (Term("B*S*Q", 4 * FP32), Term("B*a*S*S", 2 * FP32 + 1))
        backward = (Term("B*a*S*S", 3 * FP32),)
        return Op("attention by SDPA's fallback", "", saved, inputs, backward, forward)
    softmax = FP32 if precision.is_autocast or shape.softmax_fp32 else c
    after = dropped + c * (dropped or softmax != c)
    saved = (
        Term("B*S*Q", 3 * c, "query, key and value"),
        Term("B*a*S*S", softmax, "probabilities"),
        Term("B*a*S*S", c * shape.attention_softcap, "tanh of the scores"),
        Term("B*a*S*S", float(dropped), "dropout mask"),
        Term("B*a*S*S", c * (dropped or softmax != c), "scores that multiply the values"),
    )
    # The softmax reads and writes fp16 as it is; bf16 is copied to fp32 and back.
    copied = c if softmax == c or precision.name == "fp16" else FP32
    # Scores, their copy or that of the softmax, the softmax; what the layer before returned;
    # repeated keys and values.
    forward = (
        Term("B*a*S*S", c + softmax + copied * (softmax != c) + c * shape.returns_scores),
        Term("B*S*Q", 2 * c * (shape.n_kv_heads < shape.n_heads)),
    )
    # The softmax's backward holds its result, the gradient, their product and the new gradient;
    # what the operations after it kept has been freed by then.
    backward = (Term("B*a*S*S", 2 * softmax + copied - after),)
    return Op("attention written out", "", saved, inputs, backward, forward)


def packed_result(workload: Workload, c: float) -> tuple[Term, ...]:
    """Return what values keep alive besides themselves: they are a view of the packed projection.

    Rotated queries and keys are new tensors. Where positions are not rotated, all three are views.
    A ``DynamicCache`` copies the values; the tuples used before it hold the views.
    """
    names = {g.name for g in workload.shape.parameters}
    is_view = "attention.qkv.weight" in names and "embedding.positions" not in names
    return tuple(Term(u, c, "packed query and key") for u in ("B*S*Q", "B*S*K") if is_view)


def _mlp_ops(workload: Workload, precision: Precision) -> list[Op]:
    """Return the feed-forward part: one for all tokens, or experts and their shared expert."""
    shape, c = workload.shape, precision.compute
    kept = linear_input("B*S*H", precision, workload, "up", 2 if shape.is_gated else 1)
    if not shape.n_experts:
        return [*_feed_forward(workload, precision, kept, c, "B*S*F"), *_dropout(shape, c)]
    shared = _feed_forward(workload, precision, kept, c, "B*S*W") if shape.shared_ffn else []
    # All experts run in one grouped product that autocast does not know, so in the weights' dtype.
    wide = precision.weight if precision.is_autocast else c
    gathered = (Term("B*S*k*H", wide, "tokens by expert"),)
    outputs = (Term("B*S*k*H", wide, "expert outputs"),)
    return [
        *(op._replace(slot="") for op in shared),
        *_feed_forward(workload, precision, gathered, wide, "B*S*F"),
        Op("routing", "", outputs, (Term("B*S*k*H", wide),)), *_dropout(shape, c),
    ]  # fmt: skip


def _feed_forward(
    workload: Workload, precision: Precision, kept: tuple[Term, ...], c: float, unit: str
) -> list[Op]:
    """Return the two or three matrices and the activation between them.

    ``kept`` are the terms kept for the input, ``c`` the bytes per element of the tensors between
    the matrices, and ``unit`` the unit of those tensors.
    """
    shape = workload.shape
    back = FP32 if precision.is_autocast else c
    gate = Op("gate", "", (Term(unit, 2 * c, "both factors of the gate"),), (Term(unit, 2 * c),))
    kept_out = linear_input(unit, precision, workload, "down", 1)
    return [
        Op("feed-forward in", "up", kept, (Term("B*S*H", back),)),
        _activation(shape, precision, unit, c),
        *([gate] if shape.is_gated else []),
        Op("feed-forward out", "down", kept_out, (Term(unit, c),)),
    ]


def _activation(shape: ModelShape, precision: Precision, unit: str, c: float) -> Op:
    saved: tuple[Term, ...] = (Term(unit, c, "input of the activation"),)
    forward: tuple[Term, ...] = ()
    if shape.activation in ("relu", "relu2", "leaky_relu"):
        saved = ()  # the next linear layer keeps the result anyway
    elif shape.activation in ("gelu_new", "gelu_fast", "gelu_python"):
        # Written out in Python: pow keeps its input (in fp32 under autocast), tanh its result, and
        # the last product both factors. Half of the input lives while the other factor is made.
        wide = FP32 if precision.is_autocast else c
        saved = (Term(unit, 3 * wide, "input of pow, tanh, 1 + tanh"), Term(unit, c, "0.5 x"))
        forward = (Term(unit, 2 * c),)
    return Op(shape.activation, "", saved, (Term(unit, c),), forward=forward)


def linear_input(
    unit: str, precision: Precision, workload: Workload, slot: str, n_linears: int
) -> tuple[Term, ...]:
    """Return what linear layers keep of the one tensor that they all read.

    Autocast copies the input once for each layer; otherwise they share it. A frozen layer keeps
    nothing; a LoRA adapter keeps its input in fp32, in which PEFT computes.
    """
    if not workload.lora_rank:
        if precision.is_autocast:
            return (Term(unit, precision.linear_input * n_linears, "16-bit copies of the input"),)
        return (Term(unit, precision.linear_input, "input of linear layers"),)
    n_adapted = len(adapted(workload, slot))
    kept = FP32 * n_adapted
    if precision.weight == FP32:  # no cast to fp32: one tensor, or autocast's copies
        kept = precision.compute * (n_adapted if precision.is_autocast else 1)
    found = (Term(unit, kept, "inputs of adapters"),) if n_adapted else ()
    if precision.keeps_input:
        found = (*found, Term(unit, precision.compute, "input of quantized layers"))
    return found


def _dropout(shape: ModelShape, c: float) -> list[Op]:
    """Return the dropout at the end of a branch, if there is one."""
    mask = Term("B*S*H", 1, "dropout mask")
    return [Op("dropout", "", (mask,), (Term("B*S*H", c),))] if shape.hidden_dropout else []


_ATTENTION_SLOTS: Final = ("qkv", "out")
_OTHER_NAMES: Final[Mapping[str, str]] = {
    name: slot
    for slot, names in (
        ("qkv", ("q_proj k_proj v_proj qkv_proj qkv query_key_value c_attn Wqkv wqkv W_pack query "
                 "key value wq wk wv")),
        ("out", "o_proj out_proj wo dense"),
        ("up", "gate_proj up_proj gate_up_proj fc1 w1 w3 c_fc dense_h_to_4h fc_in"),
        ("down", "down_proj fc2 w2 dense_4h_to_h fc_out"),
    )
    for name in names.split()
}  # fmt: skip
"""Name of a matrix in the code of models -> its slot here."""


def adapted(workload: Workload, slot: str = "") -> list[ParameterGroup]:
    """Return the matrices that get an adapter: all of them, or only those of a slot.

    A target is ``attention``, ``all-linear`` or a name. A name that no matrix here has comes from
    the model's own code, such as ``query_key_value``; it stands for the matrices of the same slot.
    """
    if not workload.lora_rank:
        return []
    linear = [g for g in workload.shape.parameters if g.role is Role.LINEAR and g.slot != "router"]
    own = {word for group in linear for word in group.name.split(".")}

    def is_target(group: ParameterGroup, target: str) -> bool:
        is_other = target not in own and _OTHER_NAMES.get(target) == group.slot
        in_attention = target == "attention" and group.slot in _ATTENTION_SLOTS
        return target == "all-linear" or in_attention or is_other or target in group.name.split(".")

    return [
        group
        for group in linear
        if slot in ("", group.slot) and any(is_target(group, t) for t in workload.lora_targets)
    ]
