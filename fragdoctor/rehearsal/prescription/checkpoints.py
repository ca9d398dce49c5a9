"""The cheapest set of modules to checkpoint under a memory limit.

One rehearsal of the unchanged program shows what each call of each module leaves allocated for its
backward pass and which counted operations made it; another one, with the outermost modules
checkpointed, shows when it is freed if nothing keeps it. So the requests of the program with any
set of modules checkpointed are known (``recomputation.py``), and the allocator model tells what
they need, including fragmentation. Candidates are the sets that no other set beats: none drops as
much with fewer operations (a knapsack). From the first of them that fit by replay, modules are
removed or replaced by cheaper ones as long as a replay still fits. PyTorch's
``torch.distributed._tools`` (``sac_ilp.py``) does it with a solver, on estimates of memory.

A module can be checkpointed completely, or while keeping the results of some of its counted
operations (selective checkpointing), first those that are costliest to make for their size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial, reduce
from typing import Any, Final

from msgspec import Struct, field

from fragdoctor._native import _ext
from fragdoctor.rehearsal.prescription.module_calls import ModuleCall, TraceBlocks
from fragdoctor.rehearsal.prescription.need import Need
from fragdoctor.rehearsal.prescription.recomputation import Ends, Recomputation
from fragdoctor.trace.trace import Trace

MAX_OPTIONS: Final = 8
"""The most ways to checkpoint one module that are weighed; of more, every n-th is."""
N_STATES: Final = 2048
"""Sums of dropped bytes that are distinguished."""
N_BEFORE: Final = 12
"""Sets before the first that fits; some of them may fit as well."""
MAX_REPLAYS: Final = 300
"""Replays until no further set is pared down (twice as many while none fits): a few seconds."""
MAX_SAMPLES: Final = 48
"""Sets, evenly spaced over all, among which the one that needs least is looked for."""


class Choice(Struct, frozen=True):
    """A module that is checkpointed.

    Attributes:
        number: its number among the parts of the model.
        kept: numbers of the counted operations in it whose results are kept.
        n_flops: operations that are repeated, in all that was rehearsed.
        dropped_bytes: bytes that are recomputed, over all calls.
        at_once_bytes: bytes that are recomputed in the largest call, and are then live together.
    """

    number: int
    kept: tuple[int, ...]
    n_flops: int
    dropped_bytes: int = 0
    at_once_bytes: int = 0


class Plan(Struct, frozen=True):
    """A set of modules to checkpoint.

    Attributes:
        choices: the modules in their order.
        n_flops, dropped_bytes: their sums.
    """

    choices: tuple[Choice, ...] = ()
    n_flops: int = 0
    dropped_bytes: int = 0

    @classmethod
    def of(cls, choices: Iterable[Choice]) -> Plan:
        """Return the set of some modules."""
        return reduce(cls.plus, sorted(choices, key=lambda one: one.number), cls())

    def plus(self, choice: Choice) -> Plan:
        """Return the set with one more module."""
        sums = self.n_flops + choice.n_flops, self.dropped_bytes + choice.dropped_bytes
        return Plan((*self.choices, choice), *sums)

    @property
    def cost(self) -> tuple[int, int]:
        """What sets are compared by: operations, then number of modules."""
        return self.n_flops, len(self.choices)

    @property
    def is_whole(self) -> bool:
        """Whether no results are kept of any module."""
        return not any(one.kept for one in self.choices)

    def without(self, choice: Choice, *instead: Choice) -> Plan:
        """Return the set without one of its modules, or with it checkpointed in another way."""
        return Plan.of([*(one for one in self.choices if one is not choice), *instead])


class _Part(Struct):
    """A module, the ways to checkpoint it (the costliest first), and the modules within it."""

    number: int
    calls: list[ModuleCall]
    options: list[Choice] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)


class Checkpoints:
    """What a program needs with modules checkpointed, and what that costs.

    Args:
        need: the need of a rehearsal of the program.
        traits: what the same rehearsal observed.
        on_replay: called before each replay of a set; it may raise an error that ends the search.

    Attributes:
        traits: as above.
    """

    def __init__(
        self, need: Need, traits: Mapping[str, Any], on_replay: Callable[[], None] = lambda: None
    ) -> None:
        self.traits = traits
        self._on_replay = on_replay
        self._need = need
        self._blocks = TraceBlocks(need.trace)
        self._ends = Ends(self._blocks.n_rows)
        self._roots: list[_Part] = []
        self._parts: dict[int, _Part] = {}
        head = traits["head"] or {"path": ""}
        inside: list[tuple[str, _Part]] = []
        for number, described in enumerate(traits["parts"]):
            # The loss in parts calls the head separately, so the head stays outside.
            if any(f"{head['path']}.".startswith(f"{path}.") for path in described["holds"]):
                continue
            path = f"{described['model']}.{described['tree']}"
            while inside and not path.startswith(f"{inside[-1][0]}."):
                inside.pop()
            part = _Part(number, [ModuleCall(self._blocks, c) for c in self._calls(traits, number)])
            part.options = list(_options(part))
            (inside[-1][1].parts if inside else self._roots).append(part)
            self._parts[number] = part
            inside.append((path, part))

    def _calls(self, traits: Mapping[str, Any], number: int) -> list[Mapping[str, Any]]:
        parts = traits["parts"][number : number + 1]  # none if time was over before its first call
        return [c for one in parts for c in one["calls"] if c["device"] == self._need.trace.device]

    @property
    def can_save(self) -> bool:
        """Whether there is a module whose checkpointing saves memory."""
        return any(part.options for part in self._parts.values())

    @property
    def outermost(self) -> Plan:
        """The outermost modules whose checkpointing saves memory."""
        return Plan.of(one.options[0] for one in _outermost(self._roots))

    def learn_ends(self, trace: Trace, traits: Mapping[str, Any]) -> None:
        """Learn when blocks are freed, from a rehearsal with the outermost modules checkpointed."""
        blocks = TraceBlocks(trace)
        bare = {
            choice.number: [ModuleCall(blocks, one) for one in self._calls(traits, choice.number)]
            for choice in self.outermost.choices
        }
        begun = sorted(c.backward for calls in bare.values() for c in calls if c.is_repeated)
        for number, calls in bare.items():
            for pair in zip(self._parts[number].calls, calls, strict=False):
                if pair[0].is_repeated and pair[1].is_repeated:
                    until = begun[bisect_left(begun, pair[1].end)]
                    self._ends.learn(self._blocks, pair[0], blocks, pair[1], until)

    def cheapest(self, capacity_bytes: int) -> Plan | None:
        """Return the cheapest set with which the program fits, by replay; None if none does."""
        self._n_left = MAX_REPLAYS
        fits = partial(self._fits, capacity_bytes=capacity_bytes)
        found: list[Plan] = []
        for plans in self._frontiers:
            # A set that drops more fits better, except for fragmentation: earlier ones may fit too.
            first = bisect_left(plans, 1, key=fits)
            found += [plan for plan in plans[max(first - N_BEFORE, 0) : first] if fits(plan)]
            found += plans[first:]
        best: Plan | None = None
        for plan in sorted(found, key=lambda one: one.cost):
            pared = self._pared(plan, capacity_bytes)
            if pared and pared.choices and (best is None or pared.cost < best.cost):
                best = pared
            if self._n_left <= (-MAX_REPLAYS if best is None else 0):
                break
        return best

    def whole(self, capacity_bytes: int) -> Plan | None:
        """Return the cheapest first few of equal modules that fit without any results kept."""
        fits = partial(self._fits, capacity_bytes=capacity_bytes, is_steady=True)
        found: list[Plan] = []
        for parts in [self._roots, *(part.parts for part in self._parts.values())]:
            alike: dict[tuple[tuple[int, ...], ...], list[Choice]] = {}
            for options in (part.options for part in parts if part.options):
                alike.setdefault(tuple(one.kept for one in options), []).append(options[0])
            for choices in alike.values():
                plans = [Plan.of(choices[: n + 1]) for n in range(len(choices))]
                if plans[0].is_whole and fits(plans[-1]):
                    found.append(plans[bisect_left(plans, 1, hi=len(plans) - 1, key=fits)])
        return min(found, key=lambda one: one.cost, default=None)

    def lowest(self) -> Plan:
        """Return roughly the non-empty set with the least memory in tensors."""
        plans = [one for plans in self._frontiers for one in reversed(plans) if one.choices]
        peak_bytes = self._need.peak_bytes
        few = plans[:: -(-len(plans) // MAX_SAMPLES)]
        return min(few, key=lambda one: peak_bytes(self._requests(one)))

    def needs_bytes(self, plan: Plan) -> int:
        """Return the least memory that PyTorch must have with a set."""
        return self._need.bytes(self._requests(plan))

    @cached_property
    def _recomputations(self) -> list[Recomputation]:
        return [Recomputation(one, self._blocks, self._ends) for one in self._need.requests]

    def _requests(self, plan: Plan) -> list[_ext.NativeOps]:
        chosen = [(c, one.kept) for one in plan.choices for c in self._parts[one.number].calls]
        chosen.sort(key=lambda one: one[0].begin)
        return [one.operations(chosen) for one in self._recomputations]

    def _fits(self, plan: Plan, capacity_bytes: int, *, is_steady: bool = False) -> bool:
        self._on_replay()
        self._n_left -= 1
        return self._need.fits(self._requests(plan), capacity_bytes, is_steady=is_steady)

    @cached_property
    def _frontiers(self) -> list[list[Plan]]:
        """Sets that no other set beats in both memory and operations, the cheapest first.

        What a module drops is all there again when it is recomputed: a model recomputed as a whole
        needs most of what it needed before. So there is a frontier for all modules, and one for
        those that recompute at most half of that at once, and so on.
        """
        found: list[list[Plan]] = []
        step = max(sum(_most(root) for root in self._roots) // N_STATES, 1)
        sizes = sorted(o.at_once_bytes for part in self._parts.values() for o in part.options)
        while sizes:
            plans = [Plan()]
            for root in self._roots:
                plans = _with(root, plans, step, sizes[-1])
            found.append(plans[::-1])
            sizes = sizes[: bisect_right(sizes, sizes[-1] // 2)]
        return found

    def _pared(self, plan: Plan, capacity_bytes: int) -> Plan | None:
        """Return a set that fits, without what it does not need, dropping the costliest first.

        None if it fits only by luck: not with somewhat more memory.
        """
        for choice in sorted(plan.choices, key=lambda one: one.n_flops, reverse=True):
            options = self._parts[choice.number].options
            cheaper = [one for one in reversed(options) if one.n_flops < choice.n_flops]
            tries = (plan.without(choice, *instead) for instead in ((), *((c,) for c in cheaper)))
            plan = next((one for one in tries if self._fits(one, capacity_bytes)), plan)
        return plan if self._fits(plan, capacity_bytes, is_steady=True) else None


def _options(part: _Part) -> Iterator[Choice]:
    """Yield the ways to checkpoint a module, the costliest first."""
    calls = part.calls
    if not calls or not any(one.left for one in calls):
        return
    per_byte: dict[int, float] = {}
    for n, same in enumerate(zip(*(one.products for one in calls), strict=False)):
        n_bytes = sum(one.n_bytes for one in same)
        n_flops = sum(one.n_flops for one in same)
        if n_bytes and n_flops and all(one.can_be_kept for one in same):
            per_byte[n] = n_flops / n_bytes
    ranked = sorted(per_byte, key=lambda n: per_byte[n], reverse=True)
    n_each = -(-max(len(ranked), 1) // (MAX_OPTIONS - 1))
    for length in dict.fromkeys([*range(0, len(ranked), n_each), len(ranked)]):
        kept = tuple(sorted(ranked[:length]))
        dropped_bytes = sum(one.saved_bytes(kept) for one in calls)
        if dropped_bytes > 0:
            n_flops = sum(one.n_flops(kept) for one in calls)
            at_once_bytes = max(one.saved_bytes(kept) for one in calls)
            yield Choice(part.number, kept, n_flops, dropped_bytes, at_once_bytes)


def _most(part: _Part) -> int:
    """Return the most bytes that checkpointing a module, or modules within it, can drop."""
    own = max((one.dropped_bytes for one in part.options), default=0)
    return max(own, sum(_most(one) for one in part.parts))


def _with(part: _Part, plans: list[Plan], step: int, most_bytes: int) -> list[Plan]:
    """Return the cheapest sets with a module, or some within it, or neither."""
    found = plans
    for inner in part.parts:
        found = _with(inner, found, step, most_bytes)
    options = [one for one in part.options if one.at_once_bytes <= most_bytes]
    if not options:
        return found
    best: dict[int, Plan] = {}
    for plan in [*found, *(plan.plus(option) for option in options for plan in plans)]:
        key = plan.dropped_bytes // step
        cost = plan.n_flops, -plan.dropped_bytes
        if key not in best or cost < (best[key].n_flops, -best[key].dropped_bytes):
            best[key] = plan
    kept: list[Plan] = []
    for key in sorted(best, reverse=True):
        # No set that drops less takes as many operations.
        if not kept or best[key].n_flops < kept[-1].n_flops:
            kept.append(best[key])
    return kept


def _outermost(parts: Sequence[_Part]) -> Iterator[_Part]:
    for part in parts:
        if part.options:
            yield part
        else:
            yield from _outermost(part.parts)
