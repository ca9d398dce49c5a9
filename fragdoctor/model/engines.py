"""Programs with allocators of their own, and how their options put less on the device.

PyTorch's settings and code do not apply to these programs, so advice on PyTorch must not be given.
Option names are those of the stated version.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from msgspec import Struct

from fragdoctor.model.case import OomMessage


class Need(StrEnum):
    """What the requested memory was for, judging by the text."""

    STEP = "step"
    """A step's tensors, which grow with the batch and the input; also if nothing else is known."""
    ONE_INPUT = "one-input"
    """A step's tensors when the batch size is already one."""
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
    """A way to put less on the device: in a few words, and spelled as options."""

    title: str
    change: str


class Engine(Struct, frozen=True):
    """A program and its advice by need; every program has advice for ``STEP``.

    Attributes:
        name: name as people write it.
        source: version and file that the advice is from.
        speaks: kinds, backends and ``sub_kind``s of messages that only this program prints.
        words: the advice for each need.
        logs: pattern to search for in a message and the lines above it.
        verify: what shows that the advice helped.
    """

    name: str
    source: str
    speaks: frozenset[str]
    words: Mapping[Need, Advice]
    logs: str = ""
    verify: str = "The same request is served."

    def advice(self, need: Need) -> Advice:
        """Return the advice for a need."""
        return self.words.get(need, self.words[Need.STEP])


_LAYERS: Final = (
    "lower --n-gpu-layers (for MoE models --n-cpu-moe), --tensor-split over several GPUs"
)
_JAX_SHARE: Final = (
    "XLA_PYTHON_CLIENT_MEM_FRACTION=.95 (.75 is the default); XLA_PYTHON_CLIENT_PREALLOCATE=false "
    "where others use the GPU too"
)
_GROWTH: Final = (
    "tf.config.experimental.set_memory_growth(gpu, True) for each GPU before anything runs on it, "
    "or TF_FORCE_GPU_ALLOW_GROWTH=true; end other programs on the GPU, and notebooks that are "
    "still open"
)

ENGINES: Final[tuple[Engine, ...]] = (
    Engine(
        "Ollama",
        "ollama 0.12, envconfig/config.go and docs/faq.md",
        frozenset(),
        {
            Need.STEP: Advice(
                "Put less of the model on the GPU",
                "a lower num_ctx (OLLAMA_CONTEXT_LENGTH) and OLLAMA_NUM_PARALLEL=1; a lower "
                "num_gpu, which is the number of layers on the GPU; OLLAMA_FLASH_ATTENTION=1 "
                "with OLLAMA_KV_CACHE_TYPE=q8_0; a smaller quantization",
            ),
            Need.WEIGHTS: Advice(
                "Put fewer layers on the GPU",
                "a lower num_gpu, which is the number of layers on the GPU, or a smaller "
                "quantization; stop other models (ollama ps, ollama stop)",
            ),
        },
        logs=r"\bollama\b|llama runner",
        verify="ollama ps shows what is on the GPU; the log's sizes stay below the free memory.",
    ),
    Engine(
        "llama.cpp",
        "llama.cpp b6000, common/arg.cpp; llama-cpp-python 0.3, llama.py",
        frozenset({"ggml", "ggml-host"}),
        {
            Need.STEP: Advice(
                "Put fewer layers on the GPU, or use a smaller context",
                "lower --n-gpu-layers or --ctx-size (n_gpu_layers and n_ctx in Python), split "
                "over GPUs, or a smaller quantization",
            ),
            Need.GRAPH: Advice(
                "Make the compute buffer of that GPU smaller",
                "flash attention (-fa), a lower --ubatch-size (512 by default) and --ctx-size; "
                "then fewer layers on that GPU (--n-gpu-layers, --tensor-split)",
            ),
            Need.CACHE: Advice(
                "Make the KV cache smaller",
                "a lower --ctx-size (n_ctx in Python; without one it is the context that the model "
                "was trained with) or --parallel, --cache-type-k q8_0 and --cache-type-v q8_0 with "
                "flash attention (-fa); then fewer layers on that GPU (--n-gpu-layers)",
            ),
            Need.WEIGHTS: Advice(
                "Put fewer layers on that GPU",
                f"{_LAYERS}, or a smaller quantization: these are the weights, which no "
                "context size changes",
            ),
            Need.POOL: Advice(
                "Build it without the pool that maps virtual memory",
                "cmake -DGGML_CUDA_NO_VMM=ON (-DGGML_HIP_NO_VMM=ON for ROCm), or a build that "
                "has it already: some drivers refuse these calls with memory free; where the "
                "GPU is full as well, a lower --n-gpu-layers",
            ),
        },
        logs=r"\bllama_|\bggml_|llama\.cpp|llama-server",
        verify="The log's buffer sizes stay below the free memory.",
    ),
    Engine(
        "JAX",
        "jax 0.4 to 0.7, docs/gpu_memory_allocation.rst and docs/gradient-checkpointing.md",
        frozenset({"jax"}),
        {
            Need.STEP: Advice(
                "Make the program's arrays smaller, or give JAX a larger share",
                "a smaller batch or input, jax.checkpoint, donate_argnums for what is not "
                f"needed again, arrays sharded over more devices; {_JAX_SHARE}",
            ),
            Need.FULL: Advice(
                "Do not let JAX take most of the GPU at start",
                f"XLA_PYTHON_CLIENT_PREALLOCATE=false, or {_JAX_SHARE.partition(';')[0]}",
            ),
            Need.GRAPH: Advice(
                "Make the compiled program smaller, or spread it over more devices",
                "a smaller batch or input on each device, jax.checkpoint (nn.remat) around the "
                "layers, bfloat16, donate_argnums for what is not needed again; more of the "
                "mesh for weights and state (jax.sharding), or a device with more memory",
            ),
        },
        verify="The peak in jax.profiler.device_memory_profile().",
    ),
    Engine(
        "TensorFlow",
        "tensorflow 2.19, python/framework/config.py and core/framework/allocator docs",
        frozenset({"tf"}),
        {
            Need.STEP: Advice(
                "Use a smaller batch or smaller inputs",
                "a lower batch_size, or smaller images or shorter sequences; "
                "tf.keras.mixed_precision.set_global_policy('mixed_float16')",
            ),
            Need.ONE_INPUT: Advice(
                "Use smaller inputs: the batch is one already",
                "smaller images, crops or tiles, or shorter sequences; fewer filters in the "
                "layer that failed; tf.recompute_grad; "
                "tf.keras.mixed_precision.set_global_policy('mixed_float16')",
            ),
            Need.WEIGHTS: Advice(
                "Use a smaller model, or a GPU with more memory",
                "it failed while the variables were made, before any batch: fewer or smaller "
                f"layers; {_GROWTH.partition('; ')[2]}",
            ),
            Need.FULL: Advice(
                "Use a smaller batch, and see who else is on the GPU",
                f"a lower batch_size or smaller inputs; {_GROWTH.partition('; ')[2]}",
            ),
            Need.LIBRARY: Advice("Let TensorFlow grow its memory on demand", _GROWTH),
        },
        verify="nvidia-smi shows less than the whole device in use after start.",
    ),
    Engine(
        "PaddlePaddle",
        "paddlepaddle 3.0, paddle/common/flags.cc and phi/core/memory/allocation",
        frozenset({"paddle"}),
        {
            Need.STEP: Advice(
                "Use a smaller batch or smaller inputs",
                "a lower batch_size, or smaller images or shorter sequences; "
                "FLAGS_allocator_strategy=auto_growth, where it is naive_best_fit; see with "
                "nvidia-smi whether another process is on the GPU",
            ),
        },
    ),
    Engine(
        "ONNX Runtime",
        "onnxruntime 1.22, docs/execution-providers/CUDA-ExecutionProvider.md and "
        "core/framework/bfc_arena.cc",
        frozenset({"onnxruntime"}),
        {
            Need.STEP: Advice(
                "Let its arena grow by what is asked for, and run smaller inputs",
                "arena_extend_strategy=kSameAsRequested and cudnn_conv_use_max_workspace=0 in "
                "the CUDA provider's options: by default the arena doubles with each growth; a "
                "smaller batch or input; a gpu_mem_limit for each of several sessions on one "
                "GPU; and no enable_cuda_graph for a run that still allocates",
            ),
            Need.LIMIT: Advice(
                "Raise the limit that the arena was given",
                "a higher gpu_mem_limit in the provider's options, or max_mem of OrtArenaCfg "
                "(0 lets ONNX Runtime choose)",
            ),
        },
        logs=r"\bonnxruntime:",
    ),
    Engine(
        "LMDeploy's TurboMind",
        "lmdeploy 0.2.1 to 0.8, docs/en/faq.md and messages.py",
        frozenset(),
        {
            Need.STEP: Advice(
                "Give the KV cache a smaller share of the GPU",
                "--cache-max-entry-count 0.4 or less (cache_max_entry_count in "
                "TurbomindEngineConfig): by default the cache takes 0.8 of what the weights leave "
                "free; then a lower --session-len and --max-batch-size, and --quant-policy 8",
            ),
            Need.WEIGHTS: Advice(
                "Load the weights in less memory",
                "--tp over more GPUs, or an AWQ or GPTQ checkpoint: these are the weights, which "
                "no cache setting changes",
            ),
        },
        logs=r"\[TM\]\[|(?i:turbomind|lmdeploy)",
    ),
    Engine(
        "TensorRT-LLM",
        "tensorrt_llm 0.9 to 1.0, commands/build.py and llmapi/llm_args.py",
        frozenset({"trtllm"}),
        {
            Need.STEP: Advice(
                "Build the engine for smaller batches, or serve it with less cache",
                "trtllm-build with a lower --max_batch_size, --max_num_tokens and --max_seq_len, "
                "or quantized weights; --tp_size over more GPUs; at run time a lower "
                "kv_cache_free_gpu_memory_fraction (kv_cache_free_gpu_mem_fraction in Triton)",
            ),
        },
        logs=r"TRT-LLM\]|TensorRT-LLM",
    ),
    Engine(
        "TensorRT",
        "tensorrt 10, IBuilderConfig::setMemoryPoolLimit",
        frozenset({"tensorrt"}),
        {
            Need.STEP: Advice(
                "Give the builder the GPU to itself, and smaller shapes",
                "end other programs on the GPU; smaller maximum shapes in optimization profiles; "
                "a lower config.set_memory_pool_limit(MemoryPoolType.WORKSPACE, ...); FP16",
            ),
        },
        logs=r"\[TRT\]|\bTensorRT\b",
    ),
    Engine(
        "FlashInfer",
        "sglang 0.5, srt/environ.py; vllm 0.11, envs.py",
        frozenset({"workspace-limit"}),
        {
            Need.STEP: Advice(
                "Give FlashInfer a larger workspace",
                "SGLANG_FLASHINFER_WORKSPACE_SIZE=1073741824 for SGLang (384 MiB by default), "
                "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE for vLLM (394 MiB); or shorter prefills "
                "(--chunked-prefill-size, --max-num-batched-tokens)",
            ),
        },
    ),
    Engine(
        "CuPy",
        "cupy 13, docs/source/user_guide/memory.rst",
        frozenset({"cupy"}),
        {
            Need.STEP: Advice(
                "Work in smaller parts, and give the pool's free blocks back",
                "arrays in chunks, in 32 bits or less; del of what is not needed, then "
                "cupy.get_default_memory_pool().free_all_blocks(); a pool with set_limit() "
                "where others use the GPU",
            ),
        },
    ),
    Engine(
        "RMM, the allocator of RAPIDS,",
        "rmm and cudf 24.02 to 25.08, docs/user_guide",
        frozenset({"rmm"}),
        {
            Need.STEP: Advice(
                "Work in smaller parts, or let them spill to the host",
                "cudf.set_option('spill', True), or rmm.reinitialize(managed_memory=True) "
                "before anything is read; files in parts (dask_cudf), del of frames that are "
                "not needed; a higher maximum_pool_size, where a pool was given one; "
                "nvidia-smi shows who else is on the GPU",
            ),
        },
    ),
    Engine(
        "CUDA.jl",
        "CUDA.jl 5, docs/src/usage/memory.md",
        frozenset({"julia"}),
        {
            Need.STEP: Advice(
                "Use less at once, and give back what Julia has not yet collected",
                "a smaller batch or arrays in Float32; CUDA.unsafe_free!(x) where an array is "
                "done with, GC.gc(true) and CUDA.reclaim() between steps, since arrays live "
                "until Julia collects them; nvidia-smi shows who else is on the GPU",
            ),
        },
        logs=r"\.julia[/\\]|\bCuArrays\b|CUDA\.jl|\bLoadError: ",
    ),
    Engine(
        "MLX",
        "mlx 0.2 to 0.29, python/src/memory.cpp; mlx-lm 0.28, generate.py; macOS 14",
        frozenset(),
        {
            Need.STEP: Advice(
                "Use a smaller model or context, or let the GPU have more of the memory",
                "a model in fewer bits, a shorter prompt or --max-kv-size, one model at a "
                "time; mx.set_cache_limit(0) and mx.clear_cache() give back what is cached; "
                "close other programs; sudo sysctl iogpu.wired_limit_mb=N raises the share; in "
                "training --batch-size 1 and a lower --max-seq-length or --num-layers",
            ),
            Need.LIMIT: Advice(
                "Make the largest array smaller, or keep fewer of them",
                "Metal limits the size of one buffer and the number of buffers: a smaller batch, a "
                "shorter prompt or sequence, or the work in parts; where it is the number, a newer "
                "mlx, mx.eval() in each step and mx.clear_cache() between steps",
            ),
        },
        logs=r"\[METAL\]|\bmlx\b|\bmlx_|\[(?:metal::)?malloc",
    ),
    Engine(
        "XGBoost",
        "xgboost 2 and 3, doc/gpu/index.rst and doc/tutorials/external_memory.rst",
        frozenset(),
        {
            Need.STEP: Advice(
                "Put less on the GPU",
                "QuantileDMatrix instead of DMatrix, a lower max_bin or max_depth, fewer rows "
                "(subsample with sampling_method='gradient_based') or external memory; del of "
                "boosters and matrices of earlier runs; nvidia-smi shows who else is on the GPU",
            ),
        },
        logs=r"\bxgboost\b|XGBoostError",
    ),
    Engine(
        "Numba",
        "numba 0.61, docs/source/cuda/memory.rst",
        frozenset(),
        {
            Need.STEP: Advice(
                "Put less on the GPU at a time",
                "arrays in parts and in 32 bits, del of device arrays that are not needed; "
                "nvidia-smi shows who else is on the GPU",
            ),
        },
        logs=r"\bnumba[./\\]cuda|numba\.cuda|CudaAPIError",
    ),
    Engine(
        "DirectML",
        "torch-directml 0.2",
        frozenset({"directml"}),
        {
            Need.STEP: Advice(
                "Use smaller images or a smaller batch", "--lowvram or --medvram of the UI"
            )
        },
    ),
    Engine(
        "Torch7",
        "torch7 and cutorch of 2017, File.lua, nn/Module.lua and nn/utils.lua",
        frozenset(),
        {
            Need.STEP: Advice(
                "Use a smaller batch or smaller inputs, and see who else is on the GPU",
                "a lower -batch_size (-batchSize, -image_size, as the script calls it); nvidia-smi "
                "shows who else is there, CUDA_VISIBLE_DEVICES picks another GPU; the backend "
                "cudnn instead of nn keeps less",
            ),
            Need.WEIGHTS: Advice(
                "Take a GPU that is free, or a smaller model",
                "it failed while the model was loaded or moved to the GPU, before any batch: "
                "nvidia-smi shows who else is there, CUDA_VISIBLE_DEVICES picks another GPU; "
                "model:clearState() before torch.save() keeps buffers out of its file",
            ),
        },
        logs=r"\.lua\b|\bluajit:|\bqlua:",
    ),
    Engine(
        "MXNet",
        "mxnet 1.9, docs/static_site/src/pages/api/faq/env_var.md",
        frozenset(),
        {
            Need.STEP: Advice(
                "Use a smaller batch or model",
                "a lower --batch-size, a smaller vocabulary or model; "
                "MXNET_GPU_MEM_POOL_RESERVE=10 leaves more of the GPU to libraries",
            ),
        },
        logs=r"\bMXNet\b|\bmxnet\.",
    ),
)
"""A program that runs another comes before it: Ollama runs llama.cpp."""

ANY_PROGRAM: Final = Engine(
    "The program",
    "",
    frozenset(),
    {
        Need.STEP: Advice(
            "See who fills the GPU, and put less on it",
            "nvidia-smi beside the run: end other programs there; a smaller model, input or batch, "
            "if the program has options for it",
        ),
    },
)
"""A program that nothing in the text names."""


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
    if message.is_of_caching_allocator or message.kind == "kv-cache":
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

_SHAPE: Final = re.compile(
    r"shape\s?\[\s?(\d{1,12})((?:\s?,\s?\d{1,12}){0,12})\s?\](?: and type (\w{1,20}))?"
)
_ELEMENT_BYTES: Final = {"half": 2, "bfloat16": 2, "double": 8, "int64": 8, "bool": 1, "uint8": 1}
"""Sizes of TensorFlow types that do not have 4 bytes (tensorflow/core/framework/types.cc)."""
_VARIABLES: Final = re.compile(
    r"variables_initializer|\.initializer\b|(?:load|create)_\w{0,20}weights?\(|\.restore\("
)
_LUA_LOADS: Final = re.compile(
    r"/(?:torch/File|cutorch/init|cudnn/init)\.lua |\.lua (?:type|recursiveType|cuda|clone)$"
)

NEXT_TO_NOTHING_BYTES: Final = 64 << 20
"""A request up to this size fails because the GPU is full, not because the request is large: JAX
and TensorFlow take most of a GPU at the start."""

_BATCHED_DIMENSIONS: Final = 3
"""With fewer dimensions, a tensor may be a weight, whose first dimension is not the batch."""


def asked_bytes(message: OomMessage) -> int | None:
    """Return the requested bytes; TensorFlow prints the shape of the tensor instead."""
    shape = _SHAPE.search(message.text) if message.kind == "tf" else None
    if message.requested_bytes is not None or shape is None:
        return message.requested_bytes
    sizes = [int(shape[1]), *(int(n) for n in shape[2].split(",") if n.strip())]
    return math.prod(sizes) * _ELEMENT_BYTES.get(shape[3] or "float", 4)


def need_of(message: OomMessage) -> Need:
    """Return what the memory was for, judging by the message and its traceback."""
    if message.sub_kind in _NEEDS:
        return _NEEDS[message.sub_kind]
    if message.kind in ("cudnn", "cublas") or message.variant == "tf-device":
        return Need.LIBRARY
    if any(
        _VARIABLES.search(frame.code) or _LUA_LOADS.search(f"{frame.file} {frame.function}")
        for frame in message.frames
    ):
        return Need.WEIGHTS
    wanted = asked_bytes(message)
    if message.kind == "jax":
        needs, whole = message.program_bytes, message.total_bytes
        is_beyond = (
            bool(wanted and whole and wanted > whole) or (needs or 0) > NEXT_TO_NOTHING_BYTES
        )
        if is_beyond or message.variant in ("jax-program", "jax-reserve"):
            return Need.GRAPH
        wanted = wanted if needs is None else needs
    shape = _SHAPE.search(message.text)
    is_batched = shape is not None and shape[2].count(",") + 1 >= _BATCHED_DIMENSIONS
    if shape is not None and is_batched and shape[1] == "1":
        return Need.ONE_INPUT
    return Need.FULL if wanted is not None and wanted <= NEXT_TO_NOTHING_BYTES else Need.STEP


_TORCH: Final = re.compile(r"\btorch\b|PyTorch|\bTHC?\b|THCudaCheck|c10::|at::|/site-packages/")
_OF_TORCH: Final = frozenset(
    {"runtime-error", "driver-error", "device-count", "torch-0.4", "thc-check", "exception-name",
     "allocation-on-device", "bare", "ray-task"}
)  # fmt: skip
"""Variants of driver messages that PyTorch prints; llama.cpp says "CUDA error: out of memory" too,
but names itself around it."""

_IN_FILE: Final = re.compile(r"out of memory\W{1,3}(?:at )?\S{1,160}\.\w{1,3}:\d", re.IGNORECASE)
"""A program's own check prints its file and line right after the words; PyTorch's does not."""


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
