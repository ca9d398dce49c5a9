"""Plays what parameters add to a step: copies, gradients, the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.estimation.operation_memory import Term, term_bytes, units
from fragdoctor.estimation.states import GroupState, states_of
from fragdoctor.estimation.tape import Tape
from fragdoctor.estimation.training_choices import precision_of
from fragdoctor.model.memory_estimate import PhaseName
from fragdoctor.model.workload import Role, Workload

FP32: Final = 4.0


class ParameterPlayer:
    """Writes on a tape what becomes of a workload's parameters.

    Attributes:
        kind: of the layer that is played, ``dense`` or ``sparse``.
        sizes: of the units, in that layer.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.precision = precision_of(workload.dtype)
        self.states = states_of(workload)
        self.tape = Tape()
        self.has_shape = False
        self.kind = "sparse"
        self.decoder_sizes = units(workload)
        self.sizes = self.decoder_sizes
        self.gradients: dict[str, list[int]] = {}
        self.cache: list[int] = []
        self.gathered: list[int] = []

    def play(self, workspace_bytes: int, buffer_bytes: float = 0) -> Tape:
        """Return the tape of two steps."""
        states, tape = self.states, self.tape
        tape.alloc("communication", buffer_bytes)
        for group in states.groups:
            tape.alloc("parameters", group.stored_bytes, group.count)
        if states.master_bytes_each and "optimizer" not in self.workload.offload:
            for group in states.groups:
                if group.is_trained:
                    tape.alloc("master_weights", group.sharded(FP32), group.count)
        if self.workload.world_size > 1 and not self.workload.zero_stage:
            for group in states.groups:  # data parallelism: gradients once more, in its buckets
                if group.is_trained:
                    tape.alloc("buckets", group.gradient_bytes, group.count)
        for step in range(2):
            for micro in range(min(2, self.workload.grad_accumulation)):
                self._pass(workspace_bytes if step == micro == 0 else 0)
            self._optimizer_step(is_first=step == 0)
        return tape

    def _pass(self, workspace_bytes: int) -> None:
        """Run forward and backward."""
        raise NotImplementedError

    def _weight_copies(self, slot: str, *, keeps: bool) -> list[int]:
        """Make the 16-bit copies of a slot's weights.

        They belong to the graph, or, under checkpointing, to autocast's cache until it ends.
        """
        if not slot or not self.precision.copies or self.precision.is_quantised:
            return []
        made = [
            self.tape.alloc("weight_copies", g.n_each * self.precision.copies, g.per_layer)
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
        self._gradients_of(self.states.in_slot(slot, self.kind), *used)

    def _gradients_of(self, groups: Sequence[GroupState], *used: int) -> None:
        tape, p = self.tape, self.precision
        for group in groups:
            if not group.is_trained:
                continue
            full = group.gradient_bytes
            n = group.per_layer
            casts = p.is_autocast and group.slot not in ("embedding", "final_norm")
            casts = casts and group.role not in (Role.NORM, Role.EXPERT)
            raw = tape.alloc("temporaries", group.n_each * p.compute, 1) if casts else -1
            if casts:
                tape.free(*used)
                used = ()
            key = group.name
            if self.states.accumulated:  # added to what is there
                tape.free(raw, tape.alloc("temporaries", full, 1))
                continue
            if group.is_sharded_gradient:
                whole = tape.alloc("temporaries", full, 1)
                kept = tape.alloc("gradients", group.kept_gradient_bytes, n)
                tape.free(whole)
            else:
                kept = tape.alloc("gradients", full, n)
            self.gradients.setdefault(key, []).append(kept)
            tape.free(raw)
        tape.free(*used)

    def _optimizer_step(self, *, is_first: bool) -> None:
        tape, states = self.tape, self.states
        tape.phase(PhaseName.OPTIMIZER_STEP)
        tape.moment("optimizer step")
        trained = [g for g in states.groups if g.is_trained]
        if is_first:
            for group in trained:
                for size in group.state_sizes:
                    tape.alloc("optimizer_states", size, group.count)
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
        for handles in self.gradients.values():
            tape.free(*handles)
        self.gradients = {}
        self.states.accumulated = False

    def _gather_outside(self) -> None:
        if self.states.gathers:
            self.gathered = [
                self.tape.alloc("gathered_parameters", g.gathered_bytes, g.count)
                for g in self.states.groups
                if not g.layered
            ]

    def _gather_layer(self) -> list[int]:
        """Collect a layer's parameters from the other GPUs, and the next one's ahead of time."""
        if not self.states.gathers:
            return []
        return [
            self.tape.alloc("gathered_parameters", g.gathered_bytes, 2 * g.per_layer)
            for g in self.states.groups
            if g.layered and g.kind in ("", self.kind)
        ]

    def _term(self, tag: str, term: Term) -> int:
        return self.tape.alloc(tag, term_bytes(term, self.sizes))

    def _unit(self, tag: str, unit: str, bytes_per: float) -> int:
        return self.tape.alloc(tag, self.sizes[unit] * bytes_per)
