"""Plays training steps as allocations: which tensor is alive when.

The order is that of an ordinary loop: forward, loss, ``backward()``, ``optimizer.step()``,
``zero_grad(set_to_none=True)``. Two steps are played, for the optimizer's states appear in the
first one's ``step()`` and are there during the second one's forward pass.

Bounds need neither: equal layers add equal amounts, so that what is alive during one of them is
linear in its place, and the highest sum lies at the first or the last of them, in a step that finds
the states. The ones between are played together (:attr:`StepPlayer.times`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from math import isqrt
from typing import Final

from fragdoctor.estimation.layer_operations import layer_ops
from fragdoctor.estimation.operation_memory import (
    FP32,
    Op,
    Term,
    has_window,
    norm_op,
    term_bytes,
    units,
)
from fragdoctor.estimation.states import states_of
from fragdoctor.estimation.tape import Tape
from fragdoctor.estimation.training_choices import precision_of
from fragdoctor.model.memory_estimate import PhaseName
from fragdoctor.model.workload import FsdpKind, Loss, Role, Workload

INDEX: Final = 8.0
N_CHUNKS: Final = 8
"""Parts of the tokens whose loss is taken one after the other: torchtune's default."""


def segment_layers(workload: Workload) -> int:
    """Return the layers in a checkpointed segment; 0 = no checkpointing."""
    choice, n_layers = workload.checkpointing, max(1, workload.shape.n_layers)
    if choice in ("none", "") or not workload.shape.has_layers:
        return 0
    if choice == "full":
        return 1
    if choice == "sqrt":  # ceil: at most sqrt(L) segments
        root = isqrt(n_layers)
        return root if root * root == n_layers else root + 1
    return min(int(choice), n_layers)


@dataclass(slots=True)
class Kept:
    """Handles of what the forward of one operation left for its backward."""

    op: Op
    saved: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)


class StepPlayer:
    """Writes the tape of a workload.

    Attributes:
        kind: of the layer that is played, ``dense`` or ``sparse``.
        is_whole: every layer is played by itself, in two steps.
        times: layers that are played together; what stays of a layer stays so many times.
        sizes: of the units, in that layer.
    """

    def __init__(self, workload: Workload, *, is_whole: bool = True) -> None:
        self.workload = workload
        self.is_whole = is_whole
        self.times = 1
        self.precision = precision_of(workload.dtype)
        self.states = states_of(workload)
        self.tape = Tape()
        self.kind = "sparse"
        self.decoder_sizes = units(workload)
        self.sizes = self.decoder_sizes
        self.gradients: list[int] = []
        self.cache: list[int] = []
        self.gathered: list[int] = []
        self.held: list[int] = []
        self.holds = workload.fsdp_kind is FsdpKind.FIRST and workload.lora_rank > 0
        self.has_shape = workload.shape.has_layers and workload.seq > 0
        self.ops = layer_ops(workload, self.precision) if self.has_shape else []
        self.dense_ops: list[Op] = []
        if workload.shape.n_dense_layers:
            plain = replace(workload.shape, n_experts=0, shared_ffn=0,
                            ffn=workload.shape.dense_ffn)  # fmt: skip
            self.dense_sizes = units(replace(workload, shape=plain))
            self.dense_ops = layer_ops(replace(workload, shape=plain), self.precision)
        self.sliding_ops = (
            layer_ops(workload, self.precision, slides=True) if has_window(workload) else []
        )
        self.segment = segment_layers(workload)
        usual = Loss.FP32 if workload.shape.upcasts_logits else Loss.WORKING
        self.loss = workload.loss or usual
        self.n_chunks = N_CHUNKS if self.loss is Loss.CHUNKED else 1
        self.offloads = "activations" in workload.offload and not self.segment

    def play(self, workspace_bytes: int, buffer_bytes: float = 0) -> Tape:
        """Return the tape of two steps, or of one that finds the optimizer's states."""
        states, tape = self.states, self.tape
        tape.alloc("communication", buffer_bytes)
        for group in states.groups:
            tape.alloc("parameters", group.stored_bytes, group.count)
        if states.master_bytes_each and "optimizer" not in self.workload.offload:
            for group in states.groups:
                if group.is_trained:
                    tape.alloc("master_weights", group.sharded(FP32), group.count)
        self._make_buckets()
        if not self.is_whole:
            tape.alloc("workspaces", workspace_bytes, 2)
            self._make_states()
        for step in range(2 if self.is_whole else 1):
            for micro in range(min(2, self.workload.grad_accumulation)):
                workspace = workspace_bytes if self.is_whole and step == micro == 0 else 0
                self.forward(workspace)
                self.backward(workspace)
                self.states.accumulated = self.workload.grad_accumulation > 1
            self._optimizer_step(is_first=self.is_whole and step == 0)
        return tape

    def _make_buckets(self) -> None:
        """Data parallelism keeps gradients once more, in its buckets."""
        if self.workload.world_size > 1 and not self.workload.zero_stage:
            for group in self.states.groups:
                if group.is_trained:
                    self.tape.alloc("buckets", group.gradient_bytes, group.count)

    def _make_states(self) -> None:
        for group in self.states.groups:
            if group.is_trained:
                for size in group.state_sizes:
                    self.tape.alloc("optimizer_states", size, group.count)

    def _stretches(self) -> list[tuple[int, int]]:
        """Return the first layers, and how many units, of what is played together.

        A unit is a checkpointed segment, or a layer. The first two and the last two of equal ones
        stand alone: what comes before or after them lives a little longer.
        """
        n_layers, step = self.workload.shape.n_layers, self.segment or 1
        starts = range(0, n_layers, step)
        if self.is_whole or self.offloads:
            return [(start, 1) for start in starts]
        kinds = [tuple(map(self._kind_of, range(i, min(i + step, n_layers)))) for i in starts]
        found = []
        for _, run in groupby(zip(kinds, starts, strict=True), key=lambda unit: unit[0]):
            equal = [start for _, start in run]
            middle = [(equal[2], len(equal) - 4)] if len(equal) > 4 else []
            alone = [(start, 1) for start in equal]
            found += [*alone[:2], *middle, *alone[max(2, len(equal) - 2) :]]
        return found

    def _kind_of(self, layer: int) -> tuple[bool, bool]:
        """Return whether a layer has a window, and whether it is a dense one of a mixture."""
        shape = self.workload.shape
        return bool(self.sliding_ops) and layer < shape.n_sliding_layers, (
            layer < shape.n_dense_layers
        )

    # Forward

    def forward(self, workspace_bytes: int) -> None:
        """Play the forward pass and the loss."""
        tape, precision = self.tape, self.precision
        tape.phase(PhaseName.FORWARD)
        tape.moment("forward")
        tape.alloc("workspaces", workspace_bytes)
        self.inputs = [self._unit("inputs", "B*S", INDEX) for _ in range(2)]
        if not self.has_shape:
            return
        self._gather_outside()
        self.layers: list[list[Kept]] = []
        self.boundaries: list[int] = []
        self._at_layer(0)
        self.front: list[int] = []
        if self.workload.shape.adds_slopes:
            self.front.append(self._unit("activations", "B*a*S*S", precision.weight))
        stream = self._unit("activations", "B*S*H", precision.residual)
        n_layers = self.workload.shape.n_layers
        for start, times in self._stretches():
            self.times = times
            if self.segment and times > 1:
                stream = self._past_segments(start, stream)
                continue
            for i in range(start, min(start + (self.segment or 1), n_layers)):
                self._at_layer(i)
                tape.moment(f"forward of layer {i + 1} of {n_layers}")
                stream = self._through_layer(i, stream)
        self.times = 1
        self.last = stream
        self._head_forward()

    def _through_layer(self, layer: int, stream: int) -> int:
        """Play a layer on the residual stream, and return the stream after it."""
        tape, residual = self.tape, self.precision.residual
        if not self.segment:
            self.layers.append(self._layer_forward(owns_stream=stream, keeps=True))
            if self.offloads and layer:
                self._send_away(self.layers[layer - 1])
            if self.times > 1 and stream in self.layers[-1][0].saved:  # of the layers between
                more = self.tape.alloc(
                    "activations", self.sizes["B*S*H"] * residual, self.times - 1
                )
                self.layers[-1][0].saved.append(more)
            return self._unit("activations", "B*S*H", residual)
        if layer % self.segment == 0:
            self.boundaries.append(stream)
        kept = self._layer_forward(owns_stream=stream, keeps=False)
        after = self._unit("activations", "B*S*H", residual)
        self._drop(kept)
        if (layer % self.segment) != 0:
            tape.free(stream)
        return after

    def _past_segments(self, start: int, stream: int) -> int:
        """Leave of equal checkpointed segments what stays: their inputs, and autocast's copies."""
        size = self.sizes["B*S*H"] * self.precision.residual
        self.boundaries += [stream, self.tape.alloc("activations", size, self.times - 1)]
        for i in range(start, start + self.segment):
            self._at_layer(i)
            for op in self.layer_ops:
                self._weight_copies(op.slot, keeps=False)
        return self._unit("activations", "B*S*H", self.precision.residual)

    def _layer_forward(self, *, owns_stream: int, keeps: bool) -> list[Kept]:
        """Play one layer; the residual it reads is ``owns_stream``, already there."""
        tape = self.tape
        gathered = self._gather_layer()
        kept_ops: list[Kept] = []
        passing: list[int] = []
        for op in self.layer_ops:
            kept = Kept(op)
            kept.copies = self._weight_copies(op.slot, keeps=keeps)
            scratch = [self._term("temporaries", t) for t in op.scratch]
            scratch.append(self._dequantised(op.slot))
            for term in op.saved:
                is_stream = term.label == "input" and op.slot == "norm1"
                kept.saved.append(owns_stream if is_stream else self._term("activations", term))
            after = [self._term("temporaries", t) for t in op.passing]
            tape.free(*scratch, *passing)
            passing = after
            kept_ops.append(kept)
        tape.free(*passing)
        tape.free(*gathered)
        # A norm that works on an fp32 copy does not keep the residual itself.
        if keeps and not any(t.label == "input" for t in self.ops[0].saved):
            tape.free(owns_stream)
        return kept_ops

    def _drop(self, kept_ops: list[Kept]) -> None:
        """Forget what a checkpointed layer would have kept, but for the segment's input."""
        for kept in kept_ops:
            for term, handle in zip(kept.op.saved, kept.saved, strict=True):
                if not (term.label == "input" and kept.op.slot == "norm1"):
                    self.tape.free(handle)

    def _send_away(self, kept_ops: list[Kept]) -> None:
        """Give what a layer keeps to the host, while the next layer runs."""
        for kept in kept_ops:
            self.tape.free(*kept.saved)

    def _bring_back(self, kept_ops: list[Kept]) -> None:
        """Fetch it again, while the layer after it runs backward."""
        for kept in kept_ops:
            kept.saved = [self._term("activations", term) for term in kept.op.saved]

    def _head_forward(self) -> None:
        """Play the last norm, the head and the loss."""
        tape, p, shape = self.tape, self.precision, self.workload.shape
        tape.moment("loss")
        self.final = norm_op(shape.norm, p, "final", trains=not self.workload.lora_rank)
        self.final_saved = [
            self.last if t.label == "input" else self._term("activations", t)
            for t in self.final.saved
        ]
        if self.last not in self.final_saved:
            tape.free(self.last)
        head = [g for g in self.states.in_slot("head") if not g.name.endswith("bias")]
        self.head_copies = [
            tape.alloc("weight_copies", g.n_each * p.copies)
            for g in head
            if p.is_autocast and p.copies
        ]
        self.head_input = self._unit("activations", "B*S*H", p.compute)
        if self.loss is Loss.FUSED:
            self._fused_loss()
            return
        self.logits = self._unit("logits", "B*S*V", p.compute)
        upcasts = self.loss in (Loss.FP32, Loss.SHIFTED, Loss.CHUNKED)
        wide = upcasts and p.compute != FP32
        entropy = FP32 if wide else p.compute  # the dtype in which cross_entropy is called
        self.capped = -1
        if shape.logit_softcap:  # quotient, tanh, product
            quotient = self._unit("logits", "B*S*V", p.compute)
            tape.free(self.logits)
            self.capped = self._unit("logits", "B*S*V", p.compute)
            tape.free(quotient)
            self.logits = self._unit("logits", "B*S*V", p.compute)
        upcast = self._unit("logits", "B*S*V", FP32 / self.n_chunks) if wide else -1
        shifted = self._unit("logits", "B*S*V", FP32) if self.loss is Loss.SHIFTED else -1
        if not self.workload.keeps_logits and wide and self.loss is not Loss.SHIFTED:
            tape.free(self.logits)
            self.logits = -1
        self.log_probs = self._unit("logits", "B*S*V", entropy)
        # Autocast runs nll_loss in fp32, on a copy.
        self.nll_input = (
            self._unit("logits", "B*S*V", FP32) if p.is_autocast and entropy != FP32 else -1
        )
        tape.free(upcast, shifted)
        if not self.workload.keeps_logits:
            tape.free(self.logits)
            self.logits = -1
        self.entropy = entropy
        tape.free(*self.cache)  # autocast ends with the forward pass
        self.cache = []

    def _fused_loss(self) -> None:
        """Play a loss that makes logits of some tokens at a time, and its gradients right away.

        Liger's ``fused_linear_cross_entropy`` takes so many tokens that their logits are about as
        large as the hidden states; the gradient of the latter is all that stays.
        """
        chunk = [self._unit("logits", "B*S*H", n) for n in (self.precision.compute, FP32)]
        self.logits = self._unit("logits", "B*S*H", self.precision.compute)
        self.tape.free(*chunk, *self.cache)
        self.cache = []

    # Backward

    def backward(self, workspace_bytes: int) -> None:
        """Play the backward pass."""
        tape, p = self.tape, self.precision
        tape.phase(PhaseName.BACKWARD)
        tape.moment("backward of the loss")
        tape.alloc("workspaces", workspace_bytes)  # autograd's thread has a handle of its own
        if not self.has_shape:
            for slot in self.states.slots():
                self._weight_gradients(slot)
            tape.free(*self.inputs)
            return
        self._loss_backward()
        stream_grad = self._unit("temporaries", "B*S*H", p.residual)
        n_layers = self.workload.shape.n_layers
        for i, times in reversed(self._stretches()):
            self.times = times
            if times > 1:
                self._past_backward(range(i, i + (self.segment or 1)))
            elif self.segment:
                self._segment_backward(i, min(i + self.segment, n_layers))
            else:
                tape.moment(f"backward of layer {i + 1} of {n_layers}")
                self._at_layer(i)
                if self.offloads and i:
                    self._bring_back(self.layers[i - 1])
                self._layer_backward(self.layers.pop())
        self.times = 1
        tape.moment("backward of the embedding")
        for group in self.states.in_slot("head"):
            if group.role is Role.EMBEDDING and group.is_trained:  # tied: the sum is a third
                n = 1 if p.is_autocast else 2  # a gradient that was cast is added to in place
                added = [tape.alloc("temporaries", group.gradient_bytes) for _ in range(n)]
                tape.free(*added)
        self._weight_gradients("embedding")
        tape.free(stream_grad, *self.inputs, *self.front, *self.held)
        self.held = []
        tape.free(*self.gathered)
        self.gathered = []

    def _loss_backward(self) -> None:
        tape, p = self.tape, self.precision
        if self.loss is Loss.FUSED:
            self._final_backward(self.logits)
            return
        narrow = self.nll_input >= 0
        grad = self._unit("logits", "B*S*V", (FP32 if narrow else self.entropy) / self.n_chunks)
        tape.free(self.nll_input)
        if narrow:
            cast = self._unit("logits", "B*S*V", self.entropy)
            tape.free(grad)
            grad = cast
        inner = self._unit("logits", "B*S*V", self.entropy / self.n_chunks)
        if self.n_chunks == 1:
            tape.free(grad, self.log_probs)
            grad = self.log_probs = -1
        if self.entropy != p.compute:
            cast = self._unit("logits", "B*S*V", p.compute)
            tape.free(inner)
            inner = cast
        tape.free(self.logits, grad, self.log_probs)
        if self.capped >= 0:
            cast = self._unit("logits", "B*S*V", p.compute)
            tape.free(inner, self.capped)
            inner = cast
        self._final_backward(inner)

    def _final_backward(self, inner: int) -> None:
        """Go back through the head and the last norm from the gradient of the logits."""
        tape, p = self.tape, self.precision
        hidden_grad = self._unit("temporaries", "B*S*H", p.compute)
        self._weight_gradients("head", inner, self.head_input, *self.head_copies)
        scratch = [self._term("temporaries", t) for t in self.final.back_scratch]
        self._weight_gradients("final_norm")
        tape.free(hidden_grad, *scratch, *self.final_saved)

    def _past_backward(self, layers: range) -> None:
        """Let go of what was kept for equal layers, and make their gradients."""
        if self.segment:
            self.tape.free(self.boundaries.pop(), self.boundaries.pop())
        else:
            for kept in self.layers.pop():
                self.tape.free(*kept.saved, *kept.copies)
        for i in layers:
            self._at_layer(i)
            for slot in dict.fromkeys(op.slot for op in self.layer_ops if op.slot):
                self._weight_gradients(slot)
        self._hold_input()

    def _hold_input(self) -> None:
        """Keep a checkpointed segment's input and its gradient until backward ends.

        Where all weights of a unit are frozen, FSDP 1 hangs its clean-up on the gradients of the
        unit's inputs (``_register_post_backward_reshard_only_hook`` of PyTorch's
        ``distributed/fsdp/_runtime_utils.py``). Under reentrant checkpointing these are leaves, so
        the handle keeps them and their gradients alive until FSDP's last callback.
        """
        if self.holds and self.segment:
            size = self.sizes["B*S*H"] * (self.precision.residual + self.precision.compute)
            self.held.append(self.tape.alloc("activations", size, self.times))

    def _segment_backward(self, start: int, end: int) -> None:
        """Recompute a segment from its input, then go back through it."""
        text = f"layer {start + 1}" if end - start == 1 else f"layers {start + 1} to {end}"
        self.tape.moment(f"recomputation of {text}")
        stream, layers = self.boundaries.pop(), []
        for i in range(start, end):
            self._at_layer(i)
            layers.append(self._layer_forward(owns_stream=stream, keeps=True))
            if i + 1 < end:
                stream = self._unit("activations", "B*S*H", self.precision.residual)
        # The segment's output is computed again too, though it is not needed.
        self.tape.free(self._unit("activations", "B*S*H", self.precision.residual))
        self.tape.moment(f"backward of {text}")
        while layers:
            self._layer_backward(layers.pop())
        self._hold_input()

    def _layer_backward(self, kept_ops: list[Kept]) -> None:
        tape = self.tape
        gathered = self._gather_layer()
        incoming: list[int] = []
        for kept in reversed(kept_ops):
            op = kept.op
            scratch = [self._term("temporaries", t) for t in op.back_scratch]
            grads = [self._term("temporaries", t) for t in op.grads]
            tape.free(*scratch, self._dequantised(op.slot))
            if op.slot:
                self._weight_gradients(op.slot)
            tape.free(*incoming, *reversed(kept.saved), *kept.copies)
            incoming = grads
            if op.ends_branch:
                tape.free(*incoming)
                incoming = []
        tape.free(*incoming)
        tape.free(*gathered)

    # Parameters

    def _weight_copies(self, slot: str, *, keeps: bool) -> list[int]:
        """Make the 16-bit copies of a slot's weights.

        They belong to the graph, or, under checkpointing, to autocast's cache until it ends.
        """
        if not slot or not self.precision.copies or self.precision.is_quantised:
            return []
        made = [
            self.tape.alloc(
                "weight_copies", g.n_each * self.precision.copies, g.per_layer * self.times
            )
            for g in self.states.in_slot(slot, self.kind)
            if g.role is Role.LINEAR or (g.role is Role.EXPERT and not self.precision.is_autocast)
        ]
        if not keeps and self.precision.is_autocast:
            self.cache += made
            return []
        return made

    def _dequantised(self, slot: str) -> int:
        """Make the largest of a slot's quantised weights anew, in the dtype of the product.

        bitsandbytes does so in forward and in backward, for one matrix at a time (``MatMul4Bit`` of
        its ``autograd/_functions.py``).
        """
        if not self.precision.is_quantised:
            return -1
        groups = [g.n_each for g in self.states.in_slot(slot, self.kind) if g.role is Role.LINEAR]
        return self.tape.alloc("temporaries", max(groups, default=0) * self.precision.compute)

    def _weight_gradients(self, slot: str, *used: int) -> None:
        """Make a slot's gradients: in the working precision first, then as they are kept.

        What was ``used`` for the first is free by the time of the second.
        """
        tape, p = self.tape, self.precision
        for group in self.states.in_slot(slot, self.kind):
            if not group.has_gradient:
                continue
            full = group.gradient_bytes
            n = group.per_layer * (self.times if group.layered else 1)
            casts = p.is_autocast and group.slot not in ("embedding", "final_norm")
            casts = casts and group.role not in (Role.NORM, Role.EXPERT)
            raw = tape.alloc("temporaries", group.n_each * p.compute, 1) if casts else -1
            if casts:
                tape.free(*used)
                used = ()
            if self.states.accumulated:  # added to what is there
                tape.free(raw, tape.alloc("temporaries", full, 1))
                continue
            if group.is_sharded_gradient:
                whole = tape.alloc("temporaries", full, 1)
                kept = tape.alloc("gradients", group.kept_gradient_bytes, n)
                tape.free(whole)
            else:
                kept = tape.alloc("gradients", full, n)
            self.gradients.append(kept)
            tape.free(raw)
        tape.free(*used)

    def _optimizer_step(self, *, is_first: bool) -> None:
        tape, states = self.tape, self.states
        tape.phase(PhaseName.OPTIMIZER_STEP)
        tape.moment("optimizer step")
        trained = [g for g in states.groups if g.is_trained]
        if is_first:
            self._make_states()
        temporary: list[int] = []
        for _ in range(states.n_step_copies):
            if states.step_of_largest:
                largest = max((g.step_bytes for g in trained), default=0)
                temporary.append(tape.alloc("optimizer_temporaries", largest))
            else:
                temporary += [
                    tape.alloc("optimizer_temporaries", g.step_bytes, g.count) for g in trained
                ]
        tape.free(*temporary)
        tape.free(*self.gradients)
        self.gradients = []
        self.states.accumulated = False

    def _gather_outside(self) -> None:
        if self.states.gathers:
            self.gathered = [
                self.tape.alloc("gathered_parameters", g.gathered_bytes, g.count)
                for g in self.states.groups
                if not g.layered
            ]

    def _gather_layer(self) -> list[int]:
        """Collect parameters of a layer and of its neighbours from the other GPUs."""
        if not self.states.gathers:
            return []
        return [
            self.tape.alloc(
                "gathered_parameters",
                g.gathered_bytes,
                self.states.n_gathered_layers * g.per_layer,
            )
            for g in self.states.groups
            if g.layered and g.kind in ("", self.kind)
        ]

    def _term(self, tag: str, term: Term) -> int:
        n = self.times if tag == "activations" else 1
        return self.tape.alloc(tag, term_bytes(term, self.sizes), n)

    def _unit(self, tag: str, unit: str, bytes_per: float) -> int:
        return self.tape.alloc(tag, self.sizes[unit] * bytes_per)

    def _at_layer(self, layer: int) -> None:
        """Take sizes and operations of this layer: the first ones of a mixture may be dense."""
        shape = self.workload.shape
        slides = bool(self.sliding_ops) and layer < shape.n_sliding_layers
        self.layer_ops = self.sliding_ops if slides else self.ops
        if shape.n_dense_layers:
            is_dense = layer < shape.n_dense_layers
            self.kind = "dense" if is_dense else "sparse"
            self.sizes = self.dense_sizes if is_dense else self.decoder_sizes
            self.layer_ops = self.dense_ops if is_dense else self.layer_ops
