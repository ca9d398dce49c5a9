"""Attention scores: the tensors that a program makes around a softmax, in the size of its result.

The scores, their masked and scaled copies, the weights and the output of dropout all have the same
number of elements. The function that calls the softmax makes them all; a fused kernel makes none.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from fragdoctor.analysis.training_run import TrainingRequests
from fragdoctor.model.arrays import distinct, is_among
from fragdoctor.model.snapshot import I64
from fragdoctor.trace.stacks import LOSS, is_backward
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB

_SOFTMAX: Final = re.compile(r"(?:^|.*[:_])softmax|Softmax", re.IGNORECASE)

MIN_BYTES: Final = MIB
"""Smaller softmax results come from routers, gates and short sequences."""


def find_attention_scores(trace: Trace, requests: TrainingRequests) -> I64:
    """Return the events that ask for attention scores or their gradients, ascending."""
    stacks, stack, size = trace.stacks, requests.stack, requests.size_bytes
    is_softmax = stacks.calls(_SOFTMAX)[stack] & ~stacks.calls(LOSS)[stack]
    is_softmax &= stacks.roles.in_module[stack] & (size >= MIN_BYTES)
    if not is_softmax.any():
        return np.zeros(0, np.int64)
    results = distinct(size[is_softmax])
    function = stacks.functions[stacks.lines_of(stack)]
    is_near = is_among(function, distinct(function[is_softmax])) & stacks.roles.in_module[stack]
    other_types = np.concatenate((results, 2 * results, results // 2, results // 4))
    is_gradient = is_backward(stacks.roles.role[stack]) & is_among(size, results)
    rows: I64 = requests.row[(is_near & is_among(size, other_types)) | is_gradient]
    return rows
