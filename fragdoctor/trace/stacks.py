"""What a stack says: whose code it runs through, in which phase, and the memory that it makes.

Python frames mark the phases: a step of an optimizer, the call of ``backward()``, a module's call.
The kernels of a backward pass on a GPU run in a thread of the autograd engine that has no Python
frames at all, unless a hook, a custom function or a checkpointed module calls back into Python:
then the outermost frame lies in torch. With ``stacks="all"`` C++ frames name the engine.

The line of a stack is its innermost frame that is not library code. Library code is what lies in
``site-packages`` or ``dist-packages``, a source tree of torch, what Inductor generated, Python's
standard library, code without a file (``<frozen ...>``, ``<string>``) and C++ frames. Notebook
cells (``<ipython-input-...>``, ``ipykernel_*``) are the user's. Where every frame is library code
(a server started by a console script), the innermost frame of a package that is neither torch nor
the standard library stands for it, then the outermost torch frame, then the outermost Python frame.
A stack of C++ frames alone, an empty one and a missing one have no line: -1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from msgspec import Struct

from fragdoctor.model.marks import GENERATED
from fragdoctor.model.snapshot import I32, I64, U8, Bools, Snapshot, StackTable

USER, PACKAGE, TORCH, STDLIB, NATIVE = 0, 1, 2, 3, 4

_NATIVE = re.compile(
    r"\?\?|.*\.(?:so(?:\.[0-9.]+)?|dll|pyd|dylib|c|cc|cpp|cxx|cu|cuh|h|hpp|s|asm)|", re.IGNORECASE
)
_NOTEBOOK = re.compile(r"<ipython-input-|<stdin>|.*[/\\]ipykernel_\d+[/\\]")
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_TORCH = re.compile(
    r"(?:^|[/\\])torch[/\\](?:_\w+|amp|ao|autograd|backends|cuda|distributed|fx|func|functional"
    r"|jit|nn|onnx|optim|profiler|random|serialization|sparse|testing|utils)(?:\.py|[/\\])"
)
# Of packages what runs a program rather than being a part of its model.
_PLUMBING = re.compile(
    r"[/\\](?:site|dist)-packages[/\\](?:(?:accelerate|click|deepspeed|fire|hydra|ignite|lightning"
    r"|lightning_fabric|optuna|pytorch_lightning|ray|torchtnt|typer|wandb)[/\\]"
    r"|.*[/\\](?:hooks|trainer|trainer_\w+|\w+_trainer|training_loop|utils[/\\]\w+)\.py)"
)
_STDLIB = re.compile(
    r"[/\\](?:lib|Lib|lib64)[/\\]python[0-9.]*[/\\]|[/\\]Python\d+[/\\]Lib[/\\]|\.zip[/\\]"
)


def classify_file(filename: str) -> int:
    """Return whose code a file name of a frame is: ``USER`` .. ``NATIVE``."""
    return _classified(filename[:1000])


# A worker that reads thousands of ranks meets the same files again; 8 MB of names at most.
@lru_cache(maxsize=8192)
def _classified(name: str) -> int:
    if _NOTEBOOK.match(name):
        return USER
    if name.startswith("<"):
        return STDLIB
    if _NATIVE.fullmatch(name):
        return NATIVE
    if _PACKAGES.search(name):
        rest = _PACKAGES.split(name)[-1]
        return TORCH if rest.startswith(("torch/", "torch\\", "torch.py")) else PACKAGE
    if _TORCH.search(name) or GENERATED.search(name):
        return TORCH
    return STDLIB if _STDLIB.search(name) else USER


def is_plumbing(filename: str) -> bool:
    """Return whether a file of a package runs programs: a trainer, a launcher, hooks."""
    return _PLUMBING.search(filename[:1000]) is not None


def frame_classes(snapshot: Snapshot) -> U8:
    """Return the class of each frame of the snapshot (``uint8``)."""
    names, of_frame = np.unique(snapshot.frames.filename, return_inverse=True)
    classes = np.array(
        [NATIVE if i < 0 else classify_file(snapshot.strings[int(i)]) for i in names], np.uint8
    )
    return classes[of_frame.reshape(-1)] if len(names) else np.zeros(0, np.uint8)


def user_frames(snapshot: Snapshot, classes: U8 | None = None) -> I32:
    """Return the frame id of the user's own line for each stack, -1 where it has none."""
    offsets, frames = snapshot.stacks.offsets, snapshot.stacks.frames
    classes = frame_classes(snapshot) if classes is None else classes
    kind = classes[frames]
    result = np.full(len(snapshot.stacks), -1, np.int32)
    # The later choices are written first and overwritten by the better ones.
    for wanted, end in ((STDLIB, _last), (TORCH, _last), (PACKAGE, _first), (USER, _first)):
        position = end(np.flatnonzero(kind == wanted), offsets)
        found = position >= 0
        result[found] = frames[position[found]]
    return result


def frames_of(stack: I32, lines: I32) -> I32:
    """Return the user frame of each stack id, -1 for the id -1."""
    if not len(lines):
        return np.full(len(stack), -1, np.int32)
    result: I32 = np.where(stack >= 0, lines[stack], np.int32(-1))
    return result


# Roles of stacks. SILENT: recorded, but without a Python frame; NO_STACK: not recorded.
NO_STACK, FORWARD, BACKWARD, OPTIMIZER, ZERO_GRAD, SILENT = -1, 0, 1, 2, 3, 4


def is_backward(role: I32) -> Bools:
    """Return which roles are of a backward pass: the engine's thread has no Python frames."""
    return np.isin(role, (BACKWARD, SILENT))


OPTIMIZER_FILE: Final = re.compile(
    r"(?:^|[/\\])optim(?:izers?)?(?:[/\\]|\.py$)|optimizer[^/\\]*$|[/\\]runtime[/\\]zero[/\\]",
    re.IGNORECASE,
)
OPTIMIZER_STEP: Final = re.compile(r"^(?:_init_group|_?(?:single|multi)_tensor_\w+|step)$")
LOSS: Final = re.compile(
    r"loss|cross_entropy|log_softmax|nll|criterion|kl_div|logsumexp", re.IGNORECASE
)
"""Functions that compute a loss."""

EVALUATION: Final = re.compile(
    r"eval|valid|infer|predict|test|generate|sample|score", re.IGNORECASE
)
"""Names of files and functions that evaluate."""

_STEP, _BACKWARD, _MODULE, _INIT = 1, 2, 4, 8
_ZERO, _RECOMPUTE, _STATE, _CLIP, _CLOSURE, _CHECKPOINT = 32, 64, 128, 256, 512, 1024

_T: Final = r"(?:^|[/\\])torch[/\\]"
# (file, function, meaning); None matches all.
_FRAMES: Final[tuple[tuple[re.Pattern[str] | None, re.Pattern[str], int], ...]] = (
    (OPTIMIZER_FILE, OPTIMIZER_STEP, _STEP),
    (re.compile(_T + r"optim[/\\]optimizer\.py$"), re.compile(r"wrapper$|_use_grad$"), _STEP),
    (
        re.compile(r"[/\\](?:\w*_)?checkpoint(?:ing)?\.py$"),
        re.compile(r"checkpoint$|forward$"),
        _CHECKPOINT,
    ),
    (OPTIMIZER_FILE, re.compile(r"_?init_(?:group|state)|load_state_dict"), _STATE),
    (
        re.compile(_T + r"(?:autograd[/\\](?:__init__|graph)|_tensor)\.py$"),
        re.compile(r"backward$|grad$|_engine_run_backward$|_make_grads$"),
        _BACKWARD,
    ),
    (
        re.compile(r"[/\\](?:\w*_)?checkpoint(?:ing)?\.py$"),
        re.compile(r"unpack_hook$|recompute_fn$|backward$"),
        _BACKWARD | _RECOMPUTE,
    ),
    (
        re.compile(_T + r"nn[/\\]modules[/\\]module\.py$"),
        re.compile(r"_(?:wrapped_)?call_impl$"),
        _MODULE,
    ),
    (re.compile(_T + r"nn[/\\]modules[/\\]module\.py$"), re.compile(r"_apply$|to_empty$"), _INIT),
    (
        re.compile(_T + r"nn[/\\](?:modules|parameter|init|parallel|quant)"),
        re.compile(r"__init__$|__new__$|reset_parameters$"),
        _INIT,
    ),
    (
        re.compile(r"[/\\](?:nn|transformers|diffusers|accelerate|peft|safetensors|timm)[/\\]"),
        re.compile(r"\w*load_\w*state_dict\w*$|from_pretrained$|set_module_\w+$|load_state_dict$"),
        _INIT,
    ),
    (None, re.compile(r"zero_grad$"), _ZERO),
    (
        re.compile(r"[/\\](?:clip_grad|grad_scaler)\.py$"),
        re.compile(
            r"clip_grad\w*|_clip_grad\w*|_?get_total_norm|unscale_|_unscale_\w+|step|update"
        ),
        _CLIP,
    ),
    (None, re.compile(r"\w*closure$"), _CLOSURE),
    (None, re.compile(r".*torch::autograd::Engine::(?:thread_|evaluate_|reentrant)"), _BACKWARD),
)
# Threads of torch that run other things than the engine's callbacks.
_NOT_ENGINE: Final = re.compile(
    _T + r"(?:multiprocessing|distributed[/\\](?:run|launch|elastic|launcher)|utils[/\\]data"
    r"|_inductor|__main__|utils[/\\]_|autograd[/\\]grad_mode|nn[/\\])"
)

# Torch's decorators and launchers: the program goes on below them.
_TRANSPARENT: Final = re.compile(
    r"[/\\]torch[/\\](?:utils[/\\]_contextlib|amp[/\\]autocast_mode|cuda[/\\]amp[/\\]autocast_mode"
    r"|_dynamo[/\\](?:eval_frame|external_utils)|autograd[/\\]grad_mode|_compile"
    r"|multiprocessing[/\\]spawn|distributed[/\\]\w+"
    r"|distributed[/\\]elastic[/\\].*)\.py$"
)
# An optimizer may call the program back (a closure).
_OPTIMIZERS: Final = re.compile(r"[/\\]torch[/\\]optim[/\\]\w+\.py$")


class StackRoles(Struct, frozen=True):
    """One row per stack id, and one more at the end for the id -1.

    Attributes:
        role: ``NO_STACK`` .. ``SILENT``.
        in_module: made inside a module's call.
        makes_model: made while a module is built, moved or loaded.
        makes_state: where optimizers make their state; ``in_step``: anywhere in an optimizer.
        recomputes: a checkpointed part of the model that is computed again; ``checkpoints``: one
            that is computed for the first time.
        by_user: the innermost Python frame is not torch's.
    """

    role: I32
    in_module: Bools
    makes_model: Bools
    makes_state: Bools
    in_step: Bools
    recomputes: Bools
    checkpoints: Bools
    by_user: Bools

    @property
    def has_python(self) -> bool:
        """Whether any stack has a Python frame."""
        return bool(np.isin(self.role, (FORWARD, OPTIMIZER, ZERO_GRAD)).any())

    @property
    def trains(self) -> bool:
        """Whether any stack shows a backward pass or an optimizer."""
        return bool(np.isin(self.role, (BACKWARD, OPTIMIZER, ZERO_GRAD)).any())


def stack_roles(snapshot: Snapshot, classes: U8) -> StackRoles:
    """Return the role of every stack.

    ``classes`` has the class of each frame (``frame_classes``).
    """
    offsets, frames = snapshot.stacks.offsets, snapshot.stacks.frames
    meaning = _frame_meanings(snapshot)[frames]
    bits = np.append(_any_bits(meaning, offsets), 0)
    python = np.flatnonzero(classes[frames] != NATIVE)
    inner, outer = (_at(frames, np.append(end(python, offsets), -1)) for end in (_first, _last))
    has_python = inner >= 0
    role = np.where(has_python, FORWARD, SILENT).astype(np.int32)
    role[has_python & _has(bits, _ZERO)] = ZERO_GRAD
    in_step = _has(bits, _STEP) & ~np.append(_calls_back(meaning, offsets), False)
    role[in_step | (_has(bits, _CLIP) & ~_has(bits, _MODULE))] = OPTIMIZER
    role[_has(bits, _BACKWARD)] = BACKWARD
    other_thread = _matcher(snapshot, snapshot.frames.filename)(_NOT_ENGINE.search)
    is_torch = (classes == TORCH) & ~other_thread
    starts_in_torch = _at(is_torch, outer) == 1
    role[starts_in_torch & (role != OPTIMIZER)] = BACKWARD
    role[-1] = NO_STACK
    in_module = _has(bits, _MODULE)
    return StackRoles(
        role=role,
        in_module=in_module,
        makes_model=_has(bits, _INIT) & ~in_module,
        makes_state=_has(bits, _STATE),
        in_step=in_step,
        recomputes=_has(bits, _RECOMPUTE),
        checkpoints=_has(bits, _CHECKPOINT),
        by_user=np.isin(_at(classes, inner), (USER, PACKAGE)),
    )


def _at(values: U8 | I32 | Bools, positions: I64 | I32) -> I64:
    """Return the values at some positions; -1 where the position is."""
    return np.append(values, -1).astype(np.int64)[positions]


def _has(bits: I64, flag: int) -> Bools:
    result: Bools = (bits & flag) != 0
    return result


def _frame_meanings(snapshot: Snapshot) -> I64:
    """Return the meanings of each frame as bits."""
    frames = snapshot.frames
    by_name, by_file = _matcher(snapshot, frames.name), _matcher(snapshot, frames.filename)
    result = np.zeros(len(frames), np.int64)
    for in_file, in_name, flag in _FRAMES:
        hits = by_name(in_name.match)
        if in_file is not None and hits.any():
            hits &= by_file(in_file.search)
        result[hits] |= flag
    return result


def _matcher(snapshot: Snapshot, ids: I32) -> Callable[[Callable[[str], object]], Bools]:
    """Return what tells of each of some strings whether a pattern finds something in it."""
    known, member = np.unique(ids, return_inverse=True)
    texts = [snapshot.strings[i][:1000] if i >= 0 else "" for i in known.tolist()]

    def matches(find: Callable[[str], object]) -> Bools:
        hits: Bools = np.array([find(text) is not None for text in texts], np.bool_)
        return hits[member.reshape(-1)]

    return matches


def _any_bits(bits: I64, offsets: I64) -> I64:
    """Return for each stack the bits that any of its frames has."""
    result = np.zeros(len(offsets) - 1, np.int64)
    filled = np.flatnonzero(np.diff(offsets) > 0)
    if len(filled):
        result[filled] = np.bitwise_or.reduceat(bits, offsets[filled])
    return result


def _first(hits: I64, offsets: I64) -> I64:
    """Return the first of the positions inside each stack, -1 where there is none."""
    if not len(hits):
        return np.full(len(offsets) - 1, -1, np.int64)
    position = hits[np.minimum(np.searchsorted(hits, offsets[:-1]), len(hits) - 1)]
    inside = (position >= offsets[:-1]) & (position < offsets[1:])
    return np.where(inside, position, -1)


def _last(hits: I64, offsets: I64) -> I64:
    """Return the last of the positions inside each stack, -1 where there is none."""
    if not len(hits):
        return np.full(len(offsets) - 1, -1, np.int64)
    position = hits[np.maximum(np.searchsorted(hits, offsets[1:]) - 1, 0)]
    inside = (position >= offsets[:-1]) & (position < offsets[1:])
    return np.where(inside, position, -1)


def _calls_back(bits: I64, offsets: I64) -> Bools:
    """Return whether an optimizer's step called a closure that computes the loss."""
    inner = _first(np.flatnonzero((bits & (_MODULE | _CLOSURE)) != 0), offsets)
    step = _first(np.flatnonzero((bits & _STEP) != 0), offsets)
    result: Bools = (inner >= 0) & (inner < step)
    return result


class Stacks:
    """What the stacks of a snapshot say, worked out when it is asked for."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    @cached_property
    def classes(self) -> U8:
        """Whose code each frame is (``USER`` ...)."""
        return frame_classes(self._snapshot)

    @cached_property
    def functions(self) -> I64:
        """A number for the function of each frame, and -1 at the end for no frame."""
        frames = self._snapshot.frames
        key = frames.filename.astype(np.int64) * (len(self._snapshot.strings) + 1) + frames.name
        return np.append(np.unique(key, return_inverse=True)[1].reshape(-1), -1).astype(np.int64)

    @cached_property
    def lines(self) -> I32:
        """Frame id of the user's own line for each stack, -1 where it has none."""
        return user_frames(self._snapshot, self.classes)

    @cached_property
    def script(self) -> str:
        """The file of the user's that most stacks begin in; "" for notebooks and ``python -m``."""
        ends = self.python.offsets[1:][np.diff(self.python.offsets) > 0]
        ids, n_stacks = np.unique(self.python.frames[ends - 1], return_counts=True)
        n_of: Counter[str] = Counter()
        for frame_id, n in zip(ids.tolist(), n_stacks.tolist(), strict=True):
            frame = self._snapshot.frame(frame_id)
            if frame.function == "<module>" and classify_file(frame.filename) == USER:
                n_of[frame.filename] += n
        ((script, _),) = n_of.most_common(1) or [("", 0)]
        return script if script.endswith(".py") and not _NOTEBOOK.match(script) else ""

    @cached_property
    def roles(self) -> StackRoles:
        """What part of training each stack is in."""
        return stack_roles(self._snapshot, self.classes)

    @cached_property
    def outside(self) -> StackTable:
        """The frames of each stack from the line that goes into torch outwards, Python's only.

        Torch's decorators and launchers are passed over: the program goes on below them.
        """
        snapshot, table = self._snapshot, self.python
        is_torch = self.classes == TORCH
        by_file = _matcher(snapshot, snapshot.frames.filename)
        is_open = ~is_torch | by_file(_OPTIMIZERS.search)
        is_passed = is_torch & by_file(_TRANSPARENT.search)
        keep = ~is_passed[table.frames]
        offsets = np.append(0, np.cumsum(keep))[table.offsets]
        frames = table.frames[keep]
        inward = _last(np.flatnonzero(~is_open[frames]), offsets)  # the outermost that is closed
        begin = np.maximum(inward + 1, offsets[:-1])
        is_outside = np.arange(len(frames)) >= np.repeat(begin, np.diff(offsets))
        offsets = np.append(0, np.cumsum(is_outside))[offsets]
        return StackTable(offsets, frames[is_outside])

    @cached_property
    def places(self) -> I32:
        """Number of the place in the program from which each stack goes into torch.

        A place is a line with all that called it. -1, at the end too, where no frame is Python's.
        """
        frames, offsets = self.outside.frames, self.outside.offsets
        result = np.full(len(self.outside) + 1, -1, np.int32)
        numbers: dict[bytes, int] = {}
        for i in np.flatnonzero(np.diff(offsets) > 0).tolist():
            outside = frames[offsets[i] : offsets[i + 1]].tobytes()
            result[i] = numbers.setdefault(outside, len(numbers))
        return result

    @cached_property
    def python(self) -> StackTable:
        """The stacks without their C++ frames (``stacks="all"`` interleaves them)."""
        table = self._snapshot.stacks
        keep = self.classes[table.frames] != NATIVE
        offsets = np.append(0, np.cumsum(keep))[table.offsets]
        return StackTable(offsets, table.frames[keep])

    def calls(self, pattern: re.Pattern[str]) -> Bools:
        """Return which stacks allocate in a function of a name, or in what it calls in libraries.

        From the allocation outwards the search ends at the user's own line: what is farther out
        says what the program was doing, not what was made. False at the end for the id -1.
        """
        table, lines = self._snapshot.stacks, self.lines
        is_named = _matcher(self._snapshot, self._snapshot.frames.name)(pattern.search)
        found = np.zeros(len(table) + 1, np.bool_)
        first = _first(np.flatnonzero(is_named[table.frames]), table.offsets)
        for i in np.flatnonzero(first >= 0).tolist():
            inner = table.frames[table.offsets[i] : first[i]]
            found[i] = not len(inner) or lines[i] < 0 or lines[i] not in inner
        return found

    def lines_of(self, stack: I32) -> I32:
        """Return the user's line of each stack id, -1 for the id -1."""
        return frames_of(stack, self.lines)

    def same_to_user_line(self, stack: int) -> I64:
        """Return the ids of the stacks that equal one from the allocation to the user's own line.

        What calls that line may differ: a search for a batch that fits, then the run itself.
        """

        def inner(i: int) -> bytes:
            frames = self.python.frames[self.python.offsets[i] : self.python.offsets[i + 1]]
            return frames[: int(np.flatnonzero(frames == line)[0]) + 1].tobytes()

        line = int(self.lines[stack])
        if line < 0:
            return np.array([stack], np.int64)
        wanted = inner(stack)
        alike = np.flatnonzero(self.lines == line).tolist()
        return np.array([i for i in alike if inner(i) == wanted], np.int64)
