"""Remedies for programs that divide the card themselves: servers, and engines without PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from fragdoctor.diagnosis.remedies.less_at_once import less_to_run, speaks_of_model
from fragdoctor.diagnosis.remedies.remedy import (
    CLOSED,
    JudgedCase,
    Proposal,
    Remedy,
    Weight,
    proposes,
)
from fragdoctor.diagnosis.verdict_message import has_room_in_pool
from fragdoctor.lazy import regex
from fragdoctor.model.case import OomMessage, ServerShare
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.engines import (
    ANY_PROGRAM,
    Advice,
    Need,
    engine_of,
    is_told_of_nobody,
    need_of,
)
from fragdoctor.units import MIB, format_count, format_size

LEAST_UTILIZATION: Final = 0.5
"""A server that should have the card to itself is not worth starting with a smaller share."""

CACHE_STEP_BYTES: Final = 256 * MIB
"""Cache sizes are rounded down to multiples of this, which frees a bit more than was missing."""

SPREAD: Final = {
    "vllm": "use a quantized checkpoint, or spread it over more GPUs (--tensor-parallel-size)",
    "tgi": "lower --max-total-tokens; set --quantize, or spread it over more GPUs (--num-shard)",
    "sglang": "use a quantized checkpoint, or spread it over more GPUs (--tp)",
}


@proposes("Shrink what is served, or give the cache more")
def fit_kv_cache(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose the option that the figures call for if a server's KV cache does not fit."""
    message = case.message
    if case.kind != "kv-cache" or message is None:
        return
    log = case.context.case.oom
    shares = () if log is None else log.server
    title, change = _option(message, shares)
    yield remedy.proposal(
        title=title,
        weight=Weight.CURES,
        change=change,
        cost="Fewer or shorter requests at a time, or slower serving.",
        caveats=("CUDA graphs and other processes need what is above the utilization.",),
    )


def smaller_cache(case: JudgedCase) -> str:
    """Return vLLM's option for a cache that leaves a step enough, or "" without figures."""
    log, r = case.context.case.oom, case.failed_request
    shares = () if log is None else log.server
    cache = next((s.n_bytes for s in shares if s.name == "KV cache"), 0)
    is_vllm = any(f.name == "vLLM" for f in case.frameworks)
    if not is_vllm or r is None or not 0 < r.missing_bytes < cache:
        return ""
    left = (cache - r.missing_bytes) // CACHE_STEP_BYTES * CACHE_STEP_BYTES
    return (
        f"--kv-cache-memory-bytes {left} leaves the step the {format_size(r.missing_bytes)} that "
        f"it lacked (the cache has {format_size(cache)})"
    )


FEW_TOKENS: Final = 1024
"""A prefill of fewer tokens takes only tens of MiB, whatever the model."""

TRIED: Final = {
    "prefill": (
        "Prefill fewer than {} tokens at a time",
        "--max-batch-prefill-tokens",
        ", with --max-input-tokens no larger",
    ),
    "warm-up": (
        "Serve fewer than {} requests at a time",
        "--max-num-seqs",
        ", or a lower --gpu-memory-utilization, which leaves more beside the KV cache",
    ),
}
"""What a server tried at start, in vain: how to try less of it, by the finer kind of message."""

ROOM_FOR_CACHE: Final = 0.05
"""Smallest share of the card for a KV cache with which a server is worth starting."""

_ASKED: Final = regex(r"\((\d?\.\d{1,9}|1(?:\.0)?), \d")

USUAL_UTILIZATION: Final = 0.9
MOST_UTILIZATION: Final = 0.97
"""The context and the driver take the rest of a card."""


def _option(  # noqa: PLR0911 - one return a kind
    m: OomMessage, shares: Sequence[ServerShare]
) -> Advice:
    """Return what the figures of the message, or of the server's start, call for."""
    spread = SPREAD.get(m.backend, SPREAD["vllm"])
    tried = m.kv_tokens_requested or m.n_sequences
    if m.sub_kind == "prefill" and tried and tried < FEW_TOKENS:
        return Advice(
            "Store the weights in fewer bytes, or free the GPU",
            f"so few tokens need almost no memory: {spread}; run nvidia-smi before the start to "
            "see who else is on the GPU",
        )
    if m.sub_kind in TRIED and tried:
        title, option, beside = TRIED[m.sub_kind]
        return Advice(
            f"{title.format(format_count(tried))}, or store the weights in fewer bytes",
            f"set {option} {max(1, tried // 4)}{beside}; if that fails too, the weights leave no "
            f"room: {spread}",
        )
    if m.sub_kind == "startup-check" and m.total_bytes and m.free_bytes is not None:
        # The server wants this share of the card less what others hold for it (0.33: weights).
        asked, missing = _ASKED.search(m.text), (m.requested_bytes or 0) - m.free_bytes
        share = float(asked[1]) - missing / m.total_bytes if asked else m.free_bytes / m.total_bytes
        share = math.floor(100 * share + 1e-6) / 100
        if share < LEAST_UTILIZATION:
            return Advice(
                "Free the device before the server starts",
                "end what holds it (nvidia-smi; a server that crashed leaves workers behind), or "
                f"use another GPU: {format_size(m.free_bytes)} of free memory is too little",
            )
        return Advice(
            f"Start it with --gpu-memory-utilization {share:.2f}, or free the device",
            f"--gpu-memory-utilization {share:.2f} fits next to what is already there; or end "
            f"what holds {format_size(m.total_bytes - m.free_bytes)} (nvidia-smi)",
        )
    if m.sub_kind == "pool-full":
        pages = "set --page-size 1; " if has_room_in_pool(m) else ""
        return Advice(
            "Run fewer requests at a time, or give the pool more",
            f"{pages}lower --max-running-requests and --chunked-prefill-size, set "
            "--schedule-conservativeness above 1, or raise --mem-fraction-static; upgrade SGLang, "
            "whose scheduler caused several such failures",
        )
    if m.kv_tokens_capacity and m.kv_tokens_capacity > 0:
        return Advice(
            f"Serve a context of {format_count(m.kv_tokens_capacity)} tokens",
            f"set --max-model-len {m.kv_tokens_capacity}, or a higher --gpu-memory-utilization if "
            f"nothing else uses the GPU; set --kv-cache-dtype fp8; {spread}",
        )
    if m.backend == "sglang":
        return Advice(
            "Give weights and KV cache a larger share of the card",
            "raise --mem-fraction-static (0.9), with smaller graphs to pay for it "
            f"(--cuda-graph-max-bs; --cuda-graph-max-bs-decode since 0.5.20); {spread}",
        )
    return _beside_weights(m, shares, spread)


CONTEXT: Final = "set --max-model-len no longer than you need, since one such request must fit; "
_QUANTIZED: Final = regex(r"(?i)awq|gptq|\b(?:int|fp)[48]\b|w8a|w4a")
_GIVEN: Final = regex(r"gpu[-_]memory[-_]utilization[\s=:'\"]{1,4}(0?\.\d{1,3})")


def _beside_weights(m: OomMessage, shares: Sequence[ServerShare], spread: str) -> Advice:
    """Return what makes room for a KV cache of vLLM."""
    given = _GIVEN.search(m.said)
    # Weights, memory outside PyTorch and the largest step come first; the cache gets the rest.
    told = {s.name: s.n_bytes for s in shares}
    whole, weights = told.get("whole GPU", 0), told.get("weights", 0)
    first = weights + told.get("outside PyTorch", 0) + told.get("peak of a step", 0)
    least = math.ceil(100 * (first / whole + ROOM_FOR_CACHE)) / 100 if whole and weights else None
    if least is not None and least > MOST_UTILIZATION:
        return Advice(
            "Make the weights or a step smaller",
            f"{spread}; lower --max-num-batched-tokens and --max-model-len; set --enforce-eager: "
            f"weights and one step take {format_size(first)}, which leaves no cache on this card",
        )
    if least is not None:
        return Advice(
            f"Start it with --gpu-memory-utilization {least:.2f} or more",
            f"weights and one step take {format_size(first)} before any cache, so "
            f"{least:.2f} is the least; nothing else may use that much of the GPU; {spread}",
        )
    steps = "lower --max-num-seqs and --max-num-batched-tokens"
    if "enforce-eager" not in m.said:
        steps += "; set --enforce-eager"
    more = f"raise --gpu-memory-utilization{f' above {given[1]}' if given else ''}"
    if (cache := told.get("KV cache", 0)) < 0:
        more += f" (weights and one step exceed it by {format_size(-cache)})"
    is_high = given is not None and float(given[1]) >= USUAL_UTILIZATION
    return Advice(
        "Make room for a KV cache next to the weights",
        "; ".join((steps, spread) if _QUANTIZED.search(m.said) else (spread, steps))
        if is_high
        else f"{CONTEXT if m.variant == 'vllm-short-cache' else ''}{more} if nothing else uses the "
        f"GPU; {steps}; {spread}",
    )


# ---- programs with allocators of their own -------------------------------------------------------

TOLD: Final = (Need.WEIGHTS, Need.CACHE, Need.GRAPH, Need.LIMIT, Need.POOL)
"""Needs that the text itself names, so that meeting them removes the cause."""


@proposes("Put less on the GPU")
def less_on_the_device(remedy: Remedy, case: JudgedCase) -> Iterator[Proposal]:
    """Propose an option of a program other than PyTorch, chosen by what the memory was for."""
    message = case.message
    if message is None or case.cause in CLOSED or not case.is_of_other_program:
        return
    engine, need = engine_of(message) or ANY_PROGRAM, need_of(message)
    title, change = engine.advice(need)
    if is_told_of_nobody(message) and speaks_of_model(case):
        title, less = less_to_run(case)
        change = f"{less}; run nvidia-smi meanwhile to see who else is on the GPU"
    weight = Weight.CURES if need in TOLD else Weight.HELPS
    if need is Need.FULL and case.cause is Cause.UNKNOWN:
        weight = Weight.ASKS  # so little was refused: the question is who else is on the device
    yield remedy.proposal(
        title=title,
        weight=weight,
        change=change,
        cost="Less at a time, or slower." if need is not Need.LIMIT else "More memory in use.",
    )
