"""Run a program on PyTorch's own allocator with the treatments of ``rehearse --cure``.

    run.sh PY treated_program.py PACKAGE SPEC+SPEC program.py

PACKAGE is the folder that holds fragdoctor; the last line printed is ``passed`` or ``oom``, and the
peak of the program's tensors in bytes.
All numbers read as zero there, so Transformers is told that no sequences are packed.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
from typing import Any


def main(package: str, specs: str, program: str) -> tuple[str, int]:
    """Run the program; return how it ended, and the peak of its tensors on any GPU."""
    sys.path.append(package)
    sys.argv[:] = [program]
    import torch

    from fragdoctor.rehearsal.engine import always, calls, put, when_imported
    from fragdoctor.rehearsal.engine.treatments import accumulation, apply, operations

    core: Any = torch._C
    core._cuda_resetPeakMemoryStats = lambda *_: None  # that of the whole program is printed
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
    end = "passed"
    try:
        runpy.run_path(program, run_name="__main__")
    except torch.OutOfMemoryError:
        end = "oom"
    return end, max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))


if __name__ == "__main__":
    print(*main(*sys.argv[1:4]), flush=True)
    os._exit(0)
