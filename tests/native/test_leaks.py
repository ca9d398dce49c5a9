"""When the interpreter ends, the core says nothing, and nothing has leaked either."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SAMPLE = Path(__file__).parents[2] / "sample_snapshots" / "small_holes_oom.pickle"
PROGRAM = """
import sys, threading, time
import fragdoctor
from fragdoctor._native import _ext

if "warn" in sys.argv:
    _ext.warn_of_leaks(True)

def use():
    found = fragdoctor.diagnose(sys.argv[1])
    fragdoctor.simulate(found.case.snapshot, confs=["expandable_segments:True"])
    return found

def hold(found):
    time.sleep(600)

found = use()
if "hold" in sys.argv:  # as a server, a notebook or a debugger does
    threading.Thread(target=hold, args=[found], daemon=True).start()
del found
"""


def told(*words: str) -> str:
    command = [sys.executable, "-c", PROGRAM, str(SAMPLE), *words]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return ended.stderr


def test_results_that_are_let_go_leak_nothing() -> None:
    assert told("warn") == ""


def test_results_that_are_held_to_the_end_are_no_news() -> None:
    assert "leaked" in told("warn", "hold")  # otherwise the tests here could not fail
    assert told("hold") == ""
