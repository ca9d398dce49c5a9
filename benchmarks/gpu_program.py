"""Run a program once on a real GPU, and report its memory use.

    python gpu_program.py JOB

JOB is JSON with ``program``; ``package``, the folder that holds fragdoctor; ``specs``, treatments
of ``rehearse --cure`` to apply; ``capacity_bytes``, the most memory for PyTorch, or 0 for all;
``snapshot``, a file for the recording, or "". The last line printed is JSON.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

MAX_EVENTS = 400_000


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Run the program, and return how it ended and its peaks in bytes."""
    sys.argv[:] = [job["program"]]
    sys.path.append(job["package"])
    sys.path.insert(0, str(Path(job["program"]).parent))
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU here.")
    memory = torch.cuda.memory
    torch.manual_seed(0)
    random.seed(0)
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    if job["capacity_bytes"]:
        memory.set_per_process_memory_fraction(job["capacity_bytes"] / total_bytes)
    if job["snapshot"]:
        memory._record_memory_history(stacks="python", max_entries=MAX_EVENTS)
    said: dict[str, Any] = {"state": "passed", "message": ""}
    if job["specs"]:
        from fragdoctor.rehearsal.engine import calls
        from fragdoctor.rehearsal.engine.treatments import apply, operations

        core: Any = torch._C
        for module in (calls, operations):
            module.in_backward = lambda: core._current_graph_task_id() != -1
        apply(job["specs"])
    try:
        runpy.run_path(job["program"], run_name="__main__")
    except torch.OutOfMemoryError as e:
        said |= {"state": "oom", "message": str(e)}
    except Exception:  # noqa: BLE001 - a program may end with any exception
        said |= {"state": "error", "message": traceback.format_exc()[-1500:]}
    stats = memory.memory_stats()
    said |= {
        "allocated_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"],
        "n_requests": stats["allocation.all.allocated"],
        "n_retries": stats["num_alloc_retries"],
    }
    if job["snapshot"]:
        memory._dump_snapshot(job["snapshot"])
    return said


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)
