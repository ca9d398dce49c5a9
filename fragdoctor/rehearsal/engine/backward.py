"""Numbers of the autograd nodes that a backward pass makes.

The engine carries out nodes by number, the highest first, and each thread counts for itself. On a
GPU a backward pass has a thread of its own, so that nodes made in it (``create_graph``, for a
gradient penalty) have numbers of that thread. Here it runs in the thread of the program, whose
count goes on: nodes get the numbers they would have had, as far as their order against those of the
program goes.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from fragdoctor.rehearsal.engine import put
from fragdoctor.rehearsal.engine.marks import in_backward


class CountingEngine:
    """The autograd engine, with a count of its own for the nodes made in backward passes.

    Args:
        engine: the one that does the work.
        count: returns the next number of a node in this thread.
    """

    def __init__(self, engine: Any, count: Any) -> None:
        self._engine = engine
        self._count = count
        self._first = count()
        self._n_made = 0  # in backward passes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass; arguments as for PyTorch's engine."""
        if in_backward():  # within another one
            return self._engine.run_backward(outputs, *args, **kwargs)
        begin = self._count()
        try:
            gradients = self._engine.run_backward(outputs, *args, **kwargs)
        finally:
            end, before = self._count(), self._n_made
            self._n_made += end - begin
        if end > begin and gradients:
            own = begin - self._first - before  # nodes that the program itself has made
            for node in _nodes(gradients, begin, end):
                number = node._sequence_nr() - begin + before
                shift = end - begin if number >= own else 0
                node._set_sequence_nr(self._first + before + number + shift)
        return gradients


def _nodes(gradients: Any, begin: int, end: int) -> list[Any]:
    """Return the nodes behind gradients whose numbers are in a range."""
    found: dict[int, Any] = {}
    todo = [g.grad_fn for g in gradients if isinstance(g, torch.Tensor)]
    while todo:
        node = todo.pop()
        if node is None or id(node) in found or not begin <= node._sequence_nr() < end:
            continue
        found[id(node)] = node
        todo += [after for after, _ in node.next_functions]
    return list(found.values())


def install(undo: ExitStack) -> None:
    """Count so until ``undo`` is closed, where PyTorch lets nodes be numbered."""
    count = getattr(torch._C._autograd, "_get_sequence_nr", None)
    engine = torch.autograd.Variable._execution_engine
    if count is not None:
        put(undo, torch.autograd.Variable, "_execution_engine", CountingEngine(engine, count))
