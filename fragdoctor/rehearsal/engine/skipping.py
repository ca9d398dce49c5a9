"""Skipping rounds of a loop that request the same memory as the rounds before them.

What comes after them matters: the evaluation at the end of an epoch, a checkpoint, the sampling at
the end of the program. So when the rounds of a loop in the user's own code show nothing new, it
continues with those that may: its last ones, and those around which a number that grows with the
rounds meets another number in the source (``step % 500 == 0``, ``step >= warmup``,
``if done == total``). Numbers that the program itself adds to (``step += 1``) are advanced.
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
import threading
import time
from collections import ChainMap, Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from fragdoctor.rehearsal.engine import SEEN_THROUGH, frames_from, wrap

Number = int | float
Round = tuple[tuple[int, ...], ...]
"""A digest of what a round requested, and bytes allocated and reserved at its end, by device."""
Remaining = Callable[[], int | None]
"""Returns how many rounds of a loop are left; None = that is unknown."""
Key = tuple[int, int, int]
"""A number of the source: the loop or function, the object that it is called with, a position."""
EQUAL_ROUNDS: Final = 3
"""Rounds in a row that show nothing new, after which further rounds may be skipped."""
MANY_EQUAL_ROUNDS: Final = 20
CHEAP_EVENTS: Final = 40_000
"""This many rounds, or events (about a second), are enough: what happens every ten rounds, or after
the first five, is simply seen as long as that is cheap."""
ENDLESS_ROUNDS: Final = 200
"""So many in a row, and a loop is left although what would end it does not occur."""
WAIT_S: Final = 5.0
"""How long to keep fetching skipped items."""
GO_ON_S: Final = 60.0
"""How long a rehearsal continues after the first skipped rounds."""
_EQUAL_OUTER: Final = 2  # rounds in a row that show nothing new, if inner rounds were skipped
_LAST: Final = 2  # rounds at the end of a loop that are run
_AROUND: Final = 1  # rounds run before and after one in which two numbers meet
_MEETINGS: Final = 2  # how often to run the meeting of the same two numbers
_MODULE: Final = str(Path(torch.nn.modules.module.__file__))
_OPERATORS: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv, ast.Mod: operator.mod,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Meeting:
    """Two numbers of the source that are compared in a loop.

    Attributes:
        grows, other: their expressions; with a period the remainder of the first is compared.
        period: the divisor of the first number; None = it is compared itself.
        is_sure: whether the first number is known to grow with skipped rounds.
    """

    grows: ast.expr
    other: ast.expr
    period: ast.expr | None = None
    is_sure: bool = False


class Numbers(NamedTuple):
    """The numbers that a loop changes, after a round, or how much they grow in a round.

    Attributes:
        n_rounds: rounds so far, or rounds over which the growth was measured; with many, what
            happens every few rounds counts too.
        values: the counters and the growing numbers of meetings, by where they are in the source.
    """

    n_rounds: int
    values: dict[Key, Number]

    def rates_since(self, before: Numbers) -> Numbers:
        """Return how much the numbers have grown per round."""
        n_rounds = self.n_rounds - before.n_rounds
        both = self.values.keys() & before.values.keys()
        rates = {key: (self.values[key] - before.values[key]) / n_rounds for key in both}
        return Numbers(n_rounds, rates)


class Calls(NamedTuple):
    """The last call of a function that compares numbers, or adds to some that outlive it.

    Attributes:
        function: the function.
        given: its arguments that are numbers.
        first: a weak reference to its first argument, such as ``self``.
        seen: the module's names.
    """

    function: Function
    given: dict[str, Any]
    first: Callable[[], Any]
    seen: dict[str, Any]

    def names(self) -> Mapping[str, Any]:
        """Return the names by which the function knows the numbers."""
        return ChainMap(
            self.given, dict.fromkeys(self.function.arguments[:1], self.first()), self.seen
        )


class Source(NamedTuple):
    """The numbers in the source of a loop or a function.

    Attributes:
        counters: names and attributes that it adds to.
        meetings: numbers that are compared in it.
        yields: whether it yields items; then the loop that takes them decides.
    """

    counters: list[ast.expr]
    meetings: list[Meeting]
    yields: bool

    @property
    def numbers(self) -> list[ast.expr]:
        """Its counters, then the growing numbers of its meetings."""
        return [*self.counters, *(meeting.grows for meeting in self.meetings)]


class Function(NamedTuple):
    """A function of the program: its source, its arguments, and the loops within it."""

    source: Source
    arguments: Sequence[str]
    within: Sequence[Loop]


@dataclass(slots=True, eq=False)
class Loop:
    """A loop of the program, and its progress.

    Attributes:
        first, last: its lines.
        source: the numbers in it.
        test: the condition of a ``while``.
        rates: growth rates, measured over the most rounds.
        follows: whether numbers grew with skipped rounds as they would have with the rounds.
        seen: rounds that were seen.
        has_skipped: whether rounds were skipped.
        is_between: whether the next round has not begun yet and its data is being made.
        is_of_steps: whether an optimizer is called in it, and not in a loop within it.
        is_guessed: its file, if only a made-up value says how often it runs.
        passage: the progress since it was last entered.
    """

    first: int
    last: int
    source: Source
    test: ast.expr | None = None
    rates: Numbers = field(default_factory=lambda: Numbers(0, {}))
    follows: dict[Key, bool] = field(default_factory=dict)
    seen: set[Round] = field(default_factory=set)
    has_skipped: bool = False
    is_between: bool = True
    is_of_steps: bool = False
    is_guessed: str = ""
    passage: Passage | None = None


def source_of(node: ast.For | ast.While | ast.FunctionDef) -> Source:
    """Return the numbers in a loop or function, and in inner loops but not inner functions."""
    counters: dict[str, ast.expr] = {}
    meetings: list[Meeting] = []
    yields = False
    todo: list[ast.AST] = [*node.body, *([node.test] if isinstance(node, ast.While) else [])]
    while todo:
        part = todo.pop()
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        yields |= isinstance(part, ast.Yield | ast.YieldFrom)
        if (counter := _counter(part)) is not None:
            counters.setdefault(ast.unparse(counter), counter)
        meetings += _meetings(part)
        todo += ast.iter_child_nodes(part)
    items = ast.walk(node.target) if isinstance(node, ast.For) else ()
    sure = {*counters, *map(ast.unparse, items)}
    meetings = [replace(m, is_sure=ast.unparse(m.grows) in sure) for m in meetings]
    return Source([*counters.values()], meetings, yields)


def _counter(node: ast.AST) -> ast.expr | None:
    """Return what a statement adds to or takes from, as an expression that reads it."""
    match node:
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub()):
            pass
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add() | ast.Sub())):
            if ast.unparse(target) != ast.unparse(left):
                return None
        case _:
            return None
    if not _root(target):
        return None
    read: ast.expr = ast.parse(ast.unparse(target), mode="eval").body
    return read


def _root(node: ast.expr) -> str:
    """Return the name that a chain of attributes begins with, "" if it is something else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _meetings(node: ast.AST) -> Iterator[Meeting]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = node.left, node.comparators[0]
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod):
            yield Meeting(left.left, right, left.right)
        else:
            yield Meeting(left, right)
            yield Meeting(right, left)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        yield Meeting(node.left, ast.Constant(0), node.right)


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:  # noqa: C901 - a case per kind
    """Return the value of an expression made of names, attributes, constants and sums.

    Raises:
        LookupError: it is another kind of expression, or has no value.
    """
    try:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return names[node.id]
            case ast.Attribute():
                whole = value_of(node.value, names)
                if not isinstance(whole, torch.Tensor):
                    return getattr(whole, node.attr)
            case ast.Subscript():
                whole = value_of(node.value, names)
                if type(whole) in {dict, list, tuple}:
                    return whole[value_of(node.slice, names)]
            case ast.BinOp():
                sides = value_of(node.left, names), value_of(node.right, names)
                if all(isinstance(side, int | float) for side in sides):
                    return _OPERATORS[type(node.op)](*sides)
            case ast.Call(func=ast.Name(id="len"), args=[one]):
                return len(value_of(one, names))
    except Exception as err:  # the user's own attributes may raise anything
        raise LookupError(ast.dump(node)) from err
    raise LookupError(ast.dump(node))


def _number(node: ast.expr, names: Mapping[str, Any]) -> Number | None:
    with suppress(LookupError):
        value = value_of(node, names)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    return None


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the local names of a frame without making the frame keep them.

    Before Python 3.13 a function's frame keeps the dict that it shows, and tensors in it live on.
    """
    shown = frame.f_locals
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return shown  # the names of a module or a class
    found = dict(shown)
    if isinstance(shown, dict):
        shown.clear()
    return found


def _names(frame: FrameType) -> Mapping[str, Any]:
    """Return the names that a frame can see."""
    return ChainMap(_locals_of(frame), frame.f_globals)


class Moment(NamedTuple):
    """The state of each device's memory: number of events so far, bytes allocated and reserved."""

    n_events: tuple[int, ...]
    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]

    @classmethod
    def now(cls, gpus: Any, n_devices: int) -> Moment:
        """Return the current state."""
        figures = [gpus.figures(d) for d in range(n_devices)]
        columns = ("events", "allocated", "reserved")
        return cls(*(tuple(f[name] for f in figures) for name in columns))

    def round_since(self, gpus: Any, before: Sequence[int]) -> Round:
        """Return the round from the given numbers of events up to this moment."""
        pairs = enumerate(zip(before, self.n_events, strict=True))
        return tuple(gpus.digest(d, *pair) for d, pair in pairs), *self[1:]


@dataclass(slots=True, eq=False)
class Passage:
    """A loop that was entered, and its progress.

    Attributes:
        loop: the loop.
        begun: steps that the program had taken when the loop was entered.
        n_steps: steps that the program has taken so far.
        stepped: rounds and steps after the first round that was seen to take a step, and after the
            last.
        n_rounds: rounds so far, including skipped ones.
        n_run: rounds actually run since a number of the source last passed another.
        n_unlike: rounds since some in a row showed nothing new.
        n_known: how many of the last rounds showed nothing new.
        to_skip: rounds that the counters still have to be advanced by.
        n_requests, n_skips, n_events: their values when the round began; the last by device.
        n_events_of_known: n_events when the first round began that showed nothing new.
        sample: the numbers of the loop after that round.
        due: what they should be after the next round, as some were skipped.
        grown: what to advance as it begins: expressions, names, values before and after.
        met: how often the loop jumped to each meeting.
        passed: meetings in which one number has grown past the other.
        is_of_layers: whether it runs over modules, each taking what the previous one made.
    """

    loop: Loop
    begun: int
    n_steps: int = 0
    stepped: list[tuple[int, int]] = field(default_factory=list)
    n_rounds: int = 0
    n_run: int = 0
    n_unlike: int = 0
    n_known: int = 0
    to_skip: int = 0
    n_requests: int = 0
    n_skips: int = 0
    n_events: tuple[int, ...] = ()
    n_events_of_known: int = 0
    sample: Numbers | None = None
    due: dict[Key, Number] = field(default_factory=dict)
    grown: list[tuple[ast.expr, Mapping[str, Any], Number, Number]] = field(default_factory=list)
    met: Counter[Key] = field(default_factory=Counter)
    passed: set[Key] = field(default_factory=set)
    is_of_layers: bool = False


@dataclass(slots=True)
class Skipping:
    """Decides which rounds of the user's loops are skipped.

    Attributes:
        is_on: whether any rounds are skipped.
        most: steps after which a loop is left if its memory does not repeat; None = never.
        is_between: whether the last round was one of several that make up a step, and not the last.
        is_jumping: whether items are being fetched that nobody will see.
        n_requests: memory requests so far, a cheap sign that a round involves the GPU.
        n_skips: how many times rounds were skipped.
        n_skipped: number of skipped rounds, by file and line of their loop.
        partial: why something that comes later was not seen, "" if nothing is known to be missing.
        calls: functions that add to numbers, by number and first argument.
        sides: how often a made-up value chose between two sides of a branch, by file and line.
        n_steps: steps that the program would have taken in the skipped rounds.
        steps: returns how many steps the program has taken.
        on_stuck: called with a reason if the rehearsal cannot continue; it does not return.
        assumptions: what is assumed about values, and the rehearsal's notes.
    """

    is_on: bool = False
    most: int | None = None
    is_between: bool = False
    is_jumping: bool = False
    n_requests: int = 0
    n_skips: int = 0
    n_skipped: dict[tuple[str, int], int] = field(default_factory=dict)
    partial: str = ""
    calls: dict[tuple[int, int], Calls] = field(default_factory=dict)
    sides: dict[tuple[str, int], int] = field(default_factory=dict)
    n_steps: int = 0
    steps: Callable[[], int] = lambda: 0
    on_stuck: Callable[[str], None] = lambda _: None
    assumptions: Any = None
    _ends_at: float | None = None
    _gpus: Any = None
    _n_devices: int = 0

    def install(self, gpus: Any, n_devices: int) -> None:
        """Skip rounds from now on, judging by requests to the GPUs."""
        self.is_on = True
        self._gpus, self._n_devices = gpus, n_devices
        from torch.utils.data import dataloader

        for name in ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
            wrap(getattr(dataloader, name), "_next_data", self._next_data)

    def _next_data(self, original: Callable[[Any], Any], loader: Any) -> Any:
        """Return a DataLoader's next data; skipped items are loaded only once."""
        if not self.is_jumping or loader._dataset_kind:  # its length is unknown
            loader._fragdoctor_kept = None
            return original(loader)
        kept = getattr(loader, "_fragdoctor_kept", None)
        if kept is None:
            data = original(loader)
            loader._fragdoctor_kept = None if is_on_gpu(data) else [data, None]
            return data
        index = next(loader._sampler_iter, None)
        if index is not None:
            size = len(index) if isinstance(index, Sequence) else 1
            kept[1] = kept[1] or size
            if size == kept[1]:
                return kept[0]
            loader._sampler_iter = chain([index], loader._sampler_iter)
        return original(loader)

    def _moment(self) -> Moment:
        return Moment.now(self._gpus, self._n_devices)

    # ---- after a round --------------------------------------------------------------------------

    def begin(self, passage: Passage) -> None:
        """Note that a round begins."""
        for number, names, before, after in passage.grown:
            if _number(number, names) == before:  # fetching items did not advance it
                _advance(number, names, after)
        passage.grown.clear()
        passage.n_requests = self.n_requests
        passage.n_skips = self.n_skips
        if self.n_requests or passage.n_events:
            passage.n_events = self._moment().n_events

    def rounds_to_skip(self, passage: Passage, remaining: Remaining) -> int | None:
        """Return how many rounds to skip after one is over; None = to the loop's end.

        The caller is a frame of a loop, called by the user's code.
        """
        passage.n_rounds += 1
        passage.n_run += 1
        passage.n_unlike = 0 if passage.n_known >= EQUAL_ROUNDS else passage.n_unlike + 1
        n_steps = self.steps()
        if n_steps != (passage.n_steps or passage.begun):
            passage.n_steps = n_steps
            passage.stepped[1:] = [(passage.n_rounds, n_steps)]
        if self._ends_at is not None and time.monotonic() > self._ends_at:
            self.on_stuck(f"a loop had run for {GO_ON_S:.0f} s after its memory repeated")
        is_of_gpu = bool(passage.n_events) and self.n_requests != passage.n_requests
        is_of_gpu = is_of_gpu and not (passage.loop.source.yields or passage.is_of_layers)
        if not is_of_gpu or threading.current_thread() is not threading.main_thread():
            return 0
        this = self._moment().round_since(self._gpus, passage.n_events)
        is_new = this not in passage.loop.seen
        passage.loop.seen.add(this)
        callers = frames_from(sys._getframe(2))
        frame = next(f for f in callers if f.f_code.co_filename != SEEN_THROUGH)
        if passage.due:
            values = self._sampled(passage, _names(frame)).values
            for key, least in passage.due.items():
                rate = passage.loop.rates.values[key]
                passage.loop.follows[key] = (values.get(key, least) - least) * rate >= 0
            passage.due.clear()
        if is_new:
            passage.n_known = 0
            n = min(passage.n_unlike, n_steps - passage.begun)  # earlier rounds have no steps
            is_over = passage.loop.is_of_steps and self.most is not None and n >= self.most
            return self._leave(passage, n, remaining, frame) if is_over else 0
        passage.n_known += 1
        if passage.n_known == 1 or passage.sample is None:
            passage.n_events_of_known = sum(passage.n_events)
            passage.sample = self._sampled(passage, _names(frame))
            return 0
        is_outer = self.n_skips != passage.n_skips
        is_enough = self._is_enough(passage, is_outer=is_outer)
        if not is_enough or self.is_between or _is_in_module(frame):
            return 0
        return self._skip(passage, passage.sample, remaining, frame)

    def _is_enough(self, passage: Passage, *, is_outer: bool) -> bool:
        if is_outer or passage.loop.has_skipped:
            return passage.n_known >= (_EQUAL_OUTER if is_outer else EQUAL_ROUNDS)
        n_events = sum(self._moment().n_events) - passage.n_events_of_known
        is_many = passage.n_known >= MANY_EQUAL_ROUNDS or n_events >= CHEAP_EVENTS
        return is_many and passage.n_known >= EQUAL_ROUNDS

    def _sources(
        self, loop: Loop, names: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[int, int], Source, Mapping[str, Any]]]:
        """Yield where numbers of a loop are: in its source, and in functions that it may call."""
        yield (-1, 0), loop.source, names
        for key, calls in self.calls.items():
            if loop not in calls.function.within:
                yield key, calls.function.source, calls.names()

    def _sampled(self, passage: Passage, names: Mapping[str, Any]) -> Numbers:
        found = {
            (*key, i): _number(one, seen)
            for key, source, seen in self._sources(passage.loop, names)
            for i, one in enumerate(source.numbers)
        }
        return Numbers(passage.n_rounds, {k: v for k, v in found.items() if v is not None})

    def _skip(
        self, passage: Passage, before: Numbers, remaining: Remaining, frame: FrameType
    ) -> int | None:
        """Return how many rounds lie between here and the next one that may show something new."""
        names = _names(frame)
        now = self._sampled(passage, names)
        rates = now.rates_since(before)
        if rates.n_rounds >= passage.loop.rates.n_rounds:
            passage.loop.rates = rates
        ahead = dict(self._rounds_ahead(passage, now, names))
        follows, rates = passage.loop.follows, passage.loop.rates
        whole = [key for key in ahead if rates.values[key] % 1 == 0]
        if not all(follows.get(key, True) for key in whole):
            return 0  # only rounds that are run bring them together
        n_left = remaining()
        reached = min(ahead.values(), default=None)
        if n_left is None and reached is None:
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            is_lost = passage.loop.is_of_steps and remaining is no_length
            if is_lost and not passage.loop.is_guessed:
                self.on_stuck(f"it was unclear where the loop at {place} ends")
            is_left = passage.n_known >= ENDLESS_ROUNDS and isinstance(
                passage.loop.test, ast.Constant
            )
            if is_left:
                self.assumptions.note(
                    f"The loop at {place} was left when {ENDLESS_ROUNDS} rounds were equal."
                )
            return None if is_left or remaining is not no_length else 0
        ends = [] if reached is None else [reached - 1 - _AROUND]
        n = min([*ends, *([] if n_left is None else [n_left - _LAST])])
        if n > 0 and (new := [key for key in whole if key not in follows]):
            n = 1  # to see whether they follow
            passage.due = {key: now.values[key] + 1.5 * rates.values[key] for key in new}
        elif n > 0 and ends == [n]:
            passage.met.update(i for i, at in ahead.items() if at == reached)
        return self._jumped(passage, n, frame)

    def missing(self) -> str:
        """Return why something was not seen, "" if nothing is known to be missing."""
        once = next((place for place, n in self.sides.items() if n == 1), None)
        if self.partial or once is None:
            return self.partial
        name, line = Path(once[0]).name, once[1]
        return f"a value on the GPU decides the branch at {name}:{line}, and only one side was seen"

    def is_guessed(self, filename: str, line: int, n: int) -> None:
        """Note that a made-up value ended a loop, after rounds that each kept more memory."""
        place = f"{Path(filename).name}:{line}"
        self.partial = self.partial or (
            f"only a value on the GPU tells how often the loop at {place} runs: each of {n} rounds "
            "kept more memory"
        )

    def _jumped(self, passage: Passage, n: int, frame: FrameType) -> int:
        if n <= 0:
            return 0
        passage.loop.has_skipped = True
        passage.n_known = 0
        passage.sample = None
        self.note(passage, n, frame)
        return n

    def note(self, passage: Passage, n: int, frame: FrameType) -> None:
        """Note that rounds of a loop are skipped, and the steps that they would take.

        They are assumed to take steps as often as the rounds from the first to the last step did.
        """
        if passage.stepped:
            (begin, before), (end, after) = passage.stepped[0], passage.stepped[-1]
            if begin == end:
                begin, end, before = 0, passage.n_rounds, passage.begun
            self.n_steps += round(n * (after - before) / (end - begin))
            passage.n_steps = self.steps()
        passage.to_skip += n
        passage.n_rounds += n
        self._grow(passage, n, _names(frame))
        key = (frame.f_code.co_filename, frame.f_lineno)
        self.n_skipped[key] = self.n_skipped.get(key, 0) + n
        self.n_skips += 1
        if self._ends_at is None:
            self._ends_at = time.monotonic() + GO_ON_S

    def _grow(self, passage: Passage, n: int, names: Mapping[str, Any]) -> None:
        """Let the next round begin with the numbers and lists that the skipped ones would leave.

        The counters of the loop's own function are set by code that was added to it.
        """
        for key, source, seen in self._sources(passage.loop, names):
            for i, number in enumerate(source.numbers):
                rate, value = passage.loop.rates.values.get((*key, i)), _number(number, seen)
                is_list = isinstance(number, ast.Call)
                is_counter = key[0] >= 0 and i < len(source.counters)
                if rate and value is not None and (is_list or is_counter):
                    root = _root(number.args[0] if isinstance(number, ast.Call) else number)
                    kept = seen if is_counter else {root: seen.get(root)}
                    passage.grown.append((number, kept, value, _after(value, rate * n)))

    def _rounds_ahead(
        self,
        passage: Passage,
        now: Numbers,
        names: Mapping[str, Any],
    ) -> Iterator[tuple[Key, int]]:
        """Yield which numbers meet, and in how many rounds from here, 1 = in the next one.

        Those that have just met are among them, since what follows at once may be new, too.
        What happens every few rounds may depend on a number that has only now grown large enough
        (``if step > warmup: if step % 10 == 0``), so that earlier rounds did not show it.
        """
        compared = [
            ((*key, i), meeting, seen)
            for key, source, seen in self._sources(passage.loop, names)
            for i, meeting in enumerate(source.meetings, len(source.counters))
        ]
        for key, meeting, seen in sorted(compared, key=lambda one: one[1].period is not None):
            value, rate = now.values.get(key), passage.loop.rates.values.get(key)
            other = _number(meeting.other, seen)
            if value is None or not rate or other is None:
                continue
            n = (other - value) / rate
            if meeting.period is not None:
                period = (_number(meeting.period, seen) or 0) / abs(rate)
                if period <= passage.n_run or passage.met[key] >= _MEETINGS:
                    continue
                n %= period
            elif n <= 0 and key not in passage.passed:
                passage.passed.add(key)
                passage.n_run = min(passage.n_run, int(-n))
                passage.met.clear()
            if n >= -_AROUND:
                if meeting.is_sure:
                    passage.loop.follows[key] = True
                yield key, int(n)

    def _leave(
        self, passage: Passage, n: int, remaining: Remaining, frame: FrameType
    ) -> int | None:
        """Leave a loop of steps whose memory never repeats, after n steps."""
        reason = f"{n} steps did not repeat in memory"
        n_left = remaining()
        if n_left is None or _is_in_module(frame):
            self.on_stuck(reason)
            return 0
        self.partial = self.partial or f"{reason}; the rest of the loop was not rehearsed"
        return self._jumped(passage, n_left - _LAST, frame)

    def advanced(self, passage: Passage, number: int, value: Any) -> Any:
        """Return the value that a counter of the program would have after the skipped rounds."""
        rate = passage.loop.rates.values.get((-1, 0, number))
        if not rate or isinstance(value, bool) or not isinstance(value, int | float):
            return value
        return _after(value, rate * passage.to_skip)


def _after(value: Number, grown: float) -> Number:
    return value + (round(grown) if isinstance(value, int) else grown)


def _advance(number: ast.expr, names: Mapping[str, Any], value: Number) -> None:
    """Set a number of the program, or make a list as long by repeating its last item."""
    with suppress(Exception):  # the user's own attributes may raise anything
        match number:
            case ast.Name():  # of the module
                names.maps[-1][number.id] = value  # type: ignore[attr-defined]
            case ast.Attribute():
                setattr(value_of(number.value, names), number.attr, value)
            case ast.Call(args=[items]):
                kept = value_of(items, names)
                if isinstance(kept, list | deque) and not is_on_gpu(kept[-1]):
                    kept.extend(repeat(kept[-1], int(value) - len(kept)))


def is_on_gpu(item: Any) -> bool:
    """Return whether tensors of an item are on a GPU; keeping it would change what is allocated."""
    return any(isinstance(t, torch.Tensor) and t.is_cuda for t in tree_leaves(item))


def no_length() -> None:
    """Return None: nothing tells how many rounds a ``while`` loop has."""


def _is_in_module(frame: FrameType) -> bool:
    """Return whether a module is being called, so that the loop runs over its layers."""
    return any(one.f_code.co_filename == _MODULE for one in frames_from(frame))


def n_remaining(iterator: Any, items: Any, n_taken: int) -> int | None:
    """Return how many items a ``for`` has left; None = unknown.

    Args:
        iterator: the iterator that gives the items.
        items: what the iterator was made from, or the iterator itself.
        n_taken: items taken so far.
    """
    with suppress(Exception):
        if hasattr(type(iterator), "__length_hint__"):
            return operator.length_hint(iterator)
        if type(iterator) in {enumerate, zip, map}:
            made = iterator.__reduce__()[1]
            inner = made[:1] if type(iterator) is enumerate else made[type(iterator) is map :]
            found = [n_remaining(part, part, n_taken) for part in inner]
            return min((n for n in found if n is not None), default=None)
        if isinstance(iterator, GeneratorType) and iterator.gi_frame is not None:
            items = _locals_of(iterator.gi_frame).get("self", items)
        total = len(iterator) if hasattr(type(iterator), "__len__") else len(items)
        return max(0, total - n_taken)
    return None
