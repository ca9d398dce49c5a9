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
        ("the rest of the memory reserved for KV Cache is -7.83GiB.", {}),
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
        (("ValueError: The model's max seq len (9000) is larger than the maximum number of tokens "
         "that can be stored in KV cache (5000). Try increasing `gpu_memory_utilization` or "
         "decreasing `max_model_len` when initializing the engine."),
         Cause.CAPACITY, "--max-model-len 5000"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
         Cause.CAPACITY, "higher --mem-fraction-static"),
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
