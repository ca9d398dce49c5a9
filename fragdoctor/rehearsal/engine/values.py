"""What the program reads of values on the GPU: stand-ins, with stated assumptions."""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from functools import cache
from types import CodeType, MappingProxyType
from typing import Any, Final

import torch

from fragdoctor.rehearsal.engine import frames_from, session
from fragdoctor.rehearsal.engine.host import release
from fragdoctor.rehearsal.engine.known import MOST_WHOLE
from fragdoctor.rehearsal.engine.memory_history import OURS, users_frame
from fragdoctor.rehearsal.engine.session import Assumption
from fragdoctor.rehearsal.engine.skipping import READS_ZERO


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


# Functions of libraries that end a loop depending on a value, cut its results, or compare them: the
# values that they read decide whether to continue, and how far.
_LOOPS: Final = MappingProxyType(
    {
        "_beam_search": ("transformers", "it runs to its end"),
        "_rejection_sample": ("distributions", "samples are accepted at once"),
        "_compare_regular_values_close": ("testing", "both are equal"),
    }
)
FAR: Final = 2**31 - 1
MOST_FILLED: Final = 64 * 1024
"""The largest floating-point tensor that does not read as zeros: statistics, not images."""


def stand_in(dtype: torch.dtype) -> Any:
    """Return the number that stands in for a value on the GPU."""
    callers = frames_from(sys._getframe(1))
    frame = next((f for f in callers if not f.f_code.co_filename.startswith(OURS)), None)
    if frame is not None and frame.f_code.co_name in _LOOPS and not dtype.is_floating_point:
        library, assumed = _LOOPS[frame.f_code.co_name]
        if library in frame.f_code.co_filename:
            assume(frame.f_code.co_name, assumed)
            return dtype is torch.bool or FAR
    if frame is not None and dtype is torch.bool:
        valid = _valid(frame.f_code, frame.f_lasti)
        if valid is not None:
            assume("validation", "the values are valid")
            return valid
    if not dtype.is_floating_point:
        assume("item", READS_ZERO)
        return False if dtype is torch.bool else 0
    return _falling("item", "the values are 1/2, 1/3 and so on: positive, and falling")


def _falling(operation: str, assumed: str) -> float:
    """Return a value that is safe for logarithms and divisions, and eventually below any bound.

    A loss falls, and loops that end when something is small do end. Each line counts for itself.
    """
    return 1 / (1 + assume(operation, assumed))


@cache
def _valid(code: CodeType, place: int) -> bool | None:
    """Return the truth of a value read at a place that leads to no error; None = neither does.

    A program that works raises no error: what it asserts holds, and what it checks is valid.
    """
    after = [i for i in dis.get_instructions(code) if i.offset >= place and i.opname != "TO_BOOL"]
    for number, one in enumerate(after[:2]):  # the value is read by a call, or by the jump itself
        if one.opname.endswith(("IF_TRUE", "IF_FALSE")):
            is_if_true = one.opname.endswith("TRUE")
            if _raises(after[number + 1 :]):
                return is_if_true
            if _raises([i for i in after if i.offset >= one.argval]):
                return not is_if_true
    return None


_JUMPS: Final = frozenset({*dis.hasjrel, *dis.hasjabs})


def _raises(code: Sequence[dis.Instruction]) -> bool:
    """Return whether instructions end in an error without a branch."""
    for one in code:
        if one.opname == "RAISE_VARARGS":
            return True
        if one.opcode in _JUMPS or one.opname.startswith("RETURN"):
            return False
    return False


def fill(tensor: torch.Tensor, n_parts: int | None) -> None:
    """Put stand-ins into a CPU tensor that is copied from the GPU: even probabilities of so many.

    None means other values.
    """
    if n_parts and tensor.is_floating_point():
        assume("copy", f"all {n_parts} are equally likely")
        tensor.fill_(1 / n_parts)
    elif tensor.is_floating_point() and tensor.numel() <= MOST_FILLED:
        tensor.fill_(_falling("copy", "all values are 1/2, then 1/3 and so on"))
    else:
        assume("copy", "all values are 0")
        if not release(tensor):
            tensor.zero_()


def assume(operation: str, assumed: str) -> int:
    """Note an assumption at the user's line that needs it; return how often it was made."""
    frame = users_frame()
    name, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    return session.current().assumptions.make(Assumption(name, line, operation, assumed))
