"""How each framework spells a change that saves memory.

This one table serves the advice for recordings, messages and rehearsals. A framework is recognized
by its own files in stacks. Option names are those of the version in the comment above a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Change(StrEnum):
    """A change that frameworks have a name for."""

    BATCH = "batch"
    ACCUMULATE = "accumulate"
    EVALUATION_BATCH = "evaluation-batch"
    CHECKPOINT = "checkpoint"
    BF16 = "bf16"
    FUSED = "fused"
    STATE_8BIT = "state-8bit"
    OFFLOAD_STATE = "offload-state"
    LOSS = "loss"
    GATHER = "gather"
    ATTENTION = "attention"
    WEIGHTS = "weights"
    COPIES = "copies"
    HOST_MEMORY = "host-memory"
    FSDP = "fsdp"
    ZERO = "zero"
    TENSOR_PARALLEL = "tensor-parallel"


HAVE_FUSED: Final = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of ``torch.optim`` with ``fused=True`` (torch 2.13); their files have these names."""

HAVE_FOREACH: Final = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
)
"""Optimizers with ``foreach``, which makes lists of temporaries, but without ``fused`` (2.13)."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework and how it spells changes.

    Attributes:
        name: name as people write it.
        key: name in a rehearsal's traits, "" if a rehearsal does not recognize the framework.
        files: pattern to search for in the paths of frames, with ``/`` between their parts.
        logs: pattern to search for in the lines of a log and in what people write: the framework's
            name, lines and options.
        words: the words for each change, and for calls that only this framework makes or makes in
            its own way, by the names of their signs. In ``ACCUMULATE``, ``{n}`` micro-batches of
            size ``{batch}`` make a step; in ``TENSOR_PARALLEL``, ``{n}`` is the number of GPUs.
    """

    name: str
    files: str
    words: Mapping[str, str]
    key: str = ""
    logs: str = ""


_OF_TRL: Final = r"\b(?:SFT|DPO|GRPO|KTO|ORPO)(?:Trainer|Config)\b"
_ZERO_3: Final = (
    '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto", '
    '"gradient_accumulation_steps": "auto"}'
)

FRAMEWORKS: Final[tuple[Framework, ...]] = (
    # vllm 0.8 to 0.25, engine/arg_utils.py, config/cache.py and config/scheduler.py
    Framework(
        "vLLM",
        r"/vllm/(?:engine|v1|worker|executor|model_executor|entrypoints|attention|lora)/",
        {
            Change.BATCH: "lower --gpu-memory-utilization (0.92 by default in 0.25, 0.9 in "
            "earlier ones; vllm_gpu_memory_utilization in TRL and ms-swift) or "
            "--kv-cache-memory-bytes; lower --max-num-batched-tokens, --max-num-seqs or "
            "--max-model-len",
            Change.WEIGHTS: "spread the weights over more GPUs (--tensor-parallel-size), use an "
            "AWQ, GPTQ or FP8 checkpoint, or move a part to the CPU (--cpu-offload-gb)",
            "graph-capture": "lower --gpu-memory-utilization or --max-num-seqs; --enforce-eager "
            "does without graphs",
        },
        logs=r"\bVllmWorker|\bRayWorkerWrapper|\bEngineCore|\bWorker(?:_TP\d| pid=)"
        r"|\[core(?:_client)?\.py:\d|\b(?i:vllm)\b",
    ),
    # sglang 0.4 to 0.5.20, srt/server_args.py and docs/advanced_features/server_arguments.md
    Framework(
        "SGLang",
        r"/sglang/(?:srt|lang)/",
        {
            Change.BATCH: "lower --mem-fraction-static, which leaves less to the KV cache; for "
            "long prompts lower --chunked-prefill-size, and while decoding lower "
            "--max-running-requests",
            Change.WEIGHTS: "spread the weights over more GPUs (--tp), use an AWQ, GPTQ or FP8 "
            "checkpoint, or move a part to the CPU (--cpu-offload-gb)",
            "graph-capture": "lower --mem-fraction-static or --cuda-graph-max-bs "
            "(--cuda-graph-max-bs-decode since 0.5.20); --disable-cuda-graph does without"
            " graphs",
        },
        logs=r"\bsglang[.:]|\bimport sglang|mem[-_]fraction[-_]static|[Cc]apture cuda graph failed",
    ),
    # text-generation-inference 2.4, launcher/src/main.rs
    Framework(
        "TGI",
        r"/text_generation(?:_server)?/",
        {
            Change.BATCH: "lower --max-batch-prefill-tokens, --max-input-tokens or "
            "--max-batch-total-tokens; set --cuda-memory-fraction to 0.9 or less",
            Change.WEIGHTS: "spread the weights over more GPUs (--num-shard), or quantize them "
            "(--quantize)",
        },
        logs=r"text_generation(?:_|\.errors)|text-generation-launcher",
    ),
    # ComfyUI 0.3, comfy/cli_args.py and nodes.py
    Framework(
        "ComfyUI",
        r"/comfy/(?:\w+\.py|ldm/|sd\w*/|k_diffusion/)|/ComfyUI/",
        {
            Change.BATCH: "use a smaller image, fewer frames or a smaller batch_size in the latent "
            "node; use VAE Decode (Tiled) if decoding fails",
            Change.ATTENTION: "start it with --use-pytorch-cross-attention or "
            "--use-quad-cross-attention",
            Change.WEIGHTS: "start it with --lowvram or --novram, or use an fp8 or GGUF checkpoint",
            Change.HOST_MEMORY: "start it with --cache-none, which keeps no results between runs; "
            "use smaller (fp8 or GGUF) checkpoints and fewer models in one workflow; close other "
            "programs, and enlarge the page file on Windows; if it grows from run to run, turn "
            "off custom nodes one by one",
            "vae-decode": "use VAE Decode (Tiled), or smaller tiles if you use it already; start "
            "it with --cpu-vae; use a smaller image or fewer frames",
            "fused-attention-call": "use a smaller image or fewer frames; start it with "
            "--use-sage-attention or --use-flash-attention if they are installed",
        },
        # the part of cudaMallocAsync's message that ComfyUI shows
        logs=r"\bComfyUI\b|Allocation on device\s*$",
    ),
    # AUTOMATIC1111 1.10, modules/cmd_args.py
    Framework(
        "Stable Diffusion web UI",
        r"/stable-diffusion-webui[\w-]*/|/modules/(?:sd_\w+|processing|txt2img|img2img|call_queue)\.py$",
        {
            Change.BATCH: "use a smaller width and height, a batch size of 1, or a lower upscale "
            "in Hires. fix",
            Change.ATTENTION: "start it with --opt-sdp-attention (PyTorch 2), --xformers or "
            "--opt-sub-quad-attention",
            Change.WEIGHTS: "start it with --medvram, or with --lowvram, which keeps even less on "
            "the GPU; in Forge lower GPU Weights and use a model in fp8 or nf4; Forge and Fooocus "
            "also have --always-low-vram",
        },
        logs=r"use lower resolution|Torch active/reserved:|\bA: [\d.]+ GB, R: [\d.]+ GB"
        r"|\bwebui-user\.|(?i:\bhires\.? ?fix\b|stable.diffusion.web.?ui)|\bA1111\b|\bFooocus\b"
        r"|\[Memory Management\]",
    ),
    # verl 0.4 to 0.6, trainer/config and docs/perf/perf_tuning.rst
    Framework(
        "verl",
        r"/verl/(?:workers|trainer|utils|models|single_controller)/",
        {
            Change.BATCH: "lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu and "
            "rollout.log_prob_micro_batch_size_per_gpu, or set use_dynamic_bsz=True and lower "
            "ppo_max_token_len_per_gpu; lower rollout.gpu_memory_utilization",
            Change.LOSS: "actor_rollout_ref.actor.entropy_from_logits_with_chunking=True, "
            "actor_rollout_ref.model.use_fused_kernels=True, and a lower "
            "log_prob_micro_batch_size_per_gpu",
            Change.CHECKPOINT: "actor_rollout_ref.model.enable_gradient_checkpointing=True",
            Change.WEIGHTS: "actor_rollout_ref.actor.fsdp_config.param_offload=True and "
            "optimizer_offload=True",
        },
        logs=r"\bactor_rollout_|\bverl\b",
    ),
    # trl 1.16, trainer/*_config.py
    Framework(
        "TRL",
        r"/trl/(?:trainer|models|extras)/",
        {
            Change.BATCH: "lower per_device_train_batch_size (and raise "
            "gradient_accumulation_steps), or lower max_length; in GRPO lower "
            "max_completion_length or num_generations",
            Change.LOSS: 'SFTConfig(loss_type="chunked_nll")',
            Change.COPIES: "a LoRA peft_config, whose base model is the reference, or "
            "precompute_ref_log_probs=True in DPOConfig",
        },
        logs=_OF_TRL,
    ),
    # transformers 4.57, training_args.py, modeling_utils.py and integrations/deepspeed.py
    Framework(
        "Trainer",
        r"/transformers/(?:trainer\w*|training_args)\.py$|/llamafactory/|/trl/trainer/",
        {
            Change.BATCH: "lower per_device_train_batch_size, and raise "
            "gradient_accumulation_steps by as much",
            Change.ACCUMULATE: "TrainingArguments(per_device_train_batch_size={batch}, "
            "gradient_accumulation_steps={n})",
            Change.EVALUATION_BATCH: "lower per_device_eval_batch_size (8 by default, whatever "
            "training uses), and set eval_accumulation_steps=1; gradients are off already",
            Change.CHECKPOINT: "TrainingArguments(gradient_checkpointing=True)",
            Change.BF16: "TrainingArguments(bf16=True)",
            Change.FUSED: 'TrainingArguments(optim="adamw_torch_fused")',
            Change.STATE_8BIT: 'TrainingArguments(optim="adamw_8bit")',
            Change.LOSS: "TrainingArguments(use_liger_kernel=True)",
            Change.GATHER: "TrainingArguments(eval_accumulation_steps=1), and a "
            "preprocess_logits_for_metrics that returns logits.argmax(-1); or "
            "prediction_loss_only=True",
            Change.ATTENTION: 'from_pretrained(..., attn_implementation="sdpa")',
            Change.FSDP: 'TrainingArguments(fsdp="full_shard auto_wrap")',
            Change.ZERO: f"TrainingArguments(deepspeed={_ZERO_3})",
            Change.TENSOR_PARALLEL: 'from_pretrained(..., tp_plan="auto", tp_size={n}) and '
            "TrainingArguments(parallelism_config=ParallelismConfig(tp_size={n}))",
        },
        "trainer",
        r"\bTrainingArguments\(|per_device_train_batch_size|(?i:llama-?factory)|" + _OF_TRL,
    ),
    # lightning 2.6, pytorch/trainer/trainer.py and pytorch/strategies
    Framework(
        "Lightning",
        r"/(?:pytorch_lightning|lightning/(?:pytorch|fabric))/",
        {
            Change.BATCH: "lower batch_size in the DataLoader, and raise "
            "Trainer(accumulate_grad_batches=...) by as much",
            Change.ACCUMULATE: "Trainer(accumulate_grad_batches={n}), with batches of {batch}",
            Change.EVALUATION_BATCH: "lower batch_size in val_dataloader(); keep and return "
            "nothing on the GPU in validation_step(); gradients are off already",
            "loaded-checkpoint": 'load_from_checkpoint(path, map_location="cpu"), and ckpt_path= '
            "of trainer.fit() to resume, which puts each rank's weights on its own GPU",
            Change.BF16: 'Trainer(precision="bf16-mixed")',
            Change.OFFLOAD_STATE: 'Trainer(strategy="deepspeed_stage_2_offload")',
            Change.FSDP: 'Trainer(strategy="fsdp")',
            Change.ZERO: 'Trainer(strategy="deepspeed_stage_3"), or _2 or _1',
            Change.TENSOR_PARALLEL: "Trainer(strategy=ModelParallelStrategy("
            "tensor_parallel_size={n})), and parallelize_module in configure_model()",
        },
        "lightning",
        r"\bpl\.Trainer\(|\b(?:pytorch_lightning|LightningModule)\b"
        r"|PyTorch Lightning|accumulate_grad_batches|\bload_from_checkpoint\(",
    ),
    # megatron-lm core_r0.10 to 0.14, megatron/training/arguments.py
    Framework(
        "Megatron",
        r"/megatron/(?:core|training|model|legacy|\w+\.py)",
        {
            Change.BATCH: "lower --micro-batch-size or --seq-length",
            Change.CHECKPOINT: "--recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            Change.WEIGHTS: "raise --tensor-model-parallel-size or --pipeline-model-parallel-size",
        },
        logs=r"\bpretrain_gpt\d?\.py|\bMegatron-LM\b",
    ),
    # deepspeed 0.19.6, runtime/constants.py and runtime/zero/config.py
    Framework(
        "DeepSpeed",
        r"/deepspeed/(?:runtime|ops|utils|inference|module_inject)/",
        {
            Change.BATCH: 'lower "train_micro_batch_size_per_gpu", and raise '
            '"gradient_accumulation_steps"',
            Change.OFFLOAD_STATE: '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
            Change.WEIGHTS: '"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}',
            Change.HOST_MEMORY: "offload less to the host, where optimizer state takes at least 12 "
            'bytes a parameter in all: "offload_param" out first, then "offload_optimizer", or '
            'both to "device": "nvme" with an "nvme_path" (ZeRO 3); "pin_memory": false; '
            "more memory",
            "gathered-save": "stage3_gather_16bit_weights_on_model_save: false, then the "
            "zero_to_fp32.py that lies beside the checkpoint",
            "loading-weights": '"zero_optimization": {"stage": 3}, and the model built inside '
            "deepspeed.zero.Init(config_dict_or_path=...), or with an "
            "HfDeepSpeedConfig(config) alive before from_pretrained(): otherwise each "
            "process builds the whole of it",
            "optimizer-state": '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, so '
            "that the step runs on the CPU; a higher ZeRO stage or more GPUs; a lower "
            "sub_group_size under ZeRO 3",
        },
        logs=r"\[launch\.py:\d+:sigkill_handler|DeepSpeed(?:ZeRoOffload|Strategy)"
        r"|see_memory_usage\]|--deepspeed\b|(?i:\bzero[-_ ]?(?:[123]\b|stage))",
    ),
    # accelerate 1.15, accelerator.py, parallelism_config.py and utils/dataclasses.py
    Framework(
        "accelerate",
        r"/accelerate/(?:accelerator|optimizer|scheduler|data_loader)\.py$",
        {
            Change.BATCH: "lower batch_size in the DataLoader, and raise "
            "Accelerator(gradient_accumulation_steps=...) by as much",
            Change.ACCUMULATE: "Accelerator(gradient_accumulation_steps={n}), with batches of "
            "{batch}",
            Change.BF16: 'Accelerator(mixed_precision="bf16")',
            Change.FSDP: "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, "
            'auto_wrap_policy="transformer_based_wrap"))',
            Change.ZERO: "Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))",
            Change.TENSOR_PARALLEL: 'from_pretrained(..., tp_plan="auto", tp_size={n}) and '
            "Accelerator(parallelism_config=ParallelismConfig(tp_size={n}))",
        },
        "accelerate",
    ),
    # torch 2.13, distributed/fsdp
    Framework(
        "FSDP",
        r"/torch/distributed/fsdp/",
        {
            Change.OFFLOAD_STATE: "fully_shard(..., offload_policy=CPUOffloadPolicy()), or "
            "FSDP(..., cpu_offload=CPUOffload(offload_params=True))",
        },
    ),
    # torch_geometric 2.6, loader
    Framework(
        "PyG",
        r"/torch_geometric/",
        {
            Change.BATCH: 'DynamicBatchSampler(dataset, max_num=..., mode="edge"), which limits a '
            "batch by its edges; for one large graph NeighborLoader with fewer num_neighbors or a "
            "smaller batch_size",
        },
        logs=r"\b(?:torch|pytorch)_geometric\b",
    ),
    # ultralytics 8.3, cfg/default.yaml and utils/tal.py
    Framework(
        "Ultralytics",
        r"/ultralytics/(?:engine|models|nn|utils|data)/",
        {
            Change.BATCH: "lower batch= or imgsz=, or set batch=0.6, which takes that share of "
            "the GPU",
            Change.EVALUATION_BATCH: "lower batch=, imgsz= or max_det, and set "
            "retina_masks=False; use stream=True in predict(), which otherwise keeps the results "
            "of all images",
            "box-assignment": "lower batch=, since all images of a batch are padded to the one "
            "with the most objects; cut crowded images into tiles; since 8.3.30 it falls back to "
            "the CPU there, which is slow",
        },
        logs=r"(?i:\bultralytics\b|\byolo ?v?(?:5|8|9|1[0-2])[a-z]?\b)|\bimgsz\b"
        r"|\bvideo \d{1,6}/\d{1,6} \(frame \d",
    ),
    # realesrgan 0.3, inference_realesrgan.py; SwinIR, main_test_swinir.py
    Framework(
        "Real-ESRGAN",
        r"/(?:realesrgan|gfpgan)/",
        {
            Change.BATCH: "use --tile 256 or less (0, the default, takes the image as a whole), "
            "or a smaller image",
        },
        logs=r"(?i:real.?esrgan|\bswinir\b|\bgfpgan\b|\bgpen\b)",
    ),
    # diffusers 0.39, pipelines/pipeline_utils.py and models/modeling_utils.py
    Framework(
        "Diffusers",
        r"/diffusers/(?:pipelines|models|schedulers|loaders)/",
        {
            Change.CHECKPOINT: "call unet.enable_gradient_checkpointing(), or the transformer's; "
            "its example scripts have --gradient_checkpointing, and --use_8bit_adam for the state",
            Change.ATTENTION: "call pipe.enable_xformers_memory_efficient_attention(), or use "
            "PyTorch 2, where fused attention is the default; lower the resolution",
            "vae-decode": "call pipe.vae.enable_tiling() and enable_slicing(), under "
            "torch.no_grad() in code of your own; call enable_model_cpu_offload(), so that the "
            "denoiser has left the GPU by then",
        },
        logs=r"\b(?:from|import) diffusers\b|Pipeline\.from_pretrained\("
        r"|\btrain_(?:dreambooth|text_to_image|controlnet|instruct_pix2pix)\w*\.py",
    ),
    # diffusers 0.39, pipelines/pipeline_utils.py
    Framework(
        "Diffusers",  # for pipelines, which a program that trains Diffusers models does not have
        r"/diffusers/pipelines/",
        {
            Change.BATCH: "use a smaller height and width, or num_images_per_prompt=1; call "
            "pipe.vae.enable_tiling() if decoding fails",
            Change.WEIGHTS: "call pipe.enable_model_cpu_offload(); "
            "pipe.enable_sequential_cpu_offload() keeps even less on the GPU",
        },
        logs=r"\b(?:from|import) diffusers\b|Pipeline\.from_pretrained\(",
    ),
    # timm 1.0, models/vision_transformer.py and others
    Framework(
        "timm",
        r"/timm/(?:models|layers)/",
        {Change.CHECKPOINT: "model.set_grad_checkpointing()"},
    ),
    # gaussian-splatting of 2023 to 2025, arguments/__init__.py and scene/cameras.py
    Framework(
        "Gaussian splatting",
        r"/gaussian[-_](?:splatting|renderer)/",
        {
            Change.BATCH: "keep the images on the CPU (--data_device cpu), lower their resolution "
            "(-r 2), or use fewer of them; make fewer Gaussians (raise --densify_grad_threshold, "
            "lower --densify_until_iter)",
        },
        logs=r"(?i:gaussian[- _]splatting)",
    ),
    # detectron2 0.6, config/defaults.py
    Framework(
        "Detectron2",
        r"/detectron2/",
        {
            Change.BATCH: "lower SOLVER.IMS_PER_BATCH (and SOLVER.BASE_LR by as much), or "
            "INPUT.MIN_SIZE_TRAIN and MAX_SIZE_TRAIN",
            Change.EVALUATION_BATCH: "lower INPUT.MIN_SIZE_TEST and MAX_SIZE_TEST",
        },
        logs=r"\bIMS_PER_BATCH\b|(?i:\bdetectron2\b)",
    ),
    # mmengine 0.10, runner/runner.py; mmdet 2 and 3, mmseg 0 and 1, configs/_base_
    Framework(
        "OpenMMLab",
        r"/mm(?:engine|cv|det|seg|pose|rotate|action|pretrain)\w*/",
        {
            Change.BATCH: "lower batch_size in train_dataloader (samples_per_gpu in data before "
            "version 3), or scale or crop_size in the pipeline",
        },
        logs=r"\bsamples_per_gpu\b|\bmm(?:det|seg|detection|segmentation|rotate|engine)\b",
    ),
    # fairseq 0.12, options.py and dataclass/configs.py
    Framework(
        "fairseq",
        r"/fairseq(?:_cli)?/",
        {Change.BATCH: "lower --max-tokens or --batch-size, and raise --update-freq"},
        logs=r"\bfairseq\b|\| WARNING: ran out of memory",
    ),
    # nemo_toolkit 1.20 to 2.4, collections/asr/models and docs/asr
    Framework(
        "NeMo",
        r"/nemo/collections/",
        {
            Change.BATCH: "lower batch_size or max_duration in train_ds",
            Change.EVALUATION_BATCH: "cut recordings into pieces of a few minutes; call "
            "model.change_attention_model('rel_pos_local_attn', [128, 128]) and "
            "change_subsampling_conv_chunking_factor(1); use batch_size=1 in transcribe()",
        },
        logs=r"\bnemo_asr\b|\bNeMo/|nemo\.collections",
    ),
    # espnet 202301 to 202412, espnet2/tasks/abs_task.py
    Framework(
        "ESPnet",
        r"/espnet2?/",
        {
            Change.BATCH: "lower batch_bins or batch_size, and raise accum_grad; keep utterances "
            "to 20 to 30 s (--max_wav_duration)",
            Change.EVALUATION_BATCH: "keep recordings to 20 to 30 s, and lower beam_size",
        },
        logs=r"(?i:\bespnet)",
    ),
    # nnunetv2 2.2 to 2.6, inference/predict_from_raw_data.py and experiment_planning
    Framework(
        "nnU-Net",
        r"/nnunet(?:v2)?/",
        {
            Change.BATCH: "make plans for a smaller GPU: run nnUNetv2_plan_experiment with a "
            "lower -gpu_memory_target and a new -overwrite_plans_name",
            Change.EVALUATION_BATCH: "set perform_everything_on_device=False (--not_on_device of "
            "nnUNetv2_predict), which gathers the windows on the CPU; run nothing else on the GPU",
        },
        logs=r"\bnnUNet",
    ),
    # fair-esm 2.0, scripts/fold.py and README.md
    Framework(
        "ESMFold",
        r"/esm/esmfold/",
        {
            Change.BATCH: "use --chunk-size 64 or less (model.set_chunk_size), a lower "
            "--max-tokens-per-batch, --cpu-offload, or shorter chains: memory grows with the "
            "square of the length or faster",
        },
        logs=r"(?i:esm-?fold)",
    ),
    # segment-anything 1.0 and sam2 1.1, automatic_mask_generator.py and build_sam.py
    Framework(
        "Segment Anything",
        r"/(?:segment_anything|sam2)/",
        {
            Change.BATCH: "use points_per_batch=16 (64 by default) in the mask generator, a "
            "smaller image, or vit_b instead of vit_h",
        },
        logs=r"\bSam\w{0,40}Mask\w{0,40}Generator\b|(?i:segment.anything)",
    ),
    # unsloth 2026, save.py
    Framework(
        "Unsloth",
        r"/unsloth(?:_zoo)?/|/unsloth_compiled_cache/",
        {
            "merged-save": "lower maximum_memory_usage (0.9 by default; try 0.5) in "
            "save_pretrained_merged() or save_pretrained_gguf(); save_method='lora' saves the "
            "adapter alone, and another process can merge it later",
        },
    ),
    # peft 0.21, utils/other.py
    Framework(
        "PEFT",
        r"/peft/(?:tuners|utils|peft_model|mapping)",
        {
            Change.WEIGHTS: "load the base model in 4 bits "
            "(BitsAndBytesConfig(load_in_4bit=True)) and call "
            "prepare_model_for_kbit_training(model)",
        },
    ),
    # transformers 4.57, modeling_utils.py
    Framework(
        "Transformers",
        r"/transformers/(?:models|generation|integrations|modeling_\w+|pipelines)"
        r"|/accelerate/(?:utils/modeling|big_modeling)\.py$",
        {
            Change.CHECKPOINT: "model.gradient_checkpointing_enable()",
            Change.ATTENTION: 'from_pretrained(..., attn_implementation="sdpa")',
            Change.WEIGHTS: "from_pretrained(..., dtype=torch.bfloat16) (torch_dtype= before "
            "4.56), or 4 bits (quantization_config=BitsAndBytesConfig(load_in_4bit=True)); "
            "device_map='auto' spreads it over several GPUs and the CPU, with max_memory for each",
        },
        logs=r"\bdevice_map\b|\bAutoModel\w{0,40}\b",
    ),
)
"""A framework comes first if its words also hold for the ones below: TRL runs Trainer's loop."""


SERVERS: Final = ("vLLM", "SGLang", "TGI")
"""Frameworks that set memory aside themselves, by their own options."""

RUN_ONLY: Final = (
    *SERVERS,
    "ComfyUI",
    "Stable Diffusion web UI",
    "Segment Anything",
    "Real-ESRGAN",
    "ESMFold",
)
"""Frameworks that only run trained models: without another framework, nothing keeps activations."""


_ENVIRONMENT: Final = re.compile(r"\S{0,200}/\.?v?env/lib\w{0,5}/python[\d.]{1,5}(?=/)")
"""Where a virtual environment lies, which may be in the folder of a program that does not run."""


def frameworks_in(paths: Iterable[str], said: str = "") -> tuple[Framework, ...]:
    """Return the frameworks seen in paths of frames or in a log, in the order of the table.

    If there are several servers, only the one that called the others counts. ``paths`` are
    outermost first.
    """
    said = _ENVIRONMENT.sub("", said)
    distinct = dict.fromkeys(_ENVIRONMENT.sub("", path[:1000].replace("\\", "/")) for path in paths)
    found = [
        f
        for f in FRAMEWORKS
        if any(re.search(f.files, path) for path in distinct)
        or (f.logs and re.search(f.logs, said))
    ]
    servers = [f for f in found if f.name in SERVERS]
    for path in distinct if len(servers) > 1 else ():
        runs = next((f for f in servers if re.search(f.files, path)), None)
        if runs is not None:  # SGLang calls vLLM's layers; its own frames come first
            return tuple(f for f in found if f is runs or f not in servers)
    return tuple(found)


def words_for(frameworks: Iterable[Framework], *changes: str | None) -> tuple[str, str] | None:
    """Return (framework, words) for the first change that a framework has, or None."""
    known = tuple(frameworks)
    found = ((f.name, f.words[c]) for c in changes if c for f in known if c in f.words)
    return next(found, None)


def words_of(key: str, change: Change) -> str:
    """Return the words of a framework by the key that a rehearsal found, or ""."""
    return next((f.words.get(change, "") for f in FRAMEWORKS if key and f.key == key), "")
