"""What single stacks say."""

from __future__ import annotations

import pytest
from builders import BASE, alloc, block, columns, frame, segment, snapshot

from fragdoctor.trace import stacks as stack_roles
from fragdoctor.trace.stacks import Stacks

T = "/opt/venv/lib/python3.11/site-packages/torch"
W = r"C:\venv\Lib\site-packages\torch"
MAIN = frame("/home/me/optimizer_experiments/train.py", 9, "<module>")
STEP = frame("/home/me/optimizer_experiments/train.py", 5, "step")


def roles_of(*frames):
    live = block(512, "active_allocated", frames=list(frames))
    data = snapshot(
        segment(4096, live, block(1536)), events=[alloc(4096, 512, frames=list(frames))]
    )
    read = columns(data)
    roles = Stacks(read).roles
    return roles, int(read.events.stack[0])


ENGINE = "torch::autograd::Engine::thread_main(std::shared_ptr<GraphTask> const&)"
APPLY = frame(f"{T}/autograd/function.py", 1, "apply")
WRAPPER = frame(f"{T}/optim/optimizer.py", 5, "wrapper")
UNPACK = frame(f"{T}/utils/checkpoint.py", 1, "unpack_hook")
BITS = "/x/site-packages/bitsandbytes/optim/adamw.py"


@pytest.mark.parametrize(
    "frames",
    [
        (frame(f"{T}/optim/adam.py", 1, "_init_group"), MAIN),
        (frame(f"{W}\\optim\\sgd.py", 1, "step"), MAIN),
        (frame(BITS, 1, "step"), MAIN),
        (frame("muon.py", 1, "step"), WRAPPER, MAIN),
        (frame(f"{T}/nn/utils/clip_grad.py", 1, "clip_grad_norm_"), MAIN),
    ],
)
def test_stack_roles_of_a_step_is_optimizer(frames):
    roles, stack = roles_of(*frames)

    assert roles.role[stack] == stack_roles.OPTIMIZER


@pytest.mark.parametrize(
    "frames",
    [
        (frame(f"{T}/_tensor.py", 1, "backward"), MAIN),
        (frame(f"{W}\\autograd\\graph.py", 1, "_engine_run_backward"), MAIN),
        (frame("act.py", 1, "backward"), APPLY),
        (frame("model.py", 1, "forward"), UNPACK),
        (frame("??", 0, ENGINE),),
    ],
)
def test_stack_roles_of_the_engine_is_backward(frames):
    roles, stack = roles_of(*frames)

    assert roles.role[stack] == stack_roles.BACKWARD


@pytest.mark.parametrize(
    "frames",
    [
        (STEP, MAIN),  # a function that is called step, in a folder about optimizers
        (frame(f"{T}/amp/grad_scaler.py", 1, "scale"), MAIN),
        (frame(f"{T}/nn/modules/module.py", 1, "_call_impl"), MAIN),
        (frame("act.py", 1, "forward"), APPLY, MAIN),
    ],
)
def test_stack_roles_of_the_program_is_forward(frames):
    roles, stack = roles_of(*frames)

    assert roles.role[stack] == stack_roles.FORWARD


@pytest.mark.parametrize("frames", [(), (frame("??", 0, "c10::cuda::malloc(unsigned long)"),)])
def test_stack_roles_without_python_is_silent(frames):
    roles, stack = roles_of(*frames)

    assert roles.role[stack] == stack_roles.SILENT


def test_stack_roles_zero_grad_has_a_role_of_its_own():
    roles, stack = roles_of(frame(f"{T}/optim/optimizer.py", 1, "zero_grad"), MAIN)

    assert roles.role[stack] == stack_roles.ZERO_GRAD


def test_stack_roles_no_stack_is_the_last_row():
    roles, _ = roles_of(MAIN)

    assert roles.role[-1] == stack_roles.NO_STACK
    assert not roles.in_module[-1]


def test_stack_roles_closure_that_calls_a_module_is_forward():
    roles, stack = roles_of(
        frame(f"{T}/nn/modules/module.py", 1, "_call_impl"),
        frame("train.py", 1, "closure"),
        frame(f"{T}/optim/adam.py", 1, "step"),
        MAIN,
    )

    assert roles.role[stack] == stack_roles.FORWARD
    assert not roles.in_step[stack]


def script_of(*stacks):
    events = [alloc(BASE + 512 * i, 512, frames=list(stack)) for i, stack in enumerate(stacks)]
    blocks = [block(512, "active_allocated") for _ in stacks]
    return Stacks(columns(snapshot(segment(BASE, *blocks), events=events))).script


STEP, WORKER = frame("/app/net.py", 3, "step"), frame("/usr/lib/python3.11/threading.py", 9, "run")


def test_script_is_what_most_stacks_begin_in():
    main, other = (frame(f"/app/{name}.py", 9, "<module>") for name in ("train", "check"))

    assert script_of((STEP, main), (STEP, main), (STEP, other), (STEP, WORKER)) == "/app/train.py"


@pytest.mark.parametrize(
    "outer",
    [frame("/tmp/ipykernel_8/42.py", 1, "<module>"), frame("<frozen runpy>", 1, "<module>"), WORKER,
     frame("/app/train.py", 1, "main")],
)  # fmt: skip
def test_script_is_unknown_where_no_file_of_the_user_begins(outer):
    assert script_of((STEP, outer)) == ""
