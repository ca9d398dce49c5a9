"""All rules, one line each, sorted by code."""

from __future__ import annotations

from typing import Final

from fragdoctor.rules.capacity.caught_failures import CaughtFailures
from fragdoctor.rules.capacity.device_full import DeviceFull
from fragdoctor.rules.capacity.optimizer_state import OptimizerState
from fragdoctor.rules.capacity.request_beyond_device import RequestBeyondDevice
from fragdoctor.rules.capacity.rescued_requests import RescuedRequests
from fragdoctor.rules.capacity.transient_peak import TransientPeak
from fragdoctor.rules.fragmentation.drifting_sizes import DriftingSizes
from fragdoctor.rules.fragmentation.holes_below_request import HolesBelowRequest
from fragdoctor.rules.fragmentation.page_rounding import PageRounding
from fragdoctor.rules.fragmentation.pending_frees import PendingFrees
from fragdoctor.rules.fragmentation.private_pool_cache import PrivatePoolCache
from fragdoctor.rules.fragmentation.rounding_waste import RoundingWaste
from fragdoctor.rules.fragmentation.stranded_free_memory import StrandedFreeMemory
from fragdoctor.rules.growth.accumulating_trials import AccumulatingTrials
from fragdoctor.rules.growth.growing_line import GrowingLine
from fragdoctor.rules.growth.growing_statistics import GrowingStatistics
from fragdoctor.rules.input_quality.cut_history import CutHistory
from fragdoctor.rules.input_quality.cut_message import CutMessage
from fragdoctor.rules.input_quality.foreign_allocator import ForeignAllocator
from fragdoctor.rules.input_quality.missing_events import MissingEvents
from fragdoctor.rules.input_quality.no_history import NoHistory
from fragdoctor.rules.input_quality.no_stacks import NoStacks
from fragdoctor.rules.input_quality.unknown_keys import UnknownKeys
from fragdoctor.rules.processes.consequence_errors import ConsequenceErrors
from fragdoctor.rules.processes.host_memory import HostMemory
from fragdoctor.rules.processes.memory_outside_pytorch import MemoryOutsidePytorch
from fragdoctor.rules.processes.other_process import OtherProcess
from fragdoctor.rules.processes.separate_failure import SeparateFailure
from fragdoctor.rules.processes.several_ranks import SeveralRanks
from fragdoctor.rules.processes.starved_library import StarvedLibrary
from fragdoctor.rules.rule import HEADINGS, Rule
from fragdoctor.rules.settings.memory_limit import MemoryLimit
from fragdoctor.rules.settings.split_limit_with_expandable import SplitLimitWithExpandable

RULES: Final[tuple[Rule, ...]] = (
    StrandedFreeMemory(),  # FD101
    HolesBelowRequest(),  # FD102
    DriftingSizes(),  # FD103
    PageRounding(),  # FD104
    PrivatePoolCache(),  # FD105
    PendingFrees(),  # FD106
    RoundingWaste(),  # FD108
    DeviceFull(),  # FD201
    RequestBeyondDevice(),  # FD202
    TransientPeak(),  # FD203
    OptimizerState(),  # FD204
    RescuedRequests(),  # FD205
    CaughtFailures(),  # FD206
    MemoryLimit(),  # FD301
    SplitLimitWithExpandable(),  # FD303
    GrowingLine(),  # FD401
    GrowingStatistics(),  # FD402
    AccumulatingTrials(),  # FD404
    OtherProcess(),  # FD501
    MemoryOutsidePytorch(),  # FD502
    SeveralRanks(),  # FD503
    StarvedLibrary(),  # FD504
    HostMemory(),  # FD505
    ConsequenceErrors(),  # FD506
    SeparateFailure(),  # FD507
    CutHistory(),  # FD901
    NoHistory(),  # FD902
    NoStacks(),  # FD903
    MissingEvents(),  # FD904
    ForeignAllocator(),  # FD905
    UnknownKeys(),  # FD906
    CutMessage(),  # FD907
)


def find_rule(code: str) -> Rule | None:
    """Return the rule with a code (upper or lower case) or a name, or None if there is none."""
    wanted = code.strip()
    for rule in RULES:
        if wanted.upper() == rule.code or wanted.lower() == rule.name:
            return rule
    return None


def explanation(rule: Rule) -> tuple[tuple[str, str], ...]:
    """Return the documentation of a rule as (heading, text) pairs in order.

    Each text is one paragraph of the docstring, joined to one line.
    """
    parts = [" ".join(p.split()) for p in (type(rule).__doc__ or "").split("\n\n")]
    found = []
    for heading in HEADINGS:
        text = next((p for p in parts if p.startswith(heading)), "")
        found.append((heading.removesuffix("."), text.removeprefix(heading).strip()))
    return tuple(found)
