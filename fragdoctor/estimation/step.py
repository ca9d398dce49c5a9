"""What is live at the moments of a run when memory use can be highest.

The order is that of an ordinary loop: forward, loss, ``backward()``, ``optimizer.step()``,
``zero_grad(set_to_none=True)``, in a step after the optimizer's states exist. Layers are alike, so
live memory while a layer runs is linear in the layer's index: the highest sum is at the loss, in
the backward pass of the last or the first layer, or in the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, isqrt
from typing import Final, NamedTuple

from fragdoctor.estimation.kv_cache import (
    cache_bytes_of_prompt,
    cache_bytes_per_sequence,
    cache_copies,
)
from fragdoctor.estimation.layer import (
    FP32,
    bytes_of,
    layer_ops,
    makes_mask,
    norm_op,
    packed_result,
    units,
)
from fragdoctor.estimation.states import (
    TOKENS,
    GroupState,
    communication_elements,
    gathered_layers,
    local_part,
    states_of,
)
from fragdoctor.estimation.training_choices import optimizer_of, precision_of
from fragdoctor.model.gpu_table import GENERATIONS
from fragdoctor.model.memory_estimate import PhaseName
from fragdoctor.model.workload import FsdpKind, Loss, Role, Workload

INDEX: Final = 8
N_CHUNKS: Final = 8
"""Chunks of tokens whose losses are computed one after another: torchtune's default."""
SUB_GROUP: Final = 10**9
"""Elements that a step of DeepSpeed's stage 3 updates at once: ``sub_group_size``'s default."""
REDUCE_BUCKET: Final = 5 * 10**8
"""Elements of the buffer in which DeepSpeed reduces gradients: ``reduce_bucket_size``'s default,
https://www.deepspeed.ai/docs/config-json/."""

Live = Mapping[str, float]


class Instant(NamedTuple):
    """A moment, and the bytes that are live then, by purpose."""

    phase: PhaseName
    text: str
    live: Live


class LossBytes(NamedTuple):
    """Bytes per logit while the loss is computed: in forward, in backward, and in one tensor."""

    forward: float
    backward: float
    tensor: float


def loss_bytes(workload: Workload) -> LossBytes:
    """Return the bytes per logit of cross entropy: log_softmax, nll_loss, and both backwards."""
    precision, shape = precision_of(workload.dtype), workload.shape
    c, loss = precision.compute, loss_of(workload)
    if loss is Loss.KERNEL:  # xentropy_cuda_lib saves the logits and makes their gradient
        capped = c * shape.logit_softcap
        return LossBytes(capped + c, capped + 2 * c, c)
    is_wide = loss is not Loss.WORKING and c != FP32
    entropy = FP32 if is_wide else c  # the dtype in which cross_entropy is called
    n = N_CHUNKS if loss is Loss.CHUNKED else 1
    upcast = FP32 / n if is_wide else 0.0
    shifted = FP32 if loss is Loss.SHIFTED else 0.0
    held = c * (workload.keeps_logits + shape.logit_softcap)
    nll = FP32 if precision.is_autocast and entropy != FP32 else 0.0  # autocast runs it in fp32
    stays = c if not is_wide or loss is Loss.SHIFTED else 0.0
    forward = stays + upcast + shifted + entropy + nll
    backward = max(
        entropy + nll + (nll or entropy) / n,  # log_softmax's result, the gradient of nll_loss
        entropy + 2 * entropy / n,  # the same, and the gradient of log_softmax
    )
    return LossBytes(held + forward, held + backward, max(entropy, c))


def loss_of(workload: Workload) -> Loss:
    """Return which logits the loss is computed from; by default, those of the model's code."""
    return workload.loss or (Loss.FP32 if workload.shape.upcasts_logits else Loss.WORKING)


def segment_layers(workload: Workload) -> int:
    """Return the number of layers in a checkpointed segment; 0 = no checkpointing."""
    choice, n_layers = workload.checkpointing, max(1, workload.shape.n_layers)
    named = {"none": 0, "full": 1, "sqrt": isqrt(n_layers - 1) + 1}  # at most sqrt(L) segments
    return named[choice] if choice in named else min(int(choice), n_layers)


def moments_of(workload: Workload) -> list[Instant]:
    """Return the moments of a workload on one GPU when memory use can be highest."""
    workspace = GENERATIONS[workload.compute].blas_workspace_bytes
    local, c = local_part(workload), precision_of(workload.dtype).compute
    states = states_of(local)
    start = {
        "parameters": _total(states, "stored_bytes"),
        # One per handle and stream; the forward pass and autograd's thread have one each.
        "workspaces": workspace * (1 if workload.inference else 2),
        "communication": communication_elements(workload) * c,
        "inputs": local.batch * local.seq * INDEX * (1 if workload.inference else 2),
    }
    if local.inference:
        return list(_inference(local, states, start))
    return list(_Step(local, states, start).moments())


def largest_tensor(workload: Workload) -> int:
    """Return the size of a run's largest tensor that is not a parameter, gradient or state."""
    local, precision = local_part(workload), precision_of(workload.dtype)
    sizes = units(local)
    each = [sizes["B*S*H"] * precision.residual]
    if loss_of(local) is not Loss.FUSED and not local.inference:
        each.append(sizes["B*S*V"] * loss_bytes(local).tensor)
    for op in layer_ops(local, precision):
        each += [bytes_of([term], sizes) for term in (*op.saved, *op.inputs)]
    return int(max(each))


def largest_of_step(workload: Workload) -> int:
    """Return the size of the tensor in which DeepSpeed's step holds gradients, 0 for others.

    Stage 3 has one for a part of them, and finds room for it where gathered layers were: its steps
    needed no more than the other bounds.
    """
    local = local_part(workload)
    is_whole = deepspeed_stage(local) in (1, 2)
    return updated_at_once(local, states_of(local)) * int(FP32) if is_whole else 0


def deepspeed_stage(workload: Workload) -> int:
    """Return the stage of ZeRO if it is DeepSpeed's, else 0."""
    is_other = workload.inference or workload.is_fsdp or workload.grad_dtype
    return 0 if is_other or not precision_of(workload.dtype).has_master else workload.zero_stage


def bucket_bytes(workload: Workload) -> int:
    """Return the size of the buffer in which DeepSpeed reduces gradients, 0 for others."""
    is_made = deepspeed_stage(workload) > 0
    return int(REDUCE_BUCKET * precision_of(workload.dtype).compute) if is_made else 0


def updated_at_once(workload: Workload, states: Sequence[GroupState]) -> int:
    """Return how many gradients DeepSpeed's step copies to fp32 as one tensor on this GPU."""
    if "optimizer" in workload.offload:
        return 0
    own = sum(g.n_own * g.count for g in states if g.is_trained)
    return min(own, SUB_GROUP) if workload.zero_stage == 3 else own


def _plus(live: Live, **more: float) -> dict[str, float]:
    """Return live bytes with more bytes added to some purposes."""
    return {**live, **{name: live.get(name, 0) + n_bytes for name, n_bytes in more.items()}}


def _total(states: Sequence[GroupState], what: str) -> int:
    return sum(getattr(g, what) * g.count for g in states)


def _copies(states: Sequence[GroupState], workload: Workload, *, layered: bool) -> float:
    """Return the bytes of copies of linear weights that autocast or fp8 training makes."""
    precision = precision_of(workload.dtype)
    roles = (Role.HEAD,) if precision.is_quantised else (Role.LINEAR, Role.HEAD)
    is_tied = workload.shape.tied_head and workload.shape.has_lm_head
    return precision.copies * sum(
        g.n_total
        for g in states
        if g.layered is layered
        and ".lora_" not in g.name
        and (g.role in roles or (is_tied and precision.is_autocast and g.slot == "head"))
    )


def _inference(workload: Workload, states: Sequence[GroupState], start: Live) -> Iterator[Instant]:
    """Yield loading, a prefill of ``seq`` tokens, and the last of ``new_tokens`` new tokens."""
    precision, shape = precision_of(workload.dtype), workload.shape
    held, step = PhaseName.INFERENCE, workload.batch * cache_bytes_per_sequence(workload)
    if precision.is_autocast:
        copies = sum(_copies(states, workload, layered=k) for k in (True, False))
        start = _plus(start, weight_copies=copies)
    if precision.fuses:
        joined = sum(
            g.stored_bytes * g.count for g in states if g.slot == "qkv" and g.role is Role.LINEAR
        )
        yield Instant(held, "joining query, key and value", _plus(start, temporaries=joined))
    read = _plus(start, kv_cache=workload.batch * cache_bytes_of_prompt(workload))
    grown = _plus(start, kv_cache=step, temporaries=step * (cache_copies(workload) - 1))
    sizes, ops = units(workload), layer_ops(workload, precision)
    stream = sizes["B*S*H"] * precision.residual
    # All layers are alike: each operation's result lives until the next operation has read it.
    second = next(i for i, op in enumerate(ops) if op.slot == "norm2")
    most = max(
        _held_streams(workload, is_second=i >= second) * stream
        + bytes_of((*op.inputs, *op.forward, *after.inputs), sizes)
        for i, (op, after) in enumerate(zip(ops, [*ops[1:], ops[0]], strict=True))
    )
    most += sizes["B*S*S"] * makes_mask(workload)  # a byte for each score; all layers share it
    yield Instant(held, "prefill", _plus(read, activations=most))
    last = workload.batch * shape.vocab * FP32
    logits, text = last, "logits of the last token"
    # Transformers before 4.45 (its pull request 31292) made logits for the whole prompt, and
    # copied them to fp32 with logits.float() while the first ones were still alive.
    made = Loss.FP32 if workload.keeps_logits else shape.prompt_logits
    if made:
        c, text = precision.compute, "logits of the whole prompt"
        logits = sizes["B*S*V"] * (c + FP32 if made is Loss.FP32 and c != FP32 else c)
    yield Instant(held, text, _plus(read, logits=logits))
    yield Instant(held, "the last token", _plus(grown, logits=last))


def _held_streams(workload: Workload, *, is_second: bool) -> int:
    """Return how many tensors like the residual stream are held in a half of a layer.

    Variables of the callers keep them alive: in Transformers, the model's ``inputs_embeds``, the
    layer's input, its sum with the attention's output, and what was normalized for the branch; a
    layer that normalizes after adding has no such copy. A server's kernels add and normalize in
    place.
    """
    if workload.cache == "paged":
        return 1
    return 2 + is_second + (not workload.shape.is_encoder)


class _Step:
    """A training step of one GPU's part of the run."""

    def __init__(self, workload: Workload, states: Sequence[GroupState], start: Live) -> None:
        self.workload, self.states = workload, states
        self.precision = precision_of(workload.dtype)
        self.deepspeed = stage = deepspeed_stage(workload)
        # In stage 3, this GPU's gradients are views of one buffer that is there from the start.
        self.accumulates = workload.grad_accumulation > 1 or stage == 3
        trained = [g for g in states if g.is_trained]
        live = dict(start)
        if workload.cache == "tuple":  # returned with the logits of the step before, and held
            packed = bytes_of(packed_result(workload, self.precision.compute), units(workload))
            cached = workload.batch * cache_bytes_per_sequence(workload)
            live["kv_cache"] = cached + workload.shape.n_layers * packed
        live["optimizer_states"] = _total(trained, "state_bytes")
        if workload.master_weights and "optimizer" not in workload.offload:
            live["master_weights"] = sum(g.n_own * g.count for g in trained) * int(FP32)
        if workload.world_size > 1 and not workload.zero_stage:  # DistributedDataParallel's
            live["buckets"] = _total(trained, "gradient_bytes")
        self.all_gradients = sum(g.kept_gradient_bytes * g.count for g in states if g.has_gradient)
        self.start, self.passes = live, dict(live)
        self.bucket = bucket_bytes(workload) if stage < 3 else 0  # made for the first gradient
        if self.accumulates:
            self.passes["gradients"] = self.all_gradients
        layers = gathered_layers(workload)
        self.gathered = layers * sum(g.gathered_bytes * g.per_layer for g in states if g.layered)
        if layers:
            outside = sum(g.gathered_bytes * g.count for g in states if not g.layered)
            # FSDP frees a layer after its forward pass; DeepSpeed keeps as many as it may.
            kept = 0.0 if workload.is_fsdp else self.gathered
            self.passes["gathered_parameters"] = outside + kept
            self.gathered -= kept

    def moments(self) -> Iterator[Instant]:
        """Yield what is live in the passes and in the optimizer's step."""
        yield from self._passes()
        w, trained = self.workload, [g for g in self.states if g.is_trained]
        optimizer, here = optimizer_of(w.optimizer), "optimizer" not in w.offload
        steps = [g.step_bytes * g.count for g in trained]
        if optimizer.step_of_largest:
            steps = [max((g.step_bytes for g in trained), default=0)]
        moved = ceil(optimizer.step_copies) * sum(steps) if here else 0.0
        gradients: float = self.all_gradients
        if self.deepspeed and here:
            # The step copies gradients to fp32 and frees the others, if they are no views of the
            # buffer: step() of DeepSpeed's stage_1_and_2.py, _prepare_sub_group of its stage3.py.
            own = max(1, sum(g.n_own * g.count for g in trained))
            at_once = updated_at_once(w, trained)
            kept = gradients if self.deepspeed == 3 else 0.0
            gradients, moved = kept + at_once * FP32, moved * at_once / own
        del self.start["inputs"]
        step = _plus(self.start, gradients=gradients, optimizer_temporaries=moved)
        yield Instant(PhaseName.OPTIMIZER_STEP, "optimizer step", step)

    def _passes(self) -> Iterator[Instant]:
        w, p = self.workload, self.precision
        self.sizes = sizes = units(w)
        self.ops = layer_ops(w, p)
        hidden = sizes["B*S*H"]
        n_layers, segment = w.shape.n_layers, segment_layers(w)
        self.stream = stream = hidden * p.residual
        self.copies = _copies(self.states, w, layered=True) / n_layers
        self.layer = sum(bytes_of(op.saved, sizes) for op in self.ops)
        n_kept = 1 if "activations" in w.offload else n_layers
        n_segments = ceil(n_layers / segment) if segment else 0

        final = norm_op(w.shape.norm, p, "final", trains=not w.lora_rank)
        last = bytes_of(final.saved, sizes) + hidden * p.compute
        # Autocast's cache (cached_cast of PyTorch's autocast_mode.cpp) holds copies of trained
        # weights until the forward pass ends; the graph holds copies of all weights until backward.
        is_cached = p.is_autocast and not w.lora_rank
        cached = n_layers * self.copies if is_cached or not segment else 0.0
        passes = _plus(
            self.passes,
            activations=(n_segments * stream if segment else n_kept * self.layer) + last,
            weight_copies=_copies(self.states, w, layered=False) + cached,
        )
        logits, v = loss_bytes(w), sizes["B*S*V"]
        if loss_of(w) is Loss.FUSED:  # in Liger, a chunk's logits are as large as hidden states
            forward, back = hidden * (2 * p.compute + FP32), hidden * p.compute
        else:
            forward, back = v * logits.forward, v * logits.backward
        yield Instant(PhaseName.FORWARD, "loss", _plus(passes, logits=forward))
        if segment:
            passes["weight_copies"] -= cached
        yield Instant(PhaseName.BACKWARD, "backward of the loss", _plus(passes, logits=back))
        made = self._gradients("head") + self._gradients("final_norm")
        for layer in (n_layers, 1):
            yield from self._layer(layer, segment, made)
        if self.bucket:
            # To reduce a full bucket, DeepSpeed copies it: allreduce_and_copy_with_multiple_ranks
            # of its stage_1_and_2.py. By the last full one, gradients of those before it are kept.
            n = sum(g.n_total for g in self.states if g.is_trained)
            in_bucket = min(n, REDUCE_BUCKET)
            before = 0 if self.accumulates else max(0, n // REDUCE_BUCKET - 1) * REDUCE_BUCKET / n
            full = _plus(
                self.passes,
                buckets=self.bucket + in_bucket * p.compute,
                gradients=before * self.all_gradients,
            )
            yield Instant(PhaseName.BACKWARD, "reducing a bucket of gradients", full)
        if w.shape.tied_head and w.shape.has_lm_head:
            # Both gradients of the one weight are added: InputBuffer::accumulate of PyTorch's
            # input_buffer.cpp writes the sum into the head's only if that is no view of another
            # tensor. It is the transposed result of a product, unless autocast casts it to fp32.
            each = sum(g.gradient_bytes for g in self.states if g.name == TOKENS and g.is_trained)
            added = each * (1 if p.is_autocast else 2)
            now = self.passes | {"gradients": self.all_gradients, "temporaries": added}
            yield Instant(PhaseName.BACKWARD, "backward of the embedding", now)

    def _layer(self, layer: int, segment: int, outside: float) -> Iterator[Instant]:
        """Yield the backward pass of a layer, or of the checkpointed segment that ends with it."""
        w, n_layers = self.workload, self.workload.shape.n_layers
        in_layer = sum(self._gradients(slot) for slot in {op.slot for op in self.ops})
        before, inputs, done = layer - 1, 0.0, n_layers - layer
        if segment:  # recomputed as a whole
            n_segments, size = ceil(layer / segment), min(segment, n_layers)
            ended = ceil(n_layers / segment) - n_segments
            inputs = (n_segments - 1) * self.stream + self._held(ended, segment)
            before, done = size - 1, 0 if layer == n_layers else n_layers - size
        elif "activations" in w.offload:
            before = min(before, 1)
        live = _plus(
            self.passes,
            weight_copies=(before + 1) * self.copies,
            buckets=self.bucket,
            gathered_parameters=self.gathered,
            gradients=0.0 if self.accumulates else outside + done * in_layer,
        )
        kept, made, incoming = before * self.layer + inputs + self.layer, 0.0, 0
        for op in reversed(self.ops):  # last first
            back, made = bytes_of(op.inputs, self.sizes), made + self._gradients(op.slot)
            moving = self.stream + incoming + back + bytes_of(op.scratch, self.sizes)
            now = _plus(live, activations=kept, gradients=made, temporaries=moving)
            yield Instant(PhaseName.BACKWARD, f"backward of layer {layer} of {n_layers}", now)
            kept -= bytes_of(op.saved, self.sizes)
            incoming = back

    def _gradients(self, slot: str) -> float:
        """Return the bytes of gradients that a slot leaves."""
        if self.accumulates or not slot:
            return 0.0
        groups = (g for g in self.states if g.slot == slot and g.has_gradient)
        return sum(g.kept_gradient_bytes * g.per_layer for g in groups)

    def _held(self, n_segments: int, segment: int) -> float:
        """Return the bytes of segment inputs and their gradients that live until backward ends.

        If all weights of a unit are frozen, FSDP 1 ties its clean-up to the gradients of the
        unit's inputs (``_register_post_backward_reshard_only_hook`` of PyTorch's
        ``distributed/fsdp/_runtime_utils.py``). Under reentrant checkpointing the inputs are
        leaves, so the handle keeps them and their gradients alive until FSDP's last callback.
        """
        w = self.workload
        if not segment or not w.lora_rank or w.fsdp_kind is not FsdpKind.FIRST:
            return 0.0
        each = self.precision.residual + self.precision.compute
        return n_segments * self.sizes["B*S*H"] * each
