"""The cheapest set of modules to checkpoint under a limit of memory.

One rehearsal of the program as it is tells all that is needed. Of each call of each module: what it
leaves allocated for its backward pass, which counted operations made it, when its forward pass
ended and its backward pass began. Between these two a checkpointed module saves what it left.
Memory over time must stay under the limit throughout, and what is carried out again is to be least:
a knapsack in which a module is chosen, or some within it, or neither. PyTorch's
``torch.distributed._tools`` (``sac_ilp.py``) does it with a solver, on estimates of memory.

What may be done with a module: checkpoint it, or checkpoint it and keep the results of some of its
counted operations (selective checkpointing), those first that take most to make for their size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np

from fragdoctor.future.simulator import trace_of
from fragdoctor.model.snapshot import I64, Snapshot
from fragdoctor.trace.trace import Trace

MAX_OPTIONS: Final = 8
"""Ways to checkpoint one module that are weighed: of those with more results, every n-th is."""
MAX_MOMENTS: Final = 6
"""Moments at which memory is weighed: the peak, and then those that a set leaves too high."""
STATES: Final = 512
"""Sums of saved bytes that are told apart, of all moments together: of six, two of each."""
N_HALVINGS: Final = 10
PRICE_STEP: Final = 1.1
N_PRICES: Final = 120
"""Prices of a byte in operations, each a tenth above the last: from one to some 90,000."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A module that is checkpointed.

    Attributes:
        number: among the parts of the model.
        kept: numbers of the counted operations in it whose results are kept.
        n_flops: operations that are carried out again, in all that was rehearsed.
    """

    number: int
    kept: tuple[int, ...]
    n_flops: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A set of modules to checkpoint.

    Attributes:
        choices: in the order of the modules.
    """

    choices: tuple[Choice, ...]

    @property
    def n_flops(self) -> int:
        """Operations that are carried out again."""
        return sum(one.n_flops for one in self.choices)

    def without(self, choice: Choice) -> Plan:
        """Return the set without one of its modules."""
        return Plan(tuple(one for one in self.choices if one is not choice))


@dataclass(slots=True)
class _Option:
    """A way to checkpoint a module.

    Attributes:
        kept, n_flops: see :class:`Choice`.
        dropped_bytes: made again, over all calls.
        saved_bytes: by moment; negative where making it again takes more than was there.
    """

    kept: tuple[int, ...]
    n_flops: int
    dropped_bytes: int
    saved_bytes: I64


@dataclass(slots=True)
class _Part:
    number: int
    options: list[_Option] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)


Cost = tuple[int, int, int]
"""Operations and bytes that are made again, and modules."""


@dataclass(slots=True)
class _State:
    cost: Cost
    saved: tuple[int, ...]
    option: tuple[int, _Option] | None = None
    before: _State | None = None


class Checkpoints:
    """What checkpointing saves in a program, and what it costs.

    Args:
        snapshot: of a rehearsal of the program, with all its events.
        traits: what the same rehearsal observed.

    Attributes:
        traits: see above.
        peak_bytes: the most that tensors took.
    """

    def __init__(self, snapshot: Snapshot, traits: Mapping[str, Any]) -> None:
        self.traits = traits
        trace = trace_of(snapshot)
        head = traits["head"] or {"path": ""}
        self.peak_bytes = trace.totals.peak_allocated_bytes
        measures = _Measures(trace)
        parts = [
            (number, part["path"], [c for c in part["calls"] if c["device"] == trace.device])
            for number, part in enumerate(traits["parts"])
            # The loss in parts calls the head by itself, so that it stays outside.
            if not head["path"].startswith(f"{part['path']}.")
        ]
        moments = {0, trace.n_events}
        for _, _, calls in parts:
            for call in calls:
                moments |= {call["end"], call["backward"] or 0}
        self._moments = sorted(moments)
        self._needs: I64 = np.array(
            [
                trace.totals.allocated_bytes[begin : end + 1].max()
                for begin, end in zip(self._moments, self._moments[1:], strict=False)
            ],
            np.int64,
        )
        self._roots: list[_Part] = []
        inside: list[tuple[str, _Part]] = []
        for number, path, calls in parts:
            while inside and not path.startswith(f"{inside[-1][0]}."):
                inside.pop()
            part = _Part(number, list(self._options(measures, calls)))
            (inside[-1][1].parts if inside else self._roots).append(part)
            inside.append((path, part))

    @property
    def can_save(self) -> bool:
        """Whether there is a module that checkpointing saves something of."""
        return any(part.options for part in _all(self._roots))

    def cheapest(self, limit_bytes: int) -> Plan | None:
        """Return the cheapest set with which memory stays under a limit; None if none does."""
        needs = self._needs - limit_bytes
        thinned = (self._thinned(plan, needs) for plan in self._priced)
        plans = [plan for plan in (self._knapsack(needs), *thinned) if plan is not None]
        return min(plans, key=lambda plan: (plan.n_flops, len(plan.choices)), default=None)

    def _knapsack(self, needs: I64) -> Plan | None:
        moments = [int(needs.argmax())]
        while True:
            best = self._cheapest(needs, moments)
            if best is None:
                return None
            missing = needs - self._saved(best)
            worst = int(missing.argmax())
            if missing[worst] <= 0 or worst in moments or len(moments) == MAX_MOMENTS:
                return best
            moments.append(worst)

    @cached_property
    def _priced(self) -> list[Plan]:
        """The cheapest sets where each byte made again is worth some operations.

        The more moments a knapsack weighs, the coarser its sums are; a price needs none.
        """
        plans = (self._at_price(self._roots, PRICE_STEP**n)[1] for n in range(N_PRICES))
        return list(dict.fromkeys(_plan_of(choices) for choices in plans))

    def _at_price(self, parts: Sequence[_Part], price: float) -> tuple[float, list[Choice]]:
        """Return what sets of modules and of those within them come to at a price, the least."""
        total, chosen = 0.0, list[Choice]()
        for part in parts:
            best = self._at_price(part.parts, price)
            for option in part.options:
                cost = option.n_flops - price * option.dropped_bytes
                if cost < best[0]:
                    best = cost, [Choice(part.number, option.kept, option.n_flops)]
            total += best[0]
            chosen += best[1]
        return total, chosen

    def _thinned(self, plan: Plan, needs: I64) -> Plan | None:
        """Return a set without the modules that it does not need; None if it saves too little."""
        missing = needs - self._saved(plan)
        if missing.max() > 0:
            return None
        for choice in sorted(plan.choices, key=lambda one: one.n_flops, reverse=True):
            more = missing + self._options_of[choice.number][choice.kept].saved_bytes
            if more.max() <= 0:
                plan, missing = plan.without(choice), more
        return plan

    @cached_property
    def _options_of(self) -> dict[int, dict[tuple[int, ...], _Option]]:
        return {p.number: {o.kept: o for o in p.options} for p in _all(self._roots)}

    def _saved(self, plan: Plan) -> I64:
        """Return what a set saves at each moment."""
        saved = np.zeros_like(self._needs)
        for choice in plan.choices:
            saved += self._options_of[choice.number][choice.kept].saved_bytes
        return saved

    def _cheapest(self, needs: I64, moments: list[int]) -> Plan | None:
        """Return the cheapest set that saves what some of the moments need."""
        goals = tuple(int(needs[i]) for i in moments)
        states = _Sums(goals, moments).over(self._roots)
        reached = [s for s in states if all(a >= b for a, b in zip(s.saved, goals, strict=True))]
        if not reached:
            return None
        best: _State | None = min(reached, key=lambda state: state.cost)
        chosen = []
        while best is not None:
            if best.option is not None:
                number, option = best.option
                chosen.append(Choice(number, option.kept, option.n_flops))
            best = best.before
        return _plan_of(chosen)

    def everything(self) -> Plan:
        """Return the set of all repeated blocks, and of what is outermost beside them."""
        blocks = {name for group in self.traits["blocks"] for name in group["names"]}
        numbers = {n for n, part in enumerate(self.traits["parts"]) if part["path"] in blocks}
        outermost = [one for root in self._roots for one in _outermost(root, numbers)]
        return Plan(tuple(Choice(one.number, (), one.options[0].n_flops) for one in outermost))

    def lowest_bytes(self) -> int:
        """Return about the lowest limit under which there is a set."""
        low, high = 0, self.peak_bytes
        for _ in range(N_HALVINGS):
            middle = (low + high) // 2
            low, high = (low, middle) if self.cheapest(middle) else (middle, high)
        return high

    def _options(
        self, measures: _Measures, calls: Sequence[Mapping[str, Any]]
    ) -> Iterator[_Option]:
        """Yield the ways to checkpoint a module that is called so."""
        measured = [measures.of(call) for call in calls if call["backward"] is not None]
        if not measured or not any(one.left for one in measured):
            return
        n_products = min(len(one.products) for one in measured)
        per_byte: dict[int, float] = {}
        for n in range(n_products):
            same = [one.products[n] for one in measured]
            n_bytes = sum(one.n_bytes for one in same)
            n_flops = sum(one.n_flops for one in same)
            if n_bytes and n_flops and all(one.can_be_kept for one in same):
                per_byte[n] = n_flops / n_bytes
        ranked = sorted(per_byte, key=lambda n: per_byte[n], reverse=True)
        n_each = -(-max(len(ranked), 1) // (MAX_OPTIONS - 1))
        lengths = dict.fromkeys([*range(0, len(ranked), n_each), len(ranked)])
        for length in lengths:
            kept = set(ranked[:length])
            saved = np.zeros(len(self._needs), np.int64)
            dropped = n_flops = 0
            for one in measured:
                n_bytes = one.saved_bytes(kept)
                dropped += n_bytes
                n_flops += one.n_flops(kept)
                begin = bisect_left(self._moments, one.end)
                end = bisect_left(self._moments, one.backward)
                saved[begin:end] += n_bytes
                again = one.again_bytes(measures) - int(self._needs[end : end + 1].max(initial=0))
                saved[end : end + 1] -= max(again, 0)
            if dropped > 0:
                yield _Option(tuple(sorted(kept)), n_flops, dropped, saved)


def _plan_of(choices: Sequence[Choice]) -> Plan:
    return Plan(tuple(sorted(choices, key=lambda one: one.number)))


def _all(parts: Sequence[_Part]) -> Iterator[_Part]:
    for part in parts:
        yield part
        yield from _all(part.parts)


def _outermost(part: _Part, blocks: set[int]) -> Iterator[_Part]:
    """Yield a module, or those within it where blocks are or where it saves nothing itself."""
    has_blocks = any(one.number in blocks for one in _all(part.parts))
    if part.options and (part.number in blocks or not has_blocks):
        yield part
    else:
        for inner in part.parts:
            yield from _outermost(inner, blocks)


class _Sums:
    """The cheapest ways to save so many bytes at some moments."""

    def __init__(self, goals: tuple[int, ...], moments: list[int]) -> None:
        self._goals = goals
        self._moments = moments
        self._n_steps = int(STATES ** (1 / max(len(goals), 1)))

    def over(self, parts: Sequence[_Part]) -> list[_State]:
        """Return them over modules."""
        states = [_State((0, 0, 0), (0,) * len(self._goals))]
        for part in parts:
            states = self._with(part, states)
        return states

    def _with(self, part: _Part, states: list[_State]) -> list[_State]:
        found = states
        for inner in part.parts:
            found = self._with(inner, found)
        found = list(found)
        for option in part.options:
            here = tuple(int(option.saved_bytes[i]) for i in self._moments)
            n_flops, n_bytes = option.n_flops, option.dropped_bytes
            for state in states:
                flops, dropped, n = state.cost
                found.append(
                    _State(
                        (flops + n_flops, dropped + n_bytes, n + 1),
                        tuple(a + b for a, b in zip(state.saved, here, strict=True)),
                        (part.number, option),
                        state,
                    )
                )
        return self._cheapest(found)

    def _cheapest(self, states: list[_State]) -> list[_State]:
        """Return of states that save about the same the cheapest, and the one that saves most."""
        best: dict[tuple[int, ...], _State] = {}
        most: dict[tuple[int, ...], _State] = {}
        for state in states:
            key = tuple(
                self._n_steps if saved >= goal else int(saved * self._n_steps / max(goal, 1))
                for saved, goal in zip(state.saved, self._goals, strict=True)
            )
            if key not in best or state.cost < best[key].cost:
                best[key] = state
            if key not in most or sum(state.saved) > sum(most[key].saved):
                most[key] = state
        found = list({id(state): state for state in (*best.values(), *most.values())}.values())
        if len(self._goals) > 1:
            return found
        # Of those that save more none costs less.
        kept: list[_State] = []
        for state in sorted(found, key=lambda s: (-min(s.saved[0], self._goals[0]), s.cost)):
            if not kept or state.cost < kept[-1].cost:
                kept.append(state)
        return kept


@dataclass(frozen=True, slots=True)
class _Product:
    """A counted operation of a call.

    Attributes:
        n_flops: what it takes to carry it out again.
        lives: rows of the blocks that it made and that are no outputs of the call.
        n_bytes: theirs.
        can_be_kept: whether they stay as they were made.
    """

    n_flops: int
    lives: frozenset[int]
    n_bytes: int
    can_be_kept: bool


class _Measures:
    """The blocks of a trace, by address."""

    def __init__(self, trace: Trace) -> None:
        lives = trace.lives
        self.start, self.free, self.size_bytes = lives.start, lives.free, lives.size_bytes
        self.allocated = trace.totals.allocated_bytes
        self._n = lives.n_regular
        self._rows: dict[int, list[int]] = defaultdict(list)
        for row, address in enumerate(lives.address[: self._n].tolist()):
            self._rows[address].append(row)

    def of(self, call: Mapping[str, Any]) -> _Call:
        """Return what a call of a module left."""
        return _Call(self, call)

    def rows_of(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first and the last, exclusive, of the blocks made between two events."""
        first, last = np.searchsorted(self.start[: self._n], [begin, end])
        return int(first), int(last)

    def at(self, address: int, event: int) -> int | None:
        """Return the block that lies at an address after so many events."""
        for row in self._rows.get(address, ()):
            if self.start[row] < event <= self.free[row]:
                return row
        return None

    def bytes_of(self, rows: frozenset[int]) -> int:
        """Size of blocks."""
        return int(sum(self.size_bytes[row] for row in rows))


class _Call:
    """A call of a module.

    Attributes:
        begin, end, backward: events before it, after it, and as its backward pass began.
        left: blocks that it made and left for its backward pass, without its outputs.
        products: its counted operations.
    """

    def __init__(self, measures: _Measures, call: Mapping[str, Any]) -> None:
        self.begin, self.end, self.backward = call["begin"], call["end"], call["backward"]
        self._measures = measures
        start, free = measures.start, measures.free
        outputs = {measures.at(address, self.end) for address in call["outputs"]}
        first, last = measures.rows_of(self.begin, self.end)
        rows = np.arange(first, last)
        self.left = frozenset(
            int(row) for row in rows[free[rows] >= self.backward] if row not in outputs
        )
        ends = max((int(start[row]) for row in self.left), default=-1)
        self._ends = self.end if call["saves_output"] else ends
        # Inputs live on that would have gone.
        inputs = {measures.at(address, self.begin) for address in call["inputs"]}
        held = frozenset(r for r in inputs if r is not None and free[r] < self.backward)
        self._held_bytes = measures.bytes_of(held)
        self.products = [self._product(one, outputs) for one in call["products"]]

    def _product(self, product: Mapping[str, Any], outputs: set[int | None]) -> _Product:
        made = {self._measures.at(a, product["event"]) for a in product["addresses"]}
        lives = frozenset(row for row in made if row is not None and row not in outputs)
        n_bytes = self._measures.bytes_of(lives)
        can_be_kept = not product["is_changed"]
        # A call is carried out again up to the last block that is needed.
        is_again = product["event"] <= self._ends or not lives.isdisjoint(self.left)
        n_flops = product["n_flops"] if is_again else 0
        return _Product(n_flops, lives, n_bytes, can_be_kept)

    def saved_bytes(self, kept: set[int]) -> int:
        """Bytes less between the passes if it is checkpointed and some results are kept."""
        results = frozenset(row for n in kept for row in self.products[n].lives)
        bytes_of = self._measures.bytes_of
        return bytes_of(self.left - results) - bytes_of(results - self.left) - self._held_bytes

    def n_flops(self, kept: set[int]) -> int:
        """Operations that are carried out again if some results are kept."""
        return sum(one.n_flops for n, one in enumerate(self.products) if n not in kept)

    def again_bytes(self, measures: _Measures) -> int:
        """Memory as it is made again, with all else as it is."""
        allocated = measures.allocated
        rise = int(allocated[self.begin : self.end + 1].max() - allocated[self.begin])
        return int(allocated[self.backward]) - self.saved_bytes(set()) + rise
