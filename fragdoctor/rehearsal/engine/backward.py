"""Sequence numbers of the autograd nodes that a backward pass creates.

The engine runs nodes in order of their numbers, highest first, and each thread has its own counter.
On a GPU a backward pass has a thread of its own, so nodes created in it (``create_graph``, for a
gradient penalty) take their numbers from that thread. Here the pass runs in the program's thread,
where the program's counter would simply continue; so nodes are given numbers that put them in the
same order relative to the program's nodes as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fragdoctor.rehearsal.engine.calls import around_backward
from fragdoctor.rehearsal.engine.marks import in_backward


def install() -> None:
    """Number nodes this way."""
    count = torch._C._autograd._get_sequence_nr  # the next number in this thread
    first, n_made = count(), 0  # nodes made in backward passes

    def counting(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal n_made
        if in_backward():  # inside another pass
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

    around_backward(counting)


def _nodes(gradients: Any, begin: int, end: int) -> list[Any]:
    """Return the nodes behind gradients that have numbers in a range."""
    found: dict[int, Any] = {}
    todo = [g.grad_fn for g in gradients if isinstance(g, torch.Tensor)]
    while todo:
        node = todo.pop()
        if node is None or id(node) in found or not begin <= node._sequence_nr() < end:
            continue
        found[id(node)] = node
        todo += [after for after, _ in node.next_functions]
    return list(found.values())
