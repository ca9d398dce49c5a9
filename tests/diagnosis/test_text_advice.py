"""What is advised first on texts of hosts, servers and libraries: it fits who wrote them."""

from __future__ import annotations

import pytest
from oom_messages import case_of, new_style, old_style, process

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.diagnosis.remedies.framework_words import without_used
from fragdoctor.model.case import ToldSettings
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.rules.told_weights import told_weights

CPU = "RuntimeError: [enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory"
ASKED = ": you tried to allocate {} bytes. Error code 12 (Cannot allocate memory)\n"


def first_of(text: str):
    """Return the verdict on a text and the first recommendation."""
    result = diagnose(case_of(text))
    return result.verdict, result.recommendations[0]


def traceback(*frames: tuple[str, str]) -> str:
    """Return a traceback of frames, each a file and its source line."""
    lines = (f'  File "{file}", line 3, in f\n    {code}\n' for file, code in frames)
    return "Traceback (most recent call last):\n" + "".join(lines)


# ---- what the text says is set already, or was there before ----

FULL = old_style("1.00 GiB", "8.00 GiB", "7.20 GiB", "0 bytes", "7.32 GiB")


@pytest.mark.parametrize(
    "setting",
    [
        '--train_batch_size="1"',
        "per_device_train_batch_size: 1",
        "I changed the batch size to 1",
        "['main.py', '--per_device_train_batch_size', '1', '--lora_dim', '8']",
        "cfg.SOLVER.IMS_PER_BATCH = 1",
        "The batch size is already 1.",
        "When I change Num samples to 1, there is the same error.",
        "I have 4 images, and batch size is only 1.",
    ],
)
def test_batch_of_one_is_not_made_smaller(setting):
    _, first = first_of(f"{setting} \n{FULL}\n")

    assert first.title.endswith(": the batch is already one")


@pytest.mark.parametrize(
    "setting",
    [
        "per_device_eval_batch_size: 1",
        "batch 1",
        "router: batch{batch_size=1}",
    ],
)
def test_other_batches_do_not_count_as_a_batch_of_one(setting):
    _, first = first_of(f"{setting} \n{FULL}\n")

    assert first.title == "Use a smaller batch or smaller inputs"


@pytest.mark.parametrize(
    "said",
    [
        "Reducing the batch_size didn't help.",
        "I reduced batch size (no effect)",
        "It still occurs when the batch size is set to 2",
        "I get it even when lowering the batch size significantly.",
        "I tried smaller batch sizes of 4 and 2. No success.",
    ],
)
def test_smaller_batch_that_did_not_help_is_not_advised_again(said):
    _, first = first_of(f"{FULL}\n{said}\n")

    assert first.title == "Use less for one sample: a smaller batch did not help"


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ("With batch_size=1 it works, with batch_size=4 it fails.", "Lower batch_size from 4"),
        (
            "I am able to train with a batch size of 8. A batch size of 16 fails.",
            "Lower batch size from 16",
        ),
        ("I changed batch_size to 1, this time it works.", "Use a smaller batch"),
        ("batch_size=1 does not work either", "Use less for one sample: the batch is already"),
        ("训练以batch=2进行", "Lower batch from 2"),
    ],
)
def test_batch_with_which_it_works_is_not_the_one_that_fails(said, title):
    _, first = first_of(f"{said}\n{FULL}\n")

    assert first.title.startswith(title)


def test_error_with_its_own_explanation_on_one_line_is_a_failure():
    error = "RuntimeError: CUDA error: out of memory CUDA kernel errors might be reported later"

    assert first_of(f"[Bug] {error}\nIt worked yesterday, in torch.\n")[0].cause is Cause.UNKNOWN


def test_error_that_ray_passes_on_is_pytorchs():
    text = "ray.exceptions.RayTaskError(OutOfMemoryError): ray::main_task() (pid=5)\n{}\n"
    frames = traceback(("/job/verl/trainer/ppo/ray_trainer.py", "actor_output = self.actor_rol"))

    verdict, first = first_of(text.format(frames))

    assert verdict.cause is Cause.CAPACITY
    assert first.change.startswith("with verl: lower actor_rollout_ref.actor.ppo_micro_batch_size")


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("Eval bug: llama-server\nIt went OOM on the GPU", "lower --n-gpu-layers"),
        ("Ollama crashes with `CUDA error: out of memory` while loading", "lower num_ctx"),
    ],
)
def test_program_with_options_of_its_own_is_not_read_by_words_about_pytorch(said, change):
    assert first_of(f"{said}\n")[1].change.startswith(change)


def test_video_memory_is_no_video():
    _, first = first_of(f"The video card has little video memory. I run inference.\n{FULL}\n")

    assert "fewer frames or points" in first.change  # of any kind, since none is known


@pytest.mark.parametrize(
    ("said", "cause", "title"),
    [
        ("训练时显存一直增长\nCUDA out of memory", Cause.LEAK, "Keep numbers from step to step"),
        (
            "每次请求后显存一直增加\nCUDA out of memory",
            Cause.LEAK,
            "Keep nothing on the GPU from one input",
        ),
        ("推理时CUDA out of memory", Cause.CAPACITY, "Use smaller inputs"),
        ("使用知识库推理就会报显存溢出", Cause.CAPACITY, "Use smaller inputs"),
        ("OOM in the Gradio app on the GPU", Cause.CAPACITY, "Use smaller inputs"),
    ],
)
def test_chinese_texts_are_told_from_each_other_as_english_ones_are(said, cause, title):
    verdict, first = first_of(said)

    assert verdict.cause is cause
    assert first.title.startswith(title)


def test_growth_is_advised_without_what_the_author_does_already():
    grows = "CUDA out of memory: the GPU memory keeps growing while it trains."

    assert "loss.item()" in first_of(grows)[1].change
    _, first = first_of(f"{grows} I use item() everywhere.")
    assert first.title == "Find what else is kept from step to step"
    assert "loss.item()" not in first.change


@pytest.mark.parametrize(
    "said",
    [
        "My training crashes after the first epoch with CUDA out of memory.",
        "CUDA out of memory when it reaches the 23th epoch of training",
        "I train it: OOM after 8,000 iterations.",
        "The first epoch of training runs fine. Then CUDA out of memory.",
        "训练报错显存不足, 前几轮显存只占用11G左右",
    ],
)
def test_step_that_fails_after_steps_that_fit_is_compared_with_them(said):
    verdict, first = first_of(said)

    assert verdict.cause is Cause.CAPACITY
    assert Cause.LEAK in verdict.also
    assert "different about the step that failed" in first.title
    assert "loss.item()" in first.change
    assert "torch.no_grad()" in first.change


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory in the second iteration of training",  # the optimizer makes its state
        "After a crash at the 149th epoch of training I get CUDA out of memory at the start.",
        "CUDA out of memory in the first epoch of training",
    ],
)
def test_step_at_the_start_is_not_compared_with_others(said):
    assert "that earlier steps did not" not in first_of(said)[1].title


@pytest.mark.parametrize(
    "said",
    [
        "I have tried every way of reducing the batch",
        "Is there a way besides reducing the batch size?",
    ],
)
def test_smaller_batch_that_was_tried_is_not_advised(said):
    _, first = first_of(f"I train it.\n{said}.\n{FULL}")

    assert "batch" in first.title
    assert first.title.startswith(("Turn on activation", "Use less for one"))


def test_batch_that_cannot_shrink_is_no_advice_for_a_later_step_either():
    said = "batch_size=1. After 5000 iterations of training: CUDA out of memory. Why?"
    _, first = first_of(f"{said}\n")

    assert "different about the step that failed" in first.title
    assert "lower" not in first.change


def test_smaller_batch_that_helped_is_advised():
    _, first = first_of(f"I train it. I tried reducing the batch, which works.\n{FULL}")

    assert first.title.startswith("Use a smaller batch")


def test_what_is_said_above_the_lines_of_ranks_is_told_of_them():
    full = FULL.replace("RuntimeError", "torch.OutOfMemoryError")
    _, first = first_of(f"I train it. The evaluation fails.\n[rank1]: {full}")

    assert first.title.startswith("Evaluate")


def test_pipeline_keeps_no_graph():
    code = traceback(("run.py", "video = pipe(prompt=prompt, num_frames=49)"))
    _, first = first_of(f"{code}{FULL}")

    assert "gradients" not in first.title


def test_bare_metal_is_no_mac():
    _, first = first_of("Training runs out of memory on bare metal Linux with an 8 GB GPU.\n")

    assert "Activity Monitor" not in first.change


def test_array_that_the_host_cannot_hold_is_named():
    said = (
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 5.00 GiB for an array with "
        "shape (20, 256, 512, 512) and data type float32\n"
    )
    _, first = first_of(said)

    assert "5.00 GiB is one NumPy array" in first.change


def test_what_a_text_has_on_already_is_not_advised():
    text = "from diffusers import Pipe\nI call pipe.enable_model_cpu_offload() and generate: OOM."
    _, first = first_of(text)

    assert "enable_model_cpu_offload" not in first.change
    assert "enable_sequential_cpu_offload" in first.change


def test_requests_before_the_one_that_failed_leave_nothing_on_the_gpu():
    _, first = first_of("Our server of voices gets CUDA out of memory after 200 requests.")

    assert first.title == "Keep nothing on the GPU from one input to the next, and limit its length"
    assert "weights in 16, 8 or 4 bits" in first.change


@pytest.mark.parametrize(
    ("said", "is_too_much"),
    [
        (
            "Full fine-tuning of a 7b model on an A100 40GB: I get CUDA OOM, batch size 1",
            True,
        ),
        ("fine-tuning vicuna-7b: I get CUDA out of memory", True),  # more than any one card
        ("fine-tuning vicuna-7b with LoRA: I get CUDA out of memory", False),
        ("fine-tuning vicuna-7b, ZeRO 3, 8 x A100 80GB: I get CUDA out of memory", False),
        ("fine-tuning llama-70b with deepspeed, 8 x A100: I get CUDA out of memory", True),
        ("fine-tuning a 1.3b model on an A100 80GB: I get CUDA out of memory", False),
        ("Training vicuna-7b, I get CUDA out of memory after the first epoch", False),  # steps ran
    ],
)
def test_state_of_all_parameters_is_added_up_before_anything_else(said, is_too_much):
    _, first = first_of(said)

    assert (first.code == "less-to-train-all") == is_too_much
    assert ("16 bytes a parameter" in first.change) == is_too_much


def test_prose_that_names_no_program_is_advised_by_what_runs():
    _, first = first_of("OOM, a video of 720*480 does not fit my 12G VRAM, even 1 s of it")

    assert first.change.startswith("use fewer frames")
    assert "nvidia-smi" in first.change


def test_words_for_training_are_not_said_of_what_is_not_known_to_train():
    _, first = first_of(f"{FULL}\nIt fails with batch size 1 too. What should I change?")

    assert "optimizer" not in first.change
    assert "LoRA" not in first.change


def test_who_trains_inside_a_user_interface_gets_words_for_training():
    text = "# ComfyUI Error Report\n- **Node Type:** {}\nAllocation on device\n"

    assert "latent node" in first_of(text.format("KSampler"))[1].change
    assert "with sd-scripts: lower --train" in first_of(text.format("FluxTrainLoop"))[1].change


def test_name_of_a_model_among_arguments_is_not_the_program():
    text = "CUDA error: out of memory in torch, txt2img(inputs=('dog', 'RealESRGAN_x4plus'))\n"

    assert "--tile" not in first_of(text)[1].change
    assert "--tile" in first_of(text.replace("'Real", "Real"))[1].change


def test_request_as_large_as_all_that_is_live_is_a_copy_of_the_model():
    message = old_style("26.08 GiB", "31.75 GiB", "26.14 GiB", "4.77 GiB", "26.15 GiB")

    verdict, first = first_of(f"finetuning\n{message}\n")

    assert "a copy of the model" in verdict.summary
    assert first.title == "Do without a second copy of the model"
    assert first_of(f"mixed_precision: fp16\n{message}\n")[1].change == first.change
    other = message.replace("26.08", "25.08")
    assert "copy" not in first_of(f"finetuning\n{other}\n")[1].title


def test_card_of_which_next_to_nothing_is_free_is_full():
    sizes = ["20.00 MiB", "11.76 GiB", "10.92 GiB", "56.25 MiB", "10.97 GiB"]

    assert first_of(old_style(*sizes))[0].cause is Cause.CAPACITY
    sizes[3] = "300.00 MiB"
    assert first_of(old_style(*sizes))[0].cause is Cause.UNKNOWN


def test_cache_that_is_too_small_is_met_with_a_shorter_context():
    _, first = first_of("The vLLM engine stops: insufficient KV cache memory.\n")

    assert first.change.startswith("set --max-model-len no longer than you need")


def test_server_is_known_by_its_options():
    _, first = first_of("OOM on the GPU. It set max_batch_prefill_tokens to 10049.\n")

    assert first.change.startswith("with TGI: lower --max-batch-prefill-tokens")


def test_title_that_repeats_the_error_is_read_with_the_text_of_its_repetition():
    _, first = first_of(
        "CUDA out of memory\n\nI got CUDA out of memory when I train with batch size 4.\n"
    )

    assert first.title == "Lower batch size from 4, or use smaller inputs"
    assert "accumulate gradients" in first.change


def test_layers_are_checkpointed_first_in_training_if_a_smaller_batch_did_not_help():
    _, first = first_of(f"{FULL}\nTraining with --fp16 and batch size 1 fails.\n")

    assert first.title == "Turn on activation checkpointing: the batch is already one"
    assert "16 bits" not in first.change  # in use already


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ("python train.py --batch_size=6 --test_batch_size=2", "Lower --batch_size from 6"),
        ("data = dict(samples_per_gpu=4, workers_per_gpu=2)", "Lower samples_per_gpu from 4"),
        ("It fails with a batch size of 8, and of 12.", "Lower batch size from 8"),
    ],
)
def test_batch_is_named_as_the_text_names_it_with_its_value(said, title):
    _, first = first_of(f"{FULL}\n{said}\n")

    assert first.title.startswith(title)


@pytest.mark.parametrize(
    ("said", "less"),
    [
        ("We fine-tune a llama on long tokens.", "shorter sequences"),
        ("I train on audio.", "shorter audio"),
        ("Training with max_length=2048 fails.", "a lower max_length than 2048"),
        ("We train on images, audio, video and tokens.", "smaller inputs"),
    ],
)
def test_smaller_samples_are_those_that_the_text_speaks_of(said, less):
    _, first = first_of(f"{FULL}\n{said}\n")

    assert first.title == f"Use a smaller batch or {less}"


SAID = {
    "--kv-cache-dtype fp8 is not set: vllm serve m": "--gpu-memory-utilization",
    "cfg.SOLVER.IMS_PER_BATCH = 8": "SOLVER.IMS_PER_BATCH",
    "A: 2.82 GB, R: 2.90 GB, Sys: 3.8/3.8 GB (99.7%)": "width and height",
    "ERROR 03-13 09:00:43 [core.py:330] the engine failed": "--gpu-memory-utilization",
    "ZeRO stage: 2, micro batch 2": "train_micro_batch_size_per_gpu",
    "pipe = FluxPipeline.from_pretrained(name)": "num_images_per_prompt",
    "actor_rollout_ref.actor.strategy=fsdp": "ppo_micro_batch_size_per_gpu",
    "torchrun pretrain_gpt.py --bf16": "--micro-batch-size",
    "masks = SamAutomaticMaskGenerator(sam)": "points_per_batch",
    "RealESRGAN_x4plus": "--tile",
    "ESPnet 202301": "batch_bins",
    "nnUNetv2_train 7 3d_fullres 0": "-gpu_memory_target",
    "I use YOLOv8 of ultralytics": "imgsz",
}


@pytest.mark.parametrize("said", SAID)
def test_program_that_is_named_anywhere_gives_the_words(said):
    _, first = first_of(f"{FULL}\n" + "\n" * 20 + f"{said}\n")

    assert SAID[said] in first.change


@pytest.mark.parametrize(("said", "is_told"), [("vllm serve m", False), ("python train.py", True)])
def test_program_that_only_runs_models_is_not_told_to_checkpoint_layers(said, is_told):
    codes = [r.code for r in diagnose(case_of(f"$ {said}\n{FULL}\n")).recommendations]

    assert ("gradient-checkpointing" in codes) is is_told


def test_server_beside_others_is_told_the_share_that_they_leave():
    full = old_style("1.00 GiB", "40.00 GiB", "24.90 GiB", "0 bytes", "25.00 GiB")

    verdict, first = first_of(f"$ vllm serve m\n{full}\n")

    assert verdict.cause is Cause.OTHER_PROCESS
    assert "--gpu-memory-utilization 0.6" in first.change


@pytest.mark.parametrize(("n_bytes", "is_limit"), [(296, True), (9 << 30, False)])
def test_small_piece_that_cannot_be_mapped_is_at_the_limit_of_mappings(n_bytes, is_limit):
    # PyTorch 1.6 to 2.13, aten/src/ATen/MapAllocator.cpp
    text = f"RuntimeError: unable to mmap {n_bytes} bytes from file </torch_1>: Cannot allocate "

    verdict, first = first_of(f"{text}memory (12)\n")

    assert verdict.cause is Cause.HOST_MEMORY
    assert ("vm.max_map_count" in verdict.summary) is is_limit
    assert ("vm.max_map_count" in first.change) is is_limit


def test_checkpointing_that_is_on_is_no_advice():
    said = "--train_batch_size=1 --gradient_checkpointing --xformers"

    result = diagnose(case_of(f"{said}\n{FULL}\n"))

    assert result.recommendations[0].title == "Shrink the weights and the optimizer state"
    assert "gradient-checkpointing" not in [r.code for r in result.recommendations]


def test_checkpointing_in_the_traceback_is_no_advice():
    where = traceback(("/env/torch/utils/checkpoint.py", "torch.autograd.backward(outputs)"))

    result = diagnose(case_of(f"{where}{FULL}\n"))

    assert "gradient-checkpointing" not in [r.code for r in result.recommendations]


def test_request_without_figures_is_read_as_a_message_without_figures():
    verdict, first = first_of("RuntimeError: CUDA out of memory. Tried to allocate 112.00 MiB\n")

    assert (verdict.cause, verdict.confidence) == (Cause.CAPACITY, Confidence.POSSIBLE)
    assert "112.00 MiB" in verdict.summary
    assert first.code == "smaller-batch"


def test_error_of_the_driver_at_the_first_weights_is_a_gpu_that_was_full_before():
    where = traceback(("/job/fit.py", "model.to(device)"))

    verdict, first = first_of(f"{where}RuntimeError: CUDA error: out of memory\n")

    assert verdict.cause is Cause.OTHER_PROCESS
    assert first.code == "free-other-process"


def test_server_that_finds_its_gpu_in_use_gets_one_remedy_for_that():
    text = (
        "ValueError: Free memory on device (5.12/23.65 GiB) on startup is less than desired GPU "
        "memory utilization (0.9, 21.28 GiB).\n"
    )

    codes = [r.code for r in diagnose(case_of(text)).recommendations]

    assert "free-other-process" not in codes
    assert codes


def test_context_that_cannot_be_made_is_somebody_else_on_the_gpu():
    verdict, first = first_of(
        "jcuda.CudaException: CUDA_ERROR_OUT_OF_MEMORY\n    at jcuda.JCudaDriver.cuCtxCreate()\n"
    )

    assert verdict.cause is Cause.OTHER_PROCESS
    assert first.code == "free-other-process"


def test_workspace_of_flashinfer_is_made_larger():
    verdict, first = first_of(
        "RuntimeError: Buffer overflow when allocating memory for batch_prefill_tmp_v with size "
        "550502400 and alignment 16, but only 402653184 bytes available in AlignedAllocator.\n"
    )

    assert verdict.cause is Cause.MEMORY_LIMIT
    assert "SGLANG_FLASHINFER_WORKSPACE_SIZE" in first.change


def test_process_that_holds_less_than_its_cache_is_not_believed():
    text = new_style("2.25 GiB", "79.33 GiB", "1.02 GiB", "70.12 GiB", "213.67 MiB", own="0 bytes")

    verdict, _ = first_of(text)

    assert verdict.cause is Cause.CAPACITY


TABLES = {
    "nvidia-smi": "|   0  Tesla P100  Off  | 0000:05:00.0 Off |                    0 |\n"
    "| N/A   36C    P0    41W / 300W |  12799MiB / 16280MiB |      0%      Default |\n",
    "gpustat": "[0] Tesla P100 | 36'C,  0% | 12799 / 16280 MB | (null)\n",
    "processes": "|    0     31794    C   Unknown Error                            5371MiB |\n",
}


@pytest.mark.parametrize("name", TABLES)
def test_table_beside_words_about_a_failure_shows_who_fills_the_gpu(name):
    verdict, first = first_of(f"I get out of memory errors, and nothing runs:\n{TABLES[name]}")

    assert (verdict.cause, verdict.confidence) == (Cause.OTHER_PROCESS, Confidence.POSSIBLE)
    assert "on GPU 0" in verdict.summary
    assert first.code == "free-other-process"


def test_full_gpu_in_a_table_answers_for_the_drivers_error_which_has_no_figures():
    error = "RuntimeError: CUDA error: out of memory\n"
    full = TABLES["gpustat"].replace("12799", "15900")

    verdict, first = first_of(full + error)
    half_empty, _ = first_of(TABLES["gpustat"] + error)

    assert (verdict.cause, first.code) == (Cause.OTHER_PROCESS, "free-other-process")
    assert half_empty.cause is Cause.UNKNOWN


@pytest.mark.parametrize("name", TABLES)
def test_table_alone_is_no_failure(name):
    verdict = diagnose(case_of(f"How do I read this table?\n{TABLES[name]}")).verdict

    assert verdict.cause is Cause.NOT_MEMORY


# ---- the host ----

HOST = {
    "all outputs joined": (
        traceback(("/job/test.py", "scores = torch.cat(outputs)")) + CPU + ASKED.format(9 << 30),
        "9.00 GiB is one tensor",
    ),
    "one huge tensor": (CPU + ASKED.format(100 << 30), "100.00 GiB is one tensor"),
    "workers of a loader": (
        traceback(("/env/torch/utils/data/_utils/worker.py", "data = fetch(i)"))
        + CPU
        + ASKED.format(4096),
        "fewer DataLoader workers",
    ),
    "DeepSpeed": (
        "[ERROR] [launch.py:321:sigkill_handler] ['python'] exits with return code = -9\n",
        '"offload_optimizer"',
    ),
    "ComfyUI": (
        f"{CPU}{ASKED.format(4096)}\n"
        + traceback(("/home/me/ComfyUI/execution.py", "run(node)"))
        + CPU
        + ASKED.format(4096),
        "--cache-none",
    ),
    "fork of a worker": (
        "    self.pid = os.fork()\n" + CPU + ASKED.format(4096),
        "fewer DataLoader",
    ),
    "growth": (
        CPU + ASKED.format(33 << 30) + "The memory grows during the epoch without reducing back.\n",
        "only what you need from each batch",
    ),
    "nothing known": (CPU + ASKED.format(4096), "DataLoader workers"),
}


@pytest.mark.parametrize("name", HOST)
def test_host_memory_is_advised_by_what_took_it(name):
    text, said = HOST[name]

    verdict, first = first_of(text)

    assert verdict.cause is Cause.HOST_MEMORY
    assert said in first.change


def test_line_that_asked_the_host_is_named():
    text, _ = HOST["all outputs joined"]

    failure = diagnose(case_of(text)).failure

    assert failure is not None
    assert failure.location is not None
    assert failure.location.filename == "/job/test.py"
    assert failure.source_text == "scores = torch.cat(outputs)"
    assert failure.requested_bytes is None


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: One or more background workers are no longer alive. Exiting.",
        "RuntimeError: Background workers died. Look further up!",
    ],
)
def test_workers_that_are_gone_may_have_been_killed(text):
    verdict, first = first_of(text)

    assert (verdict.cause, verdict.confidence) == (Cause.HOST_MEMORY, Confidence.POSSIBLE)
    assert "-npp" in first.change


KILLED = {
    "kernel": ("[9.1] Out of memory: Killed process 7 (python) total-vm:9kB\n", Confidence.PROVEN),
    "Slurm": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n",
        Confidence.PROVEN,
    ),
    "Kubernetes": ("Reason: OOMKilled\nExit Code: 137\n", Confidence.PROVEN),
    "shell": ("epoch 1\nKilled\n", Confidence.LIKELY),
    "Colab": ("Your session crashed after using all available RAM.\n", Confidence.PROVEN),
    "Kaggle": (
        "Your notebook tried to allocate more memory than is available. It has restarted.\n",
        Confidence.PROVEN,
    ),
    "Jupyter": ("The kernel appears to have died. It will restart.\n", Confidence.POSSIBLE),
    "VS Code": ("The Kernel crashed while executing code in a cell.\n", Confidence.POSSIBLE),
    "Ollama": (
        "Error: model requires more system memory (9.0 GiB) than is available (7.0 GiB)\n",
        Confidence.PROVEN,
    ),
}


@pytest.mark.parametrize("name", KILLED)
def test_end_of_a_process_is_as_sure_as_who_tells_it(name):
    text, confidence = KILLED[name]

    verdict, first = first_of(text)

    assert (verdict.cause, verdict.confidence) == (Cause.HOST_MEMORY, confidence)
    assert ("limit first" in first.change) == (name in ("Slurm", "Kubernetes"))


# ---- llama.cpp ----

CUDA_2 = "CUDA error 2 at /src/ggml-cuda.cu:77: out of memory\n"
BUFFER = (
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 900.00 MiB on device 0: cudaMalloc "
    "failed: out of memory\n"
    "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 943718400\n"
)
LLAMA = {
    "compute": (f"{BUFFER}graph_reserve: failed to allocate compute buffers\n", "--ubatch-size"),
    "weights": (
        BUFFER.replace("ggml_gallocr_reserve_n", "alloc_tensor_range")
        + "llama_model_load: error loading model: unable to allocate CUDA0 buffer\n",
        "these are the weights",
    ),
    "cache": (f"{BUFFER}llama_kv_cache_init: failed to allocate buffer for kv cache\n", "type-k"),
    "unknown": (BUFFER, "--n-gpu-layers or --ctx-size"),
    "elsewhere": (CUDA_2, "--n-gpu-layers or --ctx-size"),
}


@pytest.mark.parametrize("name", LLAMA)
def test_buffer_of_llama_cpp_is_advised_by_its_purpose(name):
    text, said = LLAMA[name]

    verdict, first = first_of(text)

    assert verdict.cause is not Cause.HOST_MEMORY
    assert said in first.change
    assert ("NO_PINNED" in first.change) == (name == "WSL")


def test_pinned_memory_that_llama_cpp_could_not_have_is_the_hosts():
    text = f"WARNING: failed to allocate 64.00 MB of pinned memory: out of memory\n{CUDA_2}"

    verdict, first = first_of(text)

    assert verdict.cause is Cause.HOST_MEMORY
    assert "GGML_CUDA_NO_PINNED=1" in first.change


# ---- servers and libraries ----

BUDGET = (
    "the current vLLM instance can use total_gpu_memory (10.00GiB) x gpu_memory_utilization (0.50) "
    "= 5.00GiB\nmodel weights take {}GiB; non_torch_memory takes 0.10GiB; PyTorch activation peak "
    "memory takes 0.90GiB; the rest of the memory reserved for KV Cache is -1.00GiB.\n"
)


def test_server_without_room_for_a_cache_is_told_the_least_share():
    verdict, first = first_of(BUDGET.format("5.00"))

    assert (verdict.cause, verdict.confidence) == (Cause.CAPACITY, Confidence.PROVEN)
    # 5.0 + 0.1 + 0.9 of 10 GiB, and a twentieth of the card for a cache
    assert first.title == "Start it with --gpu-memory-utilization 0.65 or more"


def test_model_that_fills_the_card_is_not_told_a_share():
    _, first = first_of(BUDGET.format("9.00"))

    assert first.title == "Make the weights or a step smaller"


def test_server_that_calls_another_ones_layers_keeps_its_words():
    frames = (
        ("/env/sglang/srt/managers/tp_worker.py", "self.run()"),
        ("/env/vllm/model_executor/layers/linear.py", "y = x @ w"),
    )

    _, first = first_of(f"{traceback(*frames)}RuntimeError: CUDA error: out of memory\n")

    assert "--mem-fraction-static" in first.change
    assert "--gpu-memory-utilization" not in first.change


def test_reasons_that_ray_lists_prove_none_of_them():
    text = (
        "(raylet) Worker exit detail: End of file. There are some potential root causes. (1) The "
        "process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force "
        "is called.\n"
    )

    verdict, first = first_of(text)

    assert (verdict.cause, verdict.confidence) == (Cause.HOST_MEMORY, Confidence.POSSIBLE)
    assert "that worker's own log first" in first.change


def test_limit_of_metal_is_lifted_last():
    text = (
        "RuntimeError: MPS backend out of memory (MPS allocated: 3.00 GB, other allocations: 9.00 "
        "GB, max allowed: 12.50 GB). Tried to allocate 1.00 GB on private pool.\n"
    )

    (advice,) = (r for r in diagnose(case_of(text)).recommendations if r.code == "less-on-metal")

    assert "as a last resort set PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0" in advice.change
    little = text.replace("1.00 GB", "8.00 MB")
    (advice,) = (r for r in diagnose(case_of(little)).recommendations if r.code == "less-on-metal")
    assert advice.change.startswith("set PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 in the environment")


def test_step_of_a_servers_engine_speaks_of_its_cache():
    text = traceback(("/env/vllm/engine/llm_engine.py", "out = self.model(x)")).replace(
        "in f", "in step"
    ) + old_style("1.00 GiB", "23.69 GiB", "22.10 GiB", "412.00 MiB", "22.60 GiB")

    _, first = first_of(text)

    assert "--gpu-memory-utilization" in first.change


def test_next_to_nothing_refused_to_jax_asks_who_is_on_the_gpu():
    said = "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate {} bytes."

    _, first = first_of(said.format(1 << 20))
    _, of_much = first_of(said.format(8 << 30))

    assert first.code == "free-other-process"
    assert of_much.code == "less-on-the-device"


# ---- figures that explain nothing, or that are not there ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("torch.OutOfMemoryError: Allocation on device \n", "ComfyUI's message has no numbers"),
        ("RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at a.cpp:1154\n", "MIG slice"),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.\n", "overflowed"),
        ("My torch program hits a GPU OOM.\n", "what filled it"),
    ],
)
def test_message_that_never_has_figures_is_not_called_cut(text, said):
    result = diagnose(case_of(text))

    assert said in result.verdict.summary
    assert "whole message" not in result.verdict.settled_by
    assert not any("is cut" in note for note in result.notes)


def test_large_request_fails_by_its_size_whatever_grew_before():
    text = "A memory leak when using Hires fix\n" + old_style(
        "13.98 GiB", "24.00 GiB", "16.17 GiB", "5.39 GiB", "16.19 GiB"
    )

    _, first = first_of(text)

    assert first.title == "Use smaller inputs"
    assert "Hires. fix" in first.change


def test_server_that_was_refused_beside_free_memory_is_told_to_reserve_less():
    text = new_style("12.95 GiB", "127.00 GiB", "18.55 GiB", "99.37 GiB", "121.80 MiB")

    verdict, first = first_of(f"(EngineCore pid=2651) {text}")

    assert verdict.cause is Cause.UNKNOWN
    assert "--gpu-memory-utilization" in first.change


@pytest.mark.parametrize(("given", "said"), [("0.95", "A quantized"), ("0.4", "raise --gpu")])
def test_share_that_a_server_was_given_decides_whether_a_higher_one_is_advised(given, said):
    _, first = first_of(
        f"vllm serve m --gpu-memory-utilization {given}\nValueError: No available memory for the "
        "cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.\n"
    )

    assert said.lower() in first.change[:20].lower()


def test_assertion_on_the_device_is_told_how_to_find_its_line():
    found = diagnose(case_of("RuntimeError: CUDA error: device-side assert triggered\n"))

    assert found.verdict.cause is Cause.NOT_MEMORY
    assert "CUDA_LAUNCH_BLOCKING=1" in found.verdict.settled_by


def test_free_memory_of_rocm_that_its_driver_keeps_is_a_full_card():
    text = new_style("124.00 MiB", "19.94 GiB", "554.47 MiB", "15.87 GiB", "165.29 MiB")

    on_rocm, on_cuda = (first_of(t)[0] for t in (text.replace("CUDA", "HIP", 1), text))

    assert (on_rocm.cause, on_cuda.cause) == (Cause.CAPACITY, Cause.UNKNOWN)


@pytest.mark.parametrize(
    ("total", "free", "beside", "is_offered"),
    [
        ("23.99 GiB", "0 bytes", "", False),  # the driver of Windows
        ("23.69 GiB", "0 bytes", "", True),
        ("23.69 GiB", "2.00 MiB", "D:\\sd\\run.py", False),
    ],
)
def test_expandable_segments_are_not_offered_on_windows(total, free, beside, is_offered):
    text = f"{beside}\n" + new_style("908.00 MiB", total, free, "17.96 GiB", "4.18 GiB")

    verdict, first = first_of(text)

    assert verdict.cause is Cause.FRAGMENTATION
    assert ("expandable" in first.setting) is is_offered


def test_room_that_was_refused_is_no_reason_to_raise_a_fraction_nobody_set():
    text = new_style("60.00 MiB", "11.00 GiB", "4.00 GiB", "5.00 GiB", "200.00 MiB")

    verdict, first = first_of(text)

    assert verdict.cause is Cause.UNKNOWN
    assert first.code == "find-the-limit"
    assert "page file" in first.change


def test_message_without_what_is_reserved_proves_no_capacity():
    whole = old_style("2.20 GiB", "10.00 GiB", "4.00 GiB", "1.00 GiB", "8.00 GiB")
    cut = whole.partition(" 8.00 GiB reserved")[0]

    of_whole, of_cut = (diagnose(case_of(text)) for text in (whole, cut))

    assert of_whole.verdict.cause is Cause.FRAGMENTATION
    assert of_cut.verdict.confidence is not Confidence.PROVEN
    assert Cause.FRAGMENTATION in of_cut.verdict.also
    assert Cause.OTHER_PROCESS not in (of_cut.verdict.cause, *of_cut.verdict.also)
    assert "expandable-segments" not in [r.code for r in of_cut.rejected]


def test_request_of_nearly_all_there_is_does_not_call_a_device_full_of_live_memory():
    text = old_style("8.10 GiB", "10.00 GiB", "600.00 MiB", "8.15 GiB", "650.00 MiB")

    summary = diagnose(case_of(text)).verdict.summary

    assert "is nearly all of" in summary
    assert "last straw" not in summary


def test_large_request_beside_much_live_memory_is_no_last_straw():
    text = old_style("2.60 GiB", "10.00 GiB", "6.80 GiB", "2.40 GiB", "7.10 GiB")

    summary = diagnose(case_of(text)).verdict.summary

    assert "is nearly all of" in summary
    assert "last straw" not in summary


def test_request_beside_memory_that_spilled_to_the_host_is_no_wrong_size():
    text = old_style("10.00 GiB", "8.00 GiB", "17.00 GiB", "0 bytes", "19.00 GiB")

    result = diagnose(case_of(text))

    assert result.verdict.cause is Cause.CAPACITY
    assert "moved the rest to the host's memory" in result.verdict.summary
    assert "fix-shape" not in [r.code for r in result.recommendations]


# ---- programs with allocators of their own ----

# xla/service/buffer_assignment.cc: Stats::ToString and ToVerboseString
XLA_GPU = """XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate {asked}
bytes.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:    {parts}
              constant allocation:        12B
        maybe_live_out allocation:    {parts}
     preallocated temp allocation:         0B
                 total allocation:    {total}
              total fragmentation:         0B (0.00%)
Peak buffers:
\tBuffer 1:
\t\tSize: {parts}
\t\tOperator: op_name="jit(step)/jit(main)/dot_general[x=1]" source_file="/net.py" source_line=31
\t\tXLA Label: custom-call
\t\tShape: f32[64,2048]
\t\t==========================
"""
# The TPU compiler's table, as XlaRuntimeError carries it
XLA_TPU = """XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of
memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G.

Total hbm usage >= 21.00G:
    reserved        512.00M
    program          20.50G
    arguments            0B

Program hbm requirement 20.50G:
    HLO temp         20.25G (99.0% utilization)

  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(train)/jit(main)/attn/exp" source_file="/job/model.py" source_line=12
     Shape: bf16[16,8,4096,4096]{{3,2,1,0}}
"""
SHAPE = (
    "ResourceExhaustedError: OOM when allocating tensor with shape[{}] and type float on "
    "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:Conv2D]"
)


def test_program_of_xla_that_exceeds_the_device_is_proven_and_names_its_largest_buffer():
    result = diagnose(case_of(XLA_TPU.replace("{{", "{").replace("}}", "}")))

    assert (result.verdict.cause, result.verdict.confidence) == (Cause.CAPACITY, Confidence.PROVEN)
    assert "21.00 GiB of 15.75 GiB" in result.verdict.summary
    assert "4.00 GiB: bf16[16,8,4096,4096] of exp at model.py:12" in result.verdict.summary
    assert "nvidia-smi" not in result.verdict.settled_by
    assert "jax.checkpoint" in result.recommendations[0].change


@pytest.mark.parametrize(
    ("asked", "parts", "total", "code"),
    [
        (4 << 20, "2.00MiB", "4.00MiB", "free-other-process"),
        (9 << 30, "5.00GiB", "10.00GiB", "less-on-the-device"),
    ],
)
def test_what_a_program_needs_in_all_says_whether_it_or_others_fill_the_gpu(
    asked, parts, total, code
):
    verdict, first = first_of(XLA_GPU.format(asked=asked, parts=parts, total=total))

    assert first.code == code
    assert (verdict.cause is Cause.UNKNOWN) == (code == "free-other-process")


def test_shape_of_a_tensor_is_the_size_of_the_request():
    verdict, first = first_of(SHAPE.format("32,512,512,16"))

    assert "lower batch_size" in first.change
    assert "512.00 MiB" in verdict.summary


OTHERS = {
    # tensorflow/compiler/xla/stream_executor/cuda/cuda_dnn.cc
    "TensorFlow's cuDNN": (
        "E cuda_dnn.cc:1] Could not create cudnn handle: CUDNN_STATUS_ALLOC_FAILED\n",
        "set_memory_growth",
    ),
    # paddle/fluid/memory/allocation/cuda_allocator.cc
    "Paddle": (
        (
            "Out of memory error on GPU 0. Cannot allocate 1.500000GB memory on GPU 0, 14.000000GB "
            "memory has been allocated and available memory is only 900.000000MB."
        ),
        "batch_size",
    ),
    "Ollama": (
        "Error: llama runner process has terminated: CUDA error: out of memory\n",
        "num_ctx",
    ),
    "TensorRT-LLM": (
        (
            "[TRT-LLM] [I] Build TensorRT engine\n[TRT] [E] 2: [virtualMemoryBuffer.cpp::"
            "resizePhysical::9] Error Code 2: OutOfMemory (Requested size was 9663676416 bytes.)\n"
        ),
        "--max_batch_size",
    ),
    "ONNX Runtime": (
        (
            "bfc_arena.cc:9 AllocateRawInternal Failed to allocate memory for requested buffer of "
            "size 1610612736"
        ),
        "kSameAsRequested",
    ),
    "TurboMind of LMDeploy": (
        "RuntimeError: [TM][ERROR] CUDA runtime error: out of memory /src/utils/allocator.h:231",
        "--cache-max-entry-count",
    ),
    "cache of TensorRT-LLM": (
        (
            "[TRT-LLM] [E] Executor creation failed due to insufficient GPU memory.\n\n"
            "The following component could not be created: KV cache\n"
            "Total GPU memory (GiB): 140.06\n"
            "Free GPU memory before component creation attempt (GiB): 108.86\n"
        ),
        "free_gpu_memory_fraction",
    ),
    "Ollama by its build": (
        (
            "CUDA error: out of memory\n  in function alloc at "
            "//ml/backend/ggml/ggml/src/ggml-cuda/ggml-cuda.cu:445\n"
        ),
        "num_ctx",
    ),
    "a miner": ("Cuda error in func 'start' at line 9 : out of memory", "nvidia-smi"),
    "pool of ggml": ("ggml-cuda.cu:44: CUVMM Failure: out of memory", "GGML_CUDA_NO_VMM"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_program_with_an_allocator_of_its_own_is_advised_in_its_own_options(name):
    text, said = OTHERS[name]

    result = diagnose(case_of(text))

    assert said in result.recommendations[0].change
    shown = " ".join(f"{r.title} {r.setting} {r.change}" for r in result.recommendations)
    assert "torch" not in shown
    assert "PYTORCH" not in shown


def test_limit_of_an_arena_is_raised_and_no_fraction_of_pytorchs():
    verdict, first = first_of("Available memory of 0 is smaller than requested bytes of 2048")

    assert verdict.cause is Cause.MEMORY_LIMIT
    assert "gpu_mem_limit" in first.change


def test_library_that_fails_after_an_assertion_on_the_device_is_no_lack_of_memory():
    # aten/src/ATen/native/cuda/Indexing.cu and CUDABlas.cpp
    assertion = (
        "Indexing.cu:1: indexSelectSmallIndex: block: [0,0,0], thread: [7,0,0] Assertion "
        "`srcIndex < srcSelectDimSize` failed.\n"
    )
    failure = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(h)`"

    after, alone = (diagnose(case_of(text)).verdict for text in (assertion + failure, failure))

    assert after.cause is Cause.NOT_MEMORY
    assert "out of range" in after.summary
    assert alone.cause is Cause.CAPACITY


@pytest.mark.parametrize(
    ("node", "said"),
    [("UNETLoader", "fp8"), ("VAEDecode", "Tiled"), ("KSampler", "smaller image")],
)
def test_report_of_comfyui_is_about_the_node_that_ran(node, said):
    # ComfyUI, execution.py and the front end's report
    text = (
        f"# ComfyUI Error Report\n- **Node Type:** {node}\n- **Exception Type:** torch."
        "OutOfMemoryError\n- **Exception Message:** Allocation on device \n## Stack Trace\n"
    )

    _, first = first_of(text)

    assert said in first.change


def test_step_of_text_generation_inference_is_advised_in_its_options():
    text = (
        "text_generation.errors.GenerationError: Request failed during generation: Server error: "
    ) + new_style("42.00 MiB", "40.00 GiB", "32.00 MiB", "37.00 GiB", "1.00 GiB")

    _, first = first_of(text)

    assert "--max-batch-total-tokens" in first.change


def test_request_that_people_quote_is_told_by_the_allocator_that_printed_it():
    quoted = "Why does it say that it tried to allocate 6.00GiB?\n"
    told = "bfc_allocator.cc:1] Ran out of memory trying to allocate 6.00GiB.  See logs.\n"

    verdict, first = first_of(quoted + told)

    assert "TensorFlow could not allocate 6.00 GiB" in verdict.summary
    assert first.code == "less-on-the-device"


def test_figures_of_a_kernels_on_chip_memory_are_those_of_a_multiprocessor():
    # triton/runtime/errors.py: OutOfResources
    verdict, _ = first_of(
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, "
        "Hardware limit: 101376. Reducing block sizes or `num_stages` may help."
    )

    assert verdict.cause is Cause.NOT_MEMORY
    assert "144.00 KiB of 99.00 KiB" in verdict.summary


def test_index_error_beside_a_librarys_failure_is_what_it_was():
    failure = "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(h)`"
    told = f"{failure}\nOn the CPU it says:\nIndexError: index out of range in self\n"

    assert diagnose(case_of(told)).verdict.cause is Cause.NOT_MEMORY


def test_memory_of_a_tpus_core_is_no_matter_of_the_batch():
    # what the TPU compiler says of its vector memory
    verdict, first = first_of(
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "vmem. It should not be possible to run out of vmem - please file a bug against XLA."
    )

    assert verdict.cause is Cause.NOT_MEMORY
    assert "HBM is not short" in verdict.summary
    assert "Triton" not in first.change


def test_xla_of_jax_is_told_by_its_files_though_they_lie_in_tensorflows_tree():
    text = (
        "E external/org_tensorflow/tensorflow/compiler/xla/pjrt/c.cc:9] Execution of replica 0 "
        "failed: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5368709120 bytes."
    )

    assert "JAX could not" in diagnose(case_of(text)).verdict.summary


@pytest.mark.parametrize(
    ("asked", "cause", "code"),
    [
        ("4.00 GiB", Cause.MEMORY_LIMIT, "split-allocation"),
        ("3.00 GiB", Cause.UNKNOWN, "find-the-limit"),
    ],
)
def test_four_gibibytes_at_once_are_refused_by_intels_driver(asked, cause, code):
    # c10/xpu/XPUCachingAllocator.cpp of 2.5
    verdict, first = first_of(
        f"torch.OutOfMemoryError: XPU out of memory. Tried to allocate {asked}. GPU 0 has a total "
        "capacity of 15.00 GiB. Of the allocated memory 1.00 GiB is allocated by PyTorch, and 0 "
        "bytes is reserved by PyTorch but unallocated. Please use `empty_cache` to release all "
        "unoccupied cached memory."
    )

    assert verdict.cause is cause
    assert first.code == code


def test_more_free_than_the_device_has_is_an_integrated_gpus_and_proves_no_size():
    text = new_style("16.00 GiB", "15.50 GiB", "80.00 GiB", "1.00 GiB", "1.00 GiB")

    verdict, first = first_of(text)

    assert verdict.cause is Cause.UNKNOWN
    assert first.code == "find-the-limit"


def test_process_that_leaves_no_room_for_this_one_is_this_one():
    cut = new_style(
        "2.00 GiB",
        "40.00 GiB",
        "1.50 GiB",
        "1.00 GiB",
        "1.00 GiB",
        processes=process(71, "38.50 GiB"),
    ).partition(" memory in use")[0]

    result = diagnose(case_of(cut))

    assert result.verdict.cause is Cause.CAPACITY
    assert "71" not in result.recommendations[0].change


# ---- hosts ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.\n",
         "page file"),
        ("OSError: [WinError 1455] The paging file is too small\n", "page file"),
        ("Reason: OOMKilled\nExit Code: 137\n", "resources.limits.memory"),
        # mm/oom_kill.c and mm/memcontrol.c
        ("python invoked oom-killer: order=0\n[<0>] mem_cgroup_oom_synchronize+0x1/0x2\n",
         "resources.limits.memory"),
        ("RuntimeError: DataLoader worker (pid 5) is killed by signal: Killed.\n",
         "fewer DataLoader workers, each"),
        ("The node was low on resource: memory.\n", "resources.requests.memory"),
        # ggml/src/ggml-backend.cpp
        (("ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 9663676416"
          "\n"), "--ctx-size"),
    ],
)  # fmt: skip
def test_host_memory_is_advised_by_who_refused_it(text, said):
    verdict, first = first_of(text)

    assert verdict.cause is Cause.HOST_MEMORY
    assert said in first.change


def test_worker_that_crashed_was_not_killed_for_memory():
    text = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Segmentation fault.\n"

    verdict = diagnose(case_of(text)).verdict

    assert verdict.cause is Cause.NOT_MEMORY
    assert "crashed" in verdict.summary


def test_slow_run_beside_shared_gpu_memory_has_spilled_and_its_mention_alone_has_not():
    slow = "Training is very slow, and Shared GPU memory is at 6.1/16.0 GB.\n"
    idle = "GPU memory 1.0/24.0 GB, Shared GPU memory 0.1/16.0 GB.\n"

    spilled, quiet = (diagnose(case_of(text)) for text in (slow, idle))

    assert spilled.verdict.cause is Cause.CAPACITY
    assert "Sysmem Fallback" in spilled.recommendations[0].change
    assert quiet.verdict.cause is Cause.NOT_MEMORY


# ---- programs without PyTorch, and what nothing here knows ----

PROGRAMS = {
    # rmm, include/rmm/mr/device/cuda_memory_resource.hpp and error.hpp: RMM_CUDA_TRY_ALLOC
    "rmm": (
        ("MemoryError: std::bad_alloc: CUDA error at: /env/include/rmm/mr/device/"
        "cuda_memory_resource.hpp:68: cudaErrorMemoryAllocation out of memory\n"),
        "cudf.set_option('spill', True)",
    ),
    # rmm, include/rmm/mr/device/pool_memory_resource.hpp
    "rmm's pool": (
        ("MemoryError: std::bad_alloc: RMM failure at:/env/include/rmm/mr/device/"
        "pool_memory_resource.hpp:182: Maximum pool size exceeded\n"),
        "maximum_pool_size",
    ),
    # CUDA.jl, src/memory.jl: OutOfGPUMemoryError and memory_status
    # spconv, include/tensorview/tensor.h: checkCudaErrors
    "spconv": ("RuntimeError: storage /x/tensor.h 9\ncuda failed with error 2 out of memory.\n",
               "nvidia-smi"),
    "a program of C++": ("terminate called: what(): /src/cuda/pool.hpp(7):\nerror: out of memory\n",
                         "nvidia-smi"),
    "a check with its file": ("CUDA error: out of memory (/src/net/backend.cc:442\n", "nvidia-smi"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_without_pytorch_is_advised_in_its_own_options(name):
    text, said = PROGRAMS[name]

    verdict, first = first_of(text)

    assert verdict.cause in (Cause.CAPACITY, Cause.UNKNOWN)
    assert said in first.change
    assert "pin_memory" not in first.change
    assert "torch." not in first.change


def test_line_that_nothing_here_knows_is_no_proof_that_memory_is_fine():
    told, talked = (
        diagnose(case_of(text))
        for text in ("Error: out of memory\n", "They say that out of memory errors are common.\n")
    )

    assert told.verdict.cause is Cause.UNKNOWN
    assert Cause.HOST_MEMORY in told.verdict.also
    assert "free -h" in told.recommendations[0].change
    assert talked.verdict.cause is Cause.NOT_MEMORY


def test_words_of_a_program_that_is_known_go_before_the_last_resort():
    text = "Error: out of memory\n" + old_style(
        "1.00 GiB", "8.00 GiB", "7.00 GiB", "0 bytes", "7.50 GiB"
    )

    assert len(case_of(text).oom.messages) == 1


@pytest.mark.parametrize(
    "text",
    [
        # slurmd of Slurm 18; OpenPBS, src/resmom/mom_main.c; LSF, bhist -l
        "error: Job 51 exceeded memory limit (901 > 900), being killed\n",
        "=>> PBS: job killed: mem 9012kb exceeded limit 9000kb\n",
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.\n",
        # runc, libcontainer/process_linux.go
        "runc create failed: container init was OOM-killed (memory limit too low?)\n",
        "job.sh: line 2:  71 Killed  python fit.py\nslurmstepd: error: Detected 1 oom_kill event\n",
    ],
)
def test_scheduler_that_says_why_it_killed_a_job_is_proof(text):
    verdict, first = first_of(text)

    assert (verdict.cause, verdict.confidence) == (Cause.HOST_MEMORY, Confidence.PROVEN)
    assert "--mem of sbatch" in first.change


def test_request_of_the_old_cpu_allocator_is_the_hosts():
    # PyTorch 0.4 and 1.0, aten/src/TH/THGeneral.cpp
    text = "RuntimeError: $ Torch: not enough memory: you tried to allocate 9GB. Buy new RAM!\n"

    assert first_of(text)[0].cause is Cause.HOST_MEMORY


def test_driver_without_figures_is_met_with_who_fills_the_gpu():
    verdict, first = first_of("RuntimeError: CUDA error: out of memory\n")

    assert verdict.cause is Cause.UNKNOWN
    assert first.change.startswith(
        "run nvidia-smi while the program runs: if another process fills"
    )


def test_holders_are_found_with_the_tool_of_the_devices_maker():
    text = old_style("22.00 MiB", "60.97 GiB", "10.24 GiB", "19.52 MiB", "10.65 GiB")

    first = first_of(text.replace("CUDA out", "NPU out").replace("(GPU 0", "(NPU 0"))[1]

    assert "npu-smi" in first.change
    assert "nvidia" not in first.change


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # Khronos, CL/cl.h and vulkan_core.h
        ("OpenCL error, line 11, error CL_MEM_OBJECT_ALLOCATION_FAILURE\n", "nvidia-smi"),
        ("vkAllocateMemory failed with VK_ERROR_OUT_OF_DEVICE_MEMORY\n", "nvidia-smi"),
        # PhysX, PxgCudaMemoryAllocator.cpp; carb.cudainterop
        ("PxgCudaDeviceMemoryAllocator fail to allocate memory 4096 bytes!! Result = 2\n",
         "nvidia-smi"),
        ("[Error] CUDA error 2: cudaErrorMemoryAllocation - out of memory)\n", "nvidia-smi"),
        # hashcat, src/ext_cuda.c and src/backend.c
        ("* Device #1: card, 4096 MB\ncuMemAlloc(): out of memory\n", "nvidia-smi"),
        ("- Device #1: Device does not provide enough allocatable device-memory\n", "nvidia-smi"),
        # wgpu-core, src/device/mod.rs
        ("thread panicked at 'wgpu error\n In Device::create_buffer\n Not enough memory left",
         "nvidia-smi"),
        # mlx, backend/metal/device.cpp
        ("std::runtime_error: [METAL] Command buffer execution failed: Insufficient Memory\n",
         "iogpu.wired_limit_mb"),
        # mlx, backend/metal/allocator.cpp
        ("[metal::malloc] Unable to allocate 41 bytes.\n", "iogpu.wired_limit_mb"),
        ('MetalExecutionError: Code=8 "Insufficient Memory (IOAF code 8)"\n', "Activity Monitor"),
    ],
)  # fmt: skip
def test_programs_of_every_kind_say_that_a_device_is_full(text, said):
    verdict, first = first_of(text)

    assert verdict.cause is Cause.CAPACITY
    assert said in first.change
    assert "torch" not in first.change


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # mlx, backend/metal/allocator.cpp
        (("[metal::malloc] Attempting to allocate 25769803776 bytes which is greater than the "
          "maximum allowed buffer size of 17179869184 bytes."), "a smaller batch"),
        ("RuntimeError: [metal::malloc] Resource limit (499000) exceeded.", "mx.eval()"),
    ],
)  # fmt: skip
def test_limits_of_metal_are_no_full_device(text, said):
    verdict, first = first_of(text)

    assert verdict.cause is Cause.MEMORY_LIMIT
    assert said in first.change


def test_program_of_jax_is_held_against_the_largest_piece():
    # xla, service/heap_simulator and pjrt/tpu: free in all, and in one piece
    verdict, _ = first_of(
        "RESOURCE_EXHAUSTED: Attempting to allocate 1.20G. That was not possible. There are 1.33G "
        "free. Due to fragmentation, the largest contiguous region of free memory is 820.53M."
    )

    assert verdict.cause is Cause.CAPACITY


@pytest.mark.parametrize(("free", "cause"), [("9.00", "memory_limit"), ("1.00", "capacity")])
def test_four_gib_of_xpu_are_refused_only_where_they_would_have_fit(free, cause):
    verdict, _ = first_of(
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.50 GiB. GPU 0 has a total "
        f"capacity of 15.91 GiB of which {free} GiB is free. Of the allocated memory "
        f"{14 - float(free)} GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated."
    )

    assert verdict.cause.value == cause


def test_request_that_fits_what_is_free_is_no_full_device():
    # xgboost, src/common/device_vector.cu: ThrowOOMError
    text = (
        "xgboost.core.XGBoostError: Memory allocation error on worker 0: std::bad_alloc: "
        "cudaErrorMemoryAllocation: out of memory\n- Free memory: {}\n- Requested memory: 4096\n"
    )

    roomy, full = (first_of(text.format(free))[0] for free in (9 << 30, 1024))

    assert (roomy.cause, full.cause) == (Cause.UNKNOWN, Cause.CAPACITY)
    assert "9.00 GiB free" in roomy.summary


@pytest.mark.parametrize(
    "talk",
    [
        "If you see an out of memory error, reduce the batch.\n",
        "There is not enough memory when you run this on a laptop, please use a server.\n",
        "Runs out of memory issues are fixed in 1.2.\n",
        "GPU memory is enough; the model needs 6 GB.\n",
    ],
)
def test_talk_of_memory_is_no_failure(talk):
    assert diagnose(case_of(talk)).verdict.cause is Cause.NOT_MEMORY


def test_tensor_that_is_joined_while_memory_is_seen_to_grow_is_a_leak():
    text = (
        "The GPU memory increases over time, until it fails with CUDA out of memory.\n"
        "labels = torch.cat((labels, batch.cpu()))\n"
    )

    assert diagnose(case_of(text)).verdict.cause is Cause.LEAK


def test_tool_that_shows_who_is_on_the_gpu_is_the_vendors():
    text = (
        "HIP out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 287.98 GiB "
        "of which 0 bytes is free. Of the allocated memory 8.51 GiB is allocated by PyTorch, and "
        "1.99 MiB is reserved by PyTorch but unallocated."
    )

    result = diagnose(case_of(text))

    assert result.verdict.settled_by == "rocm-smi names the processes."
    said = " ".join(r.change for r in result.recommendations)
    assert "rocm-smi" in said
    assert "nvidia" not in said


def test_rest_of_a_tpu_is_held_by_the_program_itself():
    result = diagnose(
        case_of(
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Error allocating device "
            "buffer: Attempting to allocate 15.65G. That was not possible. There are 11.08G "
            "free.; (0x0x0_HBM0)\n"
        )
    )

    assert "this one's other arrays hold the rest" in result.verdict.summary
    assert Cause.OTHER_PROCESS not in result.verdict.also
    assert "nvidia-smi" not in result.verdict.settled_by


def test_gaussian_splatting_is_advised_in_its_options():
    full = old_style("42.00 MiB", "24.00 GiB", "53.19 GiB", "0 bytes", "53.57 GiB")

    _, first = first_of(f"{full}\nI use a 3090 for gaussian-splatting with 3000 photos.\n")

    assert "--data_device cpu" in first.change


def test_figures_of_tensorrt_llms_executor_are_told():
    text, _ = OTHERS["cache of TensorRT-LLM"]

    assert "108.86 GiB of 140.06 GiB was free" in diagnose(case_of(text)).verdict.summary


def test_memory_that_was_seen_to_grow_is_the_only_evidence_beside_a_size():
    verdict, first = first_of(
        "cuda memory increases with the iteration, then CUDA out of memory. Tried to allocate "
        "20.00 MiB\n"
    )

    assert (verdict.cause, verdict.confidence) == (Cause.LEAK, Confidence.POSSIBLE)
    assert "loss.item()" in first.change


def test_ctranslate2_is_told_once_and_not_to_block_launches():
    verdict, _ = first_of("RuntimeError: CUDA failed with error out of memory\n")

    assert verdict.summary.count("CTranslate2") == 1
    assert "CUDA_LAUNCH_BLOCKING" not in verdict.settled_by


def test_tenth_of_the_cache_in_holes_is_a_full_card():
    full = old_style("210.00 MiB", "10.92 GiB", "9.16 GiB", "147.50 MiB", "10.18 GiB")

    assert first_of(full)[0].cause is Cause.CAPACITY


def test_killed_process_with_zero_3_is_told_to_offload_less():
    _, first = first_of("zero-3-offload, one H100\nexitcode -9\n")

    assert "offload less to the host" in first.change


def test_limit_of_windows_is_told_by_its_number_in_every_language_and_goes_first():
    said = "!!! El archivo de paginación es demasiado pequeño para la operación. (os error 1455)"

    verdict, first = first_of(f"C:\\ComfyUI\\execution.py\n{said}\n")

    assert verdict.cause is Cause.HOST_MEMORY
    assert first.change.startswith("use a larger page file")
    assert "--cache-none" in first.change


@pytest.mark.parametrize(
    "said",
    [
        "lmdeploy serve api_server llava --tp 2 failed on 2 A30: the reason is OOM as below.",
        "128gb videoram, 81 frames: at the end got oom on Vae Decode node",
    ],
)
def test_words_for_a_gpu_say_whose_memory_ran_out(said):
    verdict, _ = first_of(f"{said}\n")

    assert verdict.cause is Cause.CAPACITY


def test_kill_on_colab_is_advised_in_a_notebooks_words():
    _, first = first_of("I run it on a Google colab with a T4.\nLoading layers\nKilled\n")

    assert "what earlier cells left" in first.change


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ("generate_text(q) fails with a long prompt", "Use smaller inputs"),
        ("I generate pictures to train a GAN, batch 4", "Use a smaller batch or smaller images"),
        ("I am trying to load a 4 bit model and it says", "Load smaller weights"),
        ("I tried to load the dataset and it says", "Use a smaller batch or smaller inputs"),
    ],
)
def test_words_say_whether_a_model_is_trained_run_or_loaded(said, title):
    _, first = first_of(f"{said}\n{FULL}\n")

    assert first.title == title


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ("Can you help me?", "If this is training: checkpoint the layers of the model"),
        ("It fails in epoch 3.", "Checkpoint the layers of the model"),
        ("A pre-trained net.", "If this is training: checkpoint the layers of the model"),
    ],
)
def test_checkpoints_are_for_training_only_and_say_so(said, title):
    told = diagnose(case_of(f"{said}\n{FULL}\n")).recommendations

    assert title in [r.title for r in told]


def test_words_about_a_run_do_not_go_before_the_cure_of_holes():
    holes = old_style("1.69 GiB", "7.79 GiB", "1.62 GiB", "704.56 MiB", "5.88 GiB")

    verdict, first = first_of(f"I run eval.py, it generates 15 pictures, then\n{holes}\n")

    assert verdict.cause is Cause.FRAGMENTATION
    assert first.code == "expandable-segments"


@pytest.mark.parametrize(
    ("said", "change"),
    [
        (
            "generate_text(q) with a long prompt",
            "use shorter sequences (and a lower max_new_tokens)",
        ),
        ("upscaling a picture", "use smaller images (or tiles of them)"),
        (
            "My chat bot runs a video: " + "prompt of tokens, LLM, chat. " * 3,
            "use shorter sequences (and a lower max_new_tokens); process one input at a time;",
        ),
        ("synthesizing speech", "use shorter audio"),
        ("inference fails", "use a smaller image or tiles of it, fewer frames"),
    ],
)
def test_input_of_a_model_that_runs_is_shortened_by_its_kind(said, change):
    _, first = first_of(f"{said}\n{FULL}\n")

    assert first.change.startswith(change)


def test_driver_without_figures_is_advised_in_the_words_of_what_ran():
    verdict, first = first_of(
        "[ComfyUI-0/STDERR] !!! Exception during processing !!! CUDA error: out of memory\n"
        "CUDA kernel errors might be asynchronously reported\nI generate a video.\n"
    )

    assert verdict.cause is Cause.CAPACITY
    assert first.change.startswith("with ComfyUI")


def test_cache_that_a_starting_server_sets_aside_is_no_matter_of_its_first_step():
    frames = (
        ("/x/vllm/v1/engine/core.py", "engine_core = EngineCoreProc(*args)"),
        ("/x/vllm/v1/worker/gpu_model_runner.py", "kv_caches = torch.zeros(size)"),
    )
    kept = traceback(*frames).replace(
        "line 3, in f\n    kv", "line 3, in initialize_kv_cache\n    kv"
    )

    assert "--max-num-seqs" in first_of(f"{traceback(frames[0])}{FULL}\n")[1].change
    assert first_of(f"{kept}{FULL}\n")[1].change.startswith("with vLLM: lower --gpu-memory-util")


@pytest.mark.parametrize(("asked", "is_kept"), [("686.41 MiB", True), ("4.00 GiB", False)])
def test_pool_of_the_driver_that_keeps_far_more_than_was_asked_is_in_pieces(asked, is_kept):
    verdict, first = first_of(
        "torch.cuda.OutOfMemoryError: Allocation on device 5 would exceed allowed memory. (out of "
        f"memory)\nCurrently allocated     : 68.00 GiB\nRequested               : {asked}\n"
        "Device limit            : 79.35 GiB\nFree (according to CUDA): 27.19 MiB\n"
        "PyTorch limit (set by user-supplied memory fraction)\n: 17179869184.00 GiB\n"
    )

    assert verdict.cause is (Cause.FRAGMENTATION if is_kept else Cause.CAPACITY)
    assert first.setting.endswith("backend:native" if is_kept else "")


@pytest.mark.parametrize(("total", "is_small"), [("512.00 MiB", True), ("8.00 GiB", False)])
def test_share_of_an_integrated_gpu_is_a_setting(total, is_small):
    text = old_style("2.00 MiB", total, "150.39 MiB", "312.00 MiB", "168.00 MiB")

    _, first = first_of(text.replace("CUDA", "HIP"))

    assert ("BIOS" in first.change) is is_small


@pytest.mark.parametrize(
    ("said", "title"),
    [
        ("in our docker container", "Give the container more shared memory"),
        ('I train "without" using docker', "Make the host's shared memory larger"),
        ("in the second epoch", "Make the host's shared memory larger"),
    ],
)
def test_shared_memory_is_that_of_a_container_only_where_the_text_has_one(said, title):
    _, first = first_of(
        f"{said}\nRuntimeError: DataLoader worker is killed by signal: Bus error.\n"
    )

    assert first.title == title


def test_lines_of_vllms_log_name_it_whichever_file_wrote_them():
    _, first = first_of(f"ERROR 04-27 16:28:02 [engine.py:448] {FULL}\n")

    assert first.change.startswith("with vLLM")


def test_memory_that_grows_while_a_model_runs_has_no_loss_to_let_go_of():
    verdict, first = first_of("Memory leak when I synthesize speech: the GPU runs out of memory.\n")

    assert verdict.cause is Cause.LEAK
    assert "torch.inference_mode() around each call" in first.change


def test_prompt_of_an_image_is_no_text_to_shorten():
    _, first = first_of(f"My SDXL workflow with a prompt\n{FULL}\n")

    assert not first.change.startswith("use a shorter text")


def test_program_with_options_of_its_own_keeps_them_when_it_loads_a_model():
    _, first = first_of(
        "WSL: trying to load a model that worked before\nllama.cpp: loading model from m.bin\n"
        "CUDA error 2 at ggml-cuda.cu:359: out of memory\n"
    )

    assert "--n-gpu-layers" in first.change


# ---- what the author counts is what there must be less of ----


@pytest.mark.parametrize(
    ("said", "less", "change"),
    [
        ("It fails when the points number is more than 50000.", "fewer points", "in chunks"),
        ("My network fails with 12,000 query points.", "fewer query points", "in chunks"),
        ("There are so many gt boxes in a photo.", "fewer gt boxes", "gpu_assign_thr"),
        ("I train on a graph with 9 million edges.", "fewer edges", "NeighborLoader"),
        ("The agent has stored 40k transitions.", "fewer transitions", "on the CPU"),
    ],
)
def test_less_of_what_the_author_counts_is_advised_in_the_authors_words(said, less, change):
    _, first = first_of(f"{said}\nRuntimeError: CUDA out of memory\n")

    assert less in first.title
    assert change in first.change


def test_batch_that_is_named_beside_what_is_counted_is_lowered_too():
    _, first = first_of("batch_size=8, so many gt boxes\nRuntimeError: CUDA out of memory\n")

    assert first.title == "Use fewer gt boxes, or lower batch_size from 8"


@pytest.mark.parametrize(
    "said", ["I use 8 GPUs and 400 epochs", "469,530 sentences", "30000 iterations in 12 hours"]
)
def test_sizes_of_a_run_or_a_data_set_are_not_what_there_is_too_much_of(said):
    _, first = first_of(f"{said}\nRuntimeError: CUDA out of memory\n")

    assert "at a time" not in first.title


@pytest.mark.parametrize(
    ("said", "is_told"),
    [
        ("I transcribe one long recording.", True),
        ("y = model(x)\nI transcribe one long recording.", False),  # own code has no options
        ("Which model fits my card?", False),  # it may be trained
    ],
)
def test_options_of_a_program_are_for_those_who_run_one(said, is_told):
    _, first = first_of(f"{said}\nRuntimeError: CUDA out of memory\n")

    assert ("--lowvram" in first.change) is is_told


def test_program_that_people_name_is_not_taken_for_pytorch():
    said = "CUDA out of memory\n\nI installed ollama and run the model with a prompt.\n"

    _, first = first_of(said)
    _, beside = first_of(f"{said}My torch program runs beside it.\n")

    assert "num_gpu" in first.change
    assert "num_gpu" not in beside.change


def test_array_of_cupy_that_no_gpu_holds_is_made_smaller():
    # cupy 13, cuda/memory.pyx
    verdict, first = first_of(
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 557,507,129,344 bytes "
        "(allocated so far: 10,453,504 bytes).\n"
    )

    assert verdict.cause is Cause.CAPACITY
    assert "519.22 GiB" in verdict.summary
    assert "in blocks" in first.change


def test_out_of_memory_error_with_hyphens_is_not_pythons():
    verdict, _ = first_of("The server fails on the GPU with an out-of-memory error\n")

    assert verdict.cause is not Cause.HOST_MEMORY


@pytest.mark.parametrize(
    "title",
    ["Attention: memory growth in my torch loop", "It grows to 11 gigabytes in my torch loop"],
)
def test_memory_that_grew_is_told_in_nouns_and_figures_too(title):
    verdict, _ = first_of(f"{title}\n\nMy model uses the GPU. How can I fix it?\n")

    assert verdict.cause is Cause.LEAK


def test_title_about_problems_with_memory_is_one():
    verdict, first = first_of(
        "Problems with CUDA memory when validation starts\n\nHow can I fix it?\n"
    )

    assert verdict.cause is Cause.CAPACITY
    assert "Evaluate" in first.title


@pytest.mark.parametrize(("live", "is_first"), [("10.23 GiB", True), ("4.00 GiB", False)])
def test_peak_is_lowered_before_pytorch_is_replaced_unless_most_of_the_cache_is_holes(
    live, is_first
):
    full = old_style("2.00 GiB", "14.75 GiB", live, "790.81 MiB", "12.92 GiB")

    verdict, first = first_of(f"after the train cell:\n{full}\n")

    assert verdict.cause is Cause.FRAGMENTATION
    assert (first.code == "smaller-batch") is is_first


def test_drivers_error_in_a_backward_pass_is_lowered_by_the_sizes_that_are_named():
    step = traceback(("/job/train.py", "loss.backward()"))
    failed = (
        "RuntimeError: cuda runtime error (2) : out of memory at /a/torch/csrc/cuda/Module.cpp:32\n"
    )

    _, first = first_of(f"{step}{failed}python train.py --seq-len 1600\n")
    _, elsewhere = first_of(f"{failed}python train.py --seq-len 1600\n")

    assert first.title == "Use a smaller batch or a lower --seq-len than 1600"
    assert "nvidia-smi" in first.change
    assert elsewhere.title == "Check whether the GPU is full, and what fills it"


@pytest.mark.parametrize(("card", "is_too_small"), [("GTX 1060 6GB", True), ("RTX 4090", False)])
def test_weights_are_compared_with_the_card_that_the_text_names(card, is_too_small):
    _, first = first_of(f"I load vicuna-7b on my {card}\nRuntimeError: CUDA out of memory\n")

    assert first.title.startswith("Use a smaller model") is is_too_small


def test_same_advice_of_two_remedies_is_said_once():
    result = diagnose(
        case_of("I generate images with hires, which throws out of memory on my GPU\n")
    )
    titles = [r.title for r in result.recommendations]

    assert titles[0] == "Use smaller inputs"
    assert len({*titles}) == len(titles)


# ---- where words and calls stand ----


def test_words_between_a_title_and_its_traceback_are_read():
    calls = traceback(("/job/chat.py", "answer = qa(query)"))

    verdict, _ = first_of(
        "CUDA out of memory\n\nI use torch. The memory keeps growing after every question.\n"
        f"{calls}RuntimeError: see the title\n"
    )

    assert verdict.cause is Cause.LEAK


def test_step_that_a_traceback_shows_outweighs_words_about_loading():
    calls = traceback(("/job/main.py", "resume=config.train.resume,"))
    step = traceback(("/job/trainer.py", "loss.backward()")).partition("\n")[2]

    _, loading = first_of(f"I resume from a checkpoint.\n{calls}{FULL}\n")
    _, first = first_of(f"I resume from a checkpoint.\n{calls}{step}{FULL}\n")

    assert loading.title.startswith("Load the checkpoint")
    assert "checkpoint on the CPU" not in first.title


# ---- who fills the GPU ----


@pytest.mark.parametrize(
    ("file", "code", "cause"),
    [
        ("/site-packages/torch/cuda/__init__.py", "torch._C._cuda_init()", Cause.OTHER_PROCESS),
        ("/job/gen.py", "torch.manual_seed(seed)", Cause.OTHER_PROCESS),
        ("/job/gen.py", "torch.zeros(1).cuda()", Cause.OTHER_PROCESS),
        ("/job/gen.py", 'x = torch.tensor([1., 2.], device="cuda")', Cause.OTHER_PROCESS),
        ("/job/gen.py", "y = torch.stack(x).cuda()", Cause.UNKNOWN),
        ("/job/gen.py", "y = net(x)", Cause.UNKNOWN),
    ],
)
def test_first_call_of_cuda_fails_for_what_others_hold(file, code, cause):
    calls = traceback((file, code)).replace("in f", "in _lazy_init")

    verdict, _ = first_of(f"{calls}RuntimeError: CUDA error: out of memory\n")

    assert verdict.cause is cause


def test_ranks_on_the_first_gpu_are_told_to_leave_it_and_not_to_stop():
    held = old_style("392.00 MiB", "15.90 GiB", "9.31 GiB", "201.75 MiB", "9.62 GiB")

    verdict, first = first_of(
        f"I train with DDP, and rank 0 uses more memory than others.\n{held}\n"
    )

    assert verdict.cause is Cause.OTHER_PROCESS
    assert "torch.cuda.set_device(local_rank)" in first.change


def test_gpu_that_a_table_shows_free_is_named():
    row = "| N/A   54C    P0   246W / 300W |  {:6}MiB / 16130MiB |      0%      Default |\n"
    table = "|   0  Tesla V100  On   | 00000000:00:08.0 Off |                    0 |\n"

    _, first = first_of(
        f"RuntimeError: CUDA error: out of memory\n{table}{row.format(15514)}{row.format(0)}"
    )
    _, full = first_of(
        f"RuntimeError: CUDA error: out of memory\n{table}{row.format(15514)}{row.format(9000)}"
    )

    assert first.title.startswith("Run it on GPU 1, which is free")
    assert full.title == "Stop the other processes on this GPU"


@pytest.mark.parametrize(("asked", "is_of_weights"), [("54.00 MiB", True), ("3.00 GiB", False)])
def test_small_request_of_a_model_that_runs_is_about_its_weights(asked, is_of_weights):
    calls = traceback(("/job/run.py", "image = generate(prompt)"))

    _, first = first_of(
        f"{calls}{old_style(asked, '23.64 GiB', '23.20 GiB', '24 MiB', '23.3 GiB')}"
    )

    assert (first.title == "Keep less of the model on the GPU") is is_of_weights


def test_weights_take_fewer_bits_than_they_have():
    said = (
        "I run a demo on a 24G GPU {}, and it runs out of GPU memory. How can I load the model?\n"
    )

    assert "weights in 4 bits" in first_of(said.format("with int8"))[1].change
    assert "16, 8 or 4" in first_of(said.format("as usual"))[1].change


def test_server_beside_a_training_gets_a_smaller_share():
    full = new_style(
        "1.16 GiB",
        "79.35 GiB",
        "1.05 GiB",
        "62.60 GiB",
        "95.32 MiB",
        processes=process(91, "14.90 GiB"),
    )
    calls = traceback(
        ("/site-packages/trl/trainer/grpo_trainer.py", "self.llm = LLM("),
        ("/site-packages/vllm/worker/cache_engine.py", "kv_cache = torch.zeros("),
    )

    _, first = first_of(f"{calls}{full}\n")

    assert first.title == "Give the server beside the training a smaller share of the GPU"
    assert "vllm_gpu_memory_utilization" in first.change


@pytest.mark.parametrize(
    "said",
    [
        "With every request the memory rises.",
        "显存会随着epoch的增加而增加",
        "每过100来个step\uff0c显存就会多占用4G",
        "随着问题的增加\uff0c显存溢出",
        "GPUメモリが徐々に増えていきます",
        "메모리가 계속 증가합니다",
        "Память постоянно растёт",
        "Der Speicher wächst mit jeder Epoche",
        "La mémoire augmente à chaque epoch",
    ],
)
def test_growth_is_read_in_several_languages(said):
    verdict, _ = first_of(f"torch: CUDA out of memory\n\n{said}\n")

    assert verdict.cause is Cause.LEAK


def test_program_that_printed_an_error_is_judged_and_not_the_title():
    result = diagnose(
        case_of(
            "cuda out of memory\n\nLog start\n"
            "CUDA error 2 at /data/llama.cpp/ggml-cuda.cu:5509: out of memory\n"
        )
    )

    assert "layers on the GPU" in result.recommendations[0].title


def test_growth_in_a_loop_of_the_framework_is_capped_by_its_options():
    said = "The memory keeps growing: CUDA out of memory\n\n"

    _, first = first_of(f"{said}python tune.py --per_device_train_batch_size 64\n")

    assert first.title.startswith("Cap the largest batch")
    assert "per_device_train_batch_size" in first.change


def test_growth_in_a_server_is_met_by_its_options():
    _, first = first_of("vLLM: memory keeps growing with each request until CUDA out of memory\n")

    assert "--gpu-memory-utilization" in first.change


@pytest.mark.parametrize(
    ("said", "left_out", "first"),
    [
        ('use_gradient_checkpointing = "unsloth"\nbatch_size = 1', "checkpoint", "shorter"),
        ("TrainingArguments(eval_accumulation_steps=9): evaluation fails, they accumulate over it",
         "eval_accumulation_steps", "preprocess_logits"),
        ("AutoModel.from_pretrained(name, torch_dtype=torch.float16) fails to load: CUDA OOM",
         "bfloat16", "4 bits"),
        ("I use VAE Decode (Tiled) in ComfyUI; it fails in VAE decode", "use VAE Decode", "tiles"),
    ],
)  # fmt: skip
def test_what_is_shown_with_any_value_is_in_use(said, left_out, first):
    _, one = first_of(f"CUDA out of memory in training\n{said}\n")

    assert left_out not in f"{one.title} {one.change}"
    assert first in one.change


def test_proposal_is_neither_in_use_nor_tried():
    grows = "The memory keeps growing in my training loop until CUDA runs out of memory.\n"
    _, proposed = first_of(f"{grows}It should be sufficient to change to\n\n    loss.item()\n")
    _, used = first_of(f"{grows}I sum loss.item() already.\n")

    assert proposed.title.startswith("Keep numbers")
    assert used.title.startswith("Find what else")
    assert "loss.item" not in used.change


@pytest.mark.parametrize(
    ("text", "doing"),
    [
        ("OOM in `_setup_for_real_optimizer()` while training with DeepSpeed", "optimizer"),
        (
            "CUDA out of memory.\n1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\nLoading vicuna-7b...",
            "weights",
        ),
        ("When I run infer_flux_regional.py I get CUDA out of memory.", "during inference"),
        ("Val occupies so much CUDA memory that it raises an OOM error", "evaluation"),
    ],
)
def test_names_tell_the_moment_of_the_failure(text, doing):
    found, _ = first_of(text)

    assert doing in found.summary


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: Allocation on device\n\nOOM, unloading all loaded models.\n",
        "RuntimeError: CUDA error: out of memory\n\ndemo0.py prints this.\n",
    ],
)
def test_name_of_a_script_and_what_followed_tell_no_moment(text):
    found, first = first_of(text)

    assert "weights" not in f"{found.summary} {first.title}"
    assert "during inference" not in found.summary


def test_word_in_the_name_of_a_model_is_not_about_training():
    _, first = first_of(
        "CUDA out of memory in text-generation-webui, 24 GB of VRAM, after a few messages with "
        "oasst-sft-4-pythia-12b-epoch-3.5.\n"
    )

    assert "Training all" not in first.change
    assert first.change.startswith("with text-generation-webui")


def test_storage_that_got_no_memory_is_no_call_of_a_program():
    text = "RuntimeError: cuda runtime error (2) : out of memory at /a/THC/generic/THCStorage.cu:58"

    assert "for a tensor" in first_of(text)[0].summary
    assert "direct call" in first_of("RuntimeError: CUDA error: out of memory")[0].summary


def test_title_tells_of_a_failure():
    frames = (
        'File "/ComfyUI/comfy/sd.py", line 452, in decode\n    self.first_stage_model.decode(a)\n'
    )
    found, _ = first_of(f"VAEDecodeTiled Allocation on device - error message\n\n{frames}")

    assert found.cause is Cause.CAPACITY


def test_figures_of_a_message_are_compared_with_one_another():
    pool = "RuntimeError: Decode out of memory. Try to lower your batch size.\nTry to allocate {} "
    pool += "tokens.\nAvailable tokens: 2048\n"
    _, paged = first_of(pool.format(148))
    _, full = first_of(pool.format(4096))
    huge, _ = first_of(
        "4 x A100 80GB\nggml_backend_cuda_buffer_type_alloc_buffer: allocating 204800.00 MiB on "
        "device 0: cudaMalloc failed: out of memory\n"
    )

    assert "--page-size" in paged.change
    assert "--page-size" not in full.change
    assert Cause.OTHER_PROCESS not in huge.also


@pytest.mark.parametrize(
    ("said", "title"),
    [
        (
            "When I increase the instance count, CUDA out of memory occurs.",
            "Lower the instance count",
        ),
        (
            "CUDA out of memory in training, the batch size is one.",
            "Turn on activation checkpointing: the batch",
        ),
    ],
)
def test_what_made_it_fail_is_undone_first(said, title):
    assert first_of(said)[1].title.startswith(title)


def test_heading_and_instructions_are_of_one_row():
    _, one = first_of("CUDA OOM while testing: trainer.test() of pl.Trainer( fails")

    assert one.title == "Evaluate in smaller batches, and keep less of their output"
    assert "test_dataloader()" in one.change


@pytest.mark.parametrize(
    ("said", "title"),
    [
        (
            "I tried a smaller batch size to no avail",
            "Turn on activation checkpointing: a smaller batch did",
        ),
        (
            "I reduced the batch size to 2 without success",
            "Turn on activation checkpointing: a smaller batch",
        ),
        (
            "It fails with a batch of one",
            "Turn on activation checkpointing: the batch is already one",
        ),
        ("It works with batch size 4 but batch size 8 fails", "Lower batch size from 8"),
        ("batch_size=1, and gradient checkpointing is enabled", "Use less for one sample"),
    ],
)
def test_words_for_what_was_tried_and_works(said, title):
    assert first_of(f"CUDA out of memory in training. {said}.")[1].title.startswith(title)


def test_stronger_option_includes_the_weaker_one():
    _, first = first_of("Stable Diffusion webui --lowvram --xformers: CUDA OOM, I generate images")

    assert "--medvram" not in first.change
    assert "--lowvram, which" not in first.change


def test_offloading_to_the_cpu_is_no_lack_of_host_memory():
    found, _ = first_of(
        "DeepSpeed OOM with CPU offload\n\nCUDA out of memory in training, batch of 4"
    )

    assert found.cause is Cause.CAPACITY


def test_fewer_bits_are_also_fewer_than_sixteen():
    _, first = first_of(
        "I load the model with load_in_8bit=True and device_map='auto'; model.generate() gives "
        "CUDA OOM with AutoModelForCausalLM."
    )

    assert "in 16 bits" not in first.change
    assert "max_memory" in first.change


def test_change_of_which_nothing_is_in_use_keeps_its_words():
    change = "then set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"

    assert without_used(change, ToldSettings()) == change


@pytest.mark.parametrize(
    ("billions", "said"),
    [("7", "a 7B"), ("8", "an 8B"), ("11", "an 11B"), ("1.1", "a 1.1B"), ("80", "an 80B")],
)
def test_number_of_parameters_has_the_article_that_is_said(billions, said):
    weights = told_weights(case_of(f"CUDA OOM with Llama-{billions}b\n").oom.messages[0])

    assert f"The weights of {said} model" in weights.text


def test_heading_is_not_repeated_as_an_option():
    loads = diagnose(case_of(f"{FULL}\nI get it when loading the model for inference.\n"))
    runs = diagnose(case_of(f"{FULL}\nI run inference on images.\n"))

    assert "less-model-memory" not in [r.code for r in loads.recommendations]
    assert "smaller-batch" not in [r.code for r in runs.recommendations]


def test_difference_inside_the_rounding_proves_nothing_about_settings():
    near = old_style("72.00 MiB", "14.76 GiB", "13.83 GiB", "19.75 MiB", "13.88 GiB")
    far = old_style("1.00 GiB", "14.76 GiB", "13.83 GiB", "19.75 MiB", "13.88 GiB")

    assert "no allocator setting" not in first_of(near)[0].summary
    assert "no allocator setting" in first_of(far)[0].summary


def test_gradients_go_off_first_where_the_users_own_code_runs_a_model():
    def title(*frames: tuple[str, str]) -> str:
        return first_of(f"{traceback(*frames)}{FULL}")[1].title

    called = ("/job/run.py", "mask = segment(image)")
    inside = ("/job/net.py", "x = self.up(x)")
    decorated = (
        "/env/torch/utils/_contextlib.py",
        "return func(*args, **kwargs)  # decorate_context",
    )

    assert title(("/job/demo.py", called[1]), inside) == "Turn off gradients"
    assert title(("/job/demo.py", called[1]), decorated, inside) != ("Turn off gradients")
    assert title(("/job/train.py", "train(model)"), called, inside) != ("Turn off gradients")


def test_sentence_above_an_error_that_names_it_says_what_was_done():
    said = "The validation runs out of memory: CUDA out of memory"
    _, first = first_of(f"{said}\n{traceback(('/job/run.py', 'y = net(x)'))}{FULL}\n")

    assert first.title == "Evaluate without gradients, and in smaller batches"


@pytest.mark.parametrize(
    ("bar", "is_late"),
    [
        (" 19%|#9     | 3237/16700 [3:34:12<38:35:22, 10.32s/it]", True),
        ("Loading checkpoint shards:  33%|###    | 1/3 [00:07<00:14,  7.2s/it]", False),
        ("  0%|       | 0/16700 [00:00<?, ?it/s]", False),
        ("step: 120, lr: 2e-05, loss: 1.93", True),
    ],
)
def test_steps_that_passed_show_that_the_state_of_a_whole_model_fits(bar, is_late):
    _, first = first_of(
        f"Full fine-tuning of Llama 7B\n{bar}\n{traceback(('/job/train.py', 'y = net(x)'))}{FULL}"
    )

    assert first.title.startswith("Keep fewer weights") is not is_late


def test_layers_in_a_traceback_show_that_weights_are_quantized_already():
    path = "/env/lib/python3.11/site-packages/bitsandbytes/nn/modules.py"
    _, first = first_of(
        f"Fine-tuning of Llama 70B\n{traceback((path, 'super().to(device=device)'))}{FULL}\n"
    )

    assert "LoRA" not in first.change


def test_crops_are_made_smaller_before_layers_are_checkpointed():
    _, first = first_of(f"Segmentation of images fails with batch_size==1 in training\n{FULL}\n")

    assert first.title == "Use smaller crops or images: the batch is already one"
    assert "gradient_checkpointing" in first.change


def test_adapter_is_not_advised_to_who_trains_one():
    def changes(said: str) -> str:
        text = f"{said}\n{traceback(('/env/torch/optim/adamw.py', 'state = zeros_like(p)'))}{FULL}"
        return first_of(f"{text}\n")[1].change

    assert "a LoRA adapter instead of all the weights" in changes("Training of a diffusion model")
    assert "LoRA" not in changes("Training with --network_module networks.lora")


@pytest.mark.parametrize(
    ("pids", "title"),
    [
        ((4401, 4404, 4407), "Give each rank or worker its own GPU, or run fewer at once"),
        ((4401, 91377, 250113), "Stop the other processes on this GPU"),
    ],
)
def test_processes_that_were_started_together_are_workers_of_one_program(pids, title):
    listed = " ".join(f"Process {pid} has {n}.20 GiB memory in use." for n, pid in enumerate(pids))
    verdict, first = first_of(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a "
        f"total capacity of 8.64 GiB of which 8.00 MiB is free. {listed} Including non-PyTorch "
        "memory, this process has 5.00 GiB memory in use. Of the allocated memory 4.60 GiB is "
        "allocated by PyTorch, and 30.00 MiB is reserved by PyTorch but unallocated."
    )

    assert verdict.cause is Cause.OTHER_PROCESS
    assert first.title == title


def test_batch_of_the_validation_is_not_lowered_when_training_fails():
    said = (
        "It fails when training starts.\nTraining batch size is 96\nvalidation batch size is 24\n"
    )

    assert "from 96" in first_of(f"{said}{FULL}\n")[1].title


def test_backward_pass_outweighs_what_a_server_in_the_same_job_logged():
    before = "(W pid=7) After sync in sharding manager: 20 GB.\n(W pid=7) Before vllm offload.\n"
    named = "(W pid=7) Before state_dict() in sharding manager\n"
    text = f"{named}{before}{traceback(('/a/verl/workers/actor/dp.py', 'loss.backward()'))}{FULL}\n"

    assert "ppo_micro_batch_size_per_gpu" in first_of(text)[1].change


def test_proteins_are_given_fewer_residues_and_comfyui_is_known_by_its_log():
    assert "Use fewer residues" in first_of(f"a protein of 1800 AA, bf16\n{FULL}\n")[1].title
    assert "latent node" in first_of(f"got prompt\nRequested to load Flux\n{FULL}\n")[1].change


def test_failure_whose_first_word_is_the_device_is_told_like_any_other():
    verdict, first = first_of("recipe = [AWQModifier()]\ncuda oom during the smoothing stage\n")

    assert verdict.cause is Cause.CAPACITY
    assert "num_calibration_samples" in first.change


def test_failure_in_the_middle_of_a_later_epoch_comes_after_steps_that_fit():
    said = "It went well for 11 epochs, and in the middle of the 12th epoch it had an OOM error."

    assert "different about the step that failed" in first_of(f"{said}\n{FULL}\n")[1].title


def test_evaluation_by_a_server_is_lowered_in_the_server():
    said = "CUDA OOM when I evaluate a model with lm_eval --model vllm --batch_size 32 --tasks x\n"

    assert "--max-num-seqs" in first_of(said)[1].change


def test_batch_of_a_model_that_only_runs_is_lowered_by_name():
    said = "generation with a 2B model runs, but scoring gives a CUDA OOM, --batch_size 32\n"

    assert "lower --batch_size from 32" in first_of(said)[1].change


def test_splatfacto_has_options_of_its_own():
    assert "cache-images cpu" in first_of(f"ns-train splatfacto\n{FULL}\n")[1].change
    assert "--data_device" in first_of(f"_C.rasterize_gaussians(*args)\n{FULL}\n")[1].change


@pytest.mark.parametrize(
    ("said", "is_rerun"),
    [
        ("My notebook trains once; when I run the cell again I get", True),
        ("In Jupyter the next model fails, and I would like to go on without restarting the kernel",
         True),
        ("On Colab it fails. I run it again after I restarted the runtime, still the same", False),
        ("I tried many times on Kaggle, it fails in epoch 1 with", False),
        ("python train.py works, the second run with a larger model gives", False),
    ],
)  # fmt: skip
def test_notebook_that_ran_before_still_holds_its_tensors(said, is_rerun):
    assert ("earlier run left" in first_of(f"{said}\n{FULL}\n")[1].title) is is_rerun


def test_first_gpu_is_known_by_another_number_and_nnunet_by_its_name():
    said = "Why does the first GPU (gpu 5) hold more memory than others with DDP? It runs out of"

    assert "first GPU" in first_of(f"{said} CUDA memory.\n")[1].title
    text = f"3d_fullres inference with nnU-Net v2 fails\n{FULL}\n"
    assert "perform_everything_on_device" in first_of(text)[1].change


def test_setting_that_a_text_rules_out_is_not_advised():
    holes = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has a total "
        "capacity of 79.10 GiB of which 3.10 GiB is free. Including non-PyTorch memory, this "
        "process has 76.00 GiB memory in use. Of the allocated memory 50.00 GiB is allocated by "
        "PyTorch, and 24.00 GiB is reserved by PyTorch but unallocated.\n"
    )

    assert "expandable_segments" in first_of(holes)[1].setting
    said = "`expandable_segments:True` is incompatible with the pool of our server.\n"
    assert "max_split_size_mb" in first_of(f"{said}{holes}")[1].setting


def test_a_container_that_keeps_graphs_is_named():
    code = "outputs = []\nfor x in loader:\n    outputs.append(model(x))\n"
    verdict, first = first_of(f"{code}It fails with CUDA out of memory.\n")

    assert verdict.cause is Cause.LEAK
    assert first.title == "Keep outputs without the graph of each step"
    assert "torch.no_grad()" in first.change


@pytest.mark.parametrize(
    ("asked", "cause"), [("98.00 MiB", Cause.LEAK), ("2.00 GiB", Cause.CAPACITY)]
)
def test_a_small_request_on_a_device_that_kept_graphs_fill_fails_of_a_leak(asked, cause):
    code = "outputs = []\nfor x in loader:\n    outputs.append(model(x))\n"
    failed = old_style(asked, "8.00 GiB", "7.20 GiB", "40.00 MiB", "7.32 GiB")

    verdict = first_of(f"{code}{failed}\n")[0]

    assert verdict.cause is cause
    assert ("to outputs in each round" in verdict.summary) is (cause is Cause.LEAK)


@pytest.mark.parametrize(
    ("call", "title"),
    [
        ("train.py", "Find out what is different about the step that failed"),
        ("loss.backward()", "Limit the largest samples, since earlier steps fit"),
    ],
)
def test_a_later_step_of_training_is_a_larger_sample(call, title):
    log = f"step: 1200 loss: 0.31\n{traceback(('train.py', call))}{FULL}\n"

    assert first_of(f"I fine-tune on audio of 1 to 40 seconds.\n{log}")[1].title == title
    assert "shorter audio" in first_of(f"I fine-tune on audio.\n{log}")[1].change


def test_weights_that_were_trained_for_steps_do_fit():
    said = "I fine-tune a 7B model.\n{}" + traceback(("train.py", "loss.backward()")) + FULL

    assert "The weights of a 7B" in first_of(said.format(""))[0].summary
    assert "The weights of a 7B" not in first_of(said.format("step 300 loss 0.7\n"))[0].summary


@pytest.mark.parametrize(
    ("code", "is_kept"),
    [
        ("loss.backward()\n    opt.step()\n    total += loss\n", True),
        ("loss.backward()\n    losses.append(loss)\n", True),
        ("loss.backward()\n    total += loss.item()\n", False),
        ("total += loss\n    total.backward()\n", False),
        ("losses.append(lo)\n    lo.mean().backward()\n", True),
        ("total += loss\n    scaler.scale(loss / n).backward()\n", True),
        ("losses.append(loss.item())\n    loss.backward()\n", False),
        ("loss.backward(retain_graph=True)\n", True),
    ],
)
def test_code_that_keeps_its_loss_keeps_its_graph(code, is_kept):
    title = first_of(f"for x in loader:\n    {code}It fails with\n{FULL}\n")[1].title

    assert ("graph" in title) is is_kept


def test_request_beyond_the_device_is_no_loading_of_weights():
    code = 'pipe = P.from_pretrained(name, variant="fp16").to("cuda")\n'
    huge = old_style("96.00 GiB", "15.90 GiB", "4.00 GiB", "9.00 GiB", "5.00 GiB")

    assert "Load the weights" not in first_of(f"{code}{huge}\n")[1].title


def test_server_is_not_told_to_limit_other_libraries():
    full = new_style(
        "112.00 MiB", "44.35 GiB", "53.38 MiB", "37.38 GiB", "275.68 MiB",
        processes=process(91, "44.28 GiB"),
    )  # fmt: skip
    said = "INFO 02-03 03:43:49 model_runner.py:625] Capturing the model for CUDA graphs."

    _, first = first_of(f"Error initializing vLLM engine: {full}\n{said}\n")

    assert first.title == "Leave more memory for CUDA graphs, or capture fewer"


def test_library_that_runs_its_own_model_keeps_no_graph():
    own = 'I run inference.\nCUDA out of memory. Tried to allocate 91.71 GiB.\n{}("a.wav")\n'

    assert "no_grad" not in first_of(own.format("m.transcribe"))[1].change
    assert "no_grad" in first_of(own.format("y = my_model"))[1].change


@pytest.mark.parametrize(
    "said",
    [
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-q1 (size 9637888)",
        "NCCL WARN Error: failed to extend /dev/shm/nccl-q1 to 9637892 bytes",
    ],
)
def test_nccl_without_shared_memory_is_a_lack_of_the_hosts(said):
    verdict, first = first_of(f"{said}\nncclSystemError: System call failed\n")

    assert (verdict.cause, verdict.confidence) == (Cause.HOST_MEMORY, Confidence.LIKELY)
    assert "--shm-size" in first.change


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        ("RuntimeError: cuda runtime error (999) : unknown error at THCGeneral.cpp:1", "reboot"),
        ("Unexpected error from cudaGetDeviceCount(). Error 999: unknown error", "nvidia_uvm"),
        ("RuntimeError: CUDA error: initialization error", "spawn"),
    ],
)
def test_cuda_that_cannot_start_is_no_lack_of_memory(said, cure):
    verdict, first = first_of(said)

    assert verdict.cause is Cause.NOT_MEMORY
    assert cure in first.change


def test_library_that_does_not_say_why_it_failed_may_have_met_a_wrong_index_or_a_full_gpu():
    failure = "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED\n"
    table = "|  0%   50C    P2   90W / 250W |  10901MiB / 11019MiB |     99%      Default |\n"

    alone, first = first_of(failure)
    of_index, _ = first_of(f"It is an index out of bounds on the GPU only:\n{failure}")
    full, room = first_of(failure + table)

    assert (alone.cause, alone.also) == (Cause.CAPACITY, (Cause.NOT_MEMORY,))
    assert first.title == "Find out whether the GPU is full or an index is out of range"
    assert all(word in first.change for word in ("CUDA_LAUNCH_BLOCKING", "batch", "nvidia-smi"))
    assert (of_index.cause, of_index.also) == (Cause.NOT_MEMORY, (Cause.CAPACITY,))
    assert (full.cause, full.confidence, full.also) == (Cause.CAPACITY, Confidence.LIKELY, ())
    assert room.change.startswith("use a smaller batch")


OTHERS_HOLD = old_style("40.00 MiB", "23.70 GiB", "3.11 GiB", "31.56 MiB", "3.20 GiB")


@pytest.mark.parametrize(
    ("said", "gpu", "title"),
    [
        ("export CUDA_VISIBLE_DEVICES=3", "GPU 3", "Run it on a GPU that is free"),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '2'", "GPU 2", "Run it on a GPU that is free"),
        ("I have 4 GPUs, and three are idle.", "", "Run it on a GPU that is free"),
        ("torchrun --nproc_per_node=4 on 4 GPUs", "", "Stop the other processes"),
        ("CUDA_VISIBLE_DEVICES=0 python train.py", "", "Run it on a GPU that is free"),
        ("python train.py", "", "Stop the other processes"),
    ],
)
def test_full_gpu_beside_others_is_left_to_those_who_hold_it(said, gpu, title):
    told = diagnose(case_of(f"{said}\n{OTHERS_HOLD}\n"))

    first, notes = told.recommendations[0], " ".join(told.notes)
    assert first.title.startswith(title)
    assert ("CUDA_VISIBLE_DEVICES=N" in first.change) == title.startswith("Run")
    assert (f"the first visible GPU: {gpu} in" in notes) == bool(gpu)


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ("[gw2] FAILED tests/test_a.py::test_b", "with pytest -n"),
        ("gunicorn -w 3 app:app", "with gunicorn -w"),
        ("tune.run(train_fn, resources_per_trial={'gpu': 0.3})", "each trial of Ray Tune"),
    ],
)
def test_workers_that_share_a_gpu_are_to_be_fewer(said, option):
    others = " ".join(f"Process {pid} has 4.20 GiB memory in use." for pid in (501, 502, 503))

    _, first = first_of(
        f"{said}\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 "
        f"has a total capacity of 12.70 GiB of which 8.00 MiB is free. {others} Of the allocated "
        "memory 3.80 GiB is allocated by PyTorch, and 30.00 MiB is reserved by PyTorch but "
        "unallocated."
    )

    assert first.title == "Run fewer workers at a time on this GPU"
    assert option in first.change


def test_server_that_a_table_names_beside_a_program_gets_a_smaller_share():
    table = "|    0   N/A  N/A     7001      C   VLLM::EngineCore       70120MiB |\n"

    _, first = first_of(
        f"{table}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 "
        "has a total capacity of 79.25 GiB of which 310.00 MiB is free. Process 7001 has 68.48 GiB "
        "memory in use. Including non-PyTorch memory, this process has 8.20 GiB memory in use. Of "
        "the allocated memory 7.61 GiB is allocated by PyTorch, and 90.00 MiB is reserved by "
        "PyTorch but unallocated."
    )

    assert first.title == "Give the server on this GPU a smaller share of it"
    assert "gpu-memory-utilization" in first.change
    assert "7001" in first.change


def test_driver_that_refuses_on_an_empty_gpu_is_not_about_other_programs():
    failure = f"{traceback(('/job/a.py', 'x = torch.zeros(3).cuda()'))}RuntimeError: CUDA error: "
    row = "| 30%   28C    P8     9W / 250W |      3MiB / 11178MiB |      0%      Default |\n"

    for said in (row, "nvidia-smi shows no processes\n"):
        verdict, first = first_of(f"{failure}out of memory\n{said}")

        assert (verdict.cause, verdict.also[0]) == (Cause.UNKNOWN, Cause.HOST_MEMORY)
        assert "ulimit -v" in first.change


def test_batch_is_an_option_where_this_process_holds_more_than_the_others():
    text = old_style("512.00 MiB", "7.79 GiB", "4.60 GiB", "30.00 MiB", "4.70 GiB")

    told = diagnose(case_of(text))

    assert (told.verdict.cause, Cause.CAPACITY in told.verdict.also) == (Cause.OTHER_PROCESS, True)
    assert any("smaller batch" in r.title for r in told.recommendations[1:])


# ---- where memory is ----


@pytest.mark.parametrize(
    ("text", "cause", "title"),
    [
        (
            "CUDA out of memory with 8 workers of gunicorn, each with the model on the same GPU.",
            Cause.OTHER_PROCESS,
            "Run fewer processes at a time on this GPU",
        ),
        (
            "os.environ['CUDA_VISIBLE_DEVICES'] = '2', since other cards are occupied: CUDA OOM.",
            Cause.OTHER_PROCESS,
            "Run it on a GPU that is free, or stop what is on this one",
        ),
        (
            "I train with DDP, and each rank also takes 600 MiB on GPU 0: CUDA OOM there.",
            Cause.OTHER_PROCESS,
            "Run one process per GPU, and keep the others off the first GPU",
        ),
        (
            "4 GPUs, a process on each, but GPU 0 holds memory for each of them: CUDA OOM.",
            Cause.OTHER_PROCESS,
            "Run one process per GPU, and keep the others off the first GPU",
        ),
        (
            "GPU0 is utilized by another process, and mine fails with CUDA out of memory.",
            Cause.OTHER_PROCESS,
            "Run it on a GPU that is free, or stop what is on this one",
        ),
        (
            "New workers come with each epoch, and then my CPU memory used up and it crashed.",
            Cause.HOST_MEMORY,
            "Use less RAM, or add more",
        ),
        (
            "GPU memory imbalance with many objects in an image, then CUDA out of memory.",
            Cause.CAPACITY,
            "Use fewer objects",
        ),
        (
            "RuntimeError: CUDA error: out of memory\nIt is Ubuntu in WSL2, and the card is new.",
            Cause.HOST_MEMORY,
            "Use less host memory, page-locked above all",
        ),
        (
            "CUDA out of memory when I increase num_workers from 2 to 8.",
            Cause.HOST_MEMORY,
            "Use less host memory, page-locked above all",
        ),
    ],
    ids=[
        "shared",
        "others",
        "ranks",
        "scripts",
        "utilized",
        "used-up",
        "imbalance",
        "WSL",
        "loader",
    ],
)
def test_words_say_where_memory_is(text, cause, title):
    verdict, first = first_of(f"{text}\n")

    assert verdict.cause is cause
    assert first.title == title


def test_gpu_that_the_shell_chose_is_the_one_in_use():
    said = "GPU 0 is occupied, so I run it on another one: CUDA out of memory.\n"

    chosen, _ = first_of(f"{said}CUDA_VISIBLE_DEVICES=1 python train.py\n")
    other, _ = first_of(f"{said}python train.py\n")

    assert chosen.cause is Cause.CAPACITY
    assert other.cause is Cause.OTHER_PROCESS


def test_figures_say_more_than_words_around_them():
    full, _ = first_of(f"All GPUs but this one are occupied.\n{FULL}")
    roomy, _ = first_of(
        "It is out of GPU memory when I use more workers.\n"
        + old_style("90.00 MiB", "24.00 GiB", "13.09 GiB", "5.75 GiB", "13.28 GiB")
    )

    assert full.cause is Cause.CAPACITY
    assert roomy.cause is Cause.HOST_MEMORY


# ---- what a text says a failure depends on ----


@pytest.mark.parametrize(
    ("said", "told", "title", "change"),
    [
        (
            "If I turn on `keep_maps`, it ends with CUDA out of memory.",
            "it fails with keep_maps and works without",
            "Leave out keep_maps",
            "bound what it keeps",
        ),
        (
            "It runs fine in torch 0.3.1, but in torch 0.4.0 it is CUDA out of memory.",
            "it fails with torch 0.4.0 and not with torch 0.3.1",
            "Go back to torch 0.3.1",
            "torch.no_grad()",
        ),
        (
            "CUDA out of memory with num_beams set to 60.",
            "it fails with num_beams 60",
            "Lower num_beams from 60",
            "in several calls",
        ),
        (
            "It works for 20 speakers, but 90 speakers end in CUDA out of memory.",
            "it works with 20 speakers and fails with 90",
            "Use no more than 20 speakers at a time",
            "join their results",
        ),
        (
            "The demo trains fine. With my own dataset I get CUDA out of memory.",
            "the same settings work with other data",
            "Limit the largest samples of the data set",
            "cut, resize or drop",
        ),
        (
            "CUDA out of memory for longer recordings.",
            "it fails with long recordings",
            "Split long recordings into smaller parts",
            "one after the other",
        ),
        (
            "CUDA out of memory. The vocabulary has 750,000 entries.",
            "the number of entries of the vocabulary is large",
            "Use fewer entries of the vocabulary",
            "adaptive or sampled softmax",
        ),
    ],
)
def test_what_the_failure_depends_on_is_named_and_undone(said, told, title, change):
    verdict, first = first_of(f"{said}\n")

    assert verdict.cause is Cause.CAPACITY
    assert told in verdict.summary
    assert first.title == title
    assert change in first.change


def test_replay_buffer_is_given_a_limit_instead_of_more_ram():
    verdict, first = first_of("The RAM keeps growing with my replay buffer until it is killed.\n")

    assert verdict.cause is Cause.HOST_MEMORY
    assert "it fills up to its limit" in verdict.summary
    assert first.title == "Give the replay buffer a lower limit"


def test_memory_that_grows_with_what_was_raised_is_no_leak():
    verdict, first = first_of("GPU memory keeps growing to OOM when I increase the beam size.\n")

    assert verdict.cause is Cause.CAPACITY
    assert first.title == "Lower the beam size again"


def test_shape_of_a_tensor_that_no_device_holds_outweighs_the_version():
    figures = (
        "CUDA out of memory. Tried to allocate 150.00 GiB (GPU 0; 23.70 GiB total capacity; "
        "8.36 GiB already allocated; 4.59 GiB free; 16.23 GiB reserved in total by PyTorch)"
    )

    _, first = first_of(f"It works in widget 1.4, and fails in widget 1.5.\n{figures}\n")

    assert first.title == "Shrink the one huge tensor"


@pytest.mark.parametrize(
    ("said", "title"),
    [
        (
            "The training on crops is fine, but the validation is CUDA out of memory.",
            "Evaluate on inputs no larger than in training",
        ),
        (
            "CUDA out of memory in the validation, even with a batch size of one.",
            "Evaluate without gradients, and keep no results on the GPU",
        ),
        (
            "CUDA out of memory in the validation.",
            "Evaluate without gradients, and in smaller batches",
        ),
    ],
)
def test_evaluation_needs_less_of_what_differs_from_training(said, title):
    _, first = first_of(f"{said}\n")

    assert first.title == title


# ---- what does not shrink with the input: weights, and shapes that are not meant ----

STRAW = old_style("20.00 MiB", "11.76 GiB", "11.30 GiB", "0 bytes", "11.40 GiB")


def test_title_above_a_message_without_its_first_words_hides_no_figures():
    said = STRAW.replace("CUDA out of memory", "OutOfMemoryError: ", 1)

    verdict, _ = first_of(f"CUDA out of memory\n\n`{said}`\nWhat can I do?\n")

    assert "11.30 GiB of the" in verdict.summary


def test_shapes_that_broadcast_to_what_no_gpu_holds_are_the_cause():
    warned = (
        "UserWarning: Using a target size (torch.Size([60000])) that is different to the input "
        "size (torch.Size([60000, {}])).\n"
    )
    message = old_style("13.41 GiB", "10.76 GiB", "312.00 MiB", "9.58 GiB", "330.00 MiB")

    verdict, first = first_of(warned.format(1) + message)

    assert verdict.cause is Cause.SIZE_BUG
    assert verdict.summary.startswith("Broadcasting (60000,) with (60000, 1) makes (60000, 60000)")
    assert first.title.startswith("Give both tensors the same shape")
    for other in (warned.format(2), warned.replace("60000", "64").format(1)):
        assert "Broadcasting" not in first_of(other + message)[0].summary
    larger = message.replace("13.41", "14.41")
    assert "Broadcasting" not in first_of(warned.format(1) + larger)[0].summary


@pytest.mark.parametrize(
    ("said", "is_of_weights"),
    [
        ("The model does not run on my RTX4070.", True),
        ("The model does not run.", False),
        ("Training the model fails on my RTX4070.", False),
        ("The model does not run on my RTX4070 with a batch size of 8.", False),
    ],
)
def test_card_that_is_named_beside_a_small_request_is_full_of_weights(said, is_of_weights):
    _, first = first_of(f"{said}\n{STRAW}\n")

    assert first.title.startswith("Keep less of the model") is is_of_weights


def test_model_without_a_size_in_its_name_is_known():
    text = (
        "model = whisper.load_model('large-v2').cuda()\nCUDA out of memory on my GTX 1060 6GB gpu\n"
    )

    verdict, first = first_of(text)

    assert "The weights of Whisper large take 5.77 GiB in 32 bits" in verdict.summary
    assert first.change.startswith("use Whisper medium or small")
    assert "Whisper large" not in first_of(text.replace("whisper", "faster_whisper"))[0].summary


def test_size_that_works_is_not_the_one_that_fails():
    _, first = first_of(f"The 7B version, OK. With 13B I get\n{FULL_24}\n")

    assert first.title == "Use a smaller model, or store its weights in fewer bits"
    assert first_of(f"The 7B version and 13B: I get\n{FULL_24}\n")[1].title != first.title


FULL_24 = old_style("68.00 MiB", "23.65 GiB", "22.68 GiB", "41.31 MiB", "23.14 GiB")


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("Full fine-tuning runs out of GPU memory in torch.", "train a LoRA adapter"),
        ("ZeRO-3, full parameter fine-tuning: CUDA out of memory.", "train all of it with"),
        ("Finetuning a 7B model without any PEFT: CUDA out of memory.", "training all of a 7B"),
    ],
)
def test_who_trains_all_of_a_model_is_told_about_its_state(said, change):
    _, first = first_of(f"{said}\n")

    assert first.code == "less-to-train-all"
    assert first.change.startswith(change)


def test_offloading_or_steps_that_passed_leave_the_state_alone():
    said = "Full fine-tuning with CPU offload runs out of GPU memory in torch."

    assert first_of(f"{said}\n")[1].code != "less-to-train-all"
    said = "Full fine-tuning runs out of GPU memory in torch at step 300/900 loss 0.1"
    assert first_of(f"{said}\n")[1].code != "less-to-train-all"


def test_weights_that_are_spread_over_gpus_leave_room_on_each():
    said = "model.generate() with device_map='auto' on 4 GPUs: CUDA out of memory{}\n"

    _, first = first_of(said.format(""))

    assert first.change.startswith("give from_pretrained() a max_memory for each GPU")
    _, first = first_of(said.format(", with max_memory={0: '20GiB'}"))
    assert "a max_memory for each" not in first.change


def test_merge_that_is_only_told_is_on_the_gpu():
    verdict, first = first_of("model.save_pretrained_merged('m') gives OOM. Can I do it on cpu?\n")

    assert verdict.cause is Cause.CAPACITY
    assert first.title == "Load the adapter on the CPU, and merge it there"
