"""How far a forward pass has come, told from the norms of a model, and what is still to come.

A model's parameters lie on the device in the order in which its layers were registered, which is
the order in which most models call them. The output of a norm is a whole number of rows of as many
channels as its weight has elements. So the outputs of norms in a pass can be laid beside the norms
of the model: which were called, with how many rows, and which are still to come. What a pass keeps
goes with them. Where that does not work out in order, nothing is said.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from fragdoctor.frozen import frozen
from fragdoctor.model.arrays import distinct
from fragdoctor.model.snapshot import I64
from fragdoctor.trace.trace import Trace

MAX_VECTOR: Final = 16 * 1024
"""Bytes of a bias or a norm's weight, at most, where no weight stands before it."""

MIN_INPUTS: Final = 8
"""Inputs of a layer, at least: a weight is as many times as large as its bias."""

MIN_ROWS: Final = 4
"""Rows of an output, at least."""

STATISTICS: Final = 4
"""An output is as many times as large as what a norm keeps of its statistics, at least."""

OF_BATCH_NORM, COUNTER_BYTES = 4, 8
"""Weight, bias, mean and variance of a batch norm, and what it counts its batches in after them."""

MAX_CELLS: Final = 2_000_000
"""Outputs times norms that are laid beside each other, at most."""

MIN_CALLED: Final = 4
"""Norms that must have been called before anything is said of the others."""

MIN_WIDTHS: Final = 2
"""Widths that the norms of a model must have: where all are alike, equal layers tell more, and the
decoder behind an encoder has rows of its own."""

ALIGNED: Final = 0.9
"""Share of the outputs, and of the norms up to the last one called, that must belong together."""

CLAIMED: Final = 0.9
"""Share of what is expected that is claimed.

Of 54 recordings of first forward passes the whole of it comes within 5 % of what was live at the
end in 30, in two 15 and 17 % above it (DenseNet, ConvNeXt), in the others below: rows that do not
become fewer, decoders with more of them.
"""

NOT_CALLED, NO_NORM = 0.5, 0.3
"""What it costs to pass over a norm or an output; that they belong together is worth 1."""

MAX_EMBEDDINGS: Final = 2
"""Largest weights that may be those of a vocabulary."""

HALF: Final = 2
"""Bytes of a number in half precision."""

MIN_WORDS: Final = 4
"""Bytes of a vocabulary's weight, at least, as a multiple of the square of those of a norm's: 16
words for each channel of 4 bytes, 8 for one of 2."""

_NORM: Final = re.compile(r"^(?:batch|layer|group|instance|rms)_norm$")


@frozen
class ModelLayers:
    """What the sizes of a model's parameters tell of its layers, in the order of registration.

    Attributes:
        widths: bytes of the weight of each norm.
        lines: frame of the user's line that put it on the device.
        weights: bytes of each parameter that is no vector, ascending.
        head_bytes: of the weight that ends a language model, as large as that of its vocabulary;
            0 without one, or where both are one.
    """

    widths: I64
    lines: I64
    weights: I64
    head_bytes: int

    @classmethod
    def of(cls, trace: Trace, start: int, failed: int) -> ModelLayers:
        """Return the layers whose parameters were there before a row and still are at another.

        A norm has a weight and a bias of one size, a batch norm its statistics as well. The bias of
        a layer stands behind its weight.
        """
        lives, table = trace.lives, trace.stacks
        is_older = (lives.start < start) & (lives.free > failed)
        older = np.flatnonzero(is_older & table.roles.makes_model[lives.stack])
        older = older[np.argsort(lives.start[older], kind="stable")]
        size = lives.requested_bytes[older].astype(np.int64)
        first = np.flatnonzero(np.append(True, size[1:] != size[:-1])[: len(size)])
        runs = zip(first.tolist(), [*first[1:].tolist(), len(size)], strict=True)
        norms: list[tuple[int, int]] = []
        widths: set[int] = set()
        weights: list[int] = []
        weight = 0
        for at, behind in runs:
            one, n = int(size[at]), behind - at
            if one == COUNTER_BYTES:
                continue
            counts = behind < len(size) and int(size[behind]) == COUNTER_BYTES
            if weight and weight % one == 0 and weight >= MIN_INPUTS * one:
                widths.add(one)
                n -= int(n % 2 or not counts)
            if one in widths or (n > 1 and one <= MAX_VECTOR):
                widths.add(one)
                n_norms = 1 if counts and n >= OF_BATCH_NORM else (n + 1) // 2
                norms += [(one, int(table.lines[lives.stack[older[at]]]))] * n_norms
                weight = 0
            else:
                weights.append(one)
                weight = one
        width, line = np.array(norms, np.int64).reshape(-1, 2).T
        sizes = distinct(np.array(weights, np.int64))
        head = weights[-1] if weights else 0
        ends = head in weights[:-1] and _may_be_words(head, width) and head == max(weights)
        return cls(width, line, sizes, head if ends else 0)

    def makes_logits(self, inputs: I64, output: int) -> bool:
        """Return whether an output has an element for each word of a vocabulary.

        Args:
            inputs: sizes of blocks of which one may be the input.
            output: bytes of the output, in the precision of the input or another.
        """
        width = int(self.widths.max(initial=0))
        return any(
            _may_be_words(weight, self.widths) and output * width**2 == ratio * one * weight
            for weight in self.weights[-MAX_EMBEDDINGS:].tolist()
            for one in distinct(inputs).tolist()
            for ratio in (1, 2, 4, 8)  # 2 or 4 bytes of a parameter, of the input, of the output
            if width
        )


def _may_be_words(weight: int, widths: I64) -> bool:
    """Return whether a weight is large enough for a vocabulary."""
    return weight >= MIN_WORDS * int(widths.max(initial=0)) ** 2


def logits_to_come(trace: Trace, model: ModelLayers, made: I64) -> int:
    """Return the bytes of the logits that a language model ends with; 0 where none is known to.

    One for each word of its vocabulary and row of its norms, in half precision at least. Arguments
    as for ``bytes_to_come``.
    """
    at = _outputs(trace, made)
    if not model.head_bytes or not len(at) or len(distinct(model.widths)) != 1:
        return 0
    width = int(model.widths[0])
    rows, words = int(trace.lives.requested_bytes[made[at[-1]]]) // width, model.head_bytes // width
    return HALF * rows * words


def bytes_to_come(trace: Trace, model: ModelLayers, failed: int, made: I64) -> int:
    """Return what a pass will keep behind the last norm it called; 0 where nothing tells.

    Outputs keep their rows while their channels stay, have a quarter of them where the channels
    double (a convolution with a stride of 2), and no more where they become fewer. What is kept for
    each of their bytes stays as it was.

    Args:
        trace: of the device.
        model: its layers.
        failed: row of the failing request.
        made: blocks of the pass, in order.
    """
    if len(distinct(model.widths)) < MIN_WIDTHS:
        return 0
    lives = trace.lives
    at = _outputs(trace, made)
    size = lives.requested_bytes[made[at]].astype(np.int64)
    called = _called(model.widths, size)
    if called is None:
        return 0
    norm, output = called
    last = int(norm[-1])
    to_come = model.widths[last + 1 :][model.lines[last + 1 :] == model.lines[last]]
    until = made[: int(at[output[-1]]) + 1]
    is_kept = (lives.free[until] > failed) & trace.stacks.roles.in_module[lives.stack[until]]
    kept = float(lives.size_bytes[until][is_kept].sum()) / float(size[output].sum())
    return int(CLAIMED * kept * _outputs_to_come(model.widths[norm], size[output], to_come))


def _outputs(trace: Trace, made: I64) -> I64:
    """Return the positions of the outputs of norms among the blocks of a pass."""
    stack = trace.lives.stack[made]
    size = trace.lives.requested_bytes[made].astype(np.int64)
    at = np.flatnonzero(trace.stacks.calls(_NORM)[stack])
    if not len(at):
        return at
    is_new = np.append(True, (stack[at[1:]] != stack[at[:-1]]) | (np.diff(at) > 1))
    largest = np.maximum.reduceat(size[at], np.flatnonzero(is_new))[np.cumsum(is_new) - 1]
    result: I64 = at[STATISTICS * size[at] > largest]
    return result


def _called(widths: I64, outputs: I64) -> tuple[I64, I64] | None:
    """Return which norm made which output, both in order; None where that does not work out.

    The best common subsequence: an output may be of a norm if it is a whole number of its rows.
    """
    n, m = len(outputs), len(widths)
    if min(n, m) < MIN_CALLED or n * m > MAX_CELLS:
        return None
    passed = NOT_CALLED * np.arange(m + 1)
    best = -passed
    moves = np.zeros((n, m + 1), np.int8)
    for i, size in enumerate(outputs.tolist()):
        fits = (size % widths == 0) & (size >= MIN_ROWS * widths)
        both = np.append(-np.inf, np.where(fits, best[:-1] + 1, -np.inf))
        here = np.maximum(both, best - NO_NORM)
        best = np.maximum.accumulate(here + passed) - passed
        moves[i] = np.where(best > here + 1e-9, 2, both >= here)
    i, j = n - 1, int(np.argmax(best))
    pairs: list[tuple[int, int]] = []
    while i >= 0:
        move = int(moves[i, j])
        if move == 1:
            pairs.append((j - 1, i))
        j -= int(move > 0)
        i -= int(move < 2)
    norm, output = np.array(pairs[::-1], np.int64).reshape(-1, 2).T
    if len(norm) < max(MIN_CALLED, ALIGNED * n, ALIGNED * (norm[-1] + 1)):
        return None
    return norm, output


def _outputs_to_come(widths: I64, outputs: I64, to_come: I64) -> float:
    """Return the bytes of outputs to come, from those of the norms that were called."""
    rows = outputs / widths
    rows_of = dict(zip(widths.tolist(), rows.tolist(), strict=True))
    again = np.append(False, (widths[1:] == widths[:-1]) & (rows[1:] == rows[:-1]))
    settled = set(widths[again].tolist())
    widest, at_rows, total = int(widths.max()), float(rows[-1]), 0.0
    for width in to_come.tolist():
        if width > widest:
            at_rows *= (widest / width) ** 2
            widest = width
        elif width not in settled:
            at_rows /= 4 if width == widest else 1
        at_rows = min(at_rows, rows_of.get(width, at_rows))
        settled.add(width)
        total += at_rows * width
    return total
