"""Plays inference: weights, KV cache, and the widest operation of a prefill."""

from __future__ import annotations

from fragdoctor.estimation.layers import layer_ops, term_bytes, units
from fragdoctor.estimation.precision import dtype_bytes, precision_of
from fragdoctor.estimation.states import states_of
from fragdoctor.estimation.tape import Tape
from fragdoctor.model.estimate import PhaseName
from fragdoctor.model.workload import Role, Workload

FP32 = 4.0


def kv_element_bytes(workload: Workload) -> float:
    """Return the bytes of one element of the KV cache."""
    if workload.kv_dtype:
        return dtype_bytes(workload.kv_dtype)
    return precision_of(workload.dtype).compute


def play_inference(workload: Workload, workspace_bytes: int) -> Tape:
    """Return the allocations of a prefill of ``seq`` tokens with room for ``new_tokens`` more."""
    tape, precision, shape = Tape(), precision_of(workload.dtype), workload.shape
    tape.phase(PhaseName.INFERENCE)
    tape.moment("prefill")
    states = states_of(workload)
    for group in states.groups:
        tape.alloc("parameters", group.stored_bytes, group.count)
    tape.alloc("workspaces", workspace_bytes)
    if not shape.has_layers or workload.seq <= 0:
        return tape
    tape.alloc("inputs", workload.batch * workload.seq * 8)
    tokens = workload.batch * (workload.seq + workload.new_tokens)
    row = shape.n_kv_heads * shape.head_dim * kv_element_bytes(workload)
    tape.alloc("kv_cache", tokens * row, 2 * shape.n_layers)
    if precision.is_autocast:
        copied = (Role.LINEAR, Role.EXPERT, Role.HEAD)
        for group in states.groups:
            if group.role in copied:
                tape.alloc("weight_copies", group.n_each * precision.copies, group.count)
    sizes = units(workload)
    stream = tape.alloc("activations", sizes["B*S*H"] * precision.residual)
    # One layer is like the next: each operation's result lives until the next one has read it.
    passing: list[int] = []
    for op in layer_ops(workload, precision):
        scratch = [tape.alloc("temporaries", term_bytes(t, sizes)) for t in op.scratch]
        after = [tape.alloc("activations", term_bytes(t, sizes)) for t in op.passing]
        tape.free(*scratch, *passing)
        passing = after
    tape.free(*passing, stream)
    tape.moment("logits of the last token")
    tape.alloc("logits", workload.batch * shape.vocab * FP32)
    return tape
