"""What vLLM and SGLang say at start about their memory."""

from __future__ import annotations

import pytest
from oom_messages import case_of

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.messages import find_messages
from fragdoctor.inputs.server_budget import server_budget
from fragdoctor.model.diagnosis import Cause

GIB = 1 << 30
V1 = """INFO gpu_model_runner.py:1 Model loading took 13.5000 GiB and 4.1 seconds
INFO gpu_worker.py:2 Available KV cache memory: 5.25 GiB
INFO gpu_model_runner.py:3 Graph capturing finished in 20 secs, took 0.50 GiB
"""
V0 = (
    "the current vLLM instance can use total_gpu_memory (24.00GiB) x gpu_memory_utilization (0.50)"
    " = 12.00GiB\nmodel weights take 7.00GiB; non_torch_memory takes 0.25GiB; PyTorch activation "
    "peak memory takes 1.50GiB; the rest of the memory reserved for KV Cache is 3.25GiB.\n"
)
SGLANG = """Load weight end. type=Net, dtype=torch.bfloat16, avail mem=8.00 GB, mem usage=14.50 GB.
KV Cache is allocated. #tokens: 2048, K size: 1.25 GB, V size: 1.25 GB
Capture cuda graph end. Time elapsed: 4.00 s. mem usage=0.75 GB. avail mem=1.00 GB.
"""


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        (V1, {"weights": 13.5, "KV cache": 5.25, "CUDA graphs": 0.5}),
        (V0, {"whole GPU": 24, "limit": 12, "weights": 7, "outside PyTorch": 0.25,
              "peak of a step": 1.5, "KV cache": 3.25}),
        (SGLANG, {"weights": 14.5, "K of the cache": 1.25, "V of the cache": 1.25,
                  "CUDA graphs": 0.75}),
        ("KV Cache is allocated. #tokens: 524288, KV size: 17.25 GB", {"KV cache": 17.25}),
        ("the rest of the memory reserved for KV Cache is -7.75GiB.", {"KV cache": -7.75}),
        ("INFO gpu_worker.py:2 Available KV cache memory: -0.25 GiB", {"KV cache": -0.25}),
        (("Initial free memory 9.5 GiB, reserved 6.25 GiB memory for KV Cache as specified by "
         "kv_cache_memory_bytes config"), {"KV cache": 6.25}),
        ("Capture target decode CUDA graph end. bs=[1, 2], elapsed=9.10 s, mem usage=0.75 GB",
         {"CUDA graphs": 0.75}),
        (("Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 900, KV "
         "size: 2.50 GB, avail mem=1.00 GB"), {"KV cache": 2.5}),
        ("nothing of a server", {}),
    ],
)  # fmt: skip
def test_start_up_lines_give_the_budget(text, shares):
    assert {s.name: s.n_bytes / GIB for s in server_budget(text)} == shares


def test_budget_of_ranks_is_that_of_the_fullest():
    text = V1 + V1.replace("13.5000", "13.7500")

    assert server_budget(text)[0].n_bytes == int(13.75 * GIB)


@pytest.mark.parametrize(
    ("text", "cause", "option"),
    [
        (("RuntimeError: CUDA out of memory occurred when warming up sampler with 512 dummy "
         "requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when "
         "initializing the engine."), Cause.CAPACITY, "--max-num-seqs 128"),
        (("ValueError: Free memory on device (30.00/40.00 GiB) on startup is less than desired GPU "
         "memory utilization (0.9, 36.00 GiB). Decrease GPU memory utilization or reduce GPU "
         "memory used by other processes."), Cause.OTHER_PROCESS, "--gpu-memory-utilization 0.75"),
        (("ValueError: Free memory on device (1.00/40.00 GiB) on startup is less than desired GPU "
         "memory utilization (0.9, 36.00 GiB). Decrease GPU memory utilization or reduce GPU "
         "memory used by other processes."), Cause.OTHER_PROCESS, "end what holds it"),
        (("ValueError: Free memory on device cuda:0 (30.00/40.00 GiB) on startup is less than the "
          "engine's budget after excluding external process's weights (0.9, 32.00 GiB)."),
         Cause.OTHER_PROCESS, "--gpu-memory-utilization 0.85"),
        (("INFO gpu_worker.py:7 Available KV cache memory: -1.50 GiB\nValueError: Cannot auto-fit "
          "max_model_len: not enough GPU memory available to serve even a single token."),
         Cause.CAPACITY, "weights and one step exceed it by 1.50 GiB"),
        (("RuntimeError: SWA pool cap (900 tokens, 3.00 GiB) leaves no room for the full KV pool "
          "within the available 2.00 GiB."), Cause.CAPACITY, "raise --mem-fraction-static"),
        (("RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for "
          "`--max-running-requests`."), Cause.CAPACITY, "lower --max-running-requests"),
        (("RuntimeError: Out of memory. Try to lower your batch size.\nTry to allocate 70 tokens."),
         Cause.CAPACITY, "lower --max-running-requests"),
        (("ValueError: The model's max seq len (9000) is larger than the maximum number of tokens "
         "that can be stored in KV cache (5000). Try increasing `gpu_memory_utilization` or "
         "decreasing `max_model_len` when initializing the engine."),
         Cause.CAPACITY, "--max-model-len 5000"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
         Cause.CAPACITY, "raise --mem-fraction-static"),
    ],
)  # fmt: skip
def test_failure_at_start_gives_the_option_with_its_figure(text, cause, option):
    found = diagnose(case_of(text))

    assert found.verdict.cause is cause
    assert option in found.recommendations[0].change


def test_log_carries_the_budget_of_its_server():
    assert [s.name for s in find_messages(V1).server] == ["weights", "KV cache", "CUDA graphs"]


def test_a_prefill_that_does_not_fit_at_start_gets_the_options_of_its_server():
    text = (
        'Error: Warmup(Generation("Not enough memory to handle 2048 prefill tokens. '
        'You need to decrease `--max-batch-prefill-tokens`"))'
    )

    found = diagnose(case_of(text))

    assert found.verdict.cause is Cause.CAPACITY
    assert "2,048 tokens" in found.verdict.summary
    assert "--max-batch-prefill-tokens 512" in found.recommendations[0].change
    assert "--num-shard" in found.recommendations[0].change


V1_TRACEBACK = """(EngineCore pid=7) INFO 11-02 10:00:00 [gpu_worker.py:9] {said}
(EngineCore pid=7) ERROR 11-02 10:00:09 [core.py:15] EngineCore failed to start.
Traceback (most recent call last):
  File "/env/vllm/v1/engine/core.py", line 163, in __init__
    kv_cache_config = self._initialize_kv_caches(vllm_config)
  File "/env/vllm/v1/engine/core.py", line 310, in _initialize_kv_caches
    {call}
{frame}
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total \
capacity of 8.00 GiB of which 2.00 GiB is free. Including non-PyTorch memory, this process has \
6.00 GiB memory in use. Of the allocated memory 5.50 GiB is allocated by PyTorch, and 0 bytes is \
reserved by PyTorch but unallocated.
"""


def test_a_step_before_the_cache_is_told_from_the_cache():
    # What leads to both is called _initialize_kv_caches.
    profiled = V1_TRACEBACK.format(
        said="Loading",
        call="available = self.model_executor.determine_available_memory()",
        frame='  File "/env/vllm/v1/worker/gpu/model_runner.py", line 1045, in profile_run\n'
        "    self._dummy_sampler_run(hidden_states)",
        asked="2.50",
    )
    cached = V1_TRACEBACK.format(
        said="Initial free memory 7.75 GiB, reserved 9.50 GiB memory for KV Cache as specified",
        call="self.model_executor.initialize_from_config(kv_cache_configs)",
        frame='  File "/env/vllm/v1/worker/utils.py", line 596, in allocate_kv_cache\n'
        "    buf = torch.zeros(buf_size, dtype=torch.int8, device=device)",
        asked="9.50",
    )

    step, cache = (diagnose(case_of(text)) for text in (profiled, cached))

    assert "before the server had set its KV cache aside" in step.verdict.summary
    assert "lower --max-num-seqs" in step.recommendations[0].change
    assert "attention" not in cache.verdict.summary
    assert cache.recommendations[0].change.startswith("--kv-cache-memory-bytes 2147483648 leaves")
