"""One rank of a distributed run by itself: ``torch.distributed`` without its other ranks.

Groups are PyTorch's own with its fake backend, whose collectives do nothing, under the requested
backend names. Data that other ranks would send is assumed to be the same as this rank's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import torch

from fragdoctor.rehearsal.engine import nothing, put, put_all, session, swap_all, wrap, wrapped

c10d: Any = getattr(torch.distributed, "distributed_c10d", None)
"""None in builds of PyTorch without distributed support."""
_NAME: Final = "rehearsed"
_DEVICES: Final = ("cpu", "cuda")
_TIMED_STEPS: Final = 10
_NEVER: Final = 2**31 - 1  # steps between timed steps
_BACKEND: Final = 3  # position of the backend in the arguments for a group


def install() -> None:
    """Let groups of ranks consist of this one alone."""
    if c10d is None:
        return
    import torch.nn.parallel.distributed  # imports some of what is replaced

    distributed: Any = torch.distributed
    _register()
    of_c10d = {
        "_NCCL_AVAILABLE": True,
        "default_pg_nccl_timeout": timedelta(minutes=10),
    }
    put_all(c10d, of_c10d)
    wrap(c10d, "_new_process_group_helper", _group)
    if not hasattr(c10d, "ProcessGroupNCCL"):
        put(c10d, "ProcessGroupNCCL", SimpleNamespace(Options=_Options))
    stand_ins = {
        c10d.is_nccl_available: lambda: True,
        c10d.rendezvous: _rendezvous,
        c10d.monitored_barrier: nothing,
        c10d.all_gather_object: lambda object_list, obj, group=None: _gather_object(
            obj, object_list, group=group
        ),
        c10d.gather_object: _gather_object,
        c10d.broadcast_object_list: nothing,
        c10d.scatter_object_list: _scatter_object_list,
        c10d.all_gather: wrapped(c10d.all_gather, partial(_with_flat_copy, 0)),
        c10d.reduce_scatter: wrapped(c10d.reduce_scatter, partial(_with_flat_copy, 1)),
        distributed.utils._verify_param_shape_across_processes: _compare_shapes,
    }
    swap_all({id(original): value for original, value in stand_ins.items()})
    # DDP does not time anything: builds without CUDA have no clock, those with CUDA no GPU.
    put(distributed.Logger, "set_runtime_stats_and_log", nothing)
    if next((Path(torch.__file__).parent / "lib").glob("libtorch_cuda*"), None) is not None:
        wrap(distributed.Reducer, "__init__", _make_reducer)
        # The reducer does not count a first step that is not timed; all that remains of it after
        # that step is the order of the buckets, which stays anyway.
        put(distributed.Reducer, "_set_static_graph", nothing)
        put(distributed.Reducer, "_delay_all_reduce", nothing)
    for name in ("spawn", "start_processes"):
        put(torch.multiprocessing, name, _spawn)


class _Options(SimpleNamespace):
    """``ProcessGroupNCCL.Options``."""

    def __init__(self, *_: Any, **values: Any) -> None:
        super().__init__(is_high_priority_stream=False, config=SimpleNamespace(), **values)


def _register() -> None:
    """Register backends for each combination of devices; they stay, which does no harm."""
    native: Any = torch._C._distributed_c10d
    fake = native.FakeProcessGroup
    make_backend = getattr(fake, "_create_internal", fake)

    class Group(c10d.ProcessGroup):  # type: ignore[misc]
        """A group whose collectives do nothing; a sum is that of equal parts."""

        def allreduce(self, tensors: Any, options: Any = None) -> Any:
            """Return a result, from which bucketed gradients are taken."""
            reduction = c10d.ReduceOp.SUM if options is None else options.reduceOp
            if self.size() > 1 and reduction == c10d.ReduceOp.SUM:
                with torch.no_grad():
                    for tensor in tensors if isinstance(tensors, list) else [tensors]:
                        tensor.mul_(self.size())
            done: Any = torch.futures.Future()
            done.set_result(tensors)
            return native._create_work_from_future(done)

    def maker(devices: Sequence[str]) -> Callable[..., Any]:
        def make(options: Any, _: Any) -> Any:
            rank, size = options.group_rank, options.group_size
            group, backend = Group(rank, size), make_backend(rank, size)
            custom = c10d.ProcessGroup.BackendType.CUSTOM
            for device in devices:
                group._register_backend(torch.device(device), custom, backend)
            group._set_default_backend(custom)
            return group

        return make

    for devices in (("cpu",), ("cuda",), _DEVICES):
        name = "_".join((_NAME, *devices))
        if name.upper() not in c10d.Backend._plugins:
            c10d.Backend.register_backend(
                name, maker(devices), extended_api=True, devices=list(devices)
            )


def _group(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a group that reports the requested name as its backend."""
    given = list(args)
    asked = given[_BACKEND]
    if str(asked).lower() == "fake":
        return make(*args, **kwargs)
    config = c10d.BackendConfig(c10d.Backend(asked))
    devices = [d for d in _DEVICES if d in config.get_device_backend_map()]
    given[_BACKEND] = c10d.Backend("_".join((_NAME, *(devices or _DEVICES))))
    for name in ("backend_options", "pg_options"):
        kwargs.pop(name, None)
    kwargs["device_id"] = None
    group, store = make(*given, **kwargs)
    if store is not None:
        world = c10d._world
        world.pg_map[group] = (str(asked), world.pg_map[group][1])
        world.pg_backend_config[group] = str(config)
        session.note(
            f"Rank {c10d.get_rank() if c10d.is_initialized() else group.rank()} of a "
            "distributed run was rehearsed alone: data that the others would send is assumed "
            "to be the same as its own."
        )
    return group, store


def _rendezvous(
    url: str, rank: int = -1, world_size: int = -1, **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """Return a store for this process alone, the rank, and the number of ranks."""
    query = parse_qs(urlsplit(url).query)

    def number(given: int, name: str, variable: str, otherwise: int) -> int:
        if given != -1:
            return given
        return int(query.get(name, [os.environ.get(variable, otherwise)])[0])

    distributed: Any = torch.distributed
    yield (
        distributed.HashStore(),
        number(rank, "rank", "RANK", 0),
        number(world_size, "world_size", "WORLD_SIZE", 1),
    )


def _spawn(function: Callable[..., Any], args: Sequence[Any] = (), *_: Any, **__: Any) -> None:
    """Call in this process what one of the spawned processes would."""
    session.note("Only one of the processes that it spawns was rehearsed.")
    function(int(os.environ.get("LOCAL_RANK", "0")), *args)


def _gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any
) -> None:
    group = kwargs.get("group", args[1] if len(args) > 1 else None)
    sent, _ = c10d._object_to_tensor(obj, c10d._get_object_coll_device(group), group)
    if object_gather_list is not None:
        sent.new_empty(sent.numel() * c10d.get_world_size(group))
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    group = kwargs.get("group", args[1] if len(args) > 1 else None)
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[c10d.get_rank(group)]


def _with_flat_copy(place: int, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a collective of lists that, like NCCL's, works on one flat copy of the list."""
    given = (v for v in kwargs.values() if isinstance(v, list))
    tensors = args[place] if len(args) > place else next(given, [])
    n = sum(t.numel() for t in tensors)
    flat = tensors[0].new_empty(n) if tensors and tensors[0].is_cuda else None
    try:
        return collective(*args, **kwargs)
    finally:
        del flat


def _make_reducer(make: Any, reducer: Any, *args: Any, **kwargs: Any) -> None:
    """Make the reducer of a build with CUDA, which would time its first steps on a GPU."""
    make(reducer, *args, **kwargs)
    reducer._set_ddp_runtime_logging_sample_rate(_NEVER)
    for _ in range(_TIMED_STEPS):
        with suppress(RuntimeError):
            reducer.prepare_for_forward()


def _compare_shapes(
    process_group: Any, tensors: Sequence[torch.Tensor], *_: Any, **__: Any
) -> None:
    """Request the memory with which ranks compare the shapes of their parameters (reducer.cpp)."""
    device, n_ranks = tensors[0].device, process_group.size()
    number = torch.tensor([len(tensors)], device=device)
    numbers = [torch.empty_like(number) for _ in range(n_ranks)]
    number.new_empty(n_ranks)  # NCCL gathers into one piece
    torch.empty(sum(2 * t.dim() for t in tensors), dtype=torch.int64, device=device)
    del numbers, number
