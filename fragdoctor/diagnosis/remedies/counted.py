"""How to make less of what a text counts: its points, boxes, edges or experiences."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.diagnosis.remedies.remedy import JudgedCase

FEWER: Final = {
    r"box|object|instance|anchor|proposal": "drop or split samples with hundreds of them; compare "
    "them on the CPU (gpu_assign_thr=100 of MMDetection's assigners) or in chunks",
    r"node|edge|neighbo|PyG$": "sample neighbors instead of using the whole graph (NeighborLoader "
    "of PyG, or DGL's); multiply by a sparse matrix (torch.sparse, SparseTensor) instead of making "
    "a message for each edge; fewer features or heads",
    r"experien|transition|trajector": "store them on the CPU (.cpu(), or NumPy arrays), and move "
    "only the sampled batch to the GPU",
    r"^fewer (?!frames)": "work on them in chunks (for part in x.split(n)) and join the results, "
    "since a matrix of all pairs takes the square of their number; or draw fewer of them",
}
"""What helps, by the words for what a text counts; the first pattern that matches decides."""


def less_of_counted(case: JudgedCase) -> str:
    """Return how to make less of what the text counts, or "" if it counts nothing known."""
    less = " ".join((*case.told.smaller_samples, *(f.name for f in case.frameworks[:1])))
    return next((change for words, change in FEWER.items() if re.search(words, less)), "")
