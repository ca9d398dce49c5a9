"""Run everything that a change must pass on this machine: lint, format, types, tests.

Usage::

    python tools/check.py            # the fast tests
    python tools/check.py --all      # all tests; other arguments are passed to pytest as well
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"])


def main(arguments: list[str]) -> int:
    """Run the steps up to the first one that fails, and return its exit code."""
    for step in (*STEPS, ["pytest", "-q", *arguments]):
        print(f"== {' '.join(step)}", flush=True)
        code = subprocess.run([sys.executable, "-m", *step], cwd=ROOT, check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
