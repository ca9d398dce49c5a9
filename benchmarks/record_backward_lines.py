"""Find the forward line in whose backward pass each recording of ``tests/truth`` failed.

    sh ORACLE/run.sh PY benchmarks/record_backward_lines.py

PyTorch's anomaly mode names the node that raised the error and the forward call that made the node,
which no snapshot records. Every program runs again at the capacity at which its recording failed,
and ``tests/truth/backward_lines.json`` gets the line of the program: ``model.py:42``. This needs
the same PyTorch as ``record_outlooks.py``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from outlook_server import preload, run_program
from outlook_table import read_truth
from record_outlooks import job_of, read_program

HERE = Path(__file__).resolve().parent
TRUTH = HERE.parent / "tests" / "truth"
_CALL = re.compile(r"Error detected in \w+\. Traceback(.*?)\(Triggered", re.DOTALL)
_LINE = re.compile(r'File "/workspace/([^"]+)", line (\d+)')


def jobs() -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the job to run for each recording."""
    found = []
    for path in sorted(TRUTH.glob("*.pickle.gz")):
        name = path.name.removesuffix(".pickle.gz")
        program = read_program(HERE / "outlook_programs" / f"{name.split('@')[0]}.py")
        truth = read_truth(TRUTH / "programs" / f"{program.path.stem}.json")
        run = next(r.run for r in truth.recordings if r.snapshot.split(".")[0] == name)
        found.append((name, job_of(program, run.conf, run.total_bytes >> 20)))
    return found


def run_in_child(job: dict[str, Any], log: Path, count: Any) -> None:
    """Run a program in anomaly mode, whatever mode it sets itself, and log what it prints."""
    import torch

    torch._C._cuda_getDeviceCount = count
    mode = torch.autograd.set_detect_anomaly

    class Always(mode):  # type: ignore[misc, valid-type]
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(True, check_nan=False)  # the check would request memory

    torch.autograd.set_detect_anomaly = torch.autograd.anomaly_mode.set_detect_anomaly = Always  # type: ignore[misc]
    Always()
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    run_program(job)


def main() -> None:
    """Run the programs of all recordings."""
    count, lines = preload(), {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, job in jobs():
            log = Path(folder, f"{name}.log")
            pid = os.fork()
            if pid == 0:
                try:
                    run_in_child(job, log, count)
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(0)
            os.waitpid(pid, 0)
            call = _CALL.search(log.read_text("utf-8", "replace"))
            if call and (places := _LINE.findall(call[1])):
                lines[name] = "{}:{}".format(*places[-1])
        os.chdir("/")
    path = TRUTH / "backward_lines.json"
    path.write_text(json.dumps(lines, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
