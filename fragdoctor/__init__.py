"""fragdoctor: a command-line doctor for PyTorch GPU out-of-memory.

The functions, in the order in which you need them::

    import fragdoctor

    diagnosis = fragdoctor.diagnose("snapshot.pickle", capacity_bytes=24 * 2**30)
    print(diagnosis.verdict.summary)
    diagnosis.to_html("report.html")

    what_if = fragdoctor.simulate("snapshot.pickle", ["expandable_segments:True"])
    changes = fragdoctor.compare("before.pickle", "after.pickle")
    report = fragdoctor.check("snapshots/", max_peak="70GiB")
    forecast = fragdoctor.estimate(params="7B", dtype="bf16", gpu="h100")
    rehearsal = fragdoctor.rehearse("train.py", gpu="h100")
    prescription = fragdoctor.cure("train.py", capacity_bytes=24 * 2**30)
    message = fragdoctor.parse_oom(text)

Inside a program that uses the GPU::

    with fragdoctor.record("bundle"):
        train_step(batch)
    for batch in fragdoctor.watch(loader):
        train_step(batch)

Importing the package loads nothing else; each name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fragdoctor.analysis.device import analyze_device
    from fragdoctor.api import compare, diagnose, diagnose_fleet, estimate, load, simulate
    from fragdoctor.api_check import check
    from fragdoctor.api_rehearse import cure, rehearse
    from fragdoctor.capture.record import record
    from fragdoctor.capture.watch import watch
    from fragdoctor.errors import (
        ConfigError,
        FragdoctorError,
        InputError,
        LimitExceeded,
        NotASnapshot,
        OutOfMemory,
        RefusedSnapshot,
        SimulationError,
        TruncatedSnapshot,
    )
    from fragdoctor.inputs.messages import find_messages, parse_oom
    from fragdoctor.inputs.stats_reader import read_stats
    from fragdoctor.limits import Limits
    from fragdoctor.model.case import Case, MemoryStats, OomLog, OomMessage, Overrides, StatsSeries
    from fragdoctor.model.comparison import Comparison
    from fragdoctor.model.diagnosis import Cause, Diagnosis, Recommendation, Verdict
    from fragdoctor.model.finding import Confidence, Finding, Severity
    from fragdoctor.model.settings import AllocatorSettings, parse_conf
    from fragdoctor.model.simulation import ReplayResult, Simulation
    from fragdoctor.model.snapshot import Snapshot
    from fragdoctor.trace.allocator import Allocator

__version__ = "0.2.0"

_MODULES: Final = {
    "fragdoctor.trace.allocator": "Allocator",
    "fragdoctor.analysis.device": "analyze_device",
    "fragdoctor.api": "compare diagnose diagnose_fleet estimate load simulate",
    "fragdoctor.api_check": "check",
    "fragdoctor.api_rehearse": "cure rehearse",
    "fragdoctor.capture.record": "record",
    "fragdoctor.capture.watch": "watch",
    "fragdoctor.errors": (
        "ConfigError FragdoctorError InputError LimitExceeded NotASnapshot OutOfMemory "
        "RefusedSnapshot SimulationError TruncatedSnapshot"
    ),
    "fragdoctor.inputs.messages": "find_messages parse_oom",
    "fragdoctor.inputs.stats_reader": "read_stats",
    "fragdoctor.limits": "Limits",
    "fragdoctor.model.case": "Case MemoryStats OomLog OomMessage Overrides StatsSeries",
    "fragdoctor.model.comparison": "Comparison",
    "fragdoctor.model.diagnosis": "Cause Diagnosis Recommendation Verdict",
    "fragdoctor.model.finding": "Confidence Finding Severity",
    "fragdoctor.model.settings": "AllocatorSettings parse_conf",
    "fragdoctor.model.simulation": "ReplayResult Simulation",
    "fragdoctor.model.snapshot": "Snapshot",
}
"""Module -> the public names that it is the home of."""

_HOMES: Final = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Allocator",
    "AllocatorSettings",
    "Case",
    "Cause",
    "Comparison",
    "Confidence",
    "ConfigError",
    "Diagnosis",
    "Finding",
    "FragdoctorError",
    "InputError",
    "LimitExceeded",
    "Limits",
    "MemoryStats",
    "NotASnapshot",
    "OomLog",
    "OomMessage",
    "OutOfMemory",
    "Overrides",
    "Recommendation",
    "RefusedSnapshot",
    "ReplayResult",
    "Severity",
    "Simulation",
    "SimulationError",
    "Snapshot",
    "StatsSeries",
    "TruncatedSnapshot",
    "Verdict",
    "__version__",
    "analyze_device",
    "check",
    "compare",
    "cure",
    "diagnose",
    "diagnose_fleet",
    "estimate",
    "find_messages",
    "load",
    "parse_conf",
    "parse_oom",
    "read_stats",
    "record",
    "rehearse",
    "simulate",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Return a public name, loading its module."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def load_ipython_extension(ipython: Any) -> None:
    """Register the cell magics ``%%gpu_memory`` and ``%%cure``: ``%load_ext fragdoctor``."""
    importlib.import_module("fragdoctor.magics").load(ipython)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
