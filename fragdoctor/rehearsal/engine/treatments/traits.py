"""What a program is seen to use, which tells the treatments that can help."""

from __future__ import annotations

import builtins
import gc
import io
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import checkpoint
from torch.utils.data import BatchSampler

from fragdoctor.recording.module_names import ByIdentity
from fragdoctor.rehearsal.engine import frames_from, wrap
from fragdoctor.rehearsal.engine.calls import Training, around_models, at_first_call, parameters_of
from fragdoctor.rehearsal.engine.memory_history import is_users, users_frame, users_line
from fragdoctor.rehearsal.engine.treatments.accumulation import OWN, lines_and_size
from fragdoctor.rehearsal.engine.treatments.blocks import (
    Piece,
    caching,
    expression,
    parts_of,
    repeated_blocks,
    sharded_units,
)
from fragdoctor.rehearsal.engine.treatments.contexts import is_eager
from fragdoctor.rehearsal.engine.treatments.dataflow import Losses
from fragdoctor.rehearsal.engine.treatments.losses import head_of, how_split
from fragdoctor.rehearsal.engine.treatments.operations import Operations, tensors

FRAMEWORKS: Final = {
    "trainer": ("transformers.trainer", "Trainer"),
    "lightning": ("lightning.pytorch.trainer.trainer", "Trainer"),
    "accelerate": ("accelerate.accelerator", "Accelerator"),
}
"""Frameworks that run the training, outermost first: module and class of each."""

CONFIGURATIONS: Final = (".cfg", ".ini", ".json", ".toml", ".yaml", ".yml")
"""Ends of the names of files that may set the batch size."""

MAX_ITEMS: Final = 64
"""The longest list that is searched for models."""

_FLAGS: Final = (
    "autocasts", "checkpoints", "clips", "compiles",
    "has_float32", "has_state", "is_distributed", "is_eager", "is_fused", "scales",
    "schedules", "trains", "zeroes",
)  # fmt: skip


class Traits:
    """Notes what a program uses."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {
            **dict.fromkeys(_FLAGS, False),
            **dict.fromkeys(("n_parameters", "n_flops", "n_optimizers", "kept_bytes"), 0),
            **{name: [] for name in ("parts", "caches", "optimizers", "graphs_unused", "frozen")},
            **{name: {} for name in ("batches", "blocks", "evaluated", "units")},
            **dict.fromkeys(("head", "place")),
            "framework": "",
        }
        self._operations = Operations()
        self._losses = Losses()
        self._parts: list[tuple[dict[str, Any], Any]] = []
        self._known = ByIdentity()
        self._trained = ByIdentity()
        self._rows: list[set[int]] = [set(), set()]
        self._inferred: list[set[int]] = [set(), set()]
        self._n_trained = 0
        # Where the user's code creates the optimizer, and its names for modules there.
        self._place: tuple[str, int, dict[int, str]] | None = None
        self._graphs: dict[str, bool] = {}  # whether a backward pass went through it, by line
        self._training = Training()
        around_models(self._see, self._follow)
        at_first_call(
            lambda model: self._note(
                "has_float32", any(p.dtype is torch.float32 for p in model.parameters())
            )
        )
        self._watch(torch.nn.functional, "cross_entropy", self._lost)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._watch(torch.nn.utils, name, lambda *_, **__: self._note("clips"))
        scaler = torch.amp.GradScaler
        self._watch(scaler, "scale", lambda one, *_: self._note("scales", one.is_enabled()))
        self._watch(
            torch.autocast,  # frameworks begin it in the forward pass of a model
            "__enter__",
            lambda one: self._note("autocasts", one._enabled and one.device == "cuda"),
        )
        scheduler = torch.optim.lr_scheduler.LRScheduler
        self._watch(scheduler, "__init__", lambda *_, **__: self._note("schedules"))
        register_optimizer_step_post_hook(self._updated)
        self._watch(torch.optim.Optimizer, "__init__", self._made_optimizer)
        self._samplers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._sizes: dict[str, int] = {}
        self._kept: dict[int, dict[int, int]] = {}
        self._trainable: dict[str, set[int]] = {}  # what needs gradients, by the model's name
        self._given: set[str] = set()
        self._is_given = False
        self._trained_on: set[str] = set()
        self._files: set[str] = set()
        for opener in (builtins, io):
            self._watch(opener, "open", self._opened)
        self._watch(BatchSampler, "__init__", self._made_sampler)
        wrap(BatchSampler, "__iter__", self._batches)
        self._watch(checkpoint, "checkpoint", lambda *_, **__: self._note("checkpoints"))
        for kind in (torch.optim.Optimizer, torch.nn.Module):
            self._watch(
                kind,
                "zero_grad",
                lambda _, set_to_none=True, *__, **___: self._note("zeroes", not set_to_none),
            )

    def found(self) -> dict[str, Any]:
        """Return all findings in a form for JSON."""
        distributed = torch.distributed
        self._found["is_distributed"] = distributed.is_available() and distributed.is_initialized()
        dynamo = sys.modules.get("torch._dynamo.utils")
        self._found["compiles"] = dynamo is not None and bool(dynamo.counters["frames"]["total"])
        self._found["n_flops"] = self._operations.n_flops
        self._found["losses"] = self._losses.found
        self._found["graphs_unused"] = [
            line for line, is_used in self._graphs.items() if not is_used
        ]
        self._found["frozen"] = [
            name
            for name, trainable in self._trainable.items()
            if trainable and self._training.updated and self._training.updated.isdisjoint(trainable)
        ]
        rows = self._rows if self._found["trains"] else self._inferred
        self._found["rows"] = [sorted(sizes) for sizes in rows]
        sources = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
        self._files |= {path for path in sources if path and path.endswith(".py")}
        self._found["files"] = sorted(path for path in self._files if is_users(path))
        for described, part in self._parts:
            self._found["parts"].append(described | {"calls": self._operations.of(part)})
        for lines, size in self._sizes.items():
            if size > 1:
                kind = "batches" if lines in self._trained_on else "evaluated"
                self._found[kind][lines] = size
        head = self._found["head"]
        if head is not None:
            head["n_flops"] = sum(
                p["n_flops"] for call in self._head_calls for p in call["products"]
            )
        return self._found

    def _watch(self, owner: Any, name: str, see: Any) -> None:
        def seen(original: Any, /, *args: Any, **kwargs: Any) -> Any:
            see(*args, **kwargs)
            return original(*args, **kwargs)

        wrap(owner, name, seen)

    def _note(self, name: str, is_so: bool = True) -> None:
        self._found[name] |= is_so

    def _see(self, model: Any, inputs: Any) -> AbstractContextManager[Any] | None:
        self._is_given = False
        name = self._place[2].get(id(model)) if torch.is_grad_enabled() and self._place else None
        if name is not None and name not in self._trainable:
            self._trainable[name] = {id(one) for one in model.parameters() if one.requires_grad}
        trains = self._training.includes(model, inputs)
        for axis, sizes in enumerate(self._rows if trains else self._inferred):
            sizes.update(one.shape[axis] for one in tensors(inputs) if one.dim() > axis)
        if not trains:
            return None
        self._note("trains")
        self._trained_on |= self._given
        if not self._trained.get(model):
            self._trained[model] = True
            self._n_trained += 1
            self._add_parts(model)
            for module in model.modules():
                if type(module) is torch.nn.Linear:
                    self._operations.of(module)  # it may be a head
        is_trained = model.training or self._training.updates(model)
        n_parameters = is_trained and sum(p.numel() for p in model.parameters())
        if n_parameters > self._found["n_parameters"]:
            self._found["n_parameters"] = n_parameters
            self._found["framework"] = _framework()
            self._found["caches"] = [expression(model, path) for path in caching(model)]
            self._found["is_eager"] = is_eager(model)
            for name, find in (("blocks", repeated_blocks), ("units", sharded_units)):
                self._found[name] = {path: expression(model, path) for path, _ in find(model)}
            self._found["place"] = None
            if self._place is not None and id(model) in self._place[2]:
                filename, line, names = self._place
                place = {"filename": filename, "line": line, "model": names[id(model)]}
                self._found["place"] = place
        return None

    def _follow(self, _: Any, result: Any) -> None:
        """Note whether a backward pass reaches what a call made a graph for."""
        nodes = [one.grad_fn for one in tensors(result) if one.grad_fn is not None]
        line = users_line() if nodes else ""
        if line and not self._graphs.setdefault(line, False):
            for node in nodes:
                node.register_prehook(lambda _: self._graphs.update({line: True}))

    def _add_parts(self, model: Any) -> None:
        """Count the cost of a model's parts, which are named as on the optimizer's line."""
        name = self._place[2].get(id(model), "model") if self._place else "model"
        for path, part in parts_of(model, self._known):
            about = {"model": self._n_trained, "path": path, "tree": path, "holds": [path]}
            if isinstance(part, Piece):
                written = name + expression(model, part.path)
                layers = part.sequential
                self._operations.note_piece(part, layers[part.first], layers[part.end - 1])
                numbers = range(part.first, part.end)
                names = [*part.sequential._modules]
                about |= {
                    "path": f"{written}[{part.first}:{part.end}]",
                    "holds": [f"{part.path}.{names[n]}".lstrip(".") for n in numbers],
                    "piece": [part.first, part.end],
                }
            else:
                written = name + expression(model, path)
                self._operations.of(part)
            self._parts.append((about | {"written": written}, part))

    def _updated(self, optimizer: Any, *_: Any) -> None:
        self._losses.forget()
        values = [value for state in optimizer.state.values() for value in state.values()]
        on_gpu = (torch.is_tensor(v) and v.is_cuda and v.dim() > 0 for v in values)
        self._note("has_state", any(on_gpu))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._training.updated |= parameters_of(optimizer)  # with groups that were added
        self._kept[id(optimizer)] = _sizes([*parameters, *values])
        gradients_bytes = sum(_sizes([p.grad for p in parameters]).values())
        kept: dict[int, int] = {}
        for sizes in self._kept.values():
            kept |= sizes
        at_update = sum(kept.values()) + gradients_bytes
        self._found["kept_bytes"] = max(self._found["kept_bytes"], at_update)

    def _lost(
        self, logits: Any, target: Any = None, weight: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Note the head that a loss is computed over, if that can be done in parts."""
        how = how_split(logits, target, weight, args, kwargs)
        if self._found["head"] is not None or how is None:
            return
        for model in self._trained:
            found = head_of(logits, model)
            if found is not None:
                path, is_cast = found
                self._head_calls = self._operations.of(model.get_submodule(path))
                above = path.rpartition(".")[0]
                owner = model.get_submodule(above)
                own_loss = getattr(getattr(owner, "loss_function", None), "__name__", "")
                caller = _caller_of_torch()
                self._found["head"] = {
                    "path": path, "written": expression(model, path),
                    "owner": expression(model, above), "is_cast": is_cast,
                    "loss": caller and (own_loss or caller), "how": how,
                }  # fmt: skip
                return

    def _made_optimizer(
        self, optimizer: Any, _params: Any = None, defaults: Any = None, *_: Any
    ) -> None:
        self._note("is_fused", bool((defaults or {}).get("fused")))
        self._found["n_optimizers"] += 1
        frame = users_frame()
        self._place = None
        if frame is not None:
            path = os.path.abspath(frame.f_code.co_filename)  # noqa: PTH100
            self._place = path, frame.f_lineno, _names_in({**frame.f_globals, **frame.f_locals})
        kind = type(optimizer)
        is_pytorchs = kind.__module__.startswith("torch.optim.")
        name = kind.__name__ if is_pytorchs else f"{kind.__module__}.{kind.__name__}"
        if name not in self._found["optimizers"]:
            self._found["optimizers"].append(name)

    def _made_sampler(self, sampler: Any, _inner: Any, batch_size: int, *_: Any, **__: Any) -> None:
        self._samplers[sampler] = lines = lines_and_size(batch_size)
        self._sizes[lines] = batch_size

    def _batches(self, batches: Any, sampler: Any) -> Iterator[Any]:
        """Yield a sampler's batches, and note whose batches were given out."""
        for batch in batches(sampler):
            if not self._is_given:  # models have run since the last batch
                self._given.clear()
            if sampler in self._samplers:
                self._is_given = True
                self._given.add(self._samplers[sampler])
            yield batch

    def _opened(self, file: Any, mode: str = "r", *_: Any, **__: Any) -> None:
        path = os.path.abspath(file) if isinstance(file, (str, os.PathLike)) else ""  # noqa: PTH100
        if mode in {"r", "rt", "rb"} and path.endswith(CONFIGURATIONS):
            self._files.add(path)


def _sizes(values: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of each tensor on a GPU; a sparse one has no size of its own."""
    return {
        id(v): v.nbytes
        for v in values
        if torch.is_tensor(v) and v.is_cuda and v.layout is torch.strided
    }


def _caller_of_torch() -> str:
    """Return the file that calls PyTorch, or "" if it is the user's own."""
    files = (frame.f_code.co_filename for frame in frames_from(sys._getframe(1)))
    others = (f for f in files if not f.startswith(OWN) and f"{os.sep}torch{os.sep}" not in f)
    filename = next(others, "")
    return "" if is_users(filename) else filename.replace(os.sep, "/")


def _names_in(at_hand: Mapping[str, Any]) -> dict[int, str]:
    """Return how a line can write the modules at hand: by a name, an item or an attribute.

    Long lists are left out, because they hold data.
    """
    found: dict[int, str] = {}
    for name, value in at_hand.items():
        if isinstance(value, (type, ModuleType)):
            continue
        try:
            modules = value._modules if isinstance(value, torch.nn.Module) else {}
            members = {**vars(value), **modules}
        except Exception:  # noqa: BLE001 - whatever an object of the program does
            members = {}
        reached = {f".{key}": inner for key, inner in members.items() if key.isidentifier()}
        if type(value) in {list, tuple, dict} and len(value) <= MAX_ITEMS:
            items = value.items() if type(value) is dict else enumerate(value)
            reached |= {f"[{key!r}]": inner for key, inner in items if type(key) in {int, str}}
        found |= {
            id(inner): name + how
            for how, inner in reached.items()
            if isinstance(inner, torch.nn.Module)
        }
    return found | {id(v): k for k, v in at_hand.items() if isinstance(v, torch.nn.Module)}


def _framework() -> str:
    """Return which framework runs the training, "" for the program itself."""
    loaded: dict[str, Any] = {
        name: vars(sys.modules[module]).get(kind)
        for name, (module, kind) in FRAMEWORKS.items()
        if module in sys.modules
    }
    if not loaded:
        return ""
    made = [type(value) for value in gc.get_objects()]
    return next((n for n, kind in loaded.items() if any(issubclass(t, kind) for t in made)), "")
