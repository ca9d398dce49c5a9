"""The part of ``fragdoctor estimate`` that traces the user's own model."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from fragdoctor.cli import console
from fragdoctor.cli.estimate_formula import rendered
from fragdoctor.cli.estimate_options import EstimateOptions
from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from fragdoctor.report.base import RenderOptions


def answer(chosen: EstimateOptions, look: RenderOptions, given: frozenset[str]) -> str:
    """Return the report on the user's own model; what its code prints goes to standard error.

    Args:
        chosen: all options.
        look: how to print.
        given: names of those on the command line; refused where the factory decides by itself.

    Raises:
        ConfigError: the model cannot be traced; with ``--verbose`` its traceback is printed first.
    """
    from fragdoctor.estimation.gpus import gpu_of
    from fragdoctor.estimation.tracing.plan import Plan, parse_shape
    from fragdoctor.estimation.tracing.route import traced_estimate

    gpus = [gpu_of(name) for name in dict.fromkeys(chosen.gpu or ())]
    plan = Plan(
        batch=chosen.batch,
        input_shape=parse_shape(chosen.input_shape or ""),
        input_dtype=chosen.input_dtype,
        loss=chosen.loss,
        optimizer=chosen.optimizer,
        grad_accumulation=chosen.grad_accumulation,
        inference=chosen.inference,
        steps=chosen.steps,
        given=given,
    )
    # A real GPU is neither needed nor touched, even if it is full.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    try:
        with console.Progress("Tracing"), redirect_stdout(sys.stderr):
            found = traced_estimate(chosen.model or "", plan, gpus, dtype=chosen.dtype or "")
    except ConfigError as err:
        if chosen.verbose and err.__cause__ is not None:
            sys.stderr.write("".join(traceback.format_exception(err.__cause__)))
        raise
    return rendered(found, look, explain=chosen.explain, as_json=chosen.as_json)
