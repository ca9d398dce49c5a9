"""Numbers of the autograd nodes that a backward pass makes.

The engine carries out nodes by number, the highest first, and each thread counts for itself. On a
GPU a backward pass has a thread of its own, so that nodes made in it (``create_graph``, for a
gradient penalty) have numbers of that thread. Here it runs in the thread of the program, whose
count goes on: nodes get the numbers they would have had, as far as their order against those of the
program goes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from fragdoctor.rehearsal.engine.calls import put_run_backward
from fragdoctor.rehearsal.engine.marks import in_backward


def install(undo: ExitStack) -> None:
    """Number nodes so until ``undo`` is closed, where PyTorch lets them be numbered."""
    count = getattr(torch._C._autograd, "_get_sequence_nr", None)  # the next number in this thread
    if count is None:
        return
    first, n_made = count(), 0  # nodes made in backward passes

    def counting(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            nonlocal n_made
            if in_backward():  # within another one
                return run(*args, **kwargs)
            begin = count()
            try:
                gradients = run(*args, **kwargs)
            finally:
                end, before = count(), n_made
                n_made += end - begin
            if end > begin and gradients:
                own = begin - first - before  # nodes that the program itself has made
                for node in _nodes(gradients, begin, end):
                    number = node._sequence_nr() - begin + before
                    shift = end - begin if number >= own else 0
                    node._set_sequence_nr(first + before + number + shift)
            return gradients

        return run_backward

    put_run_backward(counting, undo)


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
