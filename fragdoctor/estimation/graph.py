"""Plays a step from the graph of its operations, as autograd runs it.

Where layers are not alike, as in a UNet, there is no formula for one layer: the forward pass is
written down operation by operation, and from what each saves and reads follows when every tensor
is there. The backward pass runs in reverse; a gradient lives until the operation that made its
tensor has used it, and gradients of a tensor that several operations read are added in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from fragdoctor.estimation.parameters import FP32, ParameterPlayer
from fragdoctor.estimation.tape import Tape
from fragdoctor.frozen import frozen
from fragdoctor.model.memory_estimate import PhaseName
from fragdoctor.model.workload import Workload


class Backward(Enum):
    """What an operation's backward gives its inputs."""

    MAKES = auto()  # a gradient each
    PASSES = auto()  # the gradient of its output as it is
    CUTS = auto()  # views of it, side by side


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of the graph.

    Attributes:
        of: the tensor that it is a view of.
    """

    n_elements: int
    bytes_per: float
    of: Value | None = None

    @property
    def base(self) -> Value:
        """The tensor whose memory it lies in."""
        return self if self.of is None else self.of.base


@frozen(eq=False)
class Call:
    """One operation.

    Attributes:
        saves: kept for the inputs' gradients.
        saves_for_weights: kept for those of the parameters, where these are trained.
        extras: bytes made beside the output and kept, such as statistics.
        parameters: names of the parameter groups that it uses.
        copies: whether autocast works on copies of them.
        segment: what is recomputed together under checkpointing; -1 = nothing.
    """

    name: str
    inputs: tuple[Value, ...]
    outs: tuple[Value, ...]
    saves: tuple[Value, ...] = ()
    saves_for_weights: tuple[Value, ...] = ()
    extras: tuple[float, ...] = ()
    parameters: tuple[str, ...] = ()
    copies: bool = False
    backward: Backward = Backward.MAKES
    segment: int = -1


@dataclass(slots=True, eq=False)
class _Memory:
    """A tensor's memory, how many hold it, and whether a sum may be written into it."""

    handle: int
    n_holders: int = 1
    is_whole: bool = True


@dataclass(slots=True)
class _Kept:
    """What one run of an operation left for its backward."""

    memories: list[_Memory] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)


class GraphPlayer(ParameterPlayer):
    """Writes the tape of a workload whose operations are listed.

    ``calls`` are in forward order; ``given`` comes in from outside and needs no gradient;
    ``bounds`` and ``tape`` are as of :class:`ParameterPlayer`.
    """

    def __init__(
        self,
        workload: Workload,
        calls: Sequence[Call],
        given: Sequence[Value],
        *,
        bounds: bool = False,
        tape: Tape | None = None,
    ) -> None:
        super().__init__(workload, bounds=bounds, tape=tape)
        self.calls, self.given = calls, given
        self.by_name = {g.name: g for g in self.states.groups}
        self.trains = {name: g.is_trained for name, g in self.by_name.items()}
        self.last_use: dict[Value, int] = {}
        for i, call in enumerate(calls):
            for value in (*call.inputs, *call.outs):
                self.last_use[value.base] = i
        self.wanted = self._wanted()
        checkpoints = workload.checkpointing == "full" and not workload.inference
        self.segments = [call.segment if checkpoints else -1 for call in calls]
        self.memory: dict[Value, _Memory] = {}
        self.kept: dict[int, _Kept] = {}
        self.inputs_of: dict[int, list[tuple[Value, _Memory]]] = {}
        self.slopes: dict[Value, _Memory] = {}

    def _wanted(self) -> set[Value]:
        """Return the tensors whose gradients are needed."""
        found: set[Value] = set()
        if self.workload.inference:
            return found
        for call in self.calls:
            if any(v in found for v in call.inputs) or any(
                self.trains.get(n, False) for n in call.parameters
            ):
                found.update(call.outs)
        return found

    def served(self, workspace_bytes: int) -> Tape:
        """Return the tape of one forward pass of which nothing is kept."""
        self.tape.phase(PhaseName.INFERENCE)
        self.tape.moment("forward")
        for group in self.states.groups:
            self.tape.alloc("parameters", group.stored_bytes, group.count)
        self.tape.alloc("workspaces", workspace_bytes)
        self._bring_in()
        self._run(0, len(self.calls), keeps=False)
        self._leave(*self.memory.values())
        self.memory.clear()
        return self.tape

    def _pass(self, workspace_bytes: int) -> None:
        tape = self.tape
        tape.phase(PhaseName.FORWARD)
        tape.moment("forward")
        tape.alloc("workspaces", workspace_bytes)
        self._bring_in()
        n, start = len(self.calls), 0
        while start < n:
            end = self._end_of_segment(start)
            if self.segments[start] >= 0:
                self._hold_inputs(start, end)
            self._run(start, end, keeps=self.segments[start] < 0)
            start = end
        tape.moment("loss")
        out = self.calls[-1].outs[0]
        wide = self.tape.alloc("activations", out.n_elements * FP32)
        tape.free(*self.cache)
        self.cache = []
        tape.phase(PhaseName.BACKWARD)
        tape.moment("backward of the loss")
        tape.alloc("workspaces", workspace_bytes)
        self.slopes[out] = _Memory(tape.alloc("temporaries", out.n_elements * out.bytes_per))
        tape.free(wide)
        self._backward()
        self._leave(*self.memory.values(), *self.slopes.values())
        self.memory.clear()
        self.slopes.clear()
        self.states.accumulated = self.workload.grad_accumulation > 1

    def _backward(self) -> None:
        end = len(self.calls)
        while end:
            start = self._start_of_segment(end)
            if self.segments[start] >= 0:
                self._recompute(start, end)
            for i in range(end - 1, start - 1, -1):
                self.tape.moment(f"backward of {self.calls[i].name}")
                self._back(i)
            self._leave(*(m for _, m in self.inputs_of.pop(start, ())))
            end = start

    def _bring_in(self) -> None:
        for value in self.given:
            size = value.n_elements * value.bytes_per
            self.memory[value] = _Memory(self.tape.alloc("inputs", size), 2)

    def _end_of_segment(self, start: int) -> int:
        end = start + 1
        while end < len(self.calls) and self.segments[end] == self.segments[start]:
            end += 1
        return end

    def _start_of_segment(self, end: int) -> int:
        start = end - 1
        while start and self.segments[start - 1] == self.segments[end - 1]:
            start -= 1
        return start

    def _hold_inputs(self, start: int, end: int) -> None:
        made = {v.base for call in self.calls[start:end] for v in call.outs}
        read = {v.base: None for call in self.calls[start:end] for v in call.inputs}
        held = [(v, self.memory[v]) for v in read if v not in made]
        for _, memory in held:
            memory.n_holders += 1
        self.inputs_of[start] = held

    def _leave(self, *memories: _Memory) -> None:
        """Let go of memory; what nobody holds is freed."""
        for memory in memories:
            memory.n_holders -= 1
            if memory.n_holders == 0:
                self.tape.free(memory.handle)

    def _run(self, start: int, end: int, *, keeps: bool) -> None:
        """Play a part of the forward pass."""
        tape = self.tape
        for i in range(start, end):
            call = self.calls[i]
            if keeps:
                tape.moment(call.name)
            kept = self.kept[i] = _Kept()
            gathered = self._gather(call)
            wanted = any(out in self.wanted for out in call.outs)
            if call.copies and self.precision.copies:
                made = self._copies_of(call)
                (kept.copies if keeps and wanted else self.cache).extend(made)
            for out in call.outs:
                if out.of is None:
                    tag = "activations" if wanted or self.workload.inference else "temporaries"
                    self.memory[out] = _Memory(tape.alloc(tag, out.n_elements * out.bytes_per))
            if keeps and wanted:
                self._save(call, kept)
            tape.free(*gathered)
            for value in {v.base: None for v in (*call.inputs, *call.outs)}:
                if self.last_use[value] == i and value in self.memory and i + 1 < len(self.calls):
                    self._leave(self.memory.pop(value))

    def _save(self, call: Call, kept: _Kept) -> None:
        """Keep what the operation's backward needs."""
        for size in call.extras:
            kept.memories.append(_Memory(self.tape.alloc("activations", size)))
        for value in self._saved(call):
            memory = self.memory[value.base]
            memory.n_holders += 1
            kept.memories.append(memory)

    def _recompute(self, start: int, end: int) -> None:
        """Play a segment's forward pass again; what it returns is not read a second time."""
        self.tape.moment(f"recomputation of {self.calls[start].name}")
        held = self.inputs_of[start]
        for value, memory in held:
            memory.n_holders += 1
            self.memory[value] = memory
        self._run(start, end, keeps=True)
        made = [out for call in self.calls[start:end] for out in call.outs]
        for value in (*made, *(v for v, _ in held)):
            if value in self.memory:
                self._leave(self.memory.pop(value))

    def _saved(self, call: Call) -> list[Value]:
        saved = dict.fromkeys(call.saves) if any(v in self.wanted for v in call.inputs) else {}
        if any(self.trains.get(n, False) for n in call.parameters):
            saved |= dict.fromkeys(call.saves_for_weights)
        return list({value.base: None for value in saved})

    def _copies_of(self, call: Call) -> list[int]:
        return [
            self.tape.alloc("weight_copies", self.by_name[n].n_each * self.precision.copies)
            for n in call.parameters
        ]

    def _gather(self, call: Call) -> list[int]:
        if not self.states.gathers:
            return []
        return [
            self.tape.alloc("gathered_parameters", g.gathered_bytes, 2 * g.count)
            for g in (self.by_name[name] for name in call.parameters)
        ]

    def _back(self, i: int) -> None:
        """Play the backward of one operation."""
        call, kept = self.calls[i], self.kept.pop(i)
        incoming = [self.slopes.pop(out) for out in call.outs if out in self.slopes]
        gathered = self._gather(call)
        fresh: list[tuple[Value, _Memory]] = []
        if incoming:
            wanted = [value for value in call.inputs if value in self.wanted]
            fresh = [(value, self._slope(call, value, incoming[0])) for value in wanted]
            self._gradients_of([self.by_name[name] for name in call.parameters])
        self._leave(*incoming, *kept.memories)
        self.tape.free(*kept.copies, *gathered)
        for value, memory in fresh:
            self._add(value, memory)

    def _slope(self, call: Call, value: Value, incoming: _Memory) -> _Memory:
        if call.backward is Backward.MAKES:
            size = value.n_elements * value.bytes_per
            return _Memory(self.tape.alloc("temporaries", size))
        incoming.n_holders += 1
        if call.backward is Backward.CUTS:
            incoming.is_whole = False
        return incoming

    def _add(self, value: Value, memory: _Memory) -> None:
        """Add a gradient to what is there of a tensor's."""
        there = self.slopes.get(value)
        if there is None:
            self.slopes[value] = memory
            return
        for into, other in ((there, memory), (memory, there)):
            if into.n_holders == 1 and into.is_whole:
                self.slopes[value] = into
                self._leave(other)
                return
        size = value.n_elements * value.bytes_per
        self.slopes[value] = _Memory(self.tape.alloc("temporaries", size))
        self._leave(there, memory)
