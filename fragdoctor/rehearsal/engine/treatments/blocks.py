"""Parts of a model, found in its module tree, and checkpointing of some of them.

A part is any module that calls several others with parameters, or a run of layers in an
``nn.Sequential``. Which parts are worth checkpointing is measured
(``fragdoctor/rehearsal/prescription/checkpoints.py``), so their names do not matter.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, groupby, islice
from typing import Any, Final

import torch
from torch.utils import checkpoint as checkpoints

from fragdoctor.recording.module_names import ByIdentity
from fragdoctor.rehearsal.engine import put
from fragdoctor.rehearsal.engine.calls import at_first_call
from fragdoctor.rehearsal.engine.treatments.written import in_pieces, keeping

MIN_BLOCKS: Final = 2


class Piece:
    """A run of layers in an ``nn.Sequential``.

    Attributes:
        path: path of the sequential in the model.
        sequential: the sequential.
        first, end: numbers of the first layer and of the one after the last.
        tree: its path as a part, which begins with that of the enclosing piece.
    """

    def __init__(self, path: str, sequential: Any, first: int, end: int, inside: str) -> None:
        self.path, self.sequential = path, sequential
        self.first, self.end = first, end
        self.tree = f"{inside}.{first}:{end}".lstrip(".")


def repeated_blocks(model: Any) -> list[tuple[str, Any]]:
    """Return a model's equal blocks in a row, with their paths.

    Blocks are equal if their class is. Small groups of layers (a linear layer, a norm) do not
    count: they hold no module that has parameters. No block lies within another.
    """
    found: list[tuple[str, Any]] = []
    inside: set[int] = set()
    for path, module in model.named_modules():
        runs = groupby(module.named_children(), lambda child: type(child[1]))
        for _, run in () if id(module) in inside else runs:
            named = [(f"{path}.{name}".lstrip("."), block) for name, block in run]
            if len(named) >= MIN_BLOCKS and _is_block(named[0][1]):
                found += named
                inside |= {id(part) for _, block in named for part in block.modules()}
    return found


def sharded_units(model: Any) -> list[tuple[str, Any]]:
    """Return what is sharded and gathered together: a model's blocks, else its own parts.

    Parts that share parameters are none: these would be sharded twice.
    """
    parts = [
        (name, part)
        for name, part in model.named_children()
        if type(part).forward is not torch.nn.Module.forward and [*part.parameters()]
    ]
    ids = [id(one) for _, part in parts for one in part.parameters()]
    return repeated_blocks(model) or (parts if len({*ids}) == len(ids) else [])


def _is_block(module: Any) -> bool:
    """Return whether a callable module has several others with parameters, and is no stage."""
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
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True and all(
            config is not one for one in found.values()
        ):
            found[path] = config
    return found


def parts_of(model: Any, known: ByIdentity) -> list[tuple[str, Any]]:
    """Return the modules and pieces in a model that can be checkpointed, with their paths.

    Each comes before those within it. Those of earlier models (``known``) are left out.
    """
    found: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        is_called = type(module).forward is not torch.nn.Module.forward
        if not is_called or _n_layers(module) < MIN_BLOCKS or known.get(module):
            continue
        known[module] = True
        if path:
            found.append((path, module))
        layers = [*module.children()]  # each child only once
        if type(module) is torch.nn.Sequential and len(layers) == len(module):
            found += [(piece.tree, piece) for piece in _pieces(path, module)]
    return found


def _pieces(path: str, sequential: Any) -> Iterator[Piece]:
    """Yield the pieces of runs of layers that are no parts, halved down to one product each.

    A piece ends with a product, whose result need not be recomputed.
    """
    layers = [*sequential]
    for is_part, run in groupby(range(len(layers)), lambda n: _n_layers(layers[n]) > 1):
        numbers = [*run]
        products = [n + 1 for n in numbers if any(p.dim() > 1 for p in layers[n].parameters())]
        cuts = sorted({numbers[0], *products, numbers[-1] + 1})
        if not is_part and len(products) >= MIN_BLOCKS:
            yield from _halved(Piece(path, sequential, cuts[0], cuts[-1], path), cuts)


def _halved(piece: Piece, cuts: Sequence[int]) -> Iterator[Piece]:
    if piece.end - piece.first < MIN_BLOCKS:
        return
    if piece.end - piece.first < len(piece.sequential):
        yield piece
    middle = len(cuts) // 2
    for half in (cuts[: middle + 1], cuts[middle:]) if len(cuts) > MIN_BLOCKS else ():
        inner = Piece(piece.path, piece.sequential, half[0], half[-1], piece.tree)
        yield from _halved(inner, half)


def expression(model: Any, path: str) -> str:
    """Return a module's expression after the name of its model: ``.layers[3].mlp``."""
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
    """Return the number of modules with parameters of their own, up to two."""
    has_own = (m for m in module.modules() if next(m.parameters(recurse=False), None) is not None)
    return sum(1 for _ in islice(has_own, 2))


def checkpoint(argument: str) -> None:
    """Checkpoint parts of the trained models, by their numbers: ``0,3,8=0.2``.

    The results of the first and third counted operation of part 8 are kept.
    """
    chosen: dict[int, tuple[int, ...]] = {}
    for part in argument.split(","):
        number, _, kept = part.partition("=")
        chosen[int(number)] = tuple(int(n) for n in kept.split(".") if n)
    known = ByIdentity()
    following = count()

    def wrap(model: Any) -> None:
        for config in caching(model).values():
            config.use_cache = False  # a recomputed block would fill the cache again
        pieces: dict[Any, list[tuple[int, int, dict[str, Any]]]] = {}
        for (_, part), number in zip(parts_of(model, known), following, strict=False):
            if number not in chosen:
                continue
            kept = chosen[number]
            more: dict[str, Any] = {"context_fn": keeping(*kept)} if kept else {}
            if isinstance(part, Piece):
                pieces.setdefault(part.sequential, []).append((part.first, part.end, more))
            else:
                again = partial(checkpoints.checkpoint, use_reentrant=False, **more)
                put(part, "forward", partial(again, part.forward))
        for layers, those in pieces.items():
            put(layers, "forward", partial(in_pieces, layers, those))

    at_first_call(wrap, trains=True)
