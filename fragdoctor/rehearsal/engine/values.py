"""What the program reads of values on the GPU: stand-ins, with stated assumptions."""

from __future__ import annotations

import builtins
import operator
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import torch

from fragdoctor.rehearsal.engine import frames_from, put, session, wrap
from fragdoctor.rehearsal.engine.decisions import Decision, count_decision, decision
from fragdoctor.rehearsal.engine.host import release
from fragdoctor.rehearsal.engine.known import MOST_WHOLE
from fragdoctor.rehearsal.engine.loops import READ, unless_traced
from fragdoctor.rehearsal.engine.memory_history import OURS, is_users, users_frame
from fragdoctor.rehearsal.engine.session import Assumption
from fragdoctor.rehearsal.engine.skipping import ENDLESS_ROUNDS, EQUAL_ROUNDS, MANY_EQUAL_ROUNDS
from fragdoctor.rehearsal.engine.step_watch import LITTLE_BYTES


def n_kept(tensor: torch.Tensor, kind: str) -> int:
    """Return how many elements are kept by an operation whose result depends on values."""
    known = session.current().known.of(tensor)
    if known is not None:
        return int(known.count_nonzero()) if kind == "nonzero" else known.unique().numel()
    share = session.current().assumptions.shares.get(kind, 1.0)
    n = round(share * tensor.numel())
    most = session.current().known.most_set(tensor) if kind == "nonzero" else None
    if most is not None and most < n:
        assume(kind, "all elements that can be kept are kept")
        return most
    assumed = "all elements are kept" if share == 1.0 else f"{share:.3g} of all are kept"
    if tensor.numel() > MOST_WHOLE:
        assumed += f"; values of more than {MOST_WHOLE:,} elements are not followed"
    assume(kind, assumed)
    return n


def n_repeated(repeats: torch.Tensor) -> int:
    """Return how many elements there are after repeating each as often as a tensor says."""
    known = session.current().known.of(repeats)
    if known is not None:
        return int(known.sum())
    assume("repeat_interleave", "each is repeated once")
    return repeats.numel()


_BEAMS: Final = "_beam_search"
"""The function of Transformers that cuts its results to the longest, which it reads."""
FAR: Final = 2**31 - 1
_TORCH: Final = str(Path(torch.__file__).parent)
MOST_FILLED: Final = 64 * 1024
"""The largest floating-point tensor that does not read as zeros: statistics, not images."""


def stand_in(dtype: torch.dtype) -> Any:
    """Return the number that stands in for a value on the GPU."""
    callers = frames_from(sys._getframe(1))
    frame = next((f for f in callers if not f.f_code.co_filename.startswith(OURS)), None)
    if frame is not None and frame.f_code.co_name == _BEAMS and not dtype.is_floating_point:
        assume(_BEAMS, "it runs to its end")
        return dtype is torch.bool or FAR
    if dtype is torch.bool:
        return frame is not None and decided(frame, default=False)
    if dtype.is_floating_point:
        made = _falling("item", "the values are 1/2, 1/3 and so on: positive, and falling")
    else:
        made = 1 if frame is None else _whole(frame)
    if frame is not None and is_users(frame.f_code.co_filename):
        session.current().assumptions.read = made
    return made


def _whole(frame: FrameType) -> int:
    """Return a whole number that code reads: how often a loop runs, or another."""
    loop = count_decision(frame.f_code, frame.f_lasti)
    if loop is None:
        assume("item", "the value is 1")
        return 1
    assume("item", f"the loop runs {MANY_EQUAL_ROUNDS} times")
    session.current().loops.guess(frame.f_code.co_filename, loop.line)
    return MANY_EQUAL_ROUNDS


def _falling(operation: str, assumed: str) -> float:
    """Return a value that is safe for logarithms and divisions, and eventually below any bound.

    A loss falls, and loops that end when something is small do end. Each line counts for itself.
    """
    return 1 / (1 + assume(operation, assumed))


def decided(frame: FrameType, *, default: bool, compares: bool = False) -> bool:
    """Return a made-up truth value that the code of a frame reads; see :mod:`.decisions`."""
    found = decision(frame.f_code, frame.f_lasti, compares=compares)
    if found is None:
        if not compares:
            assume("item", "the value is 0")
        return default
    if found.kind == "error":
        assume("validation", "the values are valid")
        return found.value
    if found.kind == "loop":
        assume("loop", "it goes on until its rounds are equal")
        if not found.is_bounded:
            session.current().loops.guess(frame.f_code.co_filename, found.line)
        rounds = _rounds.setdefault((frame.f_code, found.line), _Rounds())
        return found.value != rounds.end(frame.f_code, found)
    if not (is_users(frame.f_code.co_filename) or frame.f_code.co_filename.startswith(_TORCH)):
        assume("item", "the value is 0")
        return default
    n = assume("branch", "both sides are taken in turn")
    if found.has_both:
        session.current().loops.skipping.sides[frame.f_code.co_filename, found.line] = n
    if n % 2 or not (compares or found.has_both):
        return found.value
    return not found.value if found.has_both else default


@dataclass(slots=True)
class _Rounds:
    """Rounds of a loop that a made-up value can end: how many, and how many showed nothing new.

    What it kept after each round is seen when it is entered for the first time, then it has one.
    """

    most: int = MANY_EQUAL_ROUNDS
    n: int = 0
    n_equal: int = 0
    memory: tuple[tuple[int, int], ...] = ()
    before_bytes: int = 0

    def end(self, code: CodeType, loop: Decision) -> bool:
        """Return whether the loop ends after one more round.

        A loop that also ends otherwise goes on until then, unless it shows nothing new for long. If
        it is PyTorch's own, a few rounds are enough: a search along a line may only take so many
        evaluations, and its optimizer's history grows with each search.
        """
        now = session.current()
        figures = map(now.gpus.figures, range(now.n_devices))
        memory = tuple((one["allocated"], one["peak_allocated"]) for one in figures)
        n_bytes = sum(allocated for allocated, _ in memory)
        if not self.n:
            self.before_bytes = n_bytes
        self.n += 1
        self.n_equal = self.n_equal + 1 if memory == self.memory else 0
        self.memory = memory
        few = (
            min(self.most, EQUAL_ROUNDS) if code.co_filename.startswith(_TORCH) else ENDLESS_ROUNDS
        )
        if self.n_equal < few if loop.is_bounded else self.n <= self.most:
            return False
        is_bounded = loop.is_bounded or self.n_equal >= EQUAL_ROUNDS
        if n_bytes - self.before_bytes > LITTLE_BYTES and not is_bounded:
            now.loops.skipping.is_guessed(code.co_filename, loop.line, self.most)
        self.n = self.n_equal = 0
        self.most = 1
        return True


_rounds: Final[dict[tuple[CodeType, int], _Rounds]] = {}


def fill(tensor: torch.Tensor, n_parts: int | None) -> None:
    """Put stand-ins into a CPU tensor that is copied from the GPU: even probabilities of so many.

    None means other values.
    """
    if n_parts and tensor.is_floating_point():
        assume("copy", f"all {n_parts} are equally likely")
        tensor.fill_(1 / n_parts)
    elif tensor.is_floating_point() and tensor.numel() <= MOST_FILLED:
        tensor.fill_(_falling("copy", "all values are 1/2, then 1/3 and so on"))
        COPIES[tensor.data_ptr()] = float(tensor.flatten()[0])
    else:
        assume("copy", "all values are 0")
        if not release(tensor):
            tensor.zero_()


def assume(operation: str, assumed: str) -> int:
    """Note an assumption at the user's line that needs it; return how often it was made."""
    frame = users_frame()
    name, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    return session.current().assumptions.make(Assumption(name, line, operation, assumed))


def _number(plain: type[Any]) -> type[Any]:
    """Return the type of made-up numbers: what is computed from them is made up, too."""

    def computed(compute: Any, *, is_right: bool = False) -> Any:
        def computes(self: Any, *others: Any) -> Any:
            numbers = (plain(self), *others)
            found = compute(*(reversed(numbers) if is_right else numbers))
            return _MADE_UP[type(found)](found) if type(found) in _MADE_UP else found

        return computes

    def compared(compare: Any) -> Any:
        def compares(self: Any, other: Any) -> Any:
            found, frame = compare(plain(self), other), sys._getframe(1)
            is_ours = frame.f_code.co_filename.startswith(OURS)
            if is_ours or type(found) is not bool:
                return found
            return decided(frame, default=found, compares=True)

        return compares

    names = {f"__{name}__": computed(getattr(operator, name)) for name in (*_COMPUTE, "neg", "abs")}
    for name in _COMPUTE:
        names[f"__r{name}__"] = computed(getattr(operator, name), is_right=True)
    names |= {f"__{name}__": compared(getattr(operator, name)) for name in _COMPARE}
    names |= {"__hash__": plain.__hash__, "__reduce__": lambda self: (plain, (plain(self),))}
    return type(plain.__name__, (plain,), names)


_COMPUTE: Final = ("add", "sub", "mul", "truediv")
_COMPARE: Final = ("lt", "le", "gt", "ge", "eq", "ne")
_MADE_UP: Final[dict[type[Any], type[Any]]] = {plain: _number(plain) for plain in (int, float)}


COPIES: Final[dict[int, float]] = {}
"""Address on the CPU -> the value that was last copied there in place of those of a GPU."""


def _tracked(found: Any) -> Any:
    """Return a number that was just read, as one that knows whether it is made up."""
    assumptions = session.current().assumptions
    is_made_up = type(found) in _MADE_UP and found == assumptions.read
    assumptions.read = None
    return _MADE_UP[type(found)](found) if is_made_up else found


def _read(read: Any, tensor: torch.Tensor) -> Any:
    """Read a number of a tensor, or a list; if on the CPU, it may have been copied there."""
    found = read(tensor)
    copied: float | None = None
    if type(tensor) is torch.Tensor and not tensor.is_cuda:
        with suppress(RuntimeError):  # under a transform there is no address
            copied = COPIES.get(tensor.data_ptr())
    if copied is not None and isinstance(found, list):
        return [_MADE_UP[float](one) if one == copied else one for one in found]
    if found == copied:
        session.current().assumptions.read = found
    return found


def install() -> None:
    """Track made-up numbers that the program reads by ``item``, ``int``, ``float``, ``tolist``."""
    wrap(torch.Tensor, "item", lambda read, self: _tracked(_read(read, self)))
    wrap(torch.Tensor, "__float__", _read)
    wrap(torch.Tensor, "tolist", lambda read, self: _read(read, self.cpu()))
    put(builtins, READ, unless_traced(lambda _, found: _tracked(found)))
    torch.serialization.add_safe_globals([*_MADE_UP])  # what a checkpoint makes of them
