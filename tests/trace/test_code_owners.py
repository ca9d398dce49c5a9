from __future__ import annotations

import pytest
from builders import BASE, MIB, block, frame, segment, snapshot
from stock import from_python

from fragdoctor.trace.stacks import (
    NATIVE,
    PACKAGE,
    STDLIB,
    TORCH,
    USER,
    Stacks,
    classify_file,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train.py", USER),
        ("/home/me/project/torch_models/net.py", USER),
        ("C:\\Users\\me\\train.py", USER),
        ("/tmp/ipykernel_4711/1234.py", USER),
        ("<ipython-input-3-abc>", USER),
        ("<stdin>", USER),
        ("/opt/venv/lib/python3/site-packages/torch/nn/modules/module.py", TORCH),
        ("C:\\py\\Lib\\site-packages\\torch\\optim\\adam.py", TORCH),
        ("/home/me/pytorch/torch/nn/modules/linear.py", TORCH),
        ("/tmp/r2/cr2ksix45cwftptmfe6spwwef2uqptwlmfaayit2tu3tblxzbqlv.py", TORCH),
        ("/home/me/cr2ksix45.py", USER),
        ("/usr/lib/python3/dist-packages/numpy/core.py", PACKAGE),
        ("/v/lib/python3.12/site-packages/transformers/trainer.py", PACKAGE),
        ("/usr/lib/python3.11/threading.py", STDLIB),
        ("/usr/lib/python3/runpy.py", STDLIB),
        ("C:\\Python311\\Lib\\threading.py", STDLIB),
        ("<frozen runpy>", STDLIB),
        ("<string>", STDLIB),
        ("??", NATIVE),
        ("", NATIVE),
        ("libtorch_cuda.so.2", NATIVE),
        ("/build/aten/src/ATen/Context.cpp", NATIVE),
        ("kernel.cu", NATIVE),
        ("./misc/../sysdeps/unix/sysv/linux/x86_64/clone3.S", NATIVE),
        ("../sysdeps/unix/sysv/linux/x86_64/clone3.S", NATIVE),
        ("start.s", NATIVE),
        ("/home/me/notes.s/train.py", USER),
    ],
)
def test_classify_file_known_name_is_recognised(name, expected):
    assert expected == classify_file(name)


TORCH_FRAME = frame("/v/site-packages/torch/nn/functional.py", 7, "linear")
HF_FRAME = frame("/v/site-packages/transformers/trainer.py", 8, "train")
STD_FRAME = frame("<frozen runpy>", 9, "_run")


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ([TORCH_FRAME, frame(line=1), HF_FRAME, frame(line=2)], 1),
        ([TORCH_FRAME, HF_FRAME, STD_FRAME], 8),
        ([TORCH_FRAME, STD_FRAME], 7),
        ([STD_FRAME], 9),
        ([frame("??", 0, "malloc")], None),
        ([], None),
    ],
)
def test_user_frames_stack_gives_the_users_line(stack, line):
    read = from_python(snapshot(segment(BASE, block(2 * MIB, "active_allocated", frames=stack))))

    found = int(Stacks(read).lines[read.blocks.stack[0]])

    assert line == (None if found < 0 else read.frame(found).line)
