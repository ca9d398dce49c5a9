"""How results become the documents of ``--format json``: where a document differs from its type.

A document has the fields of its type under their own names; the exceptions are listed here. The
JSON of version 1.x is a contract: fields are only ever added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct, field

from fragdoctor.gate.judgement import CheckReport, FileJudgement, JudgedGrowth, has_grown
from fragdoctor.model import (
    comparison,
    fleet,
    gpu_sharing,
    memory_estimate,
    modules,
    prescription,
    rehearsal,
    simulation,
    story,
    workload,
)
from fragdoctor.model.case import LogMarker, OomMessage, OtherProcess
from fragdoctor.model.census import Owner
from fragdoctor.model.comparison import Comparison
from fragdoctor.model.diagnosis import (
    SCHEMA_VERSION,
    Diagnosis,
    HolderReport,
    OwnerReport,
    Predicted,
    Verdict,
)
from fragdoctor.model.gpus import GpuModel
from fragdoctor.report.views.estimate import summary
from fragdoctor.report.views.explain import Explanation
from fragdoctor.rules.rule import Rule

Computed = tuple[Any, Callable[[Any], Any]]
"""The type of an additional field, and the function that computes it."""


class Shape(Struct, frozen=True):
    """Where the document of a type differs from it.

    Attributes:
        names: fields that are written under another name.
        only: the fields that are written; empty for all.
        without: fields that are left out.
        inline: fields that are replaced by their own fields.
        null: fields whose empty value (``""``, 0) means unknown.
        properties: properties that are written as well.
        computed: additional fields.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    only: Sequence[str] = ()
    without: Sequence[str] = ()
    inline: Sequence[str] = ()
    null: Sequence[str] = ()
    properties: Sequence[str] = ()
    computed: Mapping[str, Computed] = field(default_factory=dict)


class ErrorFacts(Struct, frozen=True):
    """Why there is no result.

    Attributes:
        code: a stable name.
        message: one sentence.
        hint: what to try next, "".
        offset: where in the input, in bytes.
    """

    code: str
    message: str
    hint: str = ""
    offset: int | None = None


class ErrorResult(Struct, frozen=True):
    """What stands on standard output when there is no result."""

    error: ErrorFacts


class OomResult(Struct, frozen=True):
    """A diagnosis with the messages that it was made from.

    ``primary`` is the place of the message that the verdict is about, null without messages.
    """

    diagnosis: Diagnosis
    messages: Sequence[OomMessage] = ()
    primary: int | None = None
    markers: Sequence[LogMarker] = ()

    @classmethod
    def of(cls, diagnosis: Diagnosis) -> OomResult:
        """Return a diagnosis with its messages."""
        log = diagnosis.case.oom
        if log is None:
            return cls(diagnosis)
        return cls(diagnosis, log.messages, log.primary if log.messages else None, log.markers)


class GrowthGate(Struct, frozen=True):
    """What ``--fail-on-growth`` found."""

    has_grown: bool
    judged: Sequence[JudgedGrowth]


class CompareResult(Struct, frozen=True):
    """A comparison with what the gate found, null without one."""

    comparison: Comparison
    growth: GrowthGate | None = None

    @classmethod
    def of(cls, found: Comparison, judged: Sequence[JudgedGrowth] = ()) -> CompareResult:
        """Return a comparison with its judgement."""
        return cls(found, GrowthGate(has_grown(judged), judged) if judged else None)


class ModelTable(Struct, frozen=True):
    """The models that are known by name."""

    models: Sequence[memory_estimate.KnownModel]


class GpuTable(Struct, frozen=True):
    """The GPUs that are known by name."""

    gpus: Sequence[GpuModel]


class ItemAtPeak(Struct, frozen=True):
    """A row of an estimate; what it holds at the peak and at most."""

    item: memory_estimate.Item
    at_peak_bytes: int


def _items(f: memory_estimate.Footprint) -> list[ItemAtPeak]:
    at_peak = {s.item: s.n_bytes for s in f.peak.shares}
    return [ItemAtPeak(item, at_peak.get(item.id, 0)) for item in f.items]


WRAPPERS: Final[Mapping[str, Callable[..., Struct]]] = MappingProxyType(
    {"compare": CompareResult.of, "oom": OomResult.of, "gpus": GpuTable, "models": ModelTable}
)
"""View -> what makes its document of its result and of further arguments, unless it is as it is."""

_VERSION: Final[Mapping[str, Computed]] = {"schema_version": (str, lambda _: SCHEMA_VERSION)}
_SIZES: Final = ("n_layers", "hidden", "n_heads", "n_kv_heads", "ffn", "vocab")
_BYTES: Final = Shape(names={"n_bytes": "bytes"})

# Results of the commands that diagnose, replay and judge.
_DIAGNOSES: Final[Mapping[type, Shape]] = {
    Diagnosis: Shape(
        without=("case", "timeline", "worst_segments", "n_stranded_segments", "replay_notes",
                 "analyses"),
        computed={
            **_VERSION,
            "sources": (Sequence[str], lambda d: d.case.sources),
            "notes": (Sequence[str], lambda d: (*d.notes, *d.replay_notes)),
        },
    ),
    modules.ModuleMemory: Shape(properties=("total_bytes",)),
    HolderReport: Shape(properties=("held_bytes",)),
    OwnerReport: Shape(inline=("owner",)),
    Owner: Shape(null=("name", "class_name", "scope", "through")),
    Predicted: Shape(properties=("promise",)),
    OomResult: Shape(inline=("diagnosis",)),
    OomMessage: Shape(properties=("live_bytes",), without=("code",)),
    rehearsal.RehearsalResult: Shape(inline=("diagnosis",)),
    rehearsal.Rehearsal: Shape(without=("traits",)),
    prescription.Prescription: Shape(properties=("fits", "cure"), computed=_VERSION),
    prescription.Tried: Shape(properties=("title", "numerics", "extra_compute", "n_gpus")),
    rehearsal.RehearsalSweep: Shape(properties=("fits",), computed=_VERSION),
    rehearsal.Unmodelled: _BYTES,
    OtherProcess: _BYTES,
    simulation.FidelityReport: Shape(null=("era",)),
    story.Scene: Shape(without=("precision", "figures"), null=("trial", "place")),
    story.TrialTrend: Shape(null=("label",)),
    simulation.Simulation: Shape(computed=_VERSION),
    simulation.ReplayResult: Shape(properties=("margin_bytes",)),
    CheckReport: Shape(properties=("exit_code",), computed=_VERSION),
    FileJudgement: Shape(
        without=("diagnosis",),
        properties=("status", "exit_code"),
        computed={
            "verdict": (Verdict | None, lambda f: f.diagnosis and f.diagnosis.verdict),
            "error": (ErrorFacts | None, lambda f: f.error and ErrorFacts(
                f.error.code, f.error.message, f.error.hint, f.error.offset)),
        },
    ),
}  # fmt: skip

_COMPARISONS: Final[Mapping[type, Shape]] = {
    CompareResult: Shape(inline=("comparison",), computed=_VERSION),
    comparison.RunSide: Shape(without=("moment", "analysis"), null=("torch_version",)),
    comparison.ComparedFigure: Shape(properties=("delta",)),
    comparison.LineChange: Shape(properties=("delta_bytes",)),
    JudgedGrowth: Shape(properties=("is_exceeded", "text")),
}

_FLEETS: Final[Mapping[type, Shape]] = {
    fleet.FleetReport: Shape(
        names={"rows": "ranks"},
        computed={**_VERSION, "kind": (str, lambda _: "fleet")},
    ),
    fleet.JobVerdict: Shape(null=("first_failed",)),
    fleet.RankGroup: Shape(
        null=("reference",),
        computed={"settings": (Mapping[str, str], lambda g: dict(g.settings))},
    ),
    fleet.RankRow: Shape(inline=("rank",), null=("group",)),
    fleet.RankSummary: Shape(
        null=("rank_source", "host", "job"),
        computed={
            "settings": (Mapping[str, str] | None, lambda r: (
                dict(r.settings) if r.settings_known else None)),
        },
    ),
}  # fmt: skip

_ESTIMATES: Final[Mapping[type, Shape]] = {
    memory_estimate.Estimate: Shape(
        names={"fits": "gpus"},
        inline=("footprint",),
        computed={
            **_VERSION,
            "kind": (str, lambda _: "estimate"),
            "summary": (str, summary),
            "fits": (bool | None, lambda e: e.fits[0].fits if e.fits else None),
            "margin_bytes": (int | None, lambda e: e.fits[0].margin_bytes if e.fits else None),
            "largest_batch": (int | None, lambda e: e.fits[0].largest_batch if e.fits else None),
        },
    ),
    memory_estimate.Footprint: Shape(
        properties=("peak_allocated_bytes",),
        computed={
            "items": (Sequence[ItemAtPeak], _items),
            "peak_phase": (memory_estimate.PhaseName, lambda f: f.peak.name),
        },
    ),
    ItemAtPeak: Shape(inline=("item",)),
    memory_estimate.Fit: Shape(inline=("gpu",)),
    GpuModel: Shape(
        without=("compute", "n_multiprocessors"),
        properties=("context_bytes", "usable_bytes"),
        computed={"architecture": (str | None, lambda g: g.architecture or None)},
    ),
    workload.Workload: Shape(
        only=("shape", "dtype", "master_weights", "grad_dtype", "batch", "seq", "attention",
              "checkpointing", "lora_rank", "zero_stage", "world_size", "grad_accumulation",
              "inference", "new_tokens", "cache", "tensor_parallel", "context_parallel",
              "pipeline_parallel", "expert_parallel", "sequence_parallel", "offload", "dora",
              "varying_lengths", "expandable_segments"),
        inline=("shape",),
        null=("grad_dtype", "seq", "lora_rank"),
        computed={"optimizer": (str | None, lambda w: None if w.inference else w.optimizer)},
    ),
    workload.ModelShape: Shape(
        names={"name": "model"}, only=("name", "source", "is_guess", *_SIZES), null=_SIZES
    ),
    ModelTable: Shape(computed={**_VERSION, "kind": (str, lambda _: "models")}),
    GpuTable: Shape(computed={**_VERSION, "kind": (str, lambda _: "gpus")}),
    gpu_sharing.Sharing: Shape(
        properties=("headroom_bytes", "n_fit", "n_fit_tight", "rows"), computed=_VERSION
    ),
    gpu_sharing.ProcessDemand: Shape(properties=("total_bytes",)),
    gpu_sharing.SharingRow: Shape(properties=("fits",)),
    Explanation: Shape(computed=_VERSION),
    Rule: Shape(only=("code", "severity"), properties=("name", "summary", "text")),
}  # fmt: skip

SHAPES: Final[Mapping[type, Shape]] = MappingProxyType(
    {**_DIAGNOSES, **_COMPARISONS, **_FLEETS, **_ESTIMATES}
)
"""Type -> how its document differs from it."""
