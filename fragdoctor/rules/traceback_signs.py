"""What calls of a traceback say about a failure: a table of signs, each with its source.

A sign is a place in a library that is known to need memory of its own: saving, loading, gathering,
assigning. Advice that fits the place outweighs advice that fits any failure. The innermost call
that is a sign counts; of several signs of one call the first in the table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from fragdoctor.frozen import frozen
from fragdoctor.model.case import OomMessage, TracebackFrame


class GrowsWith(StrEnum):
    """What the memory at a sign grows with, so that making it smaller helps."""

    BATCH = "batch"
    """The batch or the length of its sequences."""
    INPUT = "input"
    """One sample: an image, a prompt, a graph; a batch of one may still be too large."""
    MODEL = "model"
    """The model: weights, state, or what a server sets aside. No batch helps."""


@frozen
class TracebackSign:
    """A place that is known to need memory of its own, and what helps there.

    A frame matches where all of ``file``, ``functions`` and ``code`` that are given do.

    Attributes:
        name: stable name.
        doing: what the program was doing, within a sentence: "while ...".
        grows_with: what its memory grows with.
        title, change, why: as in ``Recommendation``.
        source: library, versions and file that the names are from.
        file: searched in the path, with ``/`` between its parts.
        functions: names of the function.
        code: searched in the source line.
        intro: searched in the message and in what stands before it on its line, where no frame is
            a sign.
        is_training: it may be a step of training, whose activations are kept.
        is_surrounding: it says in what the call stood, and counts where no place is a sign.
        can_leave_gpu: the call can be made on the CPU, so that it helps whoever fills the GPU.
    """

    name: str
    doing: str
    grows_with: GrowsWith
    title: str
    change: str
    why: str
    source: str
    file: str = ""
    functions: Sequence[str] = ()
    code: str = ""
    intro: str = ""
    is_training: bool = True
    is_surrounding: bool = False
    can_leave_gpu: bool = False

    def matches(self, frame: TracebackFrame) -> bool:
        """Return whether a frame is such a place."""
        if not (self.file or self.functions or self.code):
            return False
        return (
            (not self.file or _search(self.file, frame.file.replace("\\", "/")))
            and (not self.functions or frame.function.rpartition(".")[2] in self.functions)
            and (not self.code or _search(self.code, frame.code))
        )


def _search(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def sign_of(message: OomMessage | None) -> TracebackSign | None:
    """Return the sign that the traceback of a message shows; None without one."""
    if message is None or message.kind in ("negative", "host-ram"):
        return None
    said = f"{message.intro} {message.text}"
    for signs in (_PLACES, _SURROUNDINGS):
        for frame in reversed(message.frames):
            for sign in signs:
                if sign.matches(frame):
                    return sign
        for sign in signs:
            if sign.intro and _search(sign.intro, said):
                return sign
    return None


_MODEL = GrowsWith.MODEL
_INPUT = GrowsWith.INPUT
_BATCH = GrowsWith.BATCH

SIGNS: Final[tuple[TracebackSign, ...]] = (
    # ---- saving ----
    TracebackSign(
        name="fsdp-full-state",
        doing="while FSDP gathered the whole state dict on the GPU to save it",
        grows_with=_MODEL,
        can_leave_gpu=True,
        title="Gather the state dict on the CPU, on rank 0 only",
        change="FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, "
        "FullStateDictConfig(offload_to_cpu=True, rank0_only=True)) around state_dict(); "
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
        "cpu_offload=True)) since 2.3; fsdp_state_dict_type: SHARDED_STATE_DICT in accelerate",
        why="A full state dict holds every weight of the model on each GPU at once, where "
        "training holds a share of them.",
        source="torch 1.12 to 2.15, torch/distributed/fsdp",
        file=r"/torch/distributed/fsdp/_state_dict_utils\.py$"
        r"|/torch/distributed/checkpoint/state_dict\.py$|/fsdp/_fsdp_state\.py$",
        intro=r"/fsdp/(?:_state_dict_utils|fully_sharded_data_parallel)\.py|Failed to clone\(\) "
        r"tensor with name",
    ),
    TracebackSign(
        name="fsdp-full-state",
        doing="while FSDP gathered the whole state dict on the GPU to save it",
        grows_with=_MODEL,
        can_leave_gpu=True,
        title="Gather the state dict on the CPU, on rank 0 only",
        change="FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, "
        "FullStateDictConfig(offload_to_cpu=True, rank0_only=True)) around state_dict(); "
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
        "cpu_offload=True)) since 2.3; fsdp_state_dict_type: SHARDED_STATE_DICT in accelerate",
        why="A full state dict holds every weight of the model on each GPU at once, where "
        "training holds a share of them.",
        source="torch 1.12 to 2.15, torch/distributed/fsdp; torch 2.13, optim state",
        file=r"/torch/distributed/fsdp/",
        functions=(
            "state_dict",
            "full_optim_state_dict",
            "optim_state_dict",
            "_optim_state_dict_impl",
            "_full_pre_state_dict_hook",
            "_full_post_state_dict_hook",
        ),
    ),
    TracebackSign(
        name="zero3-gathered-save",
        doing="while DeepSpeed gathered the whole model to save it",
        grows_with=_MODEL,
        can_leave_gpu=True,
        title="Save the shards, and join them afterwards on the CPU",
        change="stage3_gather_16bit_weights_on_model_save: false, then the zero_to_fp32.py that "
        "lies beside the checkpoint",
        why="ZeRO 3 keeps a share of each weight on every GPU; saving in 16 bits gathers them.",
        source="deepspeed 0.17, runtime/engine.py",
        file=r"/deepspeed/",
        functions=("_zero3_consolidated_16bit_state_dict", "save_16bit_model", "save_fp16_model"),
    ),
    # ---- loading ----
    TracebackSign(
        name="checkpoint-on-gpu",
        doing="while torch.load put a checkpoint on the GPU that it was saved from",
        grows_with=_MODEL,
        can_leave_gpu=True,
        title="Load the checkpoint on the CPU",
        change="torch.load(path, map_location='cpu'), with mmap=True since 2.1; then "
        "load_state_dict() copies it into the model that is on the GPU already",
        why="Without map_location each tensor goes to the device it was saved from: beside the "
        "model, and of every rank to the same GPU.",
        source="torch 1.0 to 2.15, torch/serialization.py",
        file=r"/torch/(?:serialization|storage)\.py$",
        functions=(
            "load",
            "_load",
            "_legacy_load",
            "persistent_load",
            "load_tensor",
            "restore_location",
            "default_restore_location",
            "_cuda_deserialize",
            "_deserialize",
        ),
    ),
    TracebackSign(
        name="loading-state",
        doing="while a checkpoint was loaded into the model or the optimizer",
        grows_with=_MODEL,
        can_leave_gpu=True,
        title="Load the checkpoint on the CPU, and free it after loading",
        change="state = torch.load(path, map_location='cpu'); model.load_state_dict(state); del "
        "state",
        why="A loaded checkpoint on the GPU is there beside what it is copied into.",
        source="torch 2.13, torch/nn/modules/module.py and torch/optim/optimizer.py",
        file=r"/torch/(?:nn/modules/module|optim/optimizer)\.py$",
        functions=(
            "load_state_dict",
            "_load_from_state_dict",
            "_process_value_according_to_param_policy",
        ),
    ),
    TracebackSign(
        name="loading-weights",
        doing="while the weights of a model were put on the GPU",
        grows_with=_MODEL,
        title="Load the weights in less memory",
        change="torch_dtype='bfloat16' (dtype= since Transformers 5) or 4 bits "
        "(BitsAndBytesConfig(load_in_4bit=True)); device_map='auto' over several GPUs and the "
        "CPU; in Diffusers enable_model_cpu_offload(); in ComfyUI --lowvram or an fp8 checkpoint",
        why="Nothing but weights was asked for: what is missing is room for the model itself, "
        "which no batch size changes.",
        source="torch 2.13, torch/nn/modules/module.py",
        file=r"/torch/nn/modules/module\.py$",
        functions=("_apply", "convert", "to", "cuda", "half", "float", "bfloat16", "to_empty"),
    ),
    TracebackSign(
        name="loading-weights",
        doing="while the weights of a model were put on the GPU",
        grows_with=_MODEL,
        title="Load the weights in less memory",
        change="dtype='bfloat16' or 4 bits (BitsAndBytesConfig(load_in_4bit=True)); "
        "device_map='auto' over several GPUs and the CPU, with max_memory for each",
        why="Nothing but weights was asked for: what is missing is room for the model itself, "
        "which no batch size changes.",
        source="transformers 4.30 to 5.0, modeling_utils.py; accelerate 1.10, utils/modeling.py",
        file=r"/transformers/(?:modeling_utils|core_model_loading|quantizers/\w+)\.py$"
        r"|/accelerate/utils/modeling\.py$|/safetensors/torch\.py$",
    ),
    # ---- serving ----
    TracebackSign(
        name="graph-capture",
        doing="while the server captured its CUDA graphs",
        grows_with=_MODEL,
        title="Leave more memory beside the server's KV cache for CUDA graphs",
        change="SGLang: a lower --mem-fraction-static, or a lower --cuda-graph-max-bs; vLLM: a "
        "lower --gpu-memory-utilization, fewer --max-num-seqs, or --enforce-eager",
        why="The KV cache was sized first and has taken what the graphs need.",
        source="sglang 0.4, model_executor/cuda_graph_runner.py; vllm 0.11, "
        "v1/worker/gpu_model_runner.py",
        file=r"/(?:sglang|vllm)/",
        functions=(
            "init_cuda_graphs",
            "init_device_graphs",
            "capture_one_batch_size",
            "capture_model",
            "_capture_cudagraphs",
            "init_forward_metadata_capture_cuda_graph",
        ),
        intro=r"[Cc]apture cuda graph failed",
    ),
    TracebackSign(
        name="server-profiling",
        doing="while the server measured its peak with dummy requests, before any KV cache",
        grows_with=_MODEL,
        title="Make the server's largest step smaller, or spread the weights",
        change="vLLM: lower --max-num-batched-tokens and --max-num-seqs; --tensor-parallel-size "
        "over more GPUs, or a quantised checkpoint, where the weights alone fill the card",
        why="Weights and the activations of one largest step do not fit: "
        "gpu_memory_utilization only sizes the cache that comes after them.",
        source="vllm 0.6 to 0.11, v1/worker/gpu_worker.py and gpu_model_runner.py",
        file=r"/vllm/",
        functions=(
            "determine_available_memory",
            "determine_num_available_blocks",
            "profile_run",
            "_dummy_run",
            "_dummy_sampler_run",
            "_dummy_pooler_run",
        ),
    ),
    TracebackSign(
        name="server-weights",
        doing="while the server loaded the weights",
        grows_with=_MODEL,
        title="Spread the weights over more GPUs, or serve a quantised checkpoint",
        change="--tensor-parallel-size (vLLM) or --tp (SGLang) over more GPUs; an AWQ, GPTQ or "
        "FP8 checkpoint; --cpu-offload-gb in vLLM",
        why="The weights alone do not fit; nothing else is on the GPU yet.",
        source="vllm 0.11, model_executor/model_loader; sglang 0.4, model_executor/model_runner.py",
        file=r"/(?:vllm|sglang)/",
        functions=(
            "load_model",
            "initialize_model",
            "_initialize_model",
            "load_weights",
            "create_weights",
        ),
    ),
    TracebackSign(
        name="server-step",
        doing="while the server ran a step",
        grows_with=_MODEL,
        is_surrounding=True,
        title="Give the server's steps more room beside its KV cache",
        change="vLLM: a lower --gpu-memory-utilization, lower --max-num-batched-tokens or "
        "--max-num-seqs; SGLang: a lower --mem-fraction-static or --chunked-prefill-size",
        why="The server fills the card with KV cache up to its limit; what a step needs beyond "
        "what was measured at start has to come out of the rest.",
        source="vllm 0.6 to 0.11, worker and v1/worker; sglang 0.4, srt",
        file=r"/(?:vllm|sglang)/(?:.*/)?(?:worker|executor|model_executor|managers|layers|lora|v1)/",
        intro=r"\bVllmWorker|\bEngineCore|\bWorker(?:_TP\d| pid=)|\bRayWorkerWrapper"
        r"|\[(?:multiproc_executor|multiproc_worker_utils|worker_base|core)\.py:\d",
    ),
    # ---- evaluation ----
    TracebackSign(
        name="gathered-predictions",
        doing="while the predictions of the whole evaluation were joined on the GPU",
        grows_with=_INPUT,
        can_leave_gpu=True,
        is_training=False,
        title="Gather the predictions on the CPU",
        change="eval_accumulation_steps=1 in TrainingArguments, and a "
        "preprocess_logits_for_metrics that keeps what the metrics need (logits.argmax(-1)); or "
        "prediction_loss_only=True",
        why="Trainer keeps every batch's logits on the GPU until the evaluation ends, and joins "
        "them with a copy.",
        source="transformers 3.1 to 4.57, trainer.py and trainer_pt_utils.py",
        file=r"/transformers/trainer_pt_utils\.py$|/accelerate/(?:accelerator|utils/operations)\.py$",
        functions=(
            "nested_concat",
            "torch_pad_and_concatenate",
            "nested_gather",
            "distributed_concat",
            "pad_across_processes",
            "gather_for_metrics",
            "gather",
        ),
    ),
    TracebackSign(
        name="gathered-predictions",
        doing="while the predictions of the whole evaluation were joined on the GPU",
        grows_with=_INPUT,
        can_leave_gpu=True,
        is_training=False,
        title="Gather the predictions on the CPU",
        change="eval_accumulation_steps=1 in TrainingArguments, and a "
        "preprocess_logits_for_metrics that keeps what the metrics need (logits.argmax(-1)); or "
        "prediction_loss_only=True",
        why="Trainer keeps every batch's logits on the GPU until the evaluation ends, and joins "
        "them with a copy.",
        source="transformers 3.1 to 4.57, trainer.py",
        functions=("evaluation_loop", "prediction_loop"),
        code=r"nested_concat|torch\.cat|preds_host|\.add\(",
    ),
    # ---- boxes and masks of detectors ----
    TracebackSign(
        name="box-assignment",
        doing="while a detector compared all boxes of an image with all anchors",
        grows_with=_INPUT,
        can_leave_gpu=True,
        title="Assign on the CPU where an image has many boxes",
        change="gpu_assign_thr=100 of the assigner in MMDetection (train_cfg: "
        "rpn.assigner.gpu_assign_thr); otherwise drop or split images with hundreds of boxes",
        why="The matrix of overlaps has a row for each true box and a column for each anchor: one "
        "crowded image makes it huge, whatever the batch size.",
        source="mmdet 2.0 to 3.3, core/bbox/assigners and models/task_modules/assigners; "
        "detectron2 0.6, structures/boxes.py; torchvision 0.23, ops/boxes.py",
        file=r"/assigners/|iou2d_calculator\.py$|/detectron2/structures/(?:rotated_)?boxes\.py$"
        r"|/torchvision/ops/boxes\.py$|/utils/tal\.py$",
    ),
    TracebackSign(
        name="box-assignment",
        doing="while a detector compared all boxes of an image with all anchors",
        grows_with=_INPUT,
        can_leave_gpu=True,
        title="Assign on the CPU where an image has many boxes",
        change="gpu_assign_thr=100 of the assigner in MMDetection; otherwise drop or split "
        "images with hundreds of boxes",
        why="The matrix of overlaps has a row for each true box and a column for each anchor: one "
        "crowded image makes it huge, whatever the batch size.",
        source="mmdet 2.0 to 3.3; detectron2 0.6; torchvision 0.23",
        functions=("bbox_overlaps", "pairwise_iou", "box_iou", "box_iou_rotated"),
        intro=r"inputs of <function pairwise_iou",
    ),
    TracebackSign(
        name="mask-pasting",
        doing="while predicted masks were pasted at the size of the whole image",
        grows_with=_INPUT,
        can_leave_gpu=True,
        is_training=False,
        title="Evaluate on smaller images, or paste the masks on the CPU",
        change="a lower INPUT.MAX_SIZE_TEST or TEST.DETECTIONS_PER_IMAGE in Detectron2; test_cfg "
        "max_per_img in MMDetection",
        why="Each detection becomes a mask of the original image's size.",
        source="detectron2 0.6, layers/mask_ops.py; mmdet 3.3, mask_heads/fcn_mask_head.py",
        functions=("paste_masks_in_image", "_do_paste_mask", "do_paste_mask"),
        intro=r"inputs of <function paste_masks",
    ),
    # ---- graphs ----
    TracebackSign(
        name="dense-adjacency",
        doing="while a graph was turned into a dense matrix of all pairs of nodes",
        grows_with=_INPUT,
        title="Keep the graph sparse, or sample it",
        change="edge_index or torch_sparse.SparseTensor instead of to_dense_adj(); "
        "NeighborLoader or ClusterLoader for parts of a large graph",
        why="A dense adjacency has the square of the number of nodes as entries.",
        source="torch_geometric 2.6, utils/_to_dense_adj.py",
        functions=("to_dense_adj", "to_dense_batch", "to_scipy_sparse_matrix"),
    ),
    TracebackSign(
        name="graph-messages",
        doing="while a graph network computed a message for each edge",
        grows_with=_INPUT,
        title="Cap the nodes and edges of a batch",
        change="DynamicBatchSampler(max_num=...) or NeighborLoader(num_neighbors=...); "
        "EdgeIndex or SparseTensor adjacency fuses message and aggregation",
        why="A message is made for every edge, so that the largest graphs decide, not the number "
        "of graphs.",
        source="torch_geometric 2.6, nn/conv",
        file=r"/torch_geometric/nn/",
    ),
    # ---- several GPUs in one process ----
    TracebackSign(
        name="data-parallel-gather",
        doing="while DataParallel gathered the outputs of all GPUs on the first",
        grows_with=_BATCH,
        title="Use DistributedDataParallel instead of DataParallel",
        change="torchrun --nproc_per_node=N train.py with DistributedDataParallel; or compute the "
        "loss inside forward(), so that a number is gathered instead of the outputs",
        why="DataParallel joins all outputs, and the loss, on one GPU: that one fills first.",
        source="torch 1.0 to 2.15, torch/nn/parallel",
        file=r"/torch/nn/parallel/(?:scatter_gather|_functions|comm)\.py$|/torch/cuda/comm\.py$",
        functions=("gather", "gather_map", "forward"),
        code=r"gather",
    ),
    # ---- optimizers ----
    TracebackSign(
        name="sharded-optimizer-setup",
        doing="while DeepSpeed made the state of the optimizer",
        grows_with=_MODEL,
        title="Put the optimizer's state on the host, or over more GPUs",
        change="zero_optimization: offload_optimizer: device: cpu, or ZeRO stage 2 or 3 over more "
        "GPUs",
        why="Weights in 32 bits and two moments are twelve bytes a parameter, divided by the "
        "number of GPUs.",
        source="deepspeed 0.17, runtime/zero",
        file=r"/deepspeed/",
        functions=(
            "initialize_optimizer_states",
            "_setup_for_real_optimizer",
            "_create_fp32_partitions",
            "_configure_zero_optimizer",
        ),
    ),
    TracebackSign(
        name="optimizer-state",
        doing="in a step of the optimizer, which makes its state in the first one",
        grows_with=_MODEL,
        title="Use an optimizer with less state",
        change="bitsandbytes.optim.AdamW8bit (optim='adamw_bnb_8bit' in Trainer), Adafactor, or "
        "foreach=False for its temporaries; ZeRO or FSDP over more GPUs; LoRA trains fewer "
        "weights",
        why="Adam keeps two numbers for each weight from the first step on. The batch's "
        "activations are freed by then: a smaller batch changes nothing.",
        source="torch 2.13, torch/optim",
        file=r"/torch/optim/(?:adam|adamw|_multi_tensor|sgd|rmsprop|adagrad|radam|nadam)\.py$",
    ),
    # ---- images ----
    TracebackSign(
        name="vae-decode",
        doing="while a VAE turned latents into pixels",
        grows_with=_INPUT,
        title="Decode in tiles",
        change="VAE Decode (Tiled) in ComfyUI, with smaller tiles where it is in use already, "
        "--cpu-vae or --lowvram; pipe.vae.enable_tiling() and enable_slicing() in Diffusers, "
        "enable_model_cpu_offload() so that the denoiser has left the GPU; fewer frames or pixels",
        why="The decoder works at full resolution: its peak grows with the pixels of the image or "
        "the frames of the video, after the denoiser has fit.",
        source="diffusers 0.35, models/autoencoders; ComfyUI 0.3, comfy/sd.py and nodes.py",
        file=r"/diffusers/models/autoencoders/|/comfy/ldm/.*(?:vae|autoencoder)",
    ),
    TracebackSign(
        name="vae-decode",
        doing="while a VAE turned latents into pixels",
        grows_with=_INPUT,
        title="Decode in tiles",
        change="VAE Decode (Tiled) in ComfyUI, with smaller tiles where it is in use already, "
        "--cpu-vae or --lowvram; pipe.vae.enable_tiling() and enable_slicing() in Diffusers, "
        "enable_model_cpu_offload() so that the denoiser has left the GPU; fewer frames or pixels",
        why="The decoder works at full resolution: its peak grows with the pixels of the image or "
        "the frames of the video, after the denoiser has fit.",
        source="diffusers 0.35, pipelines; ComfyUI 0.3, comfy/sd.py and nodes.py",
        intro=r"when regular VAE (?:de|en)coding",
        code=r"\bvae\.(?:decode|encode)\(|first_stage_model\.(?:decode|encode)\(|decode_tiled|vae_decode\(",
    ),
    TracebackSign(
        name="sampled-grid",
        doing="while features were sampled at points of a grid",
        grows_with=_INPUT,
        title="Sample in chunks of points",
        change="split the grid along its points and join the results; fewer rays, views or points "
        "a chunk (chunk_size, n_rays, num_points of the model); under autocast it runs in 32 bits",
        why="grid_sample makes channels x points values and keeps grid and input for the backward "
        "pass: the number of points decides.",
        source="torch 2.13, torch/nn/functional.py",
        functions=("grid_sample",),
    ),
    TracebackSign(
        name="sampled-grid",
        doing="while features were sampled at points of a grid",
        grows_with=_INPUT,
        title="Sample in chunks of points",
        change="split the grid along its points and join the results; fewer rays, views or points "
        "a chunk (chunk_size, n_rays, num_points of the model); under autocast it runs in 32 bits",
        why="grid_sample makes channels x points values and keeps grid and input for the backward "
        "pass: the number of points decides.",
        source="torch 2.13, torch/nn/functional.py",
        code=r"\bgrid_sampler?\(",
    ),
    TracebackSign(
        name="gaussian-rasterizer",
        doing="in the rasterizer of a Gaussian-splatting extension",
        grows_with=_INPUT,
        title="Rebuild the rasterizer for this GPU, then look at the number of Gaussians",
        change="pip install the extension again with TORCH_CUDA_ARCH_LIST set to this GPU's "
        "(python -c 'import torch; print(torch.cuda.get_device_capability())')",
        why="It sizes its buffers on the GPU: built for another architecture it reads garbage, and "
        "asks for tens of gibibytes.",
        source="diff-gaussian-rasterization, rasterize_points.cu",
        file=r"/diff_gaussian_rasterization/|/gsplat/",
    ),
    # ---- generating and attention ----
    TracebackSign(
        name="attention-scores",
        doing="while attention made the scores of all pairs of tokens",
        grows_with=_INPUT,
        title="Use attention that never makes the scores",
        change="attn_implementation='sdpa' or 'flash_attention_2' in Transformers; "
        "torch.nn.functional.scaled_dot_product_attention; a shorter prompt or max_length",
        why="The matrix has batch x heads x length x length entries: half the length is a quarter "
        "of it.",
        source="transformers 4.20 to 4.57, models/*/modeling_*.py",
        code=r"key_states\.transpose|softmax\(\s*(?:attn|attention)_(?:weights|scores)|attn_weights"
        r"\s?=|attention_scores\s?=|\bq\w*\s?@\s?k\w*\.transpose|baddbmm\(",
    ),
    TracebackSign(
        name="all-pairs",
        doing="while a matrix of all pairs was made",
        grows_with=_INPUT,
        title="Do not make all pairs at once",
        change="work through the rows in chunks; a sparse or fused form of the operation; a "
        "smaller graph, image or sequence",
        why="All pairs are the square of the number of items.",
        source="torch 2.13: cdist, pairwise products",
        code=r"\btorch\.cdist\(|\ba\s?@\s?b\.transpose|all_combinations|repeat_interleave\(",
    ),
    TracebackSign(
        name="growing-concatenation",
        doing="while a tensor was extended by torch.cat",
        grows_with=_INPUT,
        title="Collect on the CPU, and join once",
        change="parts.append(x.detach().cpu()) in the loop, torch.cat(parts) once after it",
        why="Extending a tensor copies all of it for each part: old and new are there together, "
        "and what it holds stays on the GPU.",
        source="torch 2.13: cat returns a new tensor",
        code=r"(?<![\w.])(?P<name>[A-Za-z_][\w.]*)\s*=.{0,80}\b(?:torch\.)?(?:cat|concat)\(\s*[\[(]\s*"
        r"(?P=name)\b",
    ),
    TracebackSign(
        name="loss-of-vocabulary",
        doing="while logits over the whole vocabulary were made or turned into a loss",
        grows_with=_BATCH,
        title="Compute the loss in chunks, or fused",
        change="use_liger_kernel=True in Transformers and TRL, "
        "liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss, or cut_cross_entropy; "
        "num_logits_to_keep where few positions are scored",
        why="Logits have batch x length x vocabulary entries, in 32 bits for the loss, and their "
        "gradient once more.",
        source="torch 2.13, torch/nn/functional.py; trl 0.21; transformers 4.57, loss",
        functions=(
            "cross_entropy",
            "log_softmax",
            "selective_log_softmax",
            "_compute_distributed_log_softmax",
            "ForCausalLMLoss",
            "fixed_cross_entropy",
            "entropy_from_logits",
            "get_batch_logps",
            "_get_per_token_logps",
        ),
    ),
    TracebackSign(
        name="loss-of-vocabulary",
        doing="while logits over the whole vocabulary were made or turned into a loss",
        grows_with=_BATCH,
        title="Compute the loss in chunks, or fused",
        change="use_liger_kernel=True in Transformers and TRL, "
        "liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss, or cut_cross_entropy; "
        "num_logits_to_keep where few positions are scored",
        why="Logits have batch x length x vocabulary entries, in 32 bits for the loss, and their "
        "gradient once more.",
        source="transformers 4.20 to 4.57, models/*/modeling_*.py",
        code=r"\blogits\.(?:float|exp|log_softmax|softmax)\(|log_softmax\(|\blm_head\(|cross_entropy\(",
    ),
    TracebackSign(
        name="generation",
        doing="while text was generated",
        grows_with=_INPUT,
        is_surrounding=True,
        is_training=False,
        title="Generate with a shorter context, or a smaller cache",
        change="a shorter prompt or max_new_tokens, fewer num_beams or num_return_sequences; "
        "cache_implementation='offloaded' or 'quantized'; no contrastive search (penalty_alpha), "
        "which keeps the hidden states of top_k candidates; weights in 8 or 4 bits",
        why="The cache of keys and values grows with every token of prompt and answer, for each "
        "beam and sequence.",
        source="transformers 4.20 to 4.57, generation/utils.py and cache_utils.py",
        file=r"/transformers/(?:generation/|cache_utils\.py$)",
    ),
    TracebackSign(
        name="evaluation",
        doing="while an evaluation ran",
        grows_with=_BATCH,
        is_surrounding=True,
        is_training=False,
        title="Evaluate with a smaller batch, and without gradients",
        change="a lower per_device_eval_batch_size (it is 8 by default, whatever training uses); "
        "torch.no_grad() or inference_mode() around a loop of your own; eval_accumulation_steps=1",
        why="Training fits, the evaluation does not: its batch is another one, and it keeps what "
        "it returns.",
        source="transformers 4.57, trainer.py; lightning 2.5, loops/evaluation_loop.py",
        functions=(
            "evaluation_loop",
            "prediction_loop",
            "prediction_step",
            "evaluate",
            "_evaluation_step",
            "validation_step",
            "_run_sanity_check",
            "validate",
        ),
    ),
)

_PLACES: Final = tuple(sign for sign in SIGNS if not sign.is_surrounding)
_SURROUNDINGS: Final = tuple(sign for sign in SIGNS if sign.is_surrounding)
