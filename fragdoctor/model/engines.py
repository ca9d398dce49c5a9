"""Programs with allocators of their own, and how their options put less on the GPU.

PyTorch's settings and code do not apply to these programs, so advice on PyTorch must not be given.
Option names are those of the stated version.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct

from fragdoctor.lazy import regex
from fragdoctor.model.case import OomMessage
from fragdoctor.model.frameworks import read_table


class Need(StrEnum):
    """What the requested memory was for, judging by the text."""

    STEP = "step"
    """A step's tensors, which grow with the batch and the input; also if nothing else is known."""
    WEIGHTS = "weights"
    CACHE = "cache"
    """A KV cache."""
    GRAPH = "graph"
    """The buffer of a computation, separate from weights and cache."""
    LIBRARY = "library"
    """A library's handle or workspace, for which the allocator left no room."""
    FULL = "full"
    """Next to nothing was requested: the device was already full."""
    LIMIT = "limit"
    """A limit that the program was given ran out, not the device."""
    POOL = "pool"
    """A pool whose virtual memory the driver refuses to map."""


class Advice(NamedTuple):
    """A way to put less on the GPU: in a few words, and as instructions with its options."""

    title: str
    change: str


class Engine(Struct, frozen=True):
    """A program and its advice.

    Attributes:
        name: name as people write it.
        source: version and file that the advice is from.
        words: advice by need; that for a step is for every need that has none of its own.
        speaks: kinds, backends and ``sub_kind``s of messages that only this program prints.
        logs: pattern to search for in a message and the lines above it.
    """

    name: str
    words: Mapping[Need, Advice]
    source: str = ""
    speaks: frozenset[str] = frozenset()
    logs: str = ""

    def advice(self, need: Need) -> Advice:
        """Return the advice for a need."""
        return self.words.get(need, self.words[Need.STEP])


_TABLE: Final = r"""
Ollama
  source: ollama 0.12, envconfig/config.go and docs/faq.md
  logs: (?i:\bollama\b)|llama runner|/ml/backend/ggml/
  step: Put less of the model on the GPU
    lower num_ctx (OLLAMA_CONTEXT_LENGTH); set OLLAMA_NUM_PARALLEL=1; lower num_gpu, the number
    of layers on the GPU; set OLLAMA_FLASH_ATTENTION=1 with OLLAMA_KV_CACHE_TYPE=q8_0; or pull a
    smaller quantization
  weights: Put fewer layers on the GPU
    lower num_gpu, the number of layers on the GPU, or pull a smaller quantization; stop models that
    you do not need (ollama ps lists them, ollama stop NAME ends one)
llama.cpp
  source: llama.cpp b6000, common/arg.cpp; llama-cpp-python 0.3, llama.py
  speaks: ggml ggml-host
  logs: \bllama_|\bggml_|llama\.cpp|llama-server
  step: Put fewer layers on the GPU, or use a smaller context
    lower --n-gpu-layers or --ctx-size (n_gpu_layers and n_ctx in Python), split the model over more
    GPUs, or use a smaller quantization
  graph: Make the compute buffer of that GPU smaller
    turn on flash attention (-fa), and lower --ubatch-size (512 by default) and --ctx-size; if that
    is not enough, put fewer layers on that GPU (--n-gpu-layers, --tensor-split)
  cache: Make the KV cache smaller
    lower --ctx-size (n_ctx in Python; if you set none, it is the context that the model was trained
    with) or --parallel; store the cache in 8 bits (--cache-type-k q8_0, and --cache-type-v q8_0
    with -fa); then put fewer layers on that GPU (--n-gpu-layers)
  weights: Put fewer layers on that GPU
    lower --n-gpu-layers (--n-cpu-moe for MoE models), spread the model over more GPUs with
    --tensor-split, or use a smaller quantization: these are the weights, and no context size
    changes them
  pool: Build it without the pool that maps virtual memory
    use cmake -DGGML_CUDA_NO_VMM=ON (-DGGML_HIP_NO_VMM=ON for ROCm) or a build made that way: some
    drivers refuse these calls with memory free; if the GPU is full as well, lower --n-gpu-layers
JAX
  source: jax 0.4 to 0.7, docs/gpu_memory_allocation.rst and docs/gradient-checkpointing.md
  speaks: jax
  step: Make the program's arrays smaller, or give JAX more of the GPU
    use a smaller batch or input, jax.checkpoint, and donate_argnums for arguments that you do not
    need again; shard arrays over more devices; give JAX more of the GPU with
    XLA_PYTHON_CLIENT_MEM_FRACTION=.95 (the default is .75), or set
    XLA_PYTHON_CLIENT_PREALLOCATE=false where others use the GPU too
  full: Keep JAX from taking most of the GPU at the start
    set XLA_PYTHON_CLIENT_PREALLOCATE=false, or give JAX more of the GPU with
    XLA_PYTHON_CLIENT_MEM_FRACTION=.95 (the default is .75)
  graph: Make the compiled program smaller, or spread it over more devices
    use a smaller batch or input on each device, jax.checkpoint (nn.remat) around the layers,
    bfloat16, and donate_argnums for arguments that you do not need again; in a notebook, del arrays
    of earlier runs or restart the kernel; spread weights and state over more of the mesh
    (jax.sharding), or use a device with more memory
TensorFlow
  source: tensorflow 2.19, python/framework/config.py and core/framework/allocator docs
  speaks: tf
  step: Use a smaller batch or smaller inputs
    lower batch_size, or use smaller images or shorter sequences;
    tf.keras.mixed_precision.set_global_policy('mixed_float16') halves activations
  library: Let TensorFlow grow its memory on demand
    call tf.config.experimental.set_memory_growth(gpu, True) for each GPU before anything runs on
    it, or set TF_FORCE_GPU_ALLOW_GROWTH=true; close other programs on the GPU and notebooks that
    are still open (nvidia-smi lists them)
PaddlePaddle
  source: paddlepaddle 3.0, paddle/common/flags.cc and phi/core/memory/allocation
  speaks: paddle
  step: Use a smaller batch or smaller inputs
    lower batch_size, or use smaller images or shorter sequences; set
    FLAGS_allocator_strategy=auto_growth where it is naive_best_fit; check with nvidia-smi whether
    another process is on the GPU
ONNX Runtime
  source: onnxruntime 1.22, docs/execution-providers/CUDA-ExecutionProvider.md and
    core/framework/bfc_arena.cc
  speaks: onnxruntime
  logs: \bonnxruntime:
  step: Let its arena grow by what is asked for, and run smaller inputs
    set arena_extend_strategy=kSameAsRequested and cudnn_conv_use_max_workspace=0 in the CUDA
    provider's options (by default the arena doubles each time it grows); use a smaller batch or
    input; give each of several sessions on one GPU a gpu_mem_limit; and leave enable_cuda_graph off
    for a run that still allocates
  limit: Raise the limit that the arena was given
    raise gpu_mem_limit in the provider's options, or max_mem of OrtArenaCfg (0 lets ONNX Runtime
    choose)
LMDeploy's TurboMind
  source: lmdeploy 0.2.1 to 0.8, docs/en/faq.md and messages.py
  logs: \[TM\]\[|(?i:turbomind|lmdeploy)
  step: Give the KV cache a smaller share of the GPU
    set --cache-max-entry-count to 0.4 or less (cache_max_entry_count in TurbomindEngineConfig): by
    default the cache takes 0.8 of what the weights leave free; then lower --session-len and
    --max-batch-size, and set --quant-policy 8
TensorRT-LLM
  source: tensorrt_llm 0.9 to 1.2, commands/build.py, llmapi/llm_args.py and
    _torch/pyexecutor/py_executor_creator.py
  speaks: trtllm
  logs: TRT-LLM\]|TensorRT-LLM
  step: Build the engine for smaller batches, or serve it with less cache
    run trtllm-build with a lower --max_batch_size, --max_num_tokens and --max_seq_len, or with
    quantized weights; spread it over more GPUs with --tp_size; when serving, lower
    kv_cache_free_gpu_memory_fraction (kv_cache_free_gpu_mem_fraction in Triton)
  cache: Give the KV cache a smaller share of the GPU
    lower free_gpu_memory_fraction of kv_cache_config (--kv_cache_free_gpu_memory_fraction of
    trtllm-serve), and max_num_tokens or max_batch_size, so that more stays free beside it
  weights: Load smaller weights
    spread them over more GPUs (--tp_size, --pp_size), lower max_num_tokens, or use a quantized
    checkpoint
TensorRT
  source: tensorrt 10, IBuilderConfig::setMemoryPoolLimit
  speaks: tensorrt
  logs: \[TRT\]|\bTensorRT\b
  step: Give the builder the GPU to itself, and smaller shapes
    end other programs on the GPU; use smaller maximum shapes in the optimization profiles; lower
    config.set_memory_pool_limit(MemoryPoolType.WORKSPACE, ...); build in FP16
FlashInfer
  source: sglang 0.5, srt/environ.py; vllm 0.11, envs.py
  speaks: workspace-limit
  step: Give FlashInfer a larger workspace
    set SGLANG_FLASHINFER_WORKSPACE_SIZE=1073741824 for SGLang (384 MiB by default) or
    VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE for vLLM (394 MiB); or shorten the prefills
    (--chunked-prefill-size, --max-num-batched-tokens)
RMM, the allocator of RAPIDS,
  source: rmm and cudf 24.02 to 25.08, docs/user_guide
  speaks: rmm
  step: Work in smaller parts, or let them spill to the host
    call cudf.set_option('spill', True), or rmm.reinitialize(managed_memory=True) before you read
    anything; read files in parts (dask_cudf) and del frames that you no longer need; raise
    maximum_pool_size if the pool was given one; nvidia-smi shows who else is on the GPU
MLX
  source: mlx 0.2 to 0.29, python/src/memory.cpp; mlx-lm 0.28, generate.py; macOS 14
  logs: \[METAL\]|\bmlx\b|\bmlx_|\[(?:metal::)?malloc
  step: Use a smaller model or context, or let the GPU have more of the memory
    use a model in fewer bits, a shorter prompt or --max-kv-size, and one model at a time;
    mx.set_cache_limit(0) and mx.clear_cache() give cached memory back; close other programs; sudo
    sysctl iogpu.wired_limit_mb=N raises the GPU's share; when training, use --batch-size 1 and a
    lower --max-seq-length or --num-layers
  limit: Make the largest array smaller, or keep fewer of them
    Metal limits the size of one buffer and the number of buffers: use a smaller batch or a shorter
    prompt, or split the work; if it is the number, use a newer mlx, call mx.eval() in each step and
    mx.clear_cache() between steps
XGBoost
  source: xgboost 2 and 3, doc/gpu/index.rst and doc/tutorials/external_memory.rst
  logs: \bxgboost\b|XGBoostError
  step: Put less on the GPU
    use QuantileDMatrix instead of DMatrix, a lower max_bin or max_depth, fewer rows or external
    memory; del boosters and matrices of earlier runs; nvidia-smi shows who else is on the GPU
CuPy
  source: cupy 13, docs/source/user_guide/memory.rst
  speaks: cupy
  step: Make the array smaller, or work in parts
    compute rows in blocks: an array of all pairs takes the square of their number; use fewer points
    or a smaller type (float32); cupy.get_default_memory_pool().free_all_blocks() between the parts
MXNet
  source: mxnet 1.9, docs/static_site/src/pages/api/faq/env_var.md
  logs: \bMXNet\b|\bmxnet\.
  step: Use a smaller batch or model
    lower --batch-size, or use a smaller vocabulary or model; MXNET_GPU_MEM_POOL_RESERVE=10 leaves
    more of the GPU to libraries
DirectML
  source: torch-directml 0.2
  speaks: directml
  step: Use smaller images or a smaller batch
    start the UI with --lowvram or --medvram
The program
  step: See who fills the GPU, and put less on it
    run nvidia-smi while the program runs, and end other programs on the GPU; use a smaller model,
    input or batch if the program has options for that
"""
"""Advice for a need is its title and, below it, the instructions. The last entry is for programs
that nothing in a text names."""


def _engines() -> Iterator[Engine]:
    for name, lines in read_table(_TABLE):
        source = " ".join(lines.pop("source", ()))
        speaks, logs = "".join(lines.pop("speaks", ())), "".join(lines.pop("logs", ()))
        words = {Need(need): Advice(title, " ".join(how)) for need, (title, *how) in lines.items()}
        yield Engine(name, words, source, frozenset(speaks.split()), logs)


*_KNOWN, ANY_PROGRAM = _engines()
ENGINES: Final = tuple(_KNOWN)
"""A program that runs another comes before it: Ollama runs llama.cpp."""


def engine_of(message: OomMessage) -> Engine | None:
    """Return the engine that printed a message; None for PyTorch and for an unknown program."""
    files = " ".join(frame.file for frame in message.frames)
    said = f"{message.said} {files}"
    told = {message.kind, message.backend, message.sub_kind}
    for engine in ENGINES:
        if told & engine.speaks and not (
            engine.name == "llama.cpp" and re.search(ENGINES[0].logs, said)
        ):
            return engine
    is_named = message.variant in ("told", "bare") and _TORCH.search(said) is None
    if (message.is_of_caching_allocator and not is_named) or message.kind == "kv-cache":
        return None
    return next((e for e in ENGINES if e.logs and re.search(e.logs, said)), None)


_NEEDS: Final = {
    "weights-buffer": Need.WEIGHTS,
    "kv-buffer": Need.CACHE,
    "compute-buffer": Need.GRAPH,
    "vmm": Need.POOL,
    "arena-limit": Need.LIMIT,
    "workspace-limit": Need.LIMIT,
    "buffer-too-large": Need.LIMIT,
    "buffer-count": Need.LIMIT,
}
"""Needs by the ``sub_kind`` of the message."""

_SHAPE: Final = regex(
    r"shape\s?\[\s?(\d{1,12})((?:\s?,\s?\d{1,12}){0,12})\s?\](?: and type (\w{1,20}))?"
)
_ELEMENT_BYTES: Final = {"half": 2, "bfloat16": 2, "double": 8, "int64": 8, "bool": 1, "uint8": 1}
"""Sizes of TensorFlow types that do not have 4 bytes (tensorflow/core/framework/types.cc)."""

NEXT_TO_NOTHING_BYTES: Final = 64 << 20
"""A request up to this size fails because the GPU is full, not because the request is large: JAX
and TensorFlow take most of a GPU at the start."""


def asked_bytes(message: OomMessage) -> int | None:
    """Return the requested bytes; TensorFlow prints the shape of the tensor instead."""
    shape = _SHAPE.search(message.text) if message.kind == "tf" else None
    if message.requested_bytes is not None or shape is None:
        return message.requested_bytes
    sizes = [int(shape[1]), *(int(n) for n in shape[2].split(",") if n.strip())]
    return math.prod(sizes) * _ELEMENT_BYTES.get(shape[3] or "float", 4)


def need_of(message: OomMessage) -> Need:
    """Return what the memory was for, judging by the message."""
    if message.sub_kind in _NEEDS:
        return _NEEDS[message.sub_kind]
    if message.kind in ("cudnn", "cublas") or message.variant == "tf-device":
        return Need.LIBRARY
    wanted = asked_bytes(message)
    if message.kind == "jax":
        needs, whole = message.program_bytes, message.total_bytes
        is_beyond = (
            bool(wanted and whole and wanted > whole) or (needs or 0) > NEXT_TO_NOTHING_BYTES
        )
        if is_beyond or message.variant in ("jax-program", "jax-reserve"):
            return Need.GRAPH
        wanted = wanted if needs is None else needs
    return Need.FULL if wanted is not None and wanted <= NEXT_TO_NOTHING_BYTES else Need.STEP


_TORCH: Final = regex(r"\btorch\b|PyTorch|\bTHC?\b|THCudaCheck|c10::|at::|/site-packages/")
_OF_TORCH: Final = frozenset(
    {"runtime-error", "driver-error", "device-count", "torch-0.4", "thc-check", "exception-name",
     "allocation-on-device", "bare", "ray-task"}
)  # fmt: skip
"""Variants of driver messages that PyTorch prints; llama.cpp says "CUDA error: out of memory" too,
but names itself around it."""

_IN_FILE: Final = regex(r"out of memory\W{1,3}(?:at )?\S{1,160}\.\w{1,3}:\d", re.IGNORECASE)
"""A program's own check prints its file and line right after the words; PyTorch's does not."""


def is_told_of_nobody(message: OomMessage) -> bool:
    """Return whether people tell of a failure in their own words, and name no program."""
    return message.variant == "told" and engine_of(message) is None


def is_of_other_program(message: OomMessage | None) -> bool:
    """Return whether a program other than PyTorch asked the device for memory."""
    if message is None or not message.is_device_oom:
        return False
    if engine_of(message) is not None:
        return True
    is_of_torch = message.variant in _OF_TORCH and not _IN_FILE.search(message.text)
    if message.kind != "driver-no-figures" or is_of_torch:
        return False
    files = " ".join(frame.file for frame in message.frames)
    return _TORCH.search(f"{message.said} {files}") is None and not message.sub_kind
