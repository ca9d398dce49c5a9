"""Run a program on PyTorch's own allocator with the treatments of ``rehearse --cure``.

    run.sh PY treated_program.py PACKAGE SPEC+SPEC program.py

PACKAGE is the folder that holds fragdoctor; the last line printed is ``passed`` or ``oom``.
All numbers read as zero there, so Transformers is told that no sequences are packed.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
from typing import Any


def main(package: str, specs: str, program: str) -> str:
    """Run the program and return how it ended."""
    sys.path.append(package)
    sys.argv[:] = [program]
    import torch

    from fragdoctor.rehearsal.engine import always, calls, put, when_imported
    from fragdoctor.rehearsal.engine.treatments import accumulation, apply, operations

    core: Any = torch._C
    for module in (calls, operations):  # the real autograd engine runs here
        module.in_backward = lambda: core._current_graph_task_id() != -1
    # Samplers are known by the lines that lead to them, and a rehearsal has none of this file.
    accumulation.OWN = (*accumulation.OWN, __file__)
    is_packed = lambda masks: put(masks, "find_packed_sequence_indices", always(None))  # noqa: E731
    when_imported({"transformers.masking_utils": is_packed})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    # Loops run their own number of rounds here.
    apply([spec.removesuffix(":again") for spec in specs.split("+") if spec])
    try:
        runpy.run_path(program, run_name="__main__")
    except torch.OutOfMemoryError:
        return "oom"
    return "passed"


if __name__ == "__main__":
    print(main(*sys.argv[1:4]), flush=True)
    os._exit(0)
