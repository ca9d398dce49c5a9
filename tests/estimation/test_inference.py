"""Caches of each kind of attention, servers, and how the parts of several GPUs add up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.bounds import CHURN_PAGES
from fragdoctor.estimation.config_json import shape_of_config
from fragdoctor.estimation.formula import formula_footprint, formula_needs
from fragdoctor.estimation.kv_cache import cache_bytes_per_sequence, cached_tokens
from fragdoctor.estimation.model_shapes import GivenSizes
from fragdoctor.estimation.request import workload_of
from fragdoctor.estimation.serving import OUTSIDE_BYTES, SWITCHED_BYTES, serving_of
from fragdoctor.estimation.states import check_parallel, local_part, n_gpus
from fragdoctor.estimation.training_choices import PRECISIONS, precision_of
from fragdoctor.model.gpus import gpu_of
from fragdoctor.model.workload import Attention, ModelShape, Workload
from fragdoctor.units import GIB, MIB


def of(name: str, **options: Any) -> Workload:
    return workload_of([name], inference=True, **options)


def test_latent_attention_keeps_one_short_vector_a_token() -> None:
    """DeepSeek-V3 at 4,096 tokens: 61 layers x (512 + 64) x 2 bytes, not 128 heads' keys."""
    workload = of("deepseek-v3", seq=4096)

    assert cache_bytes_per_sequence(workload) == 61 * (512 + 64) * 2 * 4096
    kv = {item.id: item.n_bytes for item in formula_footprint(workload).items}["kv_cache"]
    assert kv == pytest.approx(0.268 * GIB, rel=0.01)
    assert workload.shape.n_parameters == 671_026_419_200


def test_grouped_queries_share_keys_and_values() -> None:
    """vLLM printed 5691 blocks of 16 tokens in 11.12 GiB for Llama 3 8B (issue 12330)."""
    workload = of("llama-3-8b", seq=1, cache="paged")

    block = cache_bytes_per_sequence(workload)
    assert block == 16 * 32 * 2 * 8 * 128 * 2
    assert 5691 * block == pytest.approx(11.12 * GIB, rel=0.001)


def test_sliding_layers_keep_their_window_only() -> None:
    mistral, gemma = of("mistral-7b", seq=32_768), of("gemma-2-9b", seq=8192)

    assert cached_tokens(mistral) == 32 * 4096
    assert cached_tokens(gemma) == 21 * 8192 + 21 * 4096


def phases_of_cache(cache: str) -> tuple[int, int]:
    """Return what a batch of 8 has at its peak, 10 tokens and 4000 new ones, and its cache."""
    workload = of("llama-2-7b", batch=8, seq=10, new_tokens=4000, cache=cache)
    return formula_footprint(workload).peak_allocated_bytes, 8 * cache_bytes_per_sequence(workload)


def test_growing_cache_is_there_again_for_one_layer_and_a_tuple_for_all() -> None:
    """modeling_llama.py of Transformers 4.35 hands tuples on, 4.36 a DynamicCache."""
    (static, cache), (dynamic, _), (twice, _) = map(phases_of_cache, ("static", "dynamic", "tuple"))

    assert 8 * 4010 * 32 * 2 * 32 * 128 * 2 == cache
    assert dynamic - static == pytest.approx(cache / 32, rel=0.02)
    assert twice - static == pytest.approx(cache, rel=0.01)


def test_growing_cache_holds_the_prompt_alone_while_that_is_read() -> None:
    short = of("llama-2-7b", seq=4000, new_tokens=0, cache="dynamic")
    long, whole = (replace(short, new_tokens=96, cache=c) for c in ("dynamic", "static"))

    peak = formula_footprint(short).peak_allocated_bytes

    assert formula_footprint(long).peak_allocated_bytes == peak
    assert formula_footprint(whole).peak_allocated_bytes == peak + 96 * 32 * 2 * 4096 * 2


def test_autoawq_joins_query_key_and_value_beside_the_separate_ones() -> None:
    """Its README: CodeLlama 34B takes 19.05 GiB for 64 tokens and 64 new ones on an RTX 4090."""
    codellama = GivenSizes(layers=48, hidden=8192, heads=64, kv_heads=8, ffn=22016, vocab=32000)
    fused = workload_of(
        sizes=codellama,
        dtype="awq-fused", inference=True, seq=64, new_tokens=64, cache="static",
    )  # fmt: skip

    assert formula_footprint(fused).peak_allocated_bytes == pytest.approx(19.05 * GIB, rel=0.01)


@pytest.mark.parametrize(
    ("name", "dtype", "published_gib"),
    [
        # Sizes that model cards state: llama.cpp's table for Llama 3.1 8B; OpenAI's for gpt-oss.
        ("llama-3.1-8b", "bf16", 14.96),
        ("gpt-oss-20b", "mxfp4", 12.8),
        ("gpt-oss-120b", "mxfp4", 60.8),
    ],
)
def test_weights_weigh_what_is_published(name: str, dtype: str, published_gib: float) -> None:
    items = formula_footprint(of(name, dtype=dtype, seq=16)).items

    weights = next(item.n_bytes for item in items if item.id == "parameters")
    assert weights == pytest.approx(published_gib * GIB, rel=0.01)


def test_base_prepared_for_training_keeps_what_is_not_quantised_in_fp32() -> None:
    plain, prepared = precision_of("int8"), precision_of("int8-peft")

    assert (plain.weight, prepared.weight, prepared.residual) == (2, 4, 4)
    assert prepared.linear_weight == plain.linear_weight
    with pytest.raises(ConfigError, match="'bf16-peft' is not a known precision"):
        precision_of("bf16-peft")


def test_precisions_are_found_by_the_names_people_use() -> None:
    assert precision_of("trainer-bf16").name == "amp-bf16"
    assert all(p.source or p.name in ("fp32", "tf32", "bf16", "fp16") for p in PRECISIONS.values())


def test_more_tokens_than_positions_are_refused_or_warned_of() -> None:
    with pytest.raises(ConfigError, match="positions"):
        of("gpt2", seq=1024, new_tokens=1)

    warned = of("llama-3-8b", seq=100_000)
    assert any("8192 positions" in note for note in warned.shape.assumptions)


def test_server_divides_its_share_into_weights_a_step_and_blocks() -> None:
    gpu = gpu_of("a100-40g")

    found = serving_of(of("llama-3-8b", seq=8192), gpu, utilization=0.9)

    assert found.budget_bytes == int(0.9 * gpu.total_bytes) - OUTSIDE_BYTES
    parts = found.weights_bytes + found.activations_bytes + found.cache_bytes
    assert parts == found.budget_bytes
    assert found.bytes_per_sequence == GIB
    assert found.sequences == found.cache_bytes // GIB
    small = serving_of(
        of("llama-3-8b", seq=8192), gpu, utilization=0.9, max_seqs=4, max_batched_tokens=2048
    )
    assert small.sequences == 4
    assert small.cache_bytes > found.cache_bytes


@pytest.mark.parametrize(
    ("model", "gpu", "options", "published"),
    [
        # https://github.com/vllm-project/vllm/pull/10511
        ("llama-3-8b", "h100", {"seq": 8192}, 53.29),
        # https://github.com/vllm-project/vllm/issues/15815
        ("qwen2.5-32b", "l40s", {"seq": 10_000, "dtype": "bf16", "tensor_parallel": 2}, 7.71),
        # vLLM 0.19, https://github.com/llm-d-incubation/llm-d-planner/tree/main/accuracy
        ("llama-3.1-8b", "h100", {"seq": 8192}, 58.11 - 0.05 * 79.1),
        # vLLM 0.19, 0.65 of the GPU: https://myoceane.fr/index.php/ai-vllm-a100-gemma-4/
        ("gpt-oss-20b", "a100-80g", {"seq": 131_072}, 36.56),
    ],
)
def test_pool_of_cache_is_that_of_published_logs(
    model: str, gpu: str, options: dict[str, Any], published: float
) -> None:
    share = 0.65 if model == "gpt-oss-20b" else 0.9
    tokens = min(options["seq"], 10_000) if model != "gpt-oss-20b" else 0

    found = serving_of(
        of(model, **options), gpu_of(gpu), utilization=share, max_batched_tokens=tokens
    )

    # Sampling took more until vLLM 0.17.
    assert found.cache_bytes / GIB == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize(
    ("gpu", "sequences", "tokens"),
    [("h100", 1024, 8192), ("a100-80g", 256, 2048), ("rtx-4090", 256, 2048), ("96GiB", 1024, 8192)],
)
def test_servers_defaults_are_those_of_vllm_on_the_gpu(
    gpu: str, sequences: int, tokens: int
) -> None:
    found = serving_of(of("qwen3-0.6b", seq=128), gpu_of(gpu), utilization=0.9)

    assert (found.max_sequences, found.max_batched_tokens) == (sequences, tokens)


def test_server_that_reads_a_whole_prompt_in_a_step_may_have_no_room_for_it() -> None:
    def of_prompt(seq: int, tokens: int = 0) -> tuple[int, int]:
        workload = of("llama-3-8b", seq=seq)
        found = serving_of(workload, gpu_of("l4"), utilization=0.9, max_batched_tokens=tokens)
        return found.sequences, found.sequences_read_whole

    assert of_prompt(32_768) == (1, 0)
    assert of_prompt(32_768, tokens=32_768) == (0, 0)
    assert of_prompt(32_768, tokens=2048) == (1, 1)  # was said, so it is not in doubt
    assert of_prompt(2048) == (of_prompt(2048)[0],) * 2


def test_server_serves_an_fp32_checkpoint_in_16_bits() -> None:
    assert of("gemma-2-9b", dtype="", seq=128).dtype == "fp32"
    assert of("gemma-2-9b", dtype="", seq=128, cache="paged").dtype == "bf16"


def test_server_never_writes_scores_out() -> None:
    found = serving_of(of("gpt-oss-20b", seq=131_072), gpu_of("a100-80g"), utilization=0.9)

    assert found.activations_bytes < 3 * GIB


def test_mxfp4_experts_of_a_layer_are_one_tensor() -> None:
    """gpt-oss-20b is made to run within 16 GB: its config.json has 32 experts in 24 layers."""
    needs = formula_needs(of("gpt-oss-20b", seq=2048))

    assert needs.high_bytes < gpu_of("16GiB").usable_bytes


def test_server_that_takes_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a share"):
        serving_of(of("llama-3-8b", seq=1), gpu_of("t4"), utilization=1.5)


# Several GPUs


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_parts_of_tensor_parallelism_add_up_to_the_model(degree: int) -> None:
    workload = of("llama-3-8b", seq=1024)
    part = local_part(replace(workload, tensor_parallel=degree))

    split = [(g, p) for g, p in zip(workload.shape.parameters, part.shape.parameters, strict=True)]
    for whole, own in split:
        assert own.n_total in (whole.n_total, -(-whole.n_total // degree))
    assert part.shape.n_parameters < 1.01 * workload.shape.n_parameters / degree
    assert n_gpus(replace(workload, tensor_parallel=degree)) == degree


@pytest.mark.parametrize(
    "split",
    [
        {"tensor_parallel": 4},
        {"pipeline_parallel": 4},
        {"context_parallel": 4},
        {"world_size": 4, "zero_stage": 3},
        {"offload": ("optimizer",)},
        {"offload": ("activations",)},
        {"tensor_parallel": 4, "sequence_parallel": True},
    ],
)
def test_each_way_of_splitting_training_lowers_what_one_gpu_needs(split: dict[str, Any]) -> None:
    whole = workload_of(["llama-3-8b"], dtype="bf16", batch=8, seq=4096)

    assert formula_needs(replace(whole, **split)).low_bytes < formula_needs(whole).low_bytes


def test_experts_are_spread() -> None:
    whole = of("qwen3-30b-a3b", seq=1024)

    part = formula_footprint(replace(whole, expert_parallel=8))

    items = {item.id: item.n_bytes for item in part.items}
    assert items["parameters"] < 0.2 * 2 * whole.shape.n_parameters
    assert items["communication"] > 0
    assert part.n_parameters == whole.shape.n_parameters


def test_states_of_experts_are_shared_among_those_that_have_the_same_ones() -> None:
    whole = workload_of(
        ["mixtral-8x7b"], dtype="deepspeed-bf16", zero_stage=3, world_size=16, batch=1, seq=1024
    )

    spread = formula_footprint(replace(whole, expert_parallel=8))

    alike = {item.id: item.n_bytes for item in formula_footprint(whole).items}
    items = {item.id: item.n_bytes for item in spread.items}
    for name in ("parameters", "optimizer_states", "gradients", "master_weights"):
        assert items[name] == pytest.approx(alike[name], rel=0.01)


def test_degrees_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="32 heads"):
        check_parallel(replace(of("llama-3-8b", seq=1), tensor_parallel=5))
    with pytest.raises(ConfigError, match="0 experts"):
        check_parallel(replace(of("llama-3-8b", seq=1), expert_parallel=2))


@pytest.mark.parametrize("optimizer", ["muon", "galore", "paged-adamw-8bit", "adamw-4bit", "lion"])
def test_lean_optimizers_keep_less_than_adamw(optimizer: str) -> None:
    base = workload_of(["llama-3.2-1b"], dtype="bf16", seq=512)

    def states(name: str) -> int:
        items = formula_footprint(replace(base, optimizer=name)).items
        return next((i.n_bytes for i in items if i.id == "optimizer_states"), 0)

    assert states(optimizer) < states("adamw")


def test_mixed_precision_of_deepspeed_and_fsdp() -> None:
    deepspeed = workload_of(["llama-3-8b"], dtype="deepspeed-bf16", seq=512)
    items = {i.id: i.n_bytes for i in formula_footprint(deepspeed).items}
    n = deepspeed.shape.n_parameters

    assert items["master_weights"] == pytest.approx(4 * n, rel=0.001)
    assert items["optimizer_states"] == pytest.approx(8 * n, rel=0.001)
    assert items["parameters"] == pytest.approx(2 * n, rel=0.001)
    with pytest.raises(ConfigError, match="FSDP"):
        workload_of(["llama-3-8b"], dtype="fsdp-bf16", seq=512)
    sharded = workload_of(["llama-3-8b"], dtype="fsdp-bf16", seq=512, zero_stage=3, world_size=8)
    items = {i.id: i.n_bytes for i in formula_footprint(sharded).items}
    assert items["parameters"] == pytest.approx(4 * n / 8, rel=0.001)
    assert items["gradients"] == pytest.approx(4 * n / 8, rel=0.02)


def test_logits_of_a_whole_prompt_are_kept_twice() -> None:
    """Qwen2's page: 0.5B (2.5 has its shape) in bf16 took 27.61 GiB at
    30,720 tokens, with logits and an fp32 copy.
    """
    last = formula_footprint(of("qwen2.5-0.5b", dtype="bf16", attention="flash", seq=30_720))
    whole = formula_footprint(
        of("qwen2.5-0.5b", dtype="bf16", attention="flash", seq=30_720, keeps_logits=True)
    )

    assert last.reserved_bytes < 3.1 * GIB
    assert whole.reserved_bytes == pytest.approx(27.61 * GIB, rel=0.05)
    assert {i.id: i.n_bytes for i in whole.items}["logits"] == 30_720 * 151_936 * (2 + 4)


def test_weights_that_share_segments_leave_gaps_in_them() -> None:
    """Matrices of 8 MiB lie two by two in segments of 20 MiB."""
    workload = of("qwen1.5-1.8b", seq=16)

    doubts = {doubt.id: doubt.n_bytes for doubt in formula_needs(workload).doubts}

    n_matrices = 4 * workload.shape.n_layers
    assert doubts["allocator"] > 2 * MIB * n_matrices + CHURN_PAGES


def shape_of(**config: Any) -> ModelShape:
    return shape_of_config({"num_attention_heads": 16, **config}, "config.json")


QWEN3 = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "intermediate_size": 3072, "vocab_size": 151_669, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
ERNIE = {
    "model_type": "ernie4_5", "hidden_size": 1024, "num_hidden_layers": 18,
    "num_key_value_heads": 2, "intermediate_size": 3072, "vocab_size": 103_424, "head_dim": 128,
}  # fmt: skip
BLOOM = {
    "model_type": "bloom", "hidden_size": 4096, "n_layer": 30, "num_attention_heads": 32,
    "vocab_size": 250_680,
}  # fmt: skip
OPT = {
    "model_type": "opt", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "ffn_dim": 16_384, "vocab_size": 50_000, "max_position_embeddings": 2048,
}  # fmt: skip
MINILM = {
    "model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
    "intermediate_size": 1536, "vocab_size": 30_522, "max_position_embeddings": 512,
    "architectures": ["BertModel"],
}  # fmt: skip
CAMEMBERT = {
    "model_type": "camembert", "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 32_005,
    "max_position_embeddings": 514, "architectures": ["CamembertForMaskedLM"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "dtype", "attention", "batch", "seq", "new_tokens", "measured_bytes"),
    [
        (QWEN3, "bf16", "eager", 1, 2000, 32, 2_140_517_376),  # copies of the scores in fp32
        (ERNIE, "fp32", "sdpa", 1, 2000, 32, 2_236_171_776),  # grouped heads: SDPA's fallback
        (BLOOM, "bf16", "sdpa", 4, 1024, 32, 18_305_851_392),  # logits of the whole prompt
        (OPT, "fp32", "sdpa", 4, 1024, 32, 31_845_875_712),
        (MINILM, "fp32", "eager", 64, 512, 0, 2_893_180_416),  # scores of the layer before
        (CAMEMBERT, "fp32", "eager", 64, 512, 0, 4_872_980_992),  # logits of all tokens, no cache
    ],
    ids=["qwen3", "ernie", "bloom", "opt", "minilm", "camembert"],
)
def test_inference_peaks_as_on_the_allocator(
    config: dict[str, Any],
    dtype: str,
    attention: str,
    batch: int,
    seq: int,
    new_tokens: int,
    measured_bytes: int,
) -> None:
    """Transformers 4.57.1 on PyTorch 2.12's CUDA allocator."""
    workload = Workload(
        shape_of(**config), dtype=dtype, attention=Attention(attention), batch=batch, seq=seq,
        new_tokens=new_tokens, inference=True, compute="9.0",
    )  # fmt: skip

    peak = formula_footprint(workload).peak_allocated_bytes
    assert peak == pytest.approx(measured_bytes, rel=0.045)


@pytest.mark.parametrize(
    ("model", "batch", "seq", "new_tokens", "cache", "measured_mib", "within"),
    [
        ("qwen2.5-1.5b", 8, 4096, 8, "dynamic", 5955.3, 0.005),
        ("llama-3.2-1b", 13, 2048, 8, "dynamic", 4893.9, 0.005),
        ("llama-3.2-3b", 4, 4096, 8, "static", 9115.9, 0.005),
        ("gemma-3-1b", 4, 4096, 8, "dynamic", 3294.0, 0.03),  # 22 of 26 layers have a window of 512
    ],
)
def test_generation_peaks_as_on_an_h200(
    model: str,
    batch: int,
    seq: int,
    new_tokens: int,
    cache: str,
    measured_mib: float,
    within: float,
) -> None:
    """``generate`` of Transformers 5.17 on PyTorch 2.11, random weights."""
    workload = of(
        model, dtype="bf16", batch=batch, seq=seq, new_tokens=new_tokens, cache=cache, compute="9.0"
    )

    peak = formula_footprint(workload).peak_allocated_bytes

    assert peak == pytest.approx(measured_mib * MIB, rel=within)


def test_written_out_activation_holds_half_of_its_input_meanwhile() -> None:
    """``generate`` with Phi-1.5 in Transformers 5.17 on PyTorch 2.11's allocator."""
    phi = of("phi-1.5", dtype="bf16", batch=16, seq=1024, new_tokens=32, compute="9.0")

    peak = formula_footprint(phi).peak_allocated_bytes

    assert peak == pytest.approx(7109 * MIB, rel=0.005)


def test_servers_kernels_add_and_normalise_in_place() -> None:
    stream = 4096 * 4096 * 2
    growing, paged = (
        formula_footprint(of("llama-3-8b", seq=4096, cache=cache)).peak_allocated_bytes
        for cache in ("dynamic", "paged")
    )

    assert growing - paged == 3 * stream


def test_encoder_has_no_cache() -> None:
    assert cache_bytes_per_sequence(of("bert-base", seq=512)) == 0


@pytest.mark.parametrize(("gpu", "is_switched"), [("h100", True), ("l40s", False)])
def test_servers_behind_an_nvlink_switch_hold_more_outside_pytorch(
    gpu: str, *, is_switched: bool
) -> None:
    """vLLM 0.19 with Qwen2.5 72B on 2 H100s has 3.04 GiB of cache at 0.95 of each."""
    one, two = (
        serving_of(of("qwen2.5-72b", tensor_parallel=n), gpu_of(gpu), utilization=0.95)
        for n in (1, 2)
    )

    assert one.budget_bytes - two.budget_bytes == (SWITCHED_BYTES if is_switched else 0)
    if is_switched:
        assert two.cache_bytes == pytest.approx(3.04 * GIB, rel=0.01)
