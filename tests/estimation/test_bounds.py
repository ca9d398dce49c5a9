from __future__ import annotations

from typing import Any

import pytest
from estimated_workloads import recorded_peaks, workload_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fragdoctor.estimation.architectures import Dimensions, parameters_of
from fragdoctor.estimation.bounds import (
    DENSE_SHARE,
    FORMULA_SHARE,
    GUESS_SHARE,
    LESS_SHARE,
    most_of_each,
    phases_of,
    shares_of,
)
from fragdoctor.estimation.config_json import shape_of_config
from fragdoctor.estimation.formula import formula_footprint, formula_needs
from fragdoctor.estimation.judge import judged
from fragdoctor.estimation.step import Instant, largest_tensor
from fragdoctor.model.gpus import gpu_of
from fragdoctor.model.memory_estimate import FitState, PhaseName
from fragdoctor.model.workload import Attention, FsdpKind, Loss, ModelShape, Norm, Workload
from fragdoctor.units import GIB, MIB


def test_peak_is_what_is_alive_at_one_moment_not_the_sum_of_maxima() -> None:
    moments = [
        Instant(PhaseName.FORWARD, "first", {"a": 3 * MIB}),
        Instant(PhaseName.FORWARD, "second", {"b": 5 * MIB}),
        Instant(PhaseName.BACKWARD, "here", {"a": 3 * MIB, "b": 700}),
    ]

    forward, backward = phases_of(moments)

    assert (forward.n_bytes, forward.moment) == (5 * MIB, "second")
    assert [(s.item, s.n_bytes) for s in forward.shares] == [("b", 5 * MIB)]
    assert (backward.n_bytes, backward.moment) == (3 * MIB + 700, "here")
    assert most_of_each(moments) == {"a": 3 * MIB, "b": 5 * MIB}


LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def llama_8b(**changes: Any) -> Workload:
    shape = shape_of_config(LLAMA_8B, "config.json")
    base = Workload(shape=shape, dtype="bf16", seq=1024, compute="9.0")
    return replace(base, **changes)


def test_adapters_under_fsdp_may_bring_gradients_of_frozen_weights() -> None:
    fsdp = llama_8b(lora_rank=8, zero_stage=3, world_size=4, is_fsdp=True)

    def gradients(kind: FsdpKind, **changes: Any) -> int:
        footprint = formula_footprint(replace(fsdp, fsdp_kind=kind, **changes))
        return next(item.n_bytes for item in footprint.items if item.id == "gradients")

    n_frozen = fsdp.shape.n_parameters
    mixed = gradients(FsdpKind.MIXED)
    assert mixed == pytest.approx(2 * n_frozen / 4, rel=0.02)
    assert gradients(FsdpKind.MIXED, grad_accumulation=2) == pytest.approx(2 * n_frozen, rel=0.02)
    assert gradients(FsdpKind.FIRST) == gradients(FsdpKind.SECOND) < mixed / 50


def test_first_fsdp_holds_inputs_of_frozen_layers_and_their_gradients() -> None:
    fsdp = llama_8b(lora_rank=8, zero_stage=3, world_size=4, is_fsdp=True, batch=16)
    fsdp = replace(fsdp, loss=Loss.FUSED)  # else the logits are the peak, whatever the layers hold

    def peak(kind: FsdpKind, checkpointing: str) -> int:
        changed = replace(fsdp, fsdp_kind=kind, checkpointing=checkpointing)
        return formula_footprint(changed).peak_allocated_bytes

    stream = 16 * 1024 * 4096 * 2
    more = peak(FsdpKind.FIRST, "full") - peak(FsdpKind.SECOND, "full")
    assert 25 * stream < more <= 32 * stream  # a gradient a layer; peaks lie elsewhere
    assert peak(FsdpKind.FIRST, "none") == peak(FsdpKind.SECOND, "none")


def test_bounds_cover_the_first_fsdp_where_it_is_not_said_which() -> None:
    fsdp = llama_8b(lora_rank=8, zero_stage=3, world_size=4, is_fsdp=True, checkpointing="full")
    unknown = formula_needs(fsdp)
    known = [formula_needs(replace(fsdp, fsdp_kind=kind)) for kind in FsdpKind]

    assert unknown.high_bytes is not None
    assert unknown.low_bytes == min(needs.low_bytes for needs in known)
    assert unknown.high_bytes >= max(needs.high_bytes or 0 for needs in known)


def test_deepspeed_keeps_a_billion_parameters_collected() -> None:
    def collected(**changes: Any) -> int:
        footprint = formula_footprint(llama_8b(zero_stage=3, world_size=8, **changes))
        return next(i.n_bytes for i in footprint.items if i.id == "gathered_parameters")

    a_layer = 2 * 218_112_000
    assert collected() - collected(is_fsdp=True) == pytest.approx((4 - 2) * a_layer, rel=0.01)


def test_several_gpus_need_room_for_nccl() -> None:
    one = formula_needs(llama_8b(lora_rank=8))
    two = formula_needs(llama_8b(lora_rank=8, tensor_parallel=2))

    assert {doubt.id for doubt in two.doubts} - {doubt.id for doubt in one.doubts} == {"nccl"}


@pytest.mark.parametrize("row", recorded_peaks(), ids=lambda row: row["settings"]["name"])
def test_recorded_peak_lies_between_the_bounds(row: dict[str, Any]) -> None:
    needs = formula_needs(workload_of(row["settings"]))

    assert needs.high_bytes is not None
    assert needs.low_bytes <= row["peak_allocated_bytes"] <= needs.high_bytes


def test_upper_bound_holds_what_the_allocator_reserved_where_memory_was_plentiful() -> None:
    rows = [row for row in recorded_peaks() if row["peak_reserved_bytes"]]
    highs = [formula_needs(workload_of(row["settings"])).high_bytes or 0 for row in rows]
    shares = [high / row["peak_reserved_bytes"] for high, row in zip(highs, rows, strict=True)]

    assert len(shares) == 56
    assert sum(share >= 1 for share in shares) >= 46
    assert min(shares) >= 0.92


def test_more_is_known_of_plain_decoders_whose_weights_are_all_trained_or_on_one_gpu() -> None:
    many = {"zero_stage": 3, "world_size": 4, "is_fsdp": True}
    windows = replace(llama_8b().shape, sliding_window=512, n_sliding_layers=20)

    plain = [llama_8b(), llama_8b(lora_rank=8), llama_8b(**many)]
    others = [llama_8b(**many, lora_rank=8), llama_8b(shape=windows)]
    guess = llama_8b(shape=replace(llama_8b().shape, is_guess=True))

    assert {shares_of(workload) for workload in plain} == {(LESS_SHARE, DENSE_SHARE)}
    assert {shares_of(workload) for workload in others} == {(LESS_SHARE, FORMULA_SHARE)}
    assert shares_of(llama_8b(tensor_parallel=2)) == (FORMULA_SHARE, FORMULA_SHARE)
    assert shares_of(guess) == (GUESS_SHARE, GUESS_SHARE)


@pytest.mark.parametrize(
    ("hidden", "layers", "ffn", "vocab", "batch", "needed_mib", "allowed"),
    [
        (2048, 16, 8192, 128256, 1, 14432, 0.07),
        (4096, 8, 11008, 32000, 4, 18431, 0.09),
        (1024, 24, 2816, 32000, 2, 3867, 0.13),
    ],
)
def test_states_in_segments_of_their_own_leave_no_holes(
    hidden: int, layers: int, ffn: int, vocab: int, batch: int, needed_mib: int, allowed: float
) -> None:
    """The figures are the least with which six steps run on PyTorch's own allocator."""
    heads = hidden // (64 if hidden < 4096 else 128)
    sizes = {
        **LLAMA_8B, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8 if vocab > 32000 else heads,
        "vocab_size": vocab,
    }  # fmt: skip
    seq = 2048 if hidden == 4096 else 512
    workload = Workload(
        shape_of_config(sizes, "config.json"), "bf16", batch=batch, seq=seq, compute="9.0",
        checkpointing="full",
    )  # fmt: skip
    footprint = formula_footprint(workload)

    assert footprint.peak.name is PhaseName.OPTIMIZER_STEP
    assert footprint.needs_low_bytes <= needed_mib * MIB <= footprint.needs_high_bytes
    assert footprint.needs_high_bytes <= (1 + allowed) * footprint.peak_allocated_bytes


@pytest.mark.slow
def test_varying_lengths_fill_the_cache_and_change_nothing_that_is_needed() -> None:
    one_length = formula_footprint(llama_8b(lora_rank=8))
    varying = formula_footprint(llama_8b(lora_rank=8, varying_lengths=True))

    logits = 4 * 1024 * 128256
    assert 5 * logits == varying.reserved_bytes - one_length.reserved_bytes
    assert one_length.needs_high_bytes == varying.needs_high_bytes
    assert one_length.peak_allocated_bytes == varying.peak_allocated_bytes


@pytest.mark.parametrize(
    ("sizes", "settings", "plain_mib", "expandable_mib"),
    [
        ((1024, 16, 151_936), {"batch": 4, "seq": 1024}, 15_088, 13_284),
        ((1024, 16, 151_936), {"batch": 8, "seq": 1024, "checkpointing": "full"}, 18_842, 17_644),
        ((2048, 12, 32_000), {"batch": 2, "seq": 2048}, 10_578, 10_328),
        ((1024, 8, 32_000), {"batch": 8, "seq": 2048, "dtype": "amp-bf16"}, 17_862, 16_108),
    ],
)
def test_expandable_segments_need_no_room_for_the_largest_tensor(
    sizes: tuple[int, int, int], settings: dict[str, Any], plain_mib: int, expandable_mib: int
) -> None:
    """The figures are the least that rehearsals of these models with the allocator need."""
    hidden, n_layers, vocab = sizes
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": int(2.75 * hidden),
        "num_hidden_layers": n_layers, "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256, "vocab_size": vocab, "torch_dtype": "bfloat16",
        "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    plain = llama_8b(shape=shape_of_config(config, "config.json"), **settings)
    expandable = replace(plain, expandable_segments=True)

    assert plain_mib * MIB <= formula_needs(plain).high_bytes
    assert expandable_mib * MIB <= formula_needs(expandable).high_bytes
    less = formula_needs(plain).high_bytes - formula_needs(expandable).high_bytes
    assert less == largest_tensor(plain) > 200 * MIB
    assert formula_needs(plain).low_bytes == formula_needs(expandable).low_bytes <= plain_mib * MIB
    assert formula_footprint(plain).published_high_bytes == pytest.approx(
        formula_footprint(expandable).published_high_bytes, abs=1
    )


def test_expandable_segments_leave_no_gaps_between_weights_and_no_cache_of_other_lengths() -> None:
    def served(**more: Any) -> int:
        return formula_footprint(llama_8b(inference=True, **more)).reserved_bytes

    def trained(**more: Any) -> int:
        return formula_footprint(llama_8b(lora_rank=8, **more)).reserved_bytes

    assert served(expandable_segments=True) < served()
    assert trained() == trained(expandable_segments=True, varying_lengths=True)


def test_answer_does_not_depend_on_cache_that_happens_to_be_there() -> None:
    """Llama 3 8B on an H100 fitted at 512 tokens, not at 1,024, and again at 1,536 and 2,048."""
    fits = [
        judged(llama_8b(seq=seq), [gpu_of("h100")]).fits[0].fits for seq in (512, 1024, 1536, 2048)
    ]

    assert fits == sorted(fits, reverse=True)


@pytest.mark.slow
def test_a_measure_that_the_first_line_names_lowers_the_peak() -> None:
    estimate = judged(llama_8b(), [gpu_of("h100")])

    assert estimate.fits[0].state is FitState.TOO_CLOSE
    assert estimate.combinations[0].measures == ("fused_optimizer",)
    assert ("fused_optimizer",) in [saving.measures for saving in estimate.savings]
    assert estimate.combinations[0].n_gpus == 1


@pytest.mark.slow
def test_spare_memory_is_what_is_left_of_the_worst_case() -> None:
    estimate = judged(llama_8b(), [gpu_of("h200")])
    fit, footprint = estimate.fits[0], estimate.footprint

    assert fit.state is FitState.FITS
    assert fit.margin_bytes == fit.gpu.usable_bytes - (footprint.needs_high_bytes or 0)
    assert fit.margin_bytes < fit.gpu.usable_bytes - footprint.peak_allocated_bytes
    assert {doubt.id for doubt in footprint.doubts} == {"formulas", "allocator"}


@pytest.mark.slow
def test_quantised_adapters_are_found_where_not_even_one_sequence_fits() -> None:
    estimate = judged(llama_8b(dtype="fp32", compute="7.5"), [gpu_of("t4")])

    assert estimate.fits[0].largest_batch == 0
    best = estimate.combinations[0]
    assert set(best.measures) == {"fused_loss", "qlora"}
    assert best.option == "--logits fused --lora 16 --dtype int4"
    assert best.needs_high_bytes is not None
    assert best.needs_high_bytes <= gpu_of("t4").usable_bytes
    assert best.slowdown is not None
    assert best.slowdown > 1.3


def test_logits_of_a_large_vocabulary_are_not_made_before_another_gpu_is_taken() -> None:
    adapters = llama_8b(dtype="bf16", lora_rank=16, seq=4096)

    best, *others = judged(adapters, [gpu_of("rtx3090")]).combinations

    assert set(best.measures) == {"checkpointing", "fused_loss"}
    assert best.option == "--logits fused --checkpointing full"
    assert best.n_gpus == 1
    assert {"checkpointing", "qlora"} in [{*other.measures} for other in others]
    assert not any({*best.measures} < {*other.measures} for other in others)


@pytest.mark.slow
def test_combination_is_what_its_options_give() -> None:
    estimate = judged(llama_8b(batch=64), [gpu_of("a100-40g")])

    assert estimate.combinations
    for found in estimate.combinations:
        assert found.needs_high_bytes is not None
        assert found.needs_high_bytes <= gpu_of("a100-40g").usable_bytes
        assert found.needs_low_bytes <= found.needs_high_bytes
    prices = [(c.n_gpus, c.changes_training) for c in estimate.combinations]
    assert prices == sorted(prices)


# The property: nothing larger fits where something smaller does not.

DIMENSIONS = Dimensions(
    vocab=4000, hidden=256, n_layers=3, n_heads=4, n_kv_heads=4, head_dim=64, ffn=704,
    is_gated=True, norm=Norm.RMSNORM_WRITTEN_OUT, qkv_bias=False, out_bias=False, mlp_bias=False,
)  # fmt: skip
RUNS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(("fp32", "bf16", "amp-bf16", "fp8")),
        "optimizer": st.sampled_from(("adamw", "adamw-fused", "sgd", "adamw-8bit", "adafactor")),
        "checkpointing": st.sampled_from(("none", "full", "sqrt")),
        "attention": st.sampled_from(Attention),
        "inference": st.booleans(),
        "zero_stage": st.sampled_from((0, 2, 3)),
    }
)


def of_width(heads: int, **changes: Any) -> Workload:
    d = replace(DIMENSIONS, hidden=64 * heads, n_heads=heads, n_kv_heads=heads, ffn=176 * heads)
    shape = ModelShape(
        name="llama", source="a test", parameters=tuple(parameters_of(d)), n_layers=d.n_layers,
        hidden=d.hidden, n_heads=heads, n_kv_heads=heads, head_dim=64, ffn=d.ffn, vocab=d.vocab,
        is_gated=True, activation="silu", norm=d.norm,
    )  # fmt: skip
    world = 4 if changes["zero_stage"] else 1
    return Workload(shape=shape, world_size=world, **changes)


@given(
    run=RUNS,
    heads=st.integers(1, 40),
    batch=st.integers(1, 64),
    seq=st.integers(1, 4096),
    more=st.tuples(st.integers(0, 8), st.integers(0, 64), st.integers(0, 4096)),
    usable=st.integers(10 * MIB, 200 * GIB),
    more_usable=st.integers(0, 100 * GIB),
)
def test_larger_run_never_fits_where_a_smaller_one_does_not(
    run: dict[str, Any],
    heads: int,
    batch: int,
    seq: int,
    more: tuple[int, int, int],
    usable: int,
    more_usable: int,
) -> None:
    small = formula_needs(of_width(heads, batch=batch, seq=seq, **run))
    large = formula_needs(
        of_width(heads + more[0], batch=batch + more[1], seq=seq + more[2], **run)
    )

    assert small.high_bytes is not None
    assert large.high_bytes is not None
    assert small.low_bytes <= large.low_bytes
    assert small.high_bytes <= large.high_bytes
    assert small.low_bytes <= small.high_bytes
    order = [FitState.DOES_NOT_FIT, FitState.TOO_CLOSE, FitState.FITS]

    def rank(low: int, high: int, memory: int) -> int:
        state = (
            FitState.DOES_NOT_FIT
            if low > memory
            else (FitState.FITS if high <= memory else FitState.TOO_CLOSE)
        )
        return order.index(state)

    assert rank(large.low_bytes, large.high_bytes, usable) <= rank(
        small.low_bytes, small.high_bytes, usable
    )
    assert rank(small.low_bytes, small.high_bytes, usable) <= rank(
        small.low_bytes, small.high_bytes, usable + more_usable
    )
