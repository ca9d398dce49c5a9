"""The tables of truth, one per program, from ``record_outlooks.py`` for ``bench_outlook.py``.

This module imports neither PyTorch nor fragdoctor, because both sides import it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

LOOKED, HELD_OUT = "looked", "held-out"

HELD_OUT_PROGRAMS = frozenset(
    (
        "autoencoder_accum",
        "bert_mlm_accum",
        "diffusers_sample",
        "gc_threshold_server",
        "gpt_adafactor",
        "hf_leak_past",
        "hf_trainer_bert_dynamic",
        "image_server",
        "leak_hidden_state",
        "leak_metric_state",
        "leak_outputs_kept",
        "lightning_cnn",
        "lstm_tbptt",
        "peft_checkpoint_trainer",
        "pipeline_stages",
        "retrieval_search",
        "sparse_tables",
        "static_kv_server",
        "style_lbfgs",
        "timm_ema_train",
        "trl_sft",
        "unet_segmentation",
        "vae_eval_between",
        "varlen_max_split",
        "wave_vocoder",
        "wgan_gp",
    )
)
"""Drawn at random, two fifths of each kind, before anything was compared."""


@dataclass(frozen=True)
class Try:
    """One setting and capacity, and what the program does under them.

    Attributes:
        capacity_bytes: the most memory that PyTorch can have.
        total_bytes: memory of the device; more than ``capacity_bytes`` if other processes use some
            or the program limits itself.
        n_steps: number of rounds of its loop that the program completed.
    """

    conf: str
    capacity_bytes: int
    total_bytes: int
    passes: bool
    n_steps: int
    peak_reserved_bytes: int = 0


@dataclass(frozen=True)
class Recording:
    """A snapshot of a run at its end or its failure, and what other runs of the program did.

    Attributes:
        share: the capacity as a share of what the program reserves without a limit.
        more: settings tried later because they were recommended; they are not counted as what-ifs,
            so that the number of what-ifs stays the same.
    """

    snapshot: str
    share: float
    run: Try
    tries: list[Try] = field(default_factory=list)
    more: list[Try] = field(default_factory=list)


@dataclass(frozen=True)
class ProgramTruth:
    """All runs of one program.

    Attributes:
        conf: the program's own allocator settings.
        peak_reserved_bytes: the peak with all the memory that the program wants.
        recordings: recordings of failed runs, and at most one of a run that did not fail.
    """

    name: str
    kind: str
    leaks: bool
    split: str
    source: str
    conf: str
    n_steps: int
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: list[int]
    recordings: list[Recording]


def split_of(name: str) -> str:
    """Return which half of the benchmark a program belongs to."""
    return HELD_OUT if name in HELD_OUT_PROGRAMS else LOOKED


def write_truth(path: Path, truth: ProgramTruth) -> None:
    """Write a table."""
    path.write_text(json.dumps(asdict(truth), indent=1) + "\n")


def read_truth(path: Path) -> ProgramTruth:
    """Read a table."""
    fields = json.loads(path.read_text())
    recordings = []
    for row in fields.pop("recordings"):
        run = Try(**row.pop("run"))
        tries, more = ([Try(**one) for one in row.pop(key, [])] for key in ("tries", "more"))
        recordings.append(Recording(**row, run=run, tries=tries, more=more))
    return ProgramTruth(**fields, recordings=recordings)
