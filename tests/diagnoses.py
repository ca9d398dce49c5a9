"""Small, readable, hand-built diagnoses for tests of the reports, one for each kind of input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.model.case import Case, LogMarker, OomLog, OomMessage, OtherProcess
from fragdoctor.model.diagnosis import (
    Cause,
    ChecklistItem,
    DeviceFigures,
    Diagnosis,
    Failure,
    HolderReport,
    Moment,
    Predicted,
    Recommendation,
    RunState,
    SegmentReport,
    Status,
    StranderReport,
    TimelineStrip,
    Verdict,
)
from fragdoctor.model.finding import Confidence, Evidence, Finding, Location, Severity, SkippedRule
from fragdoctor.model.simulation import FidelityReport, ReplayResult, Simulation
from fragdoctor.units import GIB, MIB

CACHE = Location("/home/user/project/experiments/models/gpt_cache.py", 88, "build_cache")
STEP = Location("/home/user/project/experiments/train.py", 41, "train_step")
LINEAR = Location(
    "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, "forward"
)
MAIN = Location("/home/user/project/experiments/train.py", 97, "<module>")

MESSAGE = OomMessage(
    kind="pytorch-caching-allocator",
    backend="cuda",
    is_device_oom=True,
    device_index=0,
    requested_bytes=500 * MIB,
    total_bytes=3900 * MIB,
    free_bytes=488 * MIB,
    allocated_bytes=2734 * MIB,
    reserved_bytes=3408 * MIB,
    reserved_unallocated_bytes=674 * MIB,
    process_bytes=3412 * MIB,
    variant="torch-2.1",
    text="CUDA out of memory. Tried to allocate 500.00 MiB. GPU 0 has a total capacity of ...",
)


def healthy() -> Diagnosis:
    return Diagnosis(
        case=Case(sources=("runs/healthy.pickle",)),
        verdict=Verdict(
            Cause.HEALTHY,
            Confidence.PROVEN,
            "Peak use was 2.10 GiB of 24.00 GiB, and all 310.00 MiB of free cache can be returned.",
            device=0,
            state=RunState.FITS,
        ),
        checklist=(
            ChecklistItem(
                "capacity", "Real capacity", Status.PASS, "2.10 GiB of 24.00 GiB", "", "snapshot"
            ),
            ChecklistItem(
                "retries", "Allocation retries", Status.PASS, "0", "No flush in the trace.", "trace"
            ),
            ChecklistItem(
                "largest_free_block",
                "Largest free block",
                Status.SKIP,
                "",
                "no request failed, so there is nothing to compare with",
                "",
            ),
        ),
        devices=(
            DeviceFigures(
                device=0,
                reserved_bytes=2460 * MIB,
                allocated_bytes=2150 * MIB,
                active_bytes=2150 * MIB,
                requested_bytes=2149 * MIB,
                free_cached_bytes=310 * MIB,
                releasable_bytes=310 * MIB,
                stranded_free_bytes=0,
                largest_free_block_bytes=128 * MIB,
                peak_allocated_bytes=2150 * MIB,
                peak_reserved_bytes=2460 * MIB,
                alloc_retries=0,
                ooms=0,
                capacity_bytes=24 * GIB,
                n_events=12_345,
            ),
        ),
        holders=(
            HolderReport(
                0, STEP, 2150 * MIB, 2150 * MIB, 96, (LINEAR, STEP, MAIN), moment=Moment.PEAK
            ),
        ),
        fidelity=FidelityReport(1.0, "block_counter"),
    )


def _held(
    location: Location | None,
    n_bytes: int,
    peak: int | None,
    n_blocks: int,
    stack: tuple[Location, ...] = (),
    device: int = 0,
) -> HolderReport:
    """Return the report on a holder, from a snapshot that was written at the failure."""
    return HolderReport(
        device,
        location,
        n_bytes,
        peak,
        n_blocks,
        stack,
        failure_bytes=n_bytes,
        moment=Moment.FAILURE,
    )


def fragmentation() -> Diagnosis:
    expandable = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return Diagnosis(
        case=Case(oom=OomLog((MESSAGE,)), sources=("runs/snapshot.pickle", "runs/oom.txt")),
        verdict=Verdict(
            Cause.FRAGMENTATION,
            Confidence.PROVEN,
            "500.00 MiB was refused while 1.13 GiB was free: 488.00 MiB at the driver, 674.00 MiB "
            "in the cache, where the largest block is 210.00 MiB.",
            device=0,
            also=(Cause.CAPACITY,),
            evidence=(
                Evidence("request", 500 * MIB, "bytes", "oom message"),
                Evidence("largest free block", 210 * MIB, "bytes", "snapshot"),
            ),
            decider="holes",
            settled_by="Replay the next step under expandable segments.",
            state=RunState.FAILED,
        ),
        checklist=(
            ChecklistItem(
                "capacity",
                "Real capacity",
                Status.PASS,
                "2.67 GiB live + 500.00 MiB requested <= 3.81 GiB",
                "The request would fit if the memory were in one piece.",
                "snapshot, oom message",
            ),
            ChecklistItem(
                "gap",
                "Reserved but unallocated",
                Status.WARN,
                "674.00 MiB (20%)",
                "Of it 12.00 MiB is returned on demand and 662.00 MiB is stranded by live blocks.",
                "snapshot",
            ),
            ChecklistItem(
                "largest_free_block",
                "Largest free block",
                Status.FAIL,
                "210.00 MiB for 500.00 MiB",
                "No cached block of this pool and stream can serve the request.",
                "snapshot",
            ),
            ChecklistItem(
                "growth", "Growth", Status.SKIP, "", "the trace holds fewer than 3 steps", ""
            ),
        ),
        devices=(
            DeviceFigures(
                device=0,
                reserved_bytes=3408 * MIB,
                allocated_bytes=2734 * MIB,
                active_bytes=2734 * MIB,
                requested_bytes=2730 * MIB,
                free_cached_bytes=674 * MIB,
                releasable_bytes=12 * MIB,
                stranded_free_bytes=662 * MIB,
                largest_free_block_bytes=210 * MIB,
                peak_allocated_bytes=3100 * MIB,
                peak_reserved_bytes=3408 * MIB,
                alloc_retries=3,
                ooms=1,
                capacity_bytes=3896 * MIB,
                n_events=48_102,
            ),
        ),
        failure=Failure(
            0,
            10_872,
            500 * MIB,
            488 * MIB,
            STEP,
            stack=(STEP, MAIN),
            source="trace and oom message",
        ),
        stranders=(
            StranderReport(0, 3, 24 * MIB, 412 * MIB, (LINEAR, CACHE, STEP, MAIN), CACHE, 4102),
            StranderReport(0, 128, 2 * MIB, 96 * MIB, (STEP, MAIN), STEP, 17),
            StranderReport(0, 1, 512, 2 * MIB),
        ),
        holders=(
            _held(CACHE, 1800 * MIB, 1820 * MIB, 288, (LINEAR, CACHE, STEP, MAIN)),
            _held(STEP, 934 * MIB, 1280 * MIB, 1_024, (STEP, MAIN)),
            _held(None, 0, None, 2),
        ),
        fidelity=FidelityReport(
            0.9987, "block_counter", "12 of 9,402 segment events come from before the recording"
        ),
        findings=(
            Finding(
                "FD101",
                "stranded-segments",
                Severity.WARNING,
                Confidence.PROVEN,
                "662.00 MiB of free memory sits in segments that 132 live blocks hold.",
                0,
                662 * MIB,
                (Evidence("stranded", 662 * MIB, "bytes", "snapshot"),),
                (CACHE,),
                "FD101:abc",
            ),
            Finding(
                "FD301",
                "settings-at-default",
                Severity.INFO,
                Confidence.PROVEN,
                "No allocator setting is changed.",
            ),
        ),
        skipped=(SkippedRule("FD401", "growing-line", "the trace holds fewer than 3 steps"),),
        recommendations=(
            Recommendation(
                1,
                "expandable-segments",
                "Turn on expandable segments",
                Confidence.PROVEN,
                setting=expandable,
                why="Free pages of one segment can then serve any large request.",
                predicted=Predicted(
                    True, 3224 * MIB, 0, "replay", 412, 672 * MIB, fidelity_share=0.9987
                ),
                cost="mapping pages on first touch, a few ms each",
                caveats=("Not on Windows; torch >= 2.1.",),
            ),
            Recommendation(
                2,
                "move-stranders",
                "Allocate the cache before the first step",
                Confidence.LIKELY,
                change="move build_cache() above the loop at train.py:97",
                why="3 blocks of 24.00 MiB strand 412.00 MiB.",
                locations=(CACHE,),
                predicted=Predicted(True, 3300 * MIB, 1, "arithmetic"),
            ),
            Recommendation(
                3,
                "smaller-batch",
                "Use a smaller batch",
                Confidence.POSSIBLE,
                change="batch_size=14 instead of 16",
                saves_bytes=340 * MIB,
            ),
        ),
        rejected=(
            Recommendation(
                0,
                "gc-threshold",
                "Set garbage_collection_threshold",
                Confidence.PROVEN,
                setting="PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:0.8",
                why="No effect without a memory fraction.",
                predicted=Predicted(False, 3408 * MIB, 3, "replay", 3020, -12 * MIB),
            ),
            Recommendation(
                0,
                "empty-cache",
                "Call empty_cache()",
                Confidence.PROVEN,
                change="torch.cuda.empty_cache() before the failing line",
                why="The allocator has already returned everything it could before it raised.",
            ),
        ),
        corrections=(
            "The message proposes expandable_segments whatever the cause: it is always printed.",
        ),
        notes=("The trace starts after 1.20 GiB was allocated; their stacks are not recorded.",),
        timeline=strip(),
        worst_segments=(
            SegmentReport(0, 512 * MIB, 412 * MIB, 412 * MIB, 210 * MIB),
            SegmentReport(0, 128 * MIB, 96 * MIB, 96 * MIB, 64 * MIB),
        ),
        n_stranded_segments=31,
    )


def strip() -> TimelineStrip:
    """Return a sawtooth that grows to an OOM, with one flush shortly before the OOM."""
    live = [min(600 + 10 * i + 90 * (i % 20), 3100) for i in range(99)] + [2734]
    cache = [max(live[: i + 1]) + 100 for i in range(99)] + [3408]
    return TimelineStrip(
        device=0,
        n_events=48_102,
        allocated_bytes=tuple(n * MIB for n in live),
        reserved_bytes=tuple(n * MIB for n in cache),
        first_bytes=(600 * MIB, 700 * MIB),
        last_bytes=(2734 * MIB, 3408 * MIB),
        peak_bytes=(max(live) * MIB, 3408 * MIB),
        capacity_bytes=3896 * MIB,
        oom_columns=(99,),
        flush_columns=(97,),
        n_ooms=1,
        n_flushes=1,
    )


def capacity() -> Diagnosis:
    message = replace(
        MESSAGE,
        requested_bytes=20 * MIB,
        free_bytes=3 * MIB,
        allocated_bytes=3_350 * MIB,
        reserved_bytes=3_380 * MIB,
        reserved_unallocated_bytes=30 * MIB,
        other_processes=(OtherProcess(4242, 517 * MIB),),
    )
    return Diagnosis(
        case=Case(oom=OomLog((message,)), sources=("-",)),
        verdict=Verdict(
            Cause.CAPACITY,
            Confidence.PROVEN,
            "20.00 MiB was asked while 3.27 GiB was live and 33.00 MiB was free in all.",
            device=0,
            state=RunState.FAILED,
        ),
        checklist=(
            ChecklistItem(
                "capacity",
                "Real capacity",
                Status.FAIL,
                "33.00 MiB free < 20.00 MiB + 3.27 GiB live",
                "",
                "oom message",
            ),
        ),
        devices=(
            DeviceFigures(
                device=0,
                reserved_bytes=3_380 * MIB,
                allocated_bytes=3_350 * MIB,
                free_cached_bytes=30 * MIB,
            ),
        ),
        fidelity=FidelityReport(None, "", "a message holds no trace"),
        recommendations=(
            Recommendation(
                1,
                "smaller-batch",
                "Use a smaller batch",
                Confidence.LIKELY,
                change="reduce the batch until 20.00 MiB more is free",
            ),
        ),
    )


def several_messages() -> Diagnosis:
    first = replace(MESSAGE, rank=3, line=118)
    later = replace(MESSAGE, rank=0, line=131, device_index=1, requested_bytes=None)
    nccl = OomMessage("nccl", "cuda", True, rank=1, line=140, text="NCCL error: unhandled")
    one = capacity()
    return replace(
        one,
        case=Case(
            oom=OomLog(
                (first, later, nccl),
                (LogMarker("killed", 150, None, "Killed"),),
                primary=0,
                n_lines=200,
            ),
            sources=("train.log",),
        ),
    )


def two_devices() -> Diagnosis:
    one = fragmentation()
    first = one.devices[0]
    second = DeviceFigures(
        device=1,
        reserved_bytes=1024 * MIB,
        allocated_bytes=512 * MIB,
        active_bytes=640 * MIB,
        releasable_bytes=64 * MIB,
        stranded_free_bytes=256 * MIB,
        private_pools_bytes=64 * MIB,
        capacity_bytes=4096 * MIB,
    )
    return replace(
        one,
        case=Case(sources=("two.pickle",)),
        timeline=None,
        worst_segments=(),
        n_stranded_segments=0,
        verdict=replace(one.verdict, device=1, also=(), settled_by=""),
        devices=(first, second, DeviceFigures(device=2)),
        stranders=(*one.stranders, StranderReport(1, 2, 4 * MIB, 256 * MIB, (STEP,), STEP)),
        holders=(*one.holders, _held(STEP, 512 * MIB, 600 * MIB, 12, (STEP, MAIN), device=1)),
    )


def nothing_known() -> Diagnosis:
    return Diagnosis(
        case=Case(sources=("empty.pickle",)),
        verdict=Verdict(
            Cause.UNKNOWN,
            Confidence.POSSIBLE,
            "The file holds 0 segments and 0 events, so it says nothing about memory.",
            settled_by="Record with torch.cuda.memory._record_memory_history() before "
            "the first step.",
        ),
        checklist=tuple(
            ChecklistItem(name, name.replace("_", " "), Status.SKIP, "", "the file is empty", "")
            for name in ("capacity", "gap", "retries")
        ),
    )


ALL = {
    f.__name__: f
    for f in (
        healthy,
        fragmentation,
        capacity,
        several_messages,
        two_devices,
        nothing_known,
    )
}


def simulation() -> Simulation:
    baseline = ReplayResult(
        "", 3896 * MIB, False, 48_101, 3408 * MIB, 3100 * MIB, 3408 * MIB, 3, 1, 2_981,
        peak_active_bytes=3100 * MIB, oom_bytes=500 * MIB, n_replayed=24_055,
    )  # fmt: skip
    return Simulation(
        device=0,
        baseline=baseline,
        fidelity=FidelityReport(1.0, "block_counter"),
        results=(
            replace(
                baseline,
                conf="expandable_segments:True",
                fits=True,
                oom_event=None,
                oom_bytes=None,
                peak_reserved_bytes=3224 * MIB,
                final_reserved_bytes=3224 * MIB,
                retries=0,
                ooms=0,
                driver_calls=412,
                smallest_capacity_bytes=3224 * MIB,
                smallest_capacity_note="fails again between 3,300 and 3,320 MiB",
            ),
            replace(baseline, conf="max_split_size_mb:128", driver_calls=6_120),
            replace(baseline, edit="batch scaled to 88%", capacity_bytes=None, fits=True),
        ),
        lower_bound_bytes=3100 * MIB,
        notes=("A call of empty_cache() was inferred after event 2,200.",),
    )


def planted(value: Any, text: str) -> Any:
    """Return a copy of a model value in which every free-text field holds ``text``.

    Fields of an enum type keep their value: they cannot hold text from a file.
    """
    if isinstance(value, Enum) or value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return text
    if isinstance(value, Struct):
        return replace(
            value, **{name: planted(getattr(value, name), text) for name in value.__struct_fields__}
        )
    if isinstance(value, Mapping):
        return {planted(k, text): planted(v, text) for k, v in value.items()}
    if isinstance(value, Sequence):
        return tuple(planted(v, text) for v in value)
    return value
