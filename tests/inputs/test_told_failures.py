"""Sentences that tell of memory that ran out, where no program's message is known."""

from __future__ import annotations

import pytest

from fragdoctor.inputs.told_failures import told_failure

TOLD = (
    "Full batch on this data set goes out of memory on CUDA.",
    "When I run step three I get an out of memory error, in engine.py line 1072.",
    "Resuming uses more memory than a fresh run, triggering OOM.",
    "I keep getting OutOfMemoryError after 1000 steps.",
    "OutOfMemoryError                          Traceback (most recent call last)",
    "- Device #1: Device does not provide enough allocatable device-memory",
    "check failed: (2 vs. 0)  out of memory",
    "I find the GPU is out of memory, you can use nvidia-smi to see it.",
    "Training goes well but I get cuda oom in the last step.",
    "It complains that there is no more memory on CUDA.",
    "I ran what you suggested, and it fills up the VRAM until it OOMs.",
    "The GPU memory usage keeps ceaselessly growing, and finally it blows up.",
    "GPU RAM explodes on validation.",
    "GPU RAM exploding on validation",
    "GPU memory increases with each epoch until it crashes.",
    "the training crashes since VRAM is not sufficient",
    "GPU memory exceeded",
    "No matter which batch I take, it is OOM.",
    "It tries to exceed the GPU memory and dies.",
    "训练时爆显存了",
    "推理时显存就爆了",
    "显存会随着epoch的增加而增加直到cuda out of memory然后报错",
    "The length leads to a cuda ouf of memory error.",
    "it is out of memory on the GPU. you can see the log below.",
    "On several machines rank 0 goes OOM after hours.",
    "With batch 2 I am still out of GPU memory, thanks for your great work!",
    "Has anyone met this: it can run by itself, normally, but here it is OOM",
    "[Bug]: OutOfMemoryError when it loads a model with a huge context",
    "same here, 24 GB and out of GPU memory",
    "Did you meet CUDA_OUT_OF_MEMORY here",
    "On a longer video I encounter an `OutOfMemoryError` on my device.",
    "It went out of memroy on the GPU.",
    "The error is _out of memeory_ on CUDA.",
    "running into oom on a 3090 with the default config",
    "After an hour the GPU memory simply runs out.",
    "一张A800还会oom",
    "训到三百步就OOM了, 用的是 GPU",
    "I faced OutofMermoryError on my GPU.",
    "There is a CUDA errror, it failed to allocate memory.",
)
EXPLAINED = (
    "If you see an out of memory error, reduce the batch.",
    "- **CUDA error: out of memory** means that the driver failed.",
    'if "CUDA out of memory" in str(error):',
    "    except torch.cuda.OutOfMemoryError:",
    "A large batch can cause OOM.",
    "To avoid running out of memory, use smaller tiles.",
    "12 steps, 0 OOMs, room for more",
    "Out-of-memory errors occur when nothing is left.",
    "Lower the share to make sure OOM doesn't happen.",
    "- Fix out of memory error on resume",
    "We run it without OOM, you need not worry.",
    "I found out how you can avoid OOM.",
    "When VRAM is exhausted, it goes to system RAM instead of crashing.",
    "PASSED test_handler: it raises OutOfMemoryError as expected",
    "How does the OOM killer choose what it kills?",
    "Memory usage grows linearly with the length.",
    "GPU memory usage increases with every token, linearly.",
    "Detecting memory leaks in PyTorch",
    "Memory leak check: passed",
    "Lack of memory is a frequent cause of slowness.",
    "VRAM is not enough for full finetuning, use LoRA.",
    "Tips for OOM",
    "OOM count = 0",
    "Tune this value if the process is killed by the OOM killer.",
    "Fix RuntimeError: CUDA out of memory in the loader",
    "The loader never throws an out-of-memory exception.",
    "feat: retry with a smaller batch when CUDA runs out of memory (#1821)",
    "Improved the error message when the GPU is out of memory.",
    "The memory usage keeps growing until the cache is full, then it stays constant.",
    "GPU memory keeps increasing for ten steps and then levels off.",
)


@pytest.mark.parametrize("text", TOLD)
def test_failure_is_read_from_a_sentence(text: str) -> None:
    message = told_failure(f"Hello.\n{text} Thanks!\n")

    assert message is not None
    assert message.is_device_oom
    assert message.line == 2
    assert message.text.startswith(text[:20].strip())


@pytest.mark.parametrize("text", EXPLAINED)
def test_explanation_is_no_failure(text: str) -> None:
    assert told_failure(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "I run the demo on my 5090. The process exceeds my available 32 GB. Can I reduce this?",
        "I fine-tune it with four cards. It crashes, CUDA outof memory. Please help.",
        "VRAM spikes at the end. Could I have an option for the CPU?",
        "I use 8 cards. The GPU load is unbalanced. How can I fix that?",
        "为什么 CUDA outof memory",
        "It could be a leak, since the GPU memory is growing with each epoch. Any ideas?",
        "Your method should fit, but it may run out of GPU memory here. Thanks!",
        "There is a memory error on CUDA. What should I do?",
        "The VRAM is not enough, what should I do",
        "Has anyone seen that the GPU memory would keep increasing?",
    ],
)
def test_whoever_asks_for_help_tells_of_a_failure(text: str) -> None:
    assert told_failure(text) is not None


def test_short_title_of_a_text_tells_a_failure() -> None:
    title = "Memory leak on GPU"

    assert told_failure(f"{title}\nDetails follow.\n") is not None
    assert told_failure(f"Contents of this manual\n{title}\n") is None
    assert told_failure(f"{title}\n") is None
    assert (
        told_failure("OOM on a 5090 for a small LoRA with 2 images\nAll is cached.\n") is not None
    )


def test_sentence_says_whose_memory_it_was() -> None:
    said = {
        "The job is killed, Slurm out of memory.": ("host-ram", ""),
        "An out-of-CPU-memory error, though I train on a GPU.": ("host-ram", ""),
        "The job ran out of memory on the GPU.": ("driver-no-figures", ""),
        "My CPU RAM grows until it is out of memory.": ("host-ram", ""),
        "The session crashed because of a lack of RAM.": ("host-ram", ""),
        "The job fails with 内存不足.": ("host-ram", ""),
        "每张卡的内存都不够, OOM 报错.": ("driver-no-figures", ""),
        "GPU RAM keeps growing until it crashes.": ("driver-no-figures", ""),
        "The job ran out of memory.": ("driver-no-figures", "unread"),
        "It throws a CUDA out of memory error.": ("pytorch-caching-allocator", "figures-lost"),
        "[Bug]: OutOfMemoryError on a GPU.": ("pytorch-caching-allocator", "figures-lost"),
        "I train it, and get CUDA OOM errors.": ("pytorch-caching-allocator", "figures-lost"),
        "I try to fine-tune it, but out of memory.": ("pytorch-caching-allocator", "figures-lost"),
        "In training it goes OOM; memory grows.": ("driver-no-figures", "unread"),
        "I train it with JAX, and get CUDA OOM errors.": ("driver-no-figures", ""),
    }

    found = {text: told_failure(text) for text in said}

    assert {k: (m.kind, m.sub_kind) for k, m in found.items() if m is not None} == said


def test_size_that_a_program_tells_is_kept() -> None:
    message = told_failure("[GPU 0] fatal: failed to allocate 100663296 bytes")

    assert message is not None
    assert message.requested_bytes == 100663296


def test_sentence_that_says_whose_memory_it_was_comes_first() -> None:
    message = told_failure("It fails with OOM.\nThe error is out of system memory.\n")

    assert message is not None
    assert (message.kind, message.line) == ("host-ram", 2)


def test_failure_told_beside_a_framework_of_pytorch_is_pytorchs():
    message = told_failure("At 8k tokens it goes OOM. I set device_map='auto'.\n")

    assert message is not None
    assert message.kind == "pytorch-caching-allocator"


def test_failure_in_a_backward_pass_is_pytorchs():
    message = told_failure("It says OOM on the GPU in the backward pass.\n")

    assert message is not None
    assert message.kind == "pytorch-caching-allocator"


def test_failure_told_of_an_engine_is_not_pytorchs_whatever_versions_are_listed():
    message = told_failure("lmdeploy serve api_server failed, the reason is OOM.\nPyTorch: 2.1.2\n")

    assert message is not None
    assert message.kind == "driver-no-figures"


@pytest.mark.parametrize(
    "told",
    [
        "RuntimeError: Workspace can't be allocated, no enough memory.",
        "The voice jumps, maxing out my T4's 15GB VRAM and crashing.",
    ],
)
def test_more_words_for_a_device_that_is_full(told):
    assert told_failure(f"{told}\n") is not None


def test_title_that_says_that_the_memory_of_a_gpu_grows_is_a_failure() -> None:
    told = "GPU memory usage increases at each inference"

    assert told_failure(f"{told}\n\nI run the 8B model behind an API.\n") is not None
    assert told_failure("Memory usage increases at each inference\n\nI run a model.\n") is None
    assert told_failure("SFT OOM 0.7.1 to 0.7.2 including a change\n\nOur code is below.\n")
    assert told_failure("Cuda 0 OOM!\n\nAll goes to the first one.\n")
    assert told_failure("The GPU memory of the server is increasing\n\nIt is an API.\n")
    assert told_failure("SFT OOM 0 in all runs of this version\n\nOur code is below.\n") is None


@pytest.mark.parametrize(
    ("text", "is_on_host"),
    [
        ("Rank 0 goes OOM on the GPU: it is killed by the system after hours.", True),
        ("Memory usage keeps increasing, and the program was killed.", True),
        ("The GPU is out of memory, and I have killed other programs.", False),
    ],
)
def test_what_the_system_kills_lacked_the_hosts_memory(text: str, is_on_host: bool) -> None:
    message = told_failure(f"Hello.\n{text}\n")

    assert message is not None
    assert message.is_device_oom is not is_on_host
