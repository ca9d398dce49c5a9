"""Posts that complain about memory, where nothing says that it ran out."""

from __future__ import annotations

import pytest

from fragdoctor.inputs.ledger import ledger_of
from fragdoctor.inputs.messages import find_messages
from fragdoctor.inputs.told_complaints import told_complaint
from fragdoctor.model.case import KEPT_MEMORY, NO_FAILURE, TOO_MUCH, UNEVEN

COMPLAINTS = {
    "With DDP all ranks take some memory on GPU 0. Why do I see it?": UNEVEN,
    "I train on four cards, and the first card needs twice the memory of the others.": UNEVEN,
    "One of my GPUs takes a lot of memory compared to the others. How can I fix it?": UNEVEN,
    "Training on all cards\n\nI see that the memory usage is always imbalanced.": UNEVEN,
    "为什么多卡训练时显存占用不均衡?": UNEVEN,
    "I chose cuda:1, but some memory is also taken on GPU 0 when I train on these GPUs.": UNEVEN,
    "My app can't unload the model from VRAM. Any ideas?": KEPT_MEMORY,
    "VRAM stays full after each picture\n\nIt was like that in the last version, too.": KEPT_MEMORY,
    "I stop the tool, but the GPU memory is never freed.": KEPT_MEMORY,
    "生成之后显存不释放, 请问怎么办?": KEPT_MEMORY,
    "I found that the model occupies a large amount of GPU memory.": TOO_MUCH,
    "Is there a way to reduce the GPU memory of the training?": TOO_MUCH,
    "I got a memory error on a 24 GB GPU.": TOO_MUCH,
    "The card has 10 GB of memory, which is not enough for me. I use the default.": TOO_MUCH,
    "Can I cache fewer crops?\n\nWith this flag, graphics RAM rises fast.": TOO_MUCH,
    "My evaluation on CUDA 9\n\nI see a GPU mem leak in every batch.": TOO_MUCH,
    "How to avoid CUDA out of memory?\n": TOO_MUCH,
    "I lowered it to four to avoid an OOM of the GPU. What else can I do?": TOO_MUCH,
    "Why are all processes on GPU 0?\n"
    "|    0   N/A  N/A     25799      C   /envs/a/bin/python    13724MiB |\n"
    "|    0   N/A  N/A     25800      C   /envs/a/bin/python      414MiB |\n"
    "|    1   N/A  N/A     25800      C   /envs/a/bin/python    13868MiB |": UNEVEN,
    "Excessive GPU memory use\n\nThe tool should take half of it.": TOO_MUCH,
}
NO_COMPLAINTS = (
    "Checkpointing lowers the memory that the GPU needs.",
    "# Memory usage is high\n\nA large model takes more memory than a small one.",
    "The first GPU no longer uses more memory than the others. I am happy with that.",
    "How much GPU memory do I need? My card is a 4090.",
    "Is the GPU used?\n\nI see that it is slow.",
    "I added checkpointing to save GPU memory. All tests pass.",
    "Thanks! Chunks avoid CUDA out of memory.",
    "RuntimeError: expected Half but found Float. Why?\nMy GPU memory is large enough.",
    "I share the tensor in memory, and another process reads it on the GPU.",
)


@pytest.mark.parametrize("told", COMPLAINTS)
def test_complaint(told: str) -> None:
    message = told_complaint(f"{told}\n")

    assert message is not None
    assert message.sub_kind == COMPLAINTS[told]
    assert (message.variant, message.is_device_oom) == ("told", True)


@pytest.mark.parametrize("said", NO_COMPLAINTS)
def test_memory_in_passing_is_no_complaint(said: str) -> None:
    assert told_complaint(f"{said}\n") is None
    assert find_messages(f"{said}\n").messages[0].sub_kind == NO_FAILURE


@pytest.mark.parametrize(
    "told",
    [
        "I load a large data set, and it takes almost all of my RAM (64 GB).",
        "I find that more DataLoader workers use much more memory, linear in their number.",
        "The RAM (not the GPU) fills up: my memory usage is increasing in every epoch.",
    ],
)
def test_complaint_about_the_host(told: str) -> None:
    (message,) = find_messages(f"{told}\n").messages

    assert (message.kind, message.is_device_oom) == ("host-ram", False)


@pytest.mark.parametrize(
    ("told", "uses_first", "held_before"),
    [
        ("I call model.cuda(3), and the data still goes to GPU 0.", True, False),
        ("I set device=2, but the program always takes memory on GPU 0.", True, False),
        ("Two of my jobs run on GPU 0 and GPU 1.", False, False),
        ("6 GB of memory are already used before I start the training.", False, True),
        ("기본적으로 차지하고 있는 메모리가 있습니다.", False, True),
        ("The memory that my training used is free.", False, False),
    ],
)
def test_where_a_text_says_that_memory_is(told: str, uses_first: bool, held_before: bool) -> None:
    ledger = ledger_of(told)

    assert (ledger.uses_first, ledger.held_before) == (uses_first, held_before)
