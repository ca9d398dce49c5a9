"""The operations that make a loss, each with the shapes of its results and its inputs.

A comparison with those of a smaller batch (``fragdoctor/rehearsal/prescription/batch_rows.py``)
shows which of them look at several rows of the batch at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch

from fragdoctor.rehearsal.engine import dispatch, session, wrap
from fragdoctor.rehearsal.engine.calls import around_backward, before_backward, is_of_loss
from fragdoctor.rehearsal.engine.marks import in_backward
from fragdoctor.rehearsal.engine.treatments.operations import addresses, tensors

MAX_LOSSES: Final = 4
"""The most backward passes whose losses are reported: a step has one for each trained model."""
GIVEN: Final = "given"
"""Stands in for the operation if a tensor already existed."""
_ABOUT: Final = ("dim", "dims", "training", "reduction", "other")
_USUAL: Final = ("dims", "reduction")
_SCALES: Final = "aten::_amp_"
"""Operations that choose the scale of a loss for the next step; the batch size does not matter."""
_MASKS: Final = (torch.bool, torch.uint8)
_CHOOSING: Final = ("aten::gather", "aten::index.Tensor", "aten::index_select")
_MOVING: Final = ("aten::clone", "aten::_to_copy", *_CHOOSING)
"""Operations whose results are values of the first tensor that they read."""

MAX_REACHED: Final = 100_000
"""The most operations behind live tensors; with more of them, losses are not reported."""
_COUNTED_EACH: Final = 50_000

Node = tuple[str, list[list[int]], list[int], dict[str, Any]]
"""An operation: name, shapes of its results, numbers of the nodes it reads, and some arguments.

These are: which dimensions, how it reduces them, by which number it multiplies or divides, whether
a loss over classes gives rows unequal weights, and, for an indexed tensor, its shape and what moves
its elements.
"""


class _Made(NamedTuple):
    """An operation, which lives as long as anything that was made from its results."""

    number: int
    name: str
    shapes: list[list[int]]
    reads: list[_Made]
    about: dict[str, Any]
    values: Any = None  # what they are chosen from, if it is known


class Losses:
    """The first losses of a program, each as the nodes that lead to it, the loss itself last."""

    def __init__(self) -> None:
        self.found: list[list[Node]] = []
        self._n_made = 0
        self._is_over = False
        self._is_of_loss = False  # the backward pass that is running
        self._of: dict[int, _Made] = {}

        def noted(serve: Any, op: Any, args: Any, kwargs: Any) -> Any:
            made = serve(op, args, kwargs)
            if not self._is_over and (self._is_of_loss or not in_backward()):
                self._note(op, args, kwargs, made)
            return made

        def made_anew(is_new: Any, device: int, address: int) -> None:
            self._of.pop(address, None)  # what was there before is gone
            is_new(device, address)

        def passing(run: Any, *args: Any, **how: Any) -> Any:
            before, self._is_of_loss = self._is_of_loss, is_of_loss(*args, **how)
            try:
                return run(*args, **how)
            finally:
                self._is_of_loss = before

        wrap(dispatch, "serve", noted)
        around_backward(passing)
        wrap(session.current().known, "is_new", made_anew)
        before_backward(self._began)

    def _note(self, op: Any, args: Any, kwargs: Any, made: Any) -> None:
        results = tensors(made)
        if not results or op.name().startswith(_SCALES):
            return  # parameters are updated as lists
        read = {at: one for one in tensors((args, kwargs)) for at in addresses(one)}
        written = {*addresses(results)}
        if written <= read.keys() and not op._schema.is_mutable:
            return  # a view
        arguments = op._schema.arguments
        # PyTorch leaves arguments out if they are as usual, a mean or all elements.
        named = {one.name: one.default_value for one in arguments if one.name in _USUAL}
        named |= dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
        about = {name: named[name] for name in _ABOUT if name in named}
        other = about.get("other")
        if isinstance(other, torch.Tensor):
            values = _known(other)
            about["other"] = None if values is None or other.dim() else float(values)
        if moves := self._moves(named, [*read]):
            about |= {"moves": moves, "of": list(named["self"].shape)}
        if "ignore_index" in named:
            is_weighted = named.get("weight") is not None
            about["is_weighted"] = is_weighted or self._ignores(named["target"], named)
        shapes = [list(one.shape) for one in results]
        values = _known(named["self"]) if op.name() in _CHOOSING else None
        reads = [self._made(*one) for one in read.items()]
        self._add(written, op.name(), shapes, reads, about, values)

    def _add(self, written: set[int], *what: Any) -> _Made:
        made = _Made(self._n_made, *what)
        self._of |= dict.fromkeys(written, made)
        self._n_made += 1
        if not self._n_made % _COUNTED_EACH and len(_leading_to(self._of.values())) > MAX_REACHED:
            self._is_over = True
            self.forget()
            self.found.clear()
        return made

    def _made(self, address: int, tensor: Any) -> _Made:
        known = self._of.get(address)
        return known or self._add({address}, GIVEN, [list(tensor.shape)], [], {})

    def _moves(self, named: dict[str, Any], read: list[int]) -> list[tuple[int, str, int]]:
        """Return along which dimensions indices move elements, by what, and which read that is.

        Indices that are known to count up leave the elements where they are. Equal ones have the
        same name. A mask that chooses has none: how many it keeps depends on its values.
        """
        found: list[tuple[int, Any]] = []
        if isinstance(named.get("index"), torch.Tensor) and "dim" in named:
            found = [(named["dim"] % max(named["self"].dim(), 1), named["index"])]
        elif isinstance(named.get("indices"), list | tuple):
            for one in named["indices"]:
                n_dims = one.dim() if one is not None and one.dtype in _MASKS else 1
                found += [(len(found) + n, one) for n in range(n_dims)]
        moves = []
        for dim, index in found:
            if index is None or (index.dtype in _MASKS and "values" in named):
                continue
            at = next(iter(addresses(index)), 0)
            values = _known(index)
            by = f"{self._made(at, index).number} {index.storage_offset()} {index.shape}"
            if index.dtype in _MASKS:
                by = ""
            elif values is not None:
                if torch.equal(values.flatten(), torch.arange(named["self"].shape[dim])):
                    continue
                by = str(hash(values.numpy().tobytes()))
            moves.append((dim, by, read.index(at) if at in read else -1))
        return moves

    def _ignores(self, target: Any, named: dict[str, Any]) -> bool:
        """Return whether a loss ignores some labels, or may: the step's own labels are unknown."""
        values, name = _known(target), "aten::clone"
        reads = [self._of[at] for at in addresses(target) if at in self._of]
        while values is None and reads:
            made, *others = reads
            if name not in _MOVING and (others or made.name == GIVEN):
                return True
            name, reads, values = made.name, made.reads, made.values
        return values is not None and bool((values == named["ignore_index"]).any())

    def _began(self, roots: Any, *_: Any, **__: Any) -> None:
        """Keep the operations that lead to a loss."""
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
        self._is_over |= len(self.found) == MAX_LOSSES

    def forget(self) -> None:
        """Take all that exists as given: what a pass or an update changes does not matter."""
        self._of.clear()


def _known(tensor: Any) -> Any:
    return session.current().known.of(tensor) if tensor.is_cuda else tensor


def _leading_to(made: Iterable[_Made]) -> dict[int, _Made]:
    """Return operations by their numbers, each after all that lead to it.

    The order follows from what they read, not from when they ran: what an update would have changed
    stays as it was where updates are left out.
    """
    found: dict[int, _Made] = {}
    rest = [*made][::-1]  # the last of them is then the last
    while rest:
        unread = [one for one in rest[-1].reads if one.number not in found]
        if unread:
            rest += unread
        else:
            one = rest.pop()
            found.setdefault(one.number, one)
    return found
