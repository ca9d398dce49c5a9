"""The operations that make a loss, each with the shapes of its results and what it is made of.

Where they are compared with those of a smaller batch
(``fragdoctor/rehearsal/prescription/batch_rows.py``), it shows which of them look at several rows
of the batch at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import torch

from fragdoctor.rehearsal.engine import dispatch, put, session
from fragdoctor.rehearsal.engine.calls import before_backward
from fragdoctor.rehearsal.engine.marks import in_backward
from fragdoctor.rehearsal.engine.treatments.operations import addresses, tensors

MAX_LOSSES: Final = 4
"""Backward passes whose losses are told: a step has one for each model that it trains."""
GIVEN: Final = "given"
"""Stands for the operation where a tensor was there before."""
_ABOUT: Final = ("dim", "dims", "training", "reduction", "other")
_SCALES: Final = "aten::_amp_"
"""What chooses the scale of a loss for the next step: it comes to the same for any batch."""
_COPIES: Final = ("aten::clone", "aten::_to_copy")

MAX_REACHED: Final = 100_000
"""Operations that lead to what is there: with more of them losses are not told."""
_COUNTED_EACH: Final = 50_000

Node = tuple[str, list[list[int]], list[int], dict[str, Any]]
"""An operation: name, shapes of its results, numbers of the nodes it reads, and what it is told.

That is: which dimensions, how it reduces them, by which number it multiplies or divides, and of a
loss over classes whether rows have unequal weights.
"""


class _Made(NamedTuple):
    """An operation, which lives as long as what is there was made of its results."""

    number: int
    name: str
    shapes: list[list[int]]
    reads: list[_Made]
    about: dict[str, Any]


class Losses:
    """The first losses of a program, each as the nodes that lead to it, itself the last."""

    def __init__(self, undo: ExitStack) -> None:
        self.found: list[list[Node]] = []
        self._n_made = 0
        self._is_over = False
        self._of: dict[int, _Made] = {}
        serve = dispatch.serve

        def noted(op: Any, args: Any, kwargs: Any) -> Any:
            made = serve(op, args, kwargs)
            if not (self._is_over or in_backward()):
                self._note(op, args, kwargs, made)
            return made

        known = session.current().known
        is_new = known.is_new

        def made_anew(device: int, address: int) -> None:
            self._of.pop(address, None)  # what was made there before is gone
            is_new(device, address)

        put(undo, dispatch, "serve", noted)
        put(undo, known, "is_new", made_anew)
        before_backward(self._began, undo)

    def _note(self, op: Any, args: Any, kwargs: Any, made: Any) -> None:
        results = tensors(made)
        if not results or op.name().startswith(_SCALES):
            return  # what is updated as a list: parameters
        read = {at: one for one in tensors((args, kwargs)) for at in addresses(one)}
        written = {*addresses(results)}
        if written <= read.keys() and not op._schema.is_mutable:
            return  # a view
        names = (argument.name for argument in op._schema.arguments)
        named = dict(zip(names, args, strict=False)) | kwargs
        about = {name: named[name] for name in _ABOUT if name in named}
        if isinstance(about.get("other"), torch.Tensor):
            about["other"] = None if about["other"].dim() else self._value(about["other"])
        if "ignore_index" in named:
            is_weighted = named.get("weight") is not None
            about["is_weighted"] = is_weighted or self._ignores(named["target"], named)
        shapes = [list(one.shape) for one in results]
        self._add(op.name(), shapes, [self._made(*one) for one in read.items()], about, written)

    def _add(
        self, name: str, shapes: Any, reads: list[_Made], about: dict[str, Any], written: set[int]
    ) -> _Made:
        made = _Made(self._n_made, name, shapes, reads, about)
        self._of |= dict.fromkeys(written, made)
        self._n_made += 1
        if not self._n_made % _COUNTED_EACH and len(_leading_to(self._of.values())) > MAX_REACHED:
            self._end()
            self.found.clear()
        return made

    def _made(self, address: int, tensor: Any) -> _Made:
        known = self._of.get(address)
        return self._add(GIVEN, [list(tensor.shape)], [], {}, {address}) if known is None else known

    def _ignores(self, target: Any, named: dict[str, Any]) -> bool:
        """Whether a loss leaves out some labels, or may: what the step made them of is unknown."""
        values = session.current().known.of(target)
        if values is not None:
            return bool((values == named["ignore_index"]).any())
        name = "aten::clone"
        reads = [self._of[at] for at in addresses(target) if at in self._of][:1]
        while len(reads) == 1 and (name in _COPIES or reads[0].name != GIVEN):
            name, reads = reads[0].name, reads[0].reads
        return bool(reads)

    @staticmethod
    def _value(number: Any) -> float | None:
        """Return the value of a tensor without dimensions, None where it is unknown."""
        values = session.current().known.of(number) if number.is_cuda else number
        return None if values is None else float(values)

    def _began(self, roots: Any, *_: Any, **__: Any) -> None:
        """Keep what leads to a loss."""
        if self._is_over:
            return
        leading = _leading_to(
            self._made(at, one) for one in tensors(roots) for at in addresses(one)
        )
        order = {number: n for n, number in enumerate(leading)}
        self.found.append(
            [
                (one.name, one.shapes, [order[read.number] for read in one.reads], one.about)
                for one in leading.values()
            ]
        )
        self.forget()
        if len(self.found) == MAX_LOSSES:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self.forget()

    def forget(self) -> None:
        """Take all that there is for given: what a pass or an update changes is no matter."""
        self._of.clear()


def _leading_to(made: Iterable[_Made]) -> dict[int, _Made]:
    """Return operations and all that lead to them, by their numbers in ascending order."""
    found: dict[int, _Made] = {}
    rest = [*made]
    while rest:
        one = rest.pop()
        if one.number not in found:
            found[one.number] = one
            rest += one.reads
    return dict(sorted(found.items()))
