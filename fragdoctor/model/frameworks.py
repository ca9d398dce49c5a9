"""How each framework spells a change that saves memory.

This one table serves the advice for recordings, messages and rehearsals. A framework is recognized
by its own files in stacks. Option names are those of the version in the comment above a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
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
    BF16_PARAMETERS = "bf16-parameters"
    FUSED = "fused"
    STATE_8BIT = "state-8bit"
    OFFLOAD_STATE = "offload-state"
    LOSS = "loss"
    GATHER = "gather"
    ATTENTION = "attention"
    WEIGHTS = "weights"
    SHARE = "share"
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
    words: Mapping[str, str]
    source: str
    files: str
    key: str = ""
    logs: str = ""

    def is_named(self, said: str) -> bool:
        """Return whether a text names it; a Latin word ends where another script begins."""
        return bool(said and self.logs) and re.search(self.logs, said, re.ASCII) is not None


PATTERNS: Final = ("files", "logs")
"""Keys of a table whose texts are regular expressions."""


def read_table(table: str) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield the entries of a table, each with the lines of its texts by their keys.

    A name stands at the left edge, a key is indented by two blanks, and further lines by four.
    """
    texts: dict[str, list[str]] = {}
    name = key = ""
    for line in [*table.strip().split("\n"), ""]:
        if line.startswith("    "):
            texts[key].append(line[4:])
        elif line.startswith("  "):
            key, _, text = line[2:].partition(": ")
            texts[key] = [text]
        else:
            if name:
                yield name, texts
            name, texts = line, {}


_TABLE: Final = r"""
vLLM
  source: vllm 0.8 to 0.33, engine/arg_utils.py, config/cache.py and config/scheduler.py
  files: /vllm/(?:engine|v1|worker|executor|model_executor|entrypoints|attention|lora)/
  logs: \bVllmWorker|\bRayWorkerWrapper|\bEngineCore|\bWorker(?:_TP\d| pid=)
    |\b(?i:vllm)\b|VLLM_LOG
  batch: lower --gpu-memory-utilization (0.92 by default since 0.25, 0.9 before;
    vllm_gpu_memory_utilization in TRL and ms-swift) or --kv-cache-memory-bytes; lower
    --max-num-batched-tokens, --max-num-seqs or --max-model-len
  weights: use an AWQ, GPTQ or FP8 checkpoint; spread the weights over more GPUs
    (--tensor-parallel-size); move a part to the CPU (--cpu-offload-gb)
  share: --gpu-memory-utilization
  several-models: give each server a share, all together below 0.9
    (--gpu-memory-utilization); an engine that ran before in the same Python process keeps its
    memory: start each in a process of its own, or call llm.sleep(level=2) first
  graph-capture: lower --gpu-memory-utilization or --max-num-seqs; --enforce-eager does without
    graphs
  server-start: lower --max-num-seqs, --max-num-batched-tokens and --max-model-len, and
    --limit-mm-per-prompt for images; if the weights alone are too much, use
    --tensor-parallel-size over more GPUs, or an AWQ, GPTQ or FP8 checkpoint
SGLang
  source: sglang 0.4 to 0.5.23, srt/server_args.py and docs/advanced_features/server_arguments.md
  files: /sglang/(?:srt|lang)/
  logs: \b(?i:sglang)\b|mem[-_]fraction[-_]static
    |[Cc]apture cuda graph failed
  batch: lower --mem-fraction-static, which leaves less to the KV cache; for long prompts lower
    --chunked-prefill-size, and while decoding lower --max-running-requests
  weights: use an AWQ, GPTQ or FP8 checkpoint; spread the weights over more GPUs (--tp); move a part
    to the CPU (--cpu-offload-gb)
  share: --mem-fraction-static
  graph-capture: lower --mem-fraction-static or --cuda-graph-max-bs (--cuda-graph-max-bs-decode
    since 0.5.20); --disable-cuda-graph (--cuda-graph-backend-decode=disabled in 0.5.23) does
    without graphs
TGI
  source: text-generation-inference 2.4, launcher/src/main.rs
  files: /text_generation(?:_server)?/
  logs: text_generation(?:_|\.errors)|text-generation-launcher|\bTGI\b
    |\bmax[-_]batch[-_](?:prefill|total)[-_]tokens
  batch: lower --max-batch-prefill-tokens, --max-input-tokens or --max-batch-total-tokens; set
    --cuda-memory-fraction to 0.9 or less
  share: --cuda-memory-fraction
  weights: spread the weights over more GPUs (--num-shard), or quantize them (--quantize)
  server-start: lower --max-batch-prefill-tokens, with --max-input-tokens no larger; if the weights
    alone are too much, use --num-shard over more GPUs, or --quantize
ComfyUI
  source: ComfyUI 0.3, comfy/cli_args.py, nodes.py and model_management.py
  files: /comfy/(?:\w+\.py|ldm/|sd\w*/|k_diffusion/)|/ComfyUI/
  logs: (?i:\bcomfyui\b)|Allocation on device\s*$|Set vram state to: |Requested to load [A-Z]\w+
  batch: use a smaller image, fewer frames or a smaller batch_size in the latent node
  attention: start it with --use-pytorch-cross-attention or --use-quad-cross-attention
  weights: start it with --lowvram or --novram, or use an fp8 or GGUF checkpoint
  host-memory: start it with --cache-none, which keeps no results between runs; use smaller (fp8 or
    GGUF) checkpoints and fewer models in one workflow; close other programs, and enlarge the page
    file on Windows; if it grows from run to run, turn off custom nodes one by one
  vae-decode: use VAE Decode (Tiled), or make its tiles smaller; start it with
    --cpu-vae; use a smaller image or fewer frames
Stable Diffusion web UI
  source: AUTOMATIC1111 1.10, modules/cmd_args.py
  files: /stable-diffusion-webui[\w-]*/|/modules/(?:sd_\w+|processing|txt2img|img2img
    |call_queue)\.py$
  logs: use lower resolution|Torch active/reserved:|\bA: [\d.]+ GB, R: [\d.]+ GB|\bwebui-user\.
    |(?i:\bhi(?:gh)?[ -]?res\.? ?fix\b|stable.diffusion.web.?ui|\bsd.?web.?ui\b)|\bA1111\b
    |\bFooocus\b
    |\[Memory Management\]|\[GPU Setting\]
  batch: use a smaller width and height, a batch size of 1, or a lower upscale in Hires. fix
  attention: start it with --opt-sdp-attention (PyTorch 2), --xformers or --opt-sub-quad-attention
  weights: start it with --medvram, or with --lowvram, which keeps one part at a time on the GPU; in
    Forge lower GPU Weights and use a model in fp8 or nf4; Forge and Fooocus also have
    --always-low-vram
text-generation-webui
  source: text-generation-webui 1.0 to 3.0, modules/shared.py
  files: /text-generation-webui[\w-]*/|/textgen[\w-]*/
  logs: (?i:\btext-generation-webui\b|\boobabooga|\btextgen-webui)
  batch: put fewer layers on the GPU (--n-gpu-layers for GGUF, --pre_layer for GPTQ); use a shorter
    context (truncation length, --ctx-size, --max_seq_len) and max_new_tokens
  weights: --load-in-4bit, or a quantized model (GGUF, EXL2, GPTQ); a lower --gpu-memory or
    --pre_layer (GPTQ), which keeps the rest on the CPU, or fewer --n-gpu-layers (GGUF)
verl
  source: verl 0.4 to 0.6, trainer/config and docs/perf/perf_tuning.rst
  files: /verl/(?:workers|trainer|utils|models|single_controller)/
  logs: \bactor_rollout_|\bverl\b
  batch: lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu and
    rollout.log_prob_micro_batch_size_per_gpu, or set use_dynamic_bsz=True and lower
    ppo_max_token_len_per_gpu; lower rollout.gpu_memory_utilization
  loss: actor_rollout_ref.actor.entropy_from_logits_with_chunking=True,
    actor_rollout_ref.model.use_fused_kernels=True, and a lower log_prob_micro_batch_size_per_gpu
  checkpoint: actor_rollout_ref.model.enable_gradient_checkpointing=True
  share: actor_rollout_ref.rollout.gpu_memory_utilization
  weights: actor_rollout_ref.actor.fsdp_config.param_offload=True and optimizer_offload=True
TRL
  source: trl 1.16, trainer/*_config.py
  files: /trl/(?:trainer|models|extras)/
  logs: \b(?i:(?:sft|dpo|grpo|kto|orpo)_?(?:trainer|config))(?:\b|_)|\b(?i:trl)\b
  batch: lower per_device_train_batch_size (and raise gradient_accumulation_steps), or lower
    max_length; in GRPO lower max_completion_length or num_generations
  share: vllm_gpu_memory_utilization
  loss: SFTConfig(loss_type="chunked_nll"), or use_liger_kernel=True in DPOConfig, GRPOConfig and
    KTOConfig
  copies: a LoRA peft_config, whose base model is the reference, or precompute_ref_log_probs=True in
    DPOConfig
Trainer
  source: transformers 4.57, training_args.py, modeling_utils.py and integrations/deepspeed.py
  key: trainer
  files: /transformers/(?:trainer\w*|training_args)\.py$|/llamafactory/|/trl/trainer/
  logs: \bTrainingArguments\(|per_device_train_batch_size|(?i:llama-?factory)
    |\b(?:SFT|DPO|GRPO|KTO|ORPO|Seq2Seq)(?:Trainer|Config)\b
  batch: lower per_device_train_batch_size, and raise gradient_accumulation_steps by the same
    factor
  accumulate: TrainingArguments(per_device_train_batch_size={batch},
    gradient_accumulation_steps={n})
  evaluation-batch: lower per_device_eval_batch_size (8 by default, whatever training uses), and set
    eval_accumulation_steps=1; gradients are off already
  checkpoint: TrainingArguments(gradient_checkpointing=True)
  bf16: TrainingArguments(bf16=True)
  fused: TrainingArguments(optim="adamw_torch_fused")
  state-8bit: TrainingArguments(optim="adamw_8bit")
  loss: TrainingArguments(use_liger_kernel=True)
  gather: TrainingArguments(eval_accumulation_steps=1); a preprocess_logits_for_metrics that returns
    logits.argmax(-1); or prediction_loss_only=True
  attention: from_pretrained(..., attn_implementation="sdpa"), or "flash_attention_2", which needs
    no mask; shorter sequences and smaller images
  fsdp: TrainingArguments(fsdp="full_shard auto_wrap")
  zero: TrainingArguments(deepspeed={"zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"})
  tensor-parallel: from_pretrained(..., tp_plan="auto", tp_size={n}) and
    TrainingArguments(parallelism_config=ParallelismConfig(tp_size={n}))
Lightning
  source: lightning 2.6, pytorch/trainer/trainer.py and pytorch/strategies
  key: lightning
  files: /(?:pytorch_lightning|lightning/(?:pytorch|fabric))/
  logs: \bpl\.Trainer\(|\b(?:pytorch_lightning|LightningModule)\b|PyTorch Lightning
    |accumulate_grad_batches|\bload_from_checkpoint\(
  batch: lower batch_size in the DataLoader, and raise Trainer(accumulate_grad_batches=...) by the
    same factor
  accumulate: Trainer(accumulate_grad_batches={n}), with batches of {batch}
  evaluation-batch: lower batch_size in val_dataloader() or test_dataloader(); keep no result of
    validation_step() or test_step() on the GPU; gradients are off already
  bf16: Trainer(precision="bf16-mixed")
  bf16-parameters: Trainer(precision="bf16-true")
  offload-state: Trainer(strategy="deepspeed_stage_2_offload")
  loaded-checkpoint: load_from_checkpoint(path, map_location="cpu"), and ckpt_path= of trainer.fit()
    to resume, which puts each rank's weights on its own GPU
  fsdp: Trainer(strategy="fsdp")
  zero: Trainer(strategy="deepspeed_stage_3"), or _2 or _1
  tensor-parallel: Trainer(strategy=ModelParallelStrategy(tensor_parallel_size={n})), and
    parallelize_module in configure_model()
Megatron
  source: megatron-lm core_r0.10 to 0.14, megatron/training/arguments.py
  files: /megatron/(?:core|training|model|legacy|\w+\.py)
  logs: \bpretrain_gpt\d?\.py|\bMegatron-LM\b
  batch: lower --micro-batch-size or --seq-length
  checkpoint: --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  weights: raise --tensor-model-parallel-size or --pipeline-model-parallel-size
DeepSpeed
  source: deepspeed 0.19.6, runtime/constants.py and runtime/zero/config.py
  files: /deepspeed/(?:runtime|ops|utils|inference|module_inject)/
  logs: \[launch\.py:\d+:sigkill_handler|DeepSpeed(?:ZeRoOffload|Strategy)|see_memory_usage\]
    |--deepspeed\b|(?i:\bzero[-_ ]?(?:[123]\b|stage))
  batch: lower "train_micro_batch_size_per_gpu", and raise "gradient_accumulation_steps"
  offload-state: "zero_optimization": {"offload_optimizer": {"device": "cpu"}}
  weights: "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}
  host-memory: offload less to the host, where optimizer state takes at least 12 bytes a parameter
    in all: "offload_param" out first, then "offload_optimizer", or both to "device": "nvme" with an
    "nvme_path" (ZeRO 3); "pin_memory": false; more memory
  gathered-save: stage3_gather_16bit_weights_on_model_save: false, then the zero_to_fp32.py that
    lies beside the checkpoint
  loading-weights: "zero_optimization": {"stage": 3}, and the model built inside
    deepspeed.zero.Init(config_dict_or_path=...), or with an HfDeepSpeedConfig(config) alive before
    from_pretrained(): otherwise each process builds the whole of it
  optimizer-state: "zero_optimization": {"offload_optimizer": {"device": "cpu"}}, so that the step
    runs on the CPU; ZeRO stage 3, or more GPUs; a lower sub_group_size under ZeRO 3
accelerate
  source: accelerate 1.15, accelerator.py, parallelism_config.py and utils/dataclasses.py
  key: accelerate
  files: /accelerate/(?:accelerator|optimizer|scheduler|data_loader)\.py$
  batch: lower batch_size in the DataLoader, and raise Accelerator(gradient_accumulation_steps=...)
    by the same factor
  accumulate: Accelerator(gradient_accumulation_steps={n}), with batches of {batch}
  bf16: Accelerator(mixed_precision="bf16")
  fsdp: Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap"))
  zero: Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
  tensor-parallel: from_pretrained(..., tp_plan="auto", tp_size={n}) and
    Accelerator(parallelism_config=ParallelismConfig(tp_size={n}))
FSDP
  source: torch 2.13, distributed/fsdp; accelerate 1.15, utils/dataclasses.py
  files: /torch/distributed/fsdp/
  logs: (?i:(?<![a-z])fsdp(?![a-z]))|FullyShardedDataParallel
  offload-state: fully_shard(..., offload_policy=CPUOffloadPolicy()), or FSDP(...,
    cpu_offload=CPUOffload(offload_params=True)); fsdp_offload_params: true in accelerate
  loading-weights: load the weights in rank 0 only, on the CPU, and build the model on the meta
    device in the other ranks: fsdp_cpu_ram_efficient_loading: true in accelerate, or FSDP(...,
    sync_module_states=True, param_init_fn=...); otherwise each process builds the whole of it
PyG
  source: torch_geometric 2.6, loader
  files: /torch_geometric/
  logs: (?i:\b(?:torch|pytorch)[_ ]geometric\b)
  batch: DynamicBatchSampler(dataset, max_num=..., mode="edge"), which limits a batch by its edges;
    for one large graph NeighborLoader with fewer num_neighbors or a smaller batch_size
Ultralytics
  source: ultralytics 8.3, cfg/default.yaml and utils/tal.py
  files: /ultralytics/(?:engine|models|nn|utils|data)/
  logs: (?i:\bultralytics\b|\byolo ?v?(?:5|8|9|1[0-2])[a-z]?\b)|\bimgsz\b
    |\bvideo \d{1,6}/\d{1,6} \(frame \d
  batch: lower batch= or imgsz=, or set batch=0.6, which takes that share of the GPU
  evaluation-batch: lower batch=, imgsz= or max_det, and set retina_masks=False; use stream=True in
    predict(), which otherwise keeps the results of all images
  box-assignment: lower batch=, since all images of a batch are padded to the one with the most
    objects; cut crowded images into tiles; since 8.3.30 it falls back to the CPU there, which is
    slow
Real-ESRGAN
  source: realesrgan 0.3, inference_realesrgan.py; SwinIR, main_test_swinir.py
  files: /(?:realesrgan|gfpgan)/
  logs: (?<!['\"])(?i:real.?esrgan|\bswinir\b|\bgfpgan\b|\bgpen\b)
  batch: use --tile 256 or less (0, the default, takes the image as a whole), or a smaller image
sd-scripts
  source: sd-scripts 0.9 to 0.10, library/train_util.py, sdxl_train_util.py and train_network.py
  files: /(?:sd-scripts|kohya_ss|ComfyUI-FluxTrainer)/
  logs: \b[Ff]lux ?[Tt]rain
    |\b(?:sdxl|flux|sd3)_train\w{0,30}\.py|\btrain_(?:network|db)\.py|(?i:\bkohya)
    |\bnetworks\.lora\b
  batch: lower --train_batch_size or --resolution, and set --gradient_checkpointing
  checkpoint: --gradient_checkpointing; --cache_text_encoder_outputs with
    --network_train_unet_only keeps the text encoders off the GPU
  state-8bit: --optimizer_type AdamW8bit, or Adafactor
  weights: --fp8_base and --network_train_unet_only; --blocks_to_swap for Flux and SD3; a LoRA
    (train_network.py) in place of the whole model
  evaluation-batch: leave --sample_every_n_epochs and --sample_prompts out
AI Toolkit
  source: ai-toolkit 0.12, toolkit/config_modules.py
  files: /ai-toolkit/
  logs: (?i:\bai-?toolkit\b)
  batch: lower resolution in datasets, and keep batch_size at 1 and gradient_checkpointing on; set
    quantize, quantize_te and low_vram in model
  checkpoint: set gradient_checkpointing in train
  weights: set quantize, quantize_te and low_vram in model, or layer_offloading, which keeps a share
    of transformer and text encoder on the host
  evaluation-batch: set disable_sampling in train, or use smaller or fewer sample prompts
Diffusers
  source: diffusers 0.39, pipelines/pipeline_utils.py and models/modeling_utils.py
  files: /diffusers/(?:pipelines|models|schedulers|loaders)/
  logs: \b(?:from|import) diffusers\b|Pipeline\.from_pretrained\(
    |\btrain_(?:dreambooth|text_to_image|controlnet|instruct_pix2pix)\w*\.py
  checkpoint: call unet.enable_gradient_checkpointing(), or the transformer's; its example scripts
    have --gradient_checkpointing, and --use_8bit_adam for the state
  attention: call pipe.enable_xformers_memory_efficient_attention(), or use PyTorch 2, where fused
    attention is the default; lower the resolution
  vae-decode: call pipe.vae.enable_tiling() and enable_slicing(), under torch.no_grad() in code of
    your own; lower vae.tile_sample_min_size where it is tiled; call enable_model_cpu_offload(),
    so that the denoiser has left the GPU by then
Diffusers
  source: diffusers 0.39, pipelines/pipeline_utils.py
  files: /diffusers/pipelines/
  logs: \b(?:from|import) diffusers\b|Pipeline\.from_pretrained\(
  batch: use a smaller height and width, or num_images_per_prompt=1; call pipe.vae.enable_tiling()
    if decoding fails
  weights: call pipe.enable_model_cpu_offload() in place of pipe.to("cuda");
    pipe.enable_sequential_cpu_offload() keeps one layer at a time on the GPU; load the largest
    networks in 4 bits (quantization_config=PipelineQuantizationConfig(...))
timm
  source: timm 1.0, models/vision_transformer.py and others
  files: /timm/(?:models|layers)/
  checkpoint: model.set_grad_checkpointing()
Splatfacto
  source: nerfstudio 1.1, models/splatfacto.py and data/datamanagers/full_images_datamanager.py
  files: /nerfstudio/models/splatfacto
  logs: (?i:\bsplatfacto)
  batch: keep the images on the CPU (--pipeline.datamanager.cache-images cpu); make fewer Gaussians
    (raise --pipeline.model.densify-grad-thresh, or lower --pipeline.model.max-gs-num of the mcmc
    strategy); lower the resolution of the images
Gaussian splatting
  source: gaussian-splatting of 2023 to 2025, arguments/__init__.py and scene/cameras.py
  files: /gaussian[-_](?:splatting|renderer)/
  logs: (?i:gaussian[- _]splatting|\bgsplat\b|rasterize_gaussians)
  batch: keep the images on the CPU (--data_device cpu), lower their resolution (-r 2), or use fewer
    of them; make fewer Gaussians (raise --densify_grad_threshold, lower --densify_until_iter)
Detectron2
  source: detectron2 0.6, config/defaults.py
  files: /detectron2/
  logs: \bIMS_PER_BATCH\b|(?i:\bdetectron2\b)
  batch: lower SOLVER.IMS_PER_BATCH (and SOLVER.BASE_LR by the same factor), or
    INPUT.MIN_SIZE_TRAIN and MAX_SIZE_TRAIN
  evaluation-batch: lower INPUT.MIN_SIZE_TEST and MAX_SIZE_TEST
OpenMMLab
  source: mmengine 0.10, runner/runner.py; mmdet 2 and 3, mmseg 0 and 1, configs/_base_
  files: /mm(?:engine|cv|det|seg|pose|rotate|action|pretrain)\w*/
  logs: \bsamples_per_gpu\b|\bmm(?:det|seg|detection|segmentation|rotate|engine)\b
  batch: lower batch_size in train_dataloader (samples_per_gpu in data before version 3), or scale
    or crop_size in the pipeline
ESPnet
  source: espnet 202301 to 202412, espnet2/tasks/abs_task.py
  files: /espnet2?/
  logs: (?i:\bespnet)
  batch: lower batch_bins or batch_size, and raise accum_grad; keep utterances to 20 to 30 s
    (--max_wav_duration)
  evaluation-batch: keep recordings to 20 to 30 s, and lower beam_size
nnU-Net
  source: nnunetv2 2.2 to 2.6, inference/predict_from_raw_data.py and experiment_planning
  files: /nnunet(?:v2)?/
  logs: (?i:\bnn-?u-?net)
  batch: make plans for a smaller GPU: run nnUNetv2_plan_experiment with a lower -gpu_memory_target
    and a new -overwrite_plans_name
  evaluation-batch: set perform_everything_on_device=False (--not_on_device of nnUNetv2_predict),
    which gathers the windows on the CPU; run nothing else on the GPU
Segment Anything
  source: segment-anything 1.0 and sam2 1.1, automatic_mask_generator.py and build_sam.py
  files: /(?:segment_anything|sam2)/
  logs: \bSam\w{0,40}Mask\w{0,40}Generator\b|(?i:segment.anything)
  batch: use points_per_batch=16 (64 by default) in the mask generator, a smaller image, or vit_b
    instead of vit_h
LLM Compressor and AutoAWQ
  source: llm-compressor 0.7, entrypoints/oneshot.py; autoawq 0.2, quantize/quantizer.py
  files: /llmcompressor/|/awq/(?:models|quantize)/
  logs: \b(?:AWQ|GPTQ|SmoothQuant|Quantization)Modifier\b|(?i:\bllm-?compressor\b|\bautoawq\b)
  batch: calibrate with fewer and shorter samples (num_calibration_samples and max_seq_length, or
    max_calib_samples and max_calib_seq_len of AutoAWQ)
  weights: load the model on the CPU and let one layer at a time come to the GPU
    (pipeline="sequential"); offload_device=torch.device("cpu") of AWQModifier keeps the calibrated
    activations there
PEFT
  source: peft 0.21, utils/other.py
  files: /peft/(?:tuners|utils|peft_model|mapping)
  weights: load the base model in 4 bits (BitsAndBytesConfig(load_in_4bit=True)) and call
    prepare_model_for_kbit_training(model)
Transformers
  source: transformers 4.57, modeling_utils.py
  files: /transformers/(?:models|generation|integrations|modeling_\w+|pipelines)
    |/accelerate/(?:utils/modeling|big_modeling)\.py$
  logs: \bdevice_map\b|\bAutoModel\w{0,40}\b
  checkpoint: model.gradient_checkpointing_enable()
  attention: from_pretrained(..., attn_implementation="sdpa"), or "flash_attention_2", which needs
    no mask; shorter sequences and smaller images
  weights: load them in 16 bits (torch_dtype=torch.bfloat16 in from_pretrained(), dtype= since
    4.56); load the weights in 4 bits (quantization_config=BitsAndBytesConfig(load_in_4bit=True));
    device_map='auto' spreads them over several GPUs and the CPU; a lower max_memory for each GPU
    leaves room for a step
"""
# ComfyUI's "Allocation on device" is the part of cudaMallocAsync's message that it shows. The first
# entry of Diffusers is for programs that train its models, the second for pipelines.


VLLM_LOG: Final = r"\b(?:INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[?\w{1,40}\.py:\d"
"""How each line of vLLM's log begins (logging_utils/formatter.py), whichever file wrote it."""


def _frameworks() -> Iterator[Framework]:
    for name, lines in read_table(_TABLE):
        texts = {key: ("" if key in PATTERNS else " ").join(lines[key]) for key in lines}
        texts["logs"] = texts.get("logs", "").replace("VLLM_LOG", VLLM_LOG)
        own = {key: texts.pop(key) for key in ("source", "files", "key", "logs") if key in texts}
        yield Framework(name, texts, **own)


FRAMEWORKS: Final = tuple(_frameworks())
"""A framework comes first if its words also hold for the ones below: TRL runs Trainer's loop."""


SERVERS: Final = ("vLLM", "SGLang", "TGI")
"""Frameworks that set memory aside themselves, by their own options."""

INTERFACES: Final = ("ComfyUI", "Stable Diffusion web UI", "text-generation-webui")
"""Frameworks in which people run models, and some train them by extensions."""

OWN_LOOPS: Final = (
    "verl",
    "TRL",
    "Trainer",
    "Megatron",
    "Ultralytics",
    "sd-scripts",
    "AI Toolkit",
    "Splatfacto",
    "Gaussian splatting",
    "Detectron2",
    "OpenMMLab",
    "ESPnet",
    "nnU-Net",
)
"""Frameworks that run the training loop themselves, and keep no losses with their graph."""

RUN_ONLY: Final = (
    *SERVERS,
    *INTERFACES,
    "Segment Anything",
    "Real-ESRGAN",
)
"""Frameworks that only run trained models: without another framework, nothing keeps activations."""


def frameworks_in(paths: Iterable[str], said: str = "") -> tuple[Framework, ...]:
    """Return the frameworks seen in paths of frames or in a log, in the order of the table.

    If there are several servers, only the one that called the others counts. ``paths`` are
    outermost first.
    """
    distinct = dict.fromkeys(path[:1000].replace("\\", "/") for path in paths)
    found = [
        f
        for f in FRAMEWORKS
        if any(re.search(f.files, path) for path in distinct) or f.is_named(said)
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
