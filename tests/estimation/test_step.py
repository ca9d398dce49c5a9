"""What is alive when: checkpointing, attention, and the formulas that are printed for them."""

from __future__ import annotations

import pytest
from estimated_workloads import workload_of
from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.formula import formula_footprint
from fragdoctor.estimation.layer import layer_ops
from fragdoctor.estimation.model_shapes import GivenSizes
from fragdoctor.estimation.request import workload_of as workload_of_request
from fragdoctor.estimation.step import segment_layers
from fragdoctor.estimation.training_choices import precision_of
from fragdoctor.model.workload import Attention, Loss, Workload
from fragdoctor.units import MIB

GPT = workload_of(
    {"family": "gpt", "hidden": 512, "layers": 12, "heads": 8, "vocab": 8192,
     "dtype": "bf16", "batch": 4, "seq": 1024, "attention_dropout": 0.1}
)  # fmt: skip


def layer_terms(workload: Workload) -> dict[str, float]:
    """Return the bytes kept per element of each unit, in one layer."""
    terms = [t for op in layer_ops(workload, precision_of(workload.dtype)) for t in op.saved]
    total = {unit: sum(t.bytes_per for t in terms if t.unit == unit) for unit, *_ in terms}
    return {unit: each for unit, each in total.items() if each}


def activations(workload: Workload) -> int:
    return next(i.n_bytes for i in formula_footprint(workload).items if i.id == "activations")


@pytest.mark.parametrize(
    ("choice", "layers"), [("none", 0), ("full", 1), ("sqrt", 4), ("5", 5), ("99", 12)]
)
def test_segments_have_as_many_layers_as_asked(choice: str, layers: int) -> None:
    assert segment_layers(replace(GPT, checkpointing=choice)) == layers


def test_written_out_attention_in_16_bits_sums_to_korthikanti() -> None:
    terms = layer_terms(replace(GPT, attention=Attention.EAGER))

    # 34 sbh + 5 a s^2 b, with b*s*(4h) counted as B*S*F: 11 + 2 + 8 + 8 + ... of the paper's table.
    per_hidden = terms["B*S*H"] + terms["B*S*Q"] + 4 * terms["B*S*F"]
    assert terms["B*a*S*S"] == 5
    # The paper's 34 has a dropout after attention's projection too, as this model's code here has.
    assert per_hidden == 34


def test_fused_attention_keeps_no_scores() -> None:
    assert "B*a*S*S" not in layer_terms(replace(GPT, attention=Attention.FLASH))


def test_grouped_heads_in_fp32_fall_to_the_fallback() -> None:
    shape = replace(GPT.shape, n_kv_heads=2)

    assert "B*a*S*S" in layer_terms(replace(GPT, shape=shape, dtype="fp32"))
    assert "B*a*S*S" not in layer_terms(replace(GPT, shape=shape, dtype="bf16"))


def test_checkpointing_keeps_segment_inputs_and_one_segment() -> None:
    none, full, sqrt = (
        activations(replace(GPT, checkpointing=c)) for c in ("none", "full", "sqrt")
    )

    stream = 4 * 1024 * 512 * 2
    one_layer = none / 12
    assert full < sqrt < none
    assert abs(full - (12 * stream + one_layer)) < 2.5 * stream
    assert abs(sqrt - (3 * stream + 4 * one_layer)) < 4 * stream


def test_what_one_layer_keeps_adds_up_to_the_activations() -> None:
    footprint = formula_footprint(GPT)

    layers = GPT.shape.n_layers * sum(kept.n_bytes for kept in footprint.layer)
    outside = 2 * 4 * 1024 * 512 * 2  # input of the last norm and of the head
    assert abs(layers + outside - activations(GPT)) < 0.02 * activations(GPT)


def test_dropout_masks_are_a_byte_an_element() -> None:
    without = replace(GPT, shape=replace(GPT.shape, hidden_dropout=0.0))

    saved = layer_terms(GPT)["B*S*H"] - layer_terms(without)["B*S*H"]
    assert saved == 2


def test_norms_of_branches_are_counted() -> None:
    two, four = (
        layer_terms(replace(GPT, shape=replace(GPT.shape, norms_per_layer=n)))["B*S*H"]
        for n in (2, 4)
    )

    assert four - two == 4  # the inputs of two more


def test_norms_of_queries_and_keys_keep_their_fp32_inputs() -> None:
    """Traced models with such norms held 10 to 14% more than was counted without them."""
    from fragdoctor.estimation.model_shapes import model_of

    plain = Workload(shape=model_of(["llama-3-8b"]).shape, dtype="bf16", seq=128)
    normed = Workload(shape=model_of(["qwen3-8b"]).shape, dtype="bf16", seq=128)

    before, after = layer_terms(plain), layer_terms(normed)
    assert after["B*S*Q"] - before["B*S*Q"] == 4 + 2
    assert after["B*S*K"] - before["B*S*K"] == 4 + 2


LLAMA = workload_of(
    {"family": "llama", "hidden": 512, "layers": 2, "heads": 8, "vocab": 64_000,
     "dtype": "bf16", "batch": 4, "seq": 1024, "upcasts_logits": 1}
)  # fmt: skip


def logits_per_element(loss: Loss | None) -> float:
    items = {i.id: i.n_bytes for i in formula_footprint(replace(LLAMA, loss=loss)).items}
    return items["logits"] / (4 * 1024 * 64_000)


def test_loss_of_fp32_logits_takes_three_tensors_of_four_bytes() -> None:
    assert abs(logits_per_element(Loss.FP32) - 12) < 0.1
    assert logits_per_element(None) == logits_per_element(Loss.FP32)


def test_loss_in_16_bits_takes_three_of_two_and_a_chunked_one_keeps_one_of_four() -> None:
    assert abs(logits_per_element(Loss.WORKING) - 6) < 0.1
    assert 4 < logits_per_element(Loss.CHUNKED) < 8


def test_kernel_for_cross_entropy_holds_16_bit_logits_and_their_gradient() -> None:
    assert abs(logits_per_element(Loss.KERNEL) - 4) < 0.1


def test_fused_loss_makes_logits_no_larger_than_the_hidden_states() -> None:
    assert logits_per_element(Loss.FUSED) * 64_000 <= 8 * 512


def test_autocast_keeps_no_copies_of_frozen_weights_that_are_computed_again() -> None:
    """``cached_cast`` of PyTorch caches copies of leaves that need a gradient alone."""
    trained = replace(GPT, dtype="amp-bf16", checkpointing="full", attention=Attention.FLASH)

    items = [
        {item.id: item.n_bytes for item in formula_footprint(workload).items}
        for workload in (trained, replace(trained, lora_rank=8))
    ]

    copies = [found["weight_copies"] for found in items]
    layers = 12 * 12 * 512**2 * 2  # 16-bit, as in a decoder whose feed-forward is 4 times as wide
    assert copies[0] - copies[1] == pytest.approx(layers, rel=0.1)


@pytest.mark.parametrize(("dtype", "n_copies"), [("bf16", 2), ("fp32", 2), ("amp-bf16", 1)])
def test_gradients_of_a_tied_embedding_are_added(dtype: str, n_copies: int) -> None:
    """On PyTorch 2.11's and 2.12's allocator: in place under autocast, else into a new tensor."""
    shape = replace(GPT.shape, tied_head=True)
    tied = replace(GPT, optimizer="sgd", batch=1, seq=16, shape=shape, dtype=dtype)

    peak = formula_footprint(tied).peak

    table = 8192 * 512 * (2 if dtype == "bf16" else 4)
    assert "backward of the embedding" == peak.moment
    assert n_copies * table == {share.item: share.n_bytes for share in peak.shares}["temporaries"]


@pytest.mark.parametrize(("dtype", "bytes_per_score"), [("fp32", 16), ("bf16", 16), ("fp16", 14)])
def test_backward_of_a_softmax_multiplies_before_it_sums(dtype: str, bytes_per_score: int) -> None:
    """Eager attention of Transformers, forward and backward, on PyTorch's own allocator."""
    shape = replace(GPT.shape, softmax_fp32=True, attention_dropout=0.0)
    workload = replace(GPT, shape=shape, dtype=dtype, attention=Attention.EAGER)
    precision = precision_of(dtype)

    op = next(op for op in layer_ops(workload, precision) if op.name == "attention written out")

    terms = (*op.saved, *op.scratch)
    assert sum(term.bytes_per for term in terms if term.unit == "B*a*S*S") == bytes_per_score


def test_held_tuple_of_keys_and_values_keeps_what_the_values_are_a_view_of() -> None:
    """Transformers of early 2024: pythia-410m's loop at 1 x 2,048 took 3.88 GB, 15% more."""
    held = workload_of_request(["pythia-410m"], dtype="fp16", seq=2048, keeps_logits=True)
    alone = formula_footprint(held).peak_allocated_bytes
    cached = formula_footprint(replace(held, cache="tuple")).peak_allocated_bytes
    stream = 2048 * 1024 * 2 * 24  # one tensor like the residual stream from each layer

    # Keys and values of the step before, and beside both steps' values their packed queries and
    # keys.
    assert cached - alone == (2 + 2 + 2) * stream


def test_cache_without_logits_that_hold_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="--cache"):
        workload_of_request(["pythia-410m"], cache="tuple")


MEASURED_WITH_DEEPSPEED = (
    # layers, hidden, ffn, vocabulary, tokens, stage, GPUs, MiB at the peak; "small" is a
    # reduce_bucket_size of hidden * hidden, as Transformers sets it for "auto".
    (8, 1024, 2816, 32000, 256, 2, 2, 2626.1),
    (8, 1024, 2816, 32000, 2048, 3, 2, 2478.6),  # small
    (12, 2048, 5632, 32000, 512, 2, 4, 5596.1),
    (12, 2048, 5632, 32000, 512, 3, 4, 4575.0),  # small
    (6, 2048, 8192, 128256, 1024, 3, 2, 11639.9),
    (6, 2048, 8192, 128256, 1024, 2, 2, 10693.3),
    (16, 2048, 5632, 32000, 2048, 3, 8, 5572.3),
    (4, 4096, 11008, 32000, 512, 2, 8, 5714.8),
    (20, 1024, 2816, 50304, 4096, 2, 8, 3833.0),
    (10, 1536, 4096, 50304, 1024, 3, 4, 3210.7),  # small
    (4, 3072, 8192, 128256, 512, 3, 8, 5722.3),  # small
    (14, 1536, 4096, 32000, 512, 3, 2, 5732.3),  # small
)
"""Third steps of Llama with DeepSpeed 0.19.8, bf16 and torch's AdamW, checkpointed, on PyTorch's
own allocator; the other ranks are a process group that does nothing."""


@pytest.mark.parametrize("measured", MEASURED_WITH_DEEPSPEED)
def test_step_of_deepspeed_needs_what_its_code_allocates(measured: tuple[float, ...]) -> None:
    layers, hidden, ffn, vocab, seq, stage, n_gpus, mib = measured
    sizes = GivenSizes(layers=layers, hidden=hidden, heads=hidden // 64, kv_heads=hidden // 64,
                       ffn=ffn, vocab=vocab)  # fmt: skip
    workload = workload_of_request(
        sizes=sizes, dtype="deepspeed-bf16", seq=seq, zero_stage=stage, world_size=n_gpus,
        checkpointing="full",
    )  # fmt: skip

    footprint = formula_footprint(workload)

    (outside,) = (doubt.n_bytes for doubt in footprint.doubts if doubt.id == "nccl")
    assert footprint.needs_low_bytes <= mib * MIB <= footprint.needs_high_bytes - outside


NEEDED_BY_DEEPSPEED = (
    # layers, hidden, ffn, vocabulary, tokens, GPUs, reduce_bucket_size, least MiB that is enough
    (8, 1024, 2816, 32000, 256, 2, 500_000_000, 3022),
    (8, 1024, 2816, 32000, 256, 2, 50_000_000, 2330),
    (10, 768, 2048, 32000, 128, 2, 20_000_000, 1783),
    (6, 1280, 3456, 50304, 256, 2, 20_000_000, 3481),
    (8, 1024, 2816, 16000, 128, 4, 50_000_000, 1147),
)
"""Such steps of stage 2, whose limit was bisected (``set_per_process_memory_fraction``)."""


@pytest.mark.parametrize("needed", NEEDED_BY_DEEPSPEED)
def test_step_of_deepspeed_fits_where_its_one_tensor_of_gradients_does(
    needed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, hidden, ffn, vocab, seq, n_gpus, bucket, mib = needed
    monkeypatch.setattr("fragdoctor.estimation.step.REDUCE_BUCKET", bucket)
    sizes = GivenSizes(layers=layers, hidden=hidden, heads=hidden // 64, kv_heads=hidden // 64,
                       ffn=ffn, vocab=vocab)  # fmt: skip
    workload = workload_of_request(
        sizes=sizes, dtype="deepspeed-bf16", seq=seq, zero_stage=2, world_size=n_gpus,
        checkpointing="full",
    )  # fmt: skip

    footprint = formula_footprint(workload)

    (outside,) = (doubt.n_bytes for doubt in footprint.doubts if doubt.id == "nccl")
    assert mib * MIB <= footprint.needs_high_bytes - outside < 1.1 * mib * MIB


def test_states_on_the_host_need_no_second_gpu() -> None:
    with pytest.raises(ConfigError, match="number of GPUs is missing"):
        workload_of_request(["gpt-j-6b"], dtype="deepspeed-fp16", zero_stage=3)
    away = workload_of_request(
        ["gpt-j-6b"], dtype="deepspeed-fp16", zero_stage=3, offload="optimizer,parameters"
    )
    items = {i.id: i.n_bytes for i in formula_footprint(away).items}

    assert "optimizer_states" not in items
    assert items["gathered_parameters"] > 0  # what is away comes back for its layer
