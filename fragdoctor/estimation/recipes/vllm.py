"""Arguments of ``vllm serve``, as YAML for ``--config`` or on a command line.

Names and defaults are those of https://docs.vllm.ai/en/stable/cli/serve/ (0.15): a server takes 0.9
of the GPU, serves up to 256 sequences, and lets each grow to the longest that its model allows.
"""

from __future__ import annotations

from typing import Any, Final

from fragdoctor.estimation.recipes import values
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import Format, Reading, facts
from fragdoctor.estimation.serving import UTILIZATION

SHORT: Final = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
    "q": "quantization", "ep": "enable_expert_parallel", "dcp": "decode_context_parallel_size",
    "cc": "compilation_config", "o": "compilation_config",
}  # fmt: skip
"""Short options -> their long names."""

_QUANTISED: Final = values.one_of(
    {"fp8": "fp8-weights", "awq": "awq", "awq_marlin": "awq", "gptq": "gptq",
     "gptq_marlin": "gptq", "bitsandbytes": "int4", "mxfp4": "mxfp4",
     # These are in the model's own configuration and are counted from there.
     "compressed-tensors": None, "modelopt": None, "modelopt_fp4": None, "gguf": None},
    "is not a known quantization",
)  # fmt: skip
_KV: Final = values.one_of(
    {"auto": None, "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bfloat16": "bf16",
     "float16": "fp16", "bf16": "bf16", "half": "fp16"},
    "is not a known cache precision",
)  # fmt: skip


def length(value: Any) -> int | None:
    """Return the tokens of ``8192``, ``32k`` (x 1000) or ``32K`` (x 1024), as vLLM reads them.

    Raises:
        UnsayableError: the value is not a number of tokens.
    """
    text = str(value).strip()
    factors = {"k": 1000, "m": 10**6, "K": 1024, "M": 1024**2}
    if text[-1:] in factors and text[:-1].replace(".", "", 1).isdecimal():
        return int(float(text[:-1]) * factors[text[-1]])
    return None if text in (values.AUTO, "-1") else values.count(value)


_RULES: Final = facts(
    ("model", values.name, "model model_tag"),
    ("tensor_parallel", values.count, "tensor_parallel_size"),
    ("pipeline_parallel", values.count, "pipeline_parallel_size"),
    ("replicas", values.count, "data_parallel_size"),
    ("experts_apart", True, "enable_expert_parallel"),
    ("seq", length, "max_model_len"),
    ("gpu_memory_utilization", values.share, "gpu_memory_utilization", UTILIZATION),
    ("max_num_seqs", values.count, "max_num_seqs"),
    ("max_num_batched_tokens", length, "max_num_batched_tokens"),
    ("kv_dtype", _KV, "kv_cache_dtype"),
    ("weights", values.dtype, "dtype"),
    ("quantised", _QUANTISED, "quantization"),
)


def _complete(reading: Reading, _entries: Entries) -> None:
    reading.default("inference", True, "vllm", "a server")
    # A quantized dtype counts, else a given one, else that of the model.
    if reading.value("weights") == values.AUTO or "quantised" in reading.facts:
        reading.drop("weights")
    found = reading.facts.pop("quantised", None) or reading.facts.pop("weights", None)
    if found is not None:
        reading.derive("dtype", found.value, found)
    _experts(reading)
    reading.default("seq", values.AUTO, "max_model_len", "the model's longest")


def _experts(reading: Reading) -> None:
    """With expert parallelism, split the experts among all GPUs of all replicas."""
    apart, replicas = reading.facts.pop("experts_apart", None), reading.facts.pop("replicas", None)
    n = replicas.value if replicas else 1
    parts = [fact for fact in (apart, replicas) if fact]
    if apart is not None and (n := n * (reading.value("tensor_parallel") or 1)) > 1:
        reading.take("expert_parallel", n, " + ".join(f.key for f in parts), f"{n} GPUs")
    else:
        for fact in parts:
            reading.leave(fact.key, fact.text)


def plain(entries: Entries) -> Entries:
    """Return entries under their long names, with underscores and without a leading ``no-``."""
    found: dict[str, Any] = {}
    for key, value in entries.items():
        long = SHORT.get(key, key).replace("-", "_")
        if long.startswith("no_") and not values.is_off(value):
            long, value = long.removeprefix("no_"), False  # noqa: PLW2901 - its negation
        found[long] = value
    return found


_SIGNS: Final = (
    "tensor_parallel_size", "max_model_len", "gpu_memory_utilization", "kv_cache_dtype",
    "max_num_batched_tokens", "max_num_seqs", "served_model_name", "enable_prefix_caching",
    "tool_call_parser", "reasoning_parser", "pipeline_parallel_size", "enforce_eager",
    "max_cudagraph_capture_size", "speculative_config", "model_tag",
)  # fmt: skip
FORMAT: Final = Format(
    title="arguments of vLLM",
    signs=_SIGNS,
    rules=_RULES,
    complete=_complete,
)  # fmt: skip
