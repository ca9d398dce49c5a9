"""What operations of a layer are made of: units of size, tensors, and the parts that all share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fragdoctor.estimation.safetensors import slot_of_name
from fragdoctor.estimation.training_choices import Precision
from fragdoctor.frozen import frozen
from fragdoctor.model.workload import Attention, ModelShape, Norm, Workload

FP32: Final = 4.0


@frozen
class Term:
    """``bytes_per`` for each element of ``unit``, such as ``B*S*H``."""

    unit: str
    bytes_per: float
    label: str = ""


@frozen
class Op:
    """One operation of a layer.

    Attributes:
        slot: whose parameters it uses (``ParameterGroup.slot``), or "".
        saved: tensors kept for backward.
        passing: output that the next operation consumes and autograd does not keep.
        scratch: further memory while it runs forward.
        grads: gradients of its inputs: what its backward makes.
        back_scratch: further memory while its backward runs.
        ends_branch: its gradient is added into the residual stream's.
    """

    name: str
    slot: str = ""
    saved: tuple[Term, ...] = ()
    passing: tuple[Term, ...] = ()
    scratch: tuple[Term, ...] = ()
    grads: tuple[Term, ...] = ()
    back_scratch: tuple[Term, ...] = ()
    ends_branch: bool = False


def units(workload: Workload) -> Mapping[str, int]:
    """Return the size of each unit in elements, for one layer."""
    shape, batch, seq = workload.shape, workload.batch, workload.seq
    tokens = batch * seq
    routed = max(1, shape.experts_per_token) if shape.n_experts else 1
    return {
        "B*S": tokens,
        "B*S*H": -(-tokens * shape.hidden // workload.stream_shards),
        "B*S*Q": tokens * shape.n_heads * shape.head_dim,
        "B*S*K": tokens * shape.n_kv_heads * shape.head_dim,
        "B*S*F": tokens * shape.ffn * routed,
        "B*S*W": tokens * shape.shared_ffn * shape.n_shared_experts,
        "B*S*k*H": tokens * shape.hidden * (routed if shape.n_experts else 0),
        "B*S*E": tokens * shape.n_experts,
        "B*S*V": tokens * shape.vocab if shape.has_lm_head else 0,
        "B*a*S": tokens * shape.n_heads,
        "B*a*S*S": tokens * shape.n_heads * seq,
        "1": 1,
        "S*S": seq * seq,
        "B*S*S": tokens * seq,
        "B*S*R": tokens * shape.latent_width,
    }


def term_bytes(term: Term, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a term."""
    return int(term.bytes_per * sizes[term.unit])


def has_window(workload: Workload) -> bool:
    """Return whether sequences are longer than the window of the layers that have one."""
    return 0 < workload.shape.sliding_window < workload.seq and workload.shape.n_sliding_layers > 0


def attention_used(workload: Workload, precision: Precision, *, slides: bool = False) -> Attention:
    """Return how attention is really computed: which kernel SDPA falls to.

    No fused kernel takes fp32 with fewer key than query heads: the fallback serves it. Who asks
    for a fused kernel by name has code that repeats keys and values first; so does Transformers
    where a mask cuts a window out of the scores (``slides``).
    """
    shape = workload.shape
    if workload.attention is not Attention.SDPA:
        return workload.attention
    if shape.writes_attention:
        return Attention.EAGER
    is_grouped = shape.n_kv_heads < shape.n_heads
    repeats = slides or shape.repeats_keys
    if not repeats and is_grouped and (precision.compute == FP32 or shape.shares_heads):
        return Attention.MATH
    return Attention.FLASH


def norm_op(norm: Norm, precision: Precision, slot: str, *, trains: bool = True) -> Op:
    """Return a normalisation of the residual stream."""
    residual, compute = precision.residual, precision.compute
    out = FP32 if precision.is_autocast else compute
    grads = (Term("B*S*H", residual),)
    saved: tuple[Term, ...]
    source = Term("B*S*H", residual, "input")
    if norm is Norm.LAYERNORM:
        saved = (source, Term("B*S", 2 * FP32, "mean and deviation"))
    elif norm is Norm.RMSNORM:
        saved = (source, Term("B*S", FP32, "deviation"))
    else:
        kept = [Term("B*S*H", FP32, "input" if residual == FP32 else "fp32 input")]
        if trains:
            wide = FP32 if norm is Norm.RMSNORM_WIDE else residual
            kept.append(Term("B*S*H", wide, "normalised"))
        saved = (*kept, Term("B*S", FP32, "deviation"))
        # The fp32 gradients of the two products, while the written-out norm runs backward.
        return Op(
            f"{slot} (written out)", slot, saved, (Term("B*S*H", out),),
            scratch=(Term("B*S*H", FP32),), grads=grads,
            back_scratch=(Term("B*S*H", 2 * FP32),), ends_branch=True,
        )  # fmt: skip
    return Op(slot, slot, saved, (Term("B*S*H", out),), grads=grads, ends_branch=True)


def linear_input(
    unit: str, precision: Precision, workload: Workload, slot: str, n_linears: int
) -> tuple[Term, ...]:
    """Return what linear layers that read one tensor keep of it.

    Autocast copies the input once for each of them; otherwise they share it. A frozen layer
    keeps nothing; a LoRA adapter keeps its input in fp32, as PEFT computes it.
    """
    adapted = adapted_linears(workload, slot)
    found: tuple[Term, ...]
    if workload.lora_rank:
        kept = FP32 * adapted
        if precision.weight == FP32:  # nothing to widen: one tensor, or autocast's copies
            kept = precision.compute * (adapted if precision.is_autocast else 1)
        found = (Term(unit, kept, "inputs of adapters"),) if adapted else ()
        if precision.keeps_input and slot != "out":  # those attention keeps
            found = (*found, Term(unit, precision.compute, "input of 8-bit layers"))
        return found
    if precision.is_autocast:
        return (Term(unit, precision.linear_input * n_linears, "16-bit copies of the input"),)
    return (Term(unit, precision.linear_input, "input of linear layers"),)


_ATTENTION_SLOTS: Final = ("qkv", "out")
_ALL_SLOTS: Final = (*_ATTENTION_SLOTS, "up", "down")


def adapted_linears(workload: Workload, slot: str) -> int:
    """Return how many linear layers of a slot carry an adapter."""
    if not workload.lora_rank:
        return 0
    groups = [g for g in workload.shape.parameters if g.slot == slot and len(g.shape) == 2]
    return sum(is_adapted(workload, g.name, slot) for g in groups)


def is_adapted(workload: Workload, name: str, slot: str) -> bool:
    """Return whether LoRA targets a matrix, by slot or by name.

    A name that no matrix here has is one of the model's own code, such as ``query_key_value``: it
    stands for what does the same work.
    """
    for target in workload.lora_targets:
        if target == "attention" and slot in _ATTENTION_SLOTS:
            return True
        if target == "all-linear" and slot in _ALL_SLOTS:
            return True
        if target in name.split("."):
            return True
        if slot and slot == slot_of_name(target) and target not in names_of(workload.shape):
            return True
    return False


def names_of(shape: ModelShape) -> set[str]:
    """Return all words in the names of a model's layers."""
    return {word for g in shape.parameters if g.layered for word in g.name.split(".")}


def n_linears(shape: ModelShape, slot: str) -> int:
    """Return how many linear layers a slot has."""
    return sum(g.slot == slot and len(g.shape) == 2 for g in shape.parameters) or 1


def dropout(shape: ModelShape, c: float) -> list[Op]:
    """Return the dropout at the end of a branch, if there is one."""
    if not shape.hidden_dropout:
        return []
    mask = Term("B*S*H", 1, "dropout mask")
    return [Op("dropout", "", (mask,), (Term("B*S*H", c),), grads=(Term("B*S*H", c),))]
