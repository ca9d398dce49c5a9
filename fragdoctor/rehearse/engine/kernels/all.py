"""Fills the table of rules."""

from __future__ import annotations

from fragdoctor.rehearse.engine.kernels import (  # noqa: F401
    attention,
    composites,
    convolution,
    indexing,
    normalization,
    pointwise,
    products,
    reductions,
    sorting,
)
