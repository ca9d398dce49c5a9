"""A training program in miniature on the toy allocator, with the stacks that PyTorch records."""

from __future__ import annotations

from typing import Any

from builders import MIB, frame
from stock import from_python
from toy_allocator import Block, ToyAllocator

from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.result import PhaseAnalysis
from fragdoctor.model.snapshot import Snapshot

TORCH = "/v/site-packages/torch"
MAIN = frame("train.py", 100, "<module>")
APPLY = (frame(f"{TORCH}/nn/modules/module.py", 9, "_apply"), frame("train.py", 2, "main"), MAIN)
BATCH = (frame("data.py", 3, "get_batch"), frame("train.py", 3, "main"), MAIN)
CALL = frame(f"{TORCH}/nn/modules/module.py", 7, "_call_impl")
LINEAR = (frame(f"{TORCH}/nn/functional.py", 1, "linear"), CALL, frame("train.py", 4, "main"), MAIN)
NORM = (frame(f"{TORCH}/nn/functional.py", 2, "norm"), CALL, frame("train.py", 4, "main"), MAIN)
ENGINE: tuple[dict[str, Any], ...] = ()  # a thread without Python
SEED = (
    frame(f"{TORCH}/autograd/__init__.py", 1, "_make_grads"),
    frame(f"{TORCH}/_tensor.py", 1, "backward"),
    frame("train.py", 5, "main"),
    MAIN,
)
RECOMPUTE = (
    frame(f"{TORCH}/nn/functional.py", 1, "linear"),
    CALL,
    frame(f"{TORCH}/utils/checkpoint.py", 3, "recompute_fn"),
    frame(f"{TORCH}/utils/checkpoint.py", 4, "unpack_hook"),
)
INIT_STATE = (
    frame(f"{TORCH}/optim/adam.py", 1, "_init_group"),
    frame(f"{TORCH}/optim/adam.py", 2, "step"),
    frame("train.py", 6, "main"),
    MAIN,
)
UPDATE = (
    frame(f"{TORCH}/optim/adam.py", 3, "_multi_tensor_adam"),
    frame(f"{TORCH}/optim/adam.py", 2, "step"),
    frame("train.py", 6, "main"),
    MAIN,
)
ZERO = (frame(f"{TORCH}/optim/optimizer.py", 8, "zero_grad"), frame("train.py", 8, "main"), MAIN)
USER = (frame("train.py", 9, "main"), MAIN)
VALIDATE = (frame("train.py", 10, "main"), MAIN)
OUTPUT = (frame("train.py", 22, "validate"), *VALIDATE)
HIDDEN = [
    (
        frame(f"{TORCH}/nn/functional.py", line, "linear"),
        CALL,
        frame("train.py", 21, "validate"),
        *VALIDATE,
    )
    for line in (1, 2, 3)
]

PARAMETERS = (4 * MIB, 6 * MIB)
N_LAYERS = 24  # of the deep model
ACTIVATION, TEMPORARY, INPUT, RESULT = 10 * MIB, 3 * MIB, 2 * MIB, 8 * MIB


class TrainingLoop:
    """Two parameters, one activation each, Adam; every part can be left out or varied."""

    def __init__(self, *, context: str = "all", foreach: bool = True) -> None:
        self.toy = ToyAllocator()
        self.foreach = foreach
        self.context = context
        self.stacks: list[tuple[dict[str, Any], ...]] = [ENGINE]
        self.event_stacks: dict[int, int] = {}
        self.parameters: list[Block] = []
        self.gradients: list[Block] = []
        self.state: list[Block] = []

    def stack_id(self, stack: tuple[dict[str, Any], ...]) -> int:
        if stack not in self.stacks:
            self.stacks.append(stack)
        return self.stacks.index(stack)

    def new(self, size: int, stack: tuple[dict[str, Any], ...]) -> Block:
        first = len(self.toy.events)
        block = self.toy.malloc(size, line=self.stack_id(stack))
        for i in range(first, len(self.toy.events)):
            self.event_stacks[i] = block.line
        return block

    def free(self, block: Block, stack: tuple[dict[str, Any], ...]) -> None:
        by = block.line if self.context == "alloc" else self.stack_id(stack)
        first = len(self.toy.events)
        self.toy.free(block)
        for i in range(first, len(self.toy.events)):
            self.event_stacks[i] = by

    def refuse(self, size: int, stack: tuple[dict[str, Any], ...]) -> None:
        """Log a request that fails on a full device."""
        self.event_stacks[len(self.toy.events)] = self.stack_id(stack)
        self.toy.refuse(size, 0)

    def build(self) -> None:
        self.parameters = [self.new(size, APPLY) for size in PARAMETERS]

    def forward(self) -> list[Block]:
        """Return the batch and the activations."""
        held = [self.new(INPUT, BATCH)]
        for _ in PARAMETERS:
            scratch = self.new(TEMPORARY, NORM)
            held.append(self.new(ACTIVATION, LINEAR))
            self.free(scratch, NORM)
        return held

    def backward(self, activations: list[Block]) -> None:
        seed = self.new(512, SEED)
        fresh = []
        for size, activation in zip(PARAMETERS, activations, strict=True):
            scratch = self.new(ACTIVATION, ENGINE)
            fresh.append(self.new(size, ENGINE))
            self.free(activation, ENGINE)
            self.free(scratch, ENGINE)
        if self.gradients:
            for block in fresh:
                self.free(block, ENGINE)
        else:
            self.gradients = fresh
        self.free(seed, SEED)

    def optimizer(self) -> None:
        if not self.state:
            self.state = [self.new(size, INIT_STATE) for size in PARAMETERS for _ in range(2)]
        if self.foreach:
            for block in [self.new(size, UPDATE) for size in PARAMETERS]:
                self.free(block, UPDATE)

    def zero_grad(self) -> None:
        for block in self.gradients:
            self.free(block, ZERO)
        self.gradients = []

    def step(self) -> None:
        batch, *activations = self.forward()
        self.backward(activations)
        self.optimizer()
        self.zero_grad()
        self.free(batch, USER)

    def evaluate(self, n_batches: int) -> None:
        """Run forward passes, and gather a result of each."""
        for _ in range(n_batches):
            hidden = [self.new(ACTIVATION, stack) for stack in HIDDEN]
            self.new(RESULT, OUTPUT)
            for block in hidden:
                self.free(block, OUTPUT)

    def snapshot(self, annotations: list[dict[str, Any]] | None = None) -> Snapshot:
        return from_python(self.recording(annotations))

    def recording(self, annotations: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Return what ``_snapshot()`` would have, as plain values."""
        data = self.toy.data()
        for i, e in enumerate(data["device_traces"][0]):
            e["time_us"] = 1000 + i
            e.pop("frames", None)
            if self.context != "none":
                e["frames"] = list(self.stacks[self.event_stacks.get(i, 0)])
        for segment in data["segments"]:
            for block in segment["blocks"]:
                known = block["frames"] and self.context != "none"
                block["frames"] = list(self.stacks[block["frames"][0]["line"]]) if known else []
        if annotations:
            data["external_annotations"] = annotations
        return data

    def phases(self, **more: Any) -> PhaseAnalysis:
        found = analyze_device(self.snapshot(**more), 0).phases
        assert found is not None
        return found


def deep_layers(called_at: int, function: str = "main") -> list[tuple[dict[str, Any], ...]]:
    """Return the stack of each layer's result, where a line of the program calls the model."""
    return [
        (
            frame(f"{TORCH}/nn/functional.py", 1, "linear"),
            CALL,
            frame("model.py", 10 + i, "forward"),
            CALL,
            frame("train.py", called_at, function),
            MAIN,
        )
        for i in range(N_LAYERS)
    ]


def deeply_trained(n_steps: int = 4) -> TrainingLoop:
    """Return a program that has trained a deep model."""
    loop = TrainingLoop()
    loop.build()
    for _ in range(n_steps):
        kept = [loop.new(ACTIVATION, stack) for stack in deep_layers(4)]
        for block in reversed(kept):
            loop.free(loop.new(ACTIVATION, ENGINE), ENGINE)
            loop.free(block, ENGINE)
        loop.optimizer()
    return loop
