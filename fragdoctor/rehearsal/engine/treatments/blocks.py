"""Parts of a model, found in its module tree, and checkpointing of some of them.

A part is any module that calls several others with parameters. Which ones are worth it is measured
(``fragdoctor/rehearsal/prescription/checkpoints.py``), so what they are called does not matter.
"""

from __future__ import annotations

import keyword
from contextlib import ExitStack
from functools import partial
from itertools import count, islice
from typing import Any, Final

import torch
from torch.utils import checkpoint as checkpoints

from fragdoctor.recording.module_names import ByIdentity
from fragdoctor.rehearsal.engine.calls import at_first_call, put_forward
from fragdoctor.rehearsal.engine.treatments.operations import COUNTED

MIN_BLOCKS: Final = 2


class Blocks:
    """Equal blocks that follow each other in a model.

    Attributes:
        path: of their container in the model, "" for the model itself.
        blocks: in the order of their container.
        first: place of the first among the container's children.
        is_list: whether the container can be cut like a list.
        names: paths of the blocks in the model.
    """

    def __init__(self, path: str, container: Any, blocks: list[Any]) -> None:
        self.path = path
        self.blocks = blocks
        self.first = next(i for i, m in enumerate(container.children()) if m is blocks[0])
        self.is_list = isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential))
        names = {child: name for name, child in container.named_children()}
        self.names = [f"{path}.{names[block]}".lstrip(".") for block in blocks]


def repeated_blocks(model: Any) -> list[Blocks]:
    """Return the containers of equal blocks of a model that lie in no other such block.

    Blocks are equal if their class is. Blocks of a few layers each (a linear layer, a norm) are no
    blocks: they hold no module that has parameters.
    """
    found: list[Blocks] = []
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        children = list(module.children())
        runs: list[list[Any]] = []
        for child in children:
            if runs and type(runs[-1][-1]) is type(child):
                runs[-1].append(child)
            else:
                runs.append([child])
        for run in runs:
            if len(run) < MIN_BLOCKS or not _is_block(run[0]):
                continue
            found.append(Blocks(path, module, run))
            inside |= {id(part) for block in run for part in block.modules()}
    return found


def _is_block(module: Any) -> bool:
    """Whether a module that is called has several others with parameters, and is no stage."""
    if type(module).forward is torch.nn.Module.forward:
        return False  # a list of modules, whose members the program calls
    inner = [m for m in module.modules() if m is not module]
    has_own = [m for m in inner if next(m.parameters(recurse=False), None) is not None]
    if len(has_own) < MIN_BLOCKS:
        return False
    return type(module) is not torch.nn.Sequential or not repeated_blocks(module)


def caching(model: Any) -> dict[str, Any]:
    """Return the configurations in a model that let it keep keys and values of past tokens.

    Each comes with the path of the outermost module that has it.
    """
    found: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            found.setdefault(id(config), (path, config))
    return dict(found.values())


def parts_of(model: Any, known: ByIdentity) -> list[tuple[str, Any]]:
    """Return the modules within a model that can be checkpointed, with their paths.

    Each stands before those within it. Those of models before, ``known``, are left out.
    """
    found = [
        (path, module)
        for path, module in model.named_modules()
        if path and type(module).forward is not torch.nn.Module.forward and _n_layers(module) > 1
        and not known.get(module)
    ]  # fmt: skip
    for _, module in found:
        known[module] = True
    return found


def expression(model: Any, path: str) -> str:
    """Return how a module within a model is written after the model's name: ``.layers[3].mlp``."""
    written, module = "", model
    for name in path.split(".") if path else ():
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and name.isdecimal():
            written += f"[{name}]"
        elif name.isidentifier() and not keyword.iskeyword(name):
            written += f".{name}"
        else:
            written += f".get_submodule({name!r})"
        module = getattr(module, name)
    return written


def _n_layers(module: Any) -> int:
    """Number of modules with parameters of their own, up to two."""
    has_own = (m for m in module.modules() if next(m.parameters(recurse=False), None) is not None)
    return sum(1 for _ in islice(has_own, 2))


def checkpoint(argument: str, undo: ExitStack) -> None:
    """Checkpoint parts of the models that are trained: ``0-3,8=0.2`` by their numbers.

    Of part 8 the results of its first and third counted operation are kept.
    """
    chosen: dict[int, tuple[int, ...]] = {}
    for part in argument.split(","):
        numbers, _, kept = part.partition("=")
        first, _, last = numbers.partition("-")
        for number in range(int(first), int(last or first) + 1):
            chosen[number] = tuple(int(n) for n in kept.split(".") if n)

    known = ByIdentity()
    following = count()

    def wrap(model: Any) -> None:
        for config in caching(model).values():
            config.use_cache = False  # a cache would be filled again when a block is run again
        for (_, part), number in zip(parts_of(model, known), following, strict=False):
            if number in chosen:
                put_forward(part, _checkpointed(part, chosen[number]), undo)

    at_first_call(wrap, undo, trains=True)


def _checkpointed(block: Any, kept: tuple[int, ...]) -> Any:
    """Return a block's forward pass, checkpointed as the lines for it do."""
    more: dict[str, Any] = {"context_fn": partial(_keeping, kept)} if kept else {}
    return partial(checkpoints.checkpoint, block.forward, use_reentrant=False, **more)


def _keeping(kept: tuple[int, ...]) -> Any:
    """Return contexts that keep the results of counted operations, by their numbers in a call."""
    counts = {False: count(), True: count()}

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> Any:
        is_counted = getattr(op, "overloadpacket", None) in COUNTED
        is_kept = is_counted and next(counts[context.is_recompute]) in kept
        choice = checkpoints.CheckpointPolicy
        return choice.MUST_SAVE if is_kept else choice.PREFER_RECOMPUTE

    return checkpoints.create_selective_checkpoint_contexts(policy)
