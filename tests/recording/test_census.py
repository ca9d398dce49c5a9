"""Who holds what, on tensors of the CPU that stand for those of a GPU."""

from __future__ import annotations

import functools
import gc
import json
import sys
import threading
import time
import types
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fragdoctor.recording import census as subject  # noqa: E402 - after the skip
from fragdoctor.recording import object_search  # noqa: E402
from fragdoctor.recording.census_log import CensusLog, uncompiled  # noqa: E402
from fragdoctor.recording.history_recorder import Recorder  # noqa: E402
from fragdoctor.recording.object_owners import Keeper  # noqa: E402
from fragdoctor.recording.object_search import frame_locals  # noqa: E402
from fragdoctor.recording.record_options import Options  # noqa: E402

N = 1000


class _OnGpu:
    """In the place of the descriptor ``Tensor.is_cuda``: true of all tensors."""

    def __get__(self, value: Any, kind: Any = None) -> Any:
        return self if value is None else True


BASE = SimpleNamespace(
    is_cuda=_OnGpu(),
    **{
        name: getattr(torch._C.TensorBase, name)
        for name in ("is_leaf", "grad", "grad_fn", "untyped_storage")
    },
)
LIKE_CUDA = SimpleNamespace(
    Tensor=torch.Tensor,
    nn=torch.nn,
    optim=torch.optim,
    cuda=SimpleNamespace(device_count=lambda: 1, memory_allocated=lambda: 0),
    _C=SimpleNamespace(
        TensorBase=BASE,
        DisableTorchFunction=torch._C.DisableTorchFunction,
        _FunctionBase=torch._C._FunctionBase,
        _autograd=torch._C._autograd,
        _is_cow_tensor=torch._C._is_cow_tensor,
        _current_autograd_node=torch._C._current_autograd_node,
    ),
)


@pytest.fixture(autouse=True)
def _without_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the frames of pytest, from which all tests are reached: a census would walk them."""
    every = object_search.running_frames

    def is_tested(frame: types.FrameType) -> bool:
        code = frame.f_code
        return "site-packages" not in code.co_filename and code is not below_pytest.__code__

    def below_pytest() -> list[types.FrameType]:
        return [frame for frame in every() if is_tested(frame)]

    monkeypatch.setattr(object_search, "running_frames", below_pytest)


def new() -> Any:
    return torch.zeros(N)


def owner_of(tensor_address: int, limit_s: float = 30.0) -> Any:
    """Return who holds a storage; None where no name was found for it."""
    found = subject.take_census(LIKE_CUDA, limit_s=limit_s)
    holder = found["holders"][found["addresses"].index(tensor_address)]
    return Keeper(**found["owners"][holder]) if holder >= 0 else None


def address(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


class Agent:
    def __init__(self) -> None:
        self.buffer: list[Any] = []


def test_list_of_an_object_holds_its_tensors():
    agent = Agent()
    agent.buffer += [{"obs": new()}, {"obs": new()}]

    owner = owner_of(address(agent.buffer[0]["obs"]))

    assert (owner.name, owner.kind, owner.n_items) == ("agent.buffer", "container", 2)
    assert owner.scope == "test_list_of_an_object_holds_its_tensors()"


def test_limit_of_a_deque_is_noted():
    class Hostile(deque):  # type: ignore[type-arg]
        maxlen = property(lambda self: pytest.fail("called"))  # type: ignore[assignment]

    bounded, free, hostile = deque(maxlen=7), deque(), Hostile(maxlen=5)
    for one in (bounded, free, hostile):
        one += [new(), new()]

    owners = [owner_of(address(one[0])) for one in (bounded, free, hostile)]

    assert [(o.n_items, o.max_items) for o in owners] == [(2, 7), (2, 0), (2, 5)]


def test_item_that_has_nearly_all_of_a_container_is_named_itself():
    outputs = {"small": torch.zeros(8), "large": torch.zeros(100 * N)}

    owner = owner_of(address(outputs["large"]))

    assert owner.name == "outputs['large']"


def test_module_optimizer_and_gradients_go_by_their_names():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weight = model[0].weight

    kinds = [
        owner_of(address(t))[:2] for t in (weight, weight.grad, optimizer.state[weight]["exp_avg"])
    ]

    assert kinds == [
        ("model", "parameters"), ("model", "gradients"), ("optimizer.state", "optimizer"),
    ]  # fmt: skip


def test_cache_of_an_inner_module_is_its_own_and_not_the_model():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].cache = [new(), new()]

    owner = owner_of(address(model[0].cache[0]))

    assert (owner.name, owner.kind) == ("model.0.cache", "container")


def test_graph_is_kept_by_the_list_of_its_losses():
    weight = torch.zeros(N, requires_grad=True)
    losses = []
    kept = []
    for _ in range(3):
        hidden = weight.exp()  # saves its result
        kept.append(address(hidden))
        losses.append(hidden.sum())
        del hidden

    owner = owner_of(kept[0])

    assert (owner.name, owner.kind, owner.n_items) == ("losses", "graph", 3)


def test_exception_that_is_kept_names_the_frame_and_its_local():
    def attempt() -> None:
        scratch = new()
        raise ValueError(address(scratch))

    errors = []
    for _ in range(2):
        try:
            attempt()
        except ValueError as e:
            errors.append(e)

    owner = owner_of(errors[0].args[0])

    assert owner.name == "errors"
    assert owner.through == " -> traceback -> frame attempt() -> scratch"


def test_exception_being_handled_names_what_its_frames_keep():
    def attempt() -> None:
        scratch = new()
        raise ValueError(address(scratch))

    try:
        attempt()
    except ValueError as e:
        kept = e.args[0]
        del e
        owner = owner_of(kept)

    assert owner.name == "exception -> traceback -> frame attempt() -> scratch"


def test_cycle_that_only_the_collector_frees_goes_by_its_classes():
    class Tree:
        pass

    def make() -> int:
        root, leaf = Tree(), Tree()
        root.leaf, leaf.root = leaf, root  # type: ignore[attr-defined]
        leaf.data = torch.zeros(50_000_000)  # type: ignore[attr-defined] - more than a fiftieth of all
        return address(leaf.data)  # type: ignore[attr-defined]

    gc.collect()
    gc.disable()
    try:
        owner = owner_of(make())
    finally:
        gc.enable()
        gc.collect()

    assert (owner.kind, owner.name) == ("cycle", "Tree -> Tree")


@pytest.mark.parametrize("kind", ["closure", "partial", "class", "slots", "generator", "thread"])
def test_tensors_are_found_wherever_python_keeps_them(kind: str):
    tensors = [new(), new()]
    wanted = address(tensors[0])
    holder, name, close = HOLDERS[kind](tensors)
    del tensors

    owner = owner_of(wanted)
    close()

    assert owner.name == name
    del holder


def _in_closure(tensors: Any) -> Any:
    seen = [*tensors]

    def step() -> Any:
        return seen

    return step, "holder", lambda: None


def _in_partial(tensors: Any) -> Any:
    return functools.partial(print, [*tensors]), "holder.args[0]", lambda: None


def _in_class(tensors: Any) -> Any:
    return type("Registry", (), {"entries": [*tensors]}), "holder.entries", lambda: None


def _in_slots(tensors: Any) -> Any:
    class Node:
        __slots__ = ("data",)

    one = Node()
    one.data = [*tensors]
    return one, "holder.data", lambda: None


def _in_generator(tensors: Any) -> Any:
    def stream() -> Any:
        window = [*tensors]
        yield len(window)

    running = stream()
    next(running)
    return running, "holder -> window", lambda: None


def _in_thread(tensors: Any) -> Any:
    ready, done = threading.Event(), threading.Event()

    def work(results: Any) -> None:
        ready.set()
        done.wait(30)
        del results

    thread = threading.Thread(target=work, args=([*tensors],))
    thread.start()
    ready.wait(30)

    def close() -> None:
        done.set()
        thread.join()

    return None, "results", close


HOLDERS = {
    "closure": _in_closure,
    "partial": _in_partial,
    "class": _in_class,
    "slots": _in_slots,
    "generator": _in_generator,
    "thread": _in_thread,
}


def test_nothing_of_the_program_is_called():
    def fail(*_: Any) -> Any:
        raise AssertionError("called")

    names = ("__getattr__", "__getattribute__", "__eq__", "__hash__", "__repr__", "__len__",
             "__iter__", "__bool__", "__getitem__", "__del__", "__contains__")  # fmt: skip
    body = dict.fromkeys(names, fail) | {"__dict__": property(fail), "field": property(fail)}
    hostile = type("Hostile", (), body)
    listed = type("HostileList", (list,), {n: fail for n in names if n != "__del__"})
    mapped = type("HostileDict", (dict,), {n: fail for n in names if n != "__del__"})
    checks = ("__eq__", "__hash__", "__instancecheck__", "__subclasscheck__")
    meta = type("Meta", (type,), dict.fromkeys(checks, fail))
    tensor, other = new(), new()

    class Wrapped(torch.Tensor):  # type: ignore[misc, name-defined]
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            raise AssertionError("called")

    inner = listed()
    list.append(inner, tensor)
    list.append(inner, other)
    outer = mapped()
    dict.__setitem__(outer, "kept", inner)
    things = [outer, meta("Strange", (), {}), torch.Tensor._make_subclass(Wrapped, new())]
    del hostile.__del__
    things.append(object.__new__(hostile))
    wanted = address(tensor)
    del tensor, other, inner

    owner = owner_of(wanted)

    assert owner.name == "outer['kept']"
    assert (owner.n_items, owner.class_name) == (2, "HostileList")
    del things


def test_packed_tensors_are_not_unpacked():
    def unpack(_: Any) -> Any:
        raise AssertionError("called")

    weight = torch.zeros(N, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("packed", t.detach()), unpack):
        hidden = weight.exp()
    wanted = address(hidden)
    loss = hidden.sum()
    del hidden

    assert owner_of(wanted)[:2] == ("loss", "graph")
    del loss


def test_locals_of_a_running_frame_are_not_kept_by_it():
    class Thing:
        pass

    def look(frame: Any) -> None:
        assert "thing" in frame_locals(frame)

    def run() -> bool:
        thing = Thing()
        gone = weakref.ref(thing)
        look(sys._getframe())
        del thing
        return gone() is None

    assert run()


def test_censuses_that_follow_each_other_keep_no_tensor_alive():
    def run() -> tuple[bool, bool]:
        tensor, kept = new(), [new(), new()]
        gone = [weakref.ref(tensor), weakref.ref(kept[0])]
        for _ in range(3):
            subject.take_census(LIKE_CUDA)
        del tensor, kept
        return gone[0]() is None, gone[1]() is None

    assert run() == (True, True)


def test_census_leaves_no_frame_to_the_collector():
    def run() -> Any:
        tensor = new()
        subject.take_census(LIKE_CUDA)
        return weakref.ref(tensor)

    gc.collect()
    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()


def test_lists_of_all_objects_are_emptied_whoever_holds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A profiler may hold the frame that asked for one."""
    listed: list[list[Any]] = []
    every = gc.get_objects

    def get_objects() -> list[Any]:
        listed.append(every())
        return listed[-1]

    monkeypatch.setattr(gc, "get_objects", get_objects)
    tensor = new()

    subject.take_census(LIKE_CUDA)

    assert listed
    assert [len(one) for one in listed] == [0] * len(listed)
    del tensor


def test_dict_of_plain_values_that_the_program_took_survives_a_census():
    def run() -> Any:
        first, second = 1, "two"
        mine = locals()
        for _ in range(2):
            subject.take_census(LIKE_CUDA)
        return dict(mine), first, second

    mine, *_ = run()

    assert (mine["first"], mine["second"]) == (1, "two")


def test_instances_whose_class_has_a_hash_of_its_own_are_walked_through():
    def fail(*_: Any) -> Any:
        raise AssertionError("called")

    meta = type("Meta", (type,), {"__hash__": fail, "__eq__": fail})
    strange = meta("Strange", (), {})()
    strange.kept = [new(), new()]
    wanted = address(strange.kept[0])

    assert owner_of(wanted).name == "strange.kept"


def test_dict_that_the_program_took_of_its_locals_stays_as_it_is():
    def run() -> Any:
        thing = object()
        mine = locals()
        frame_locals(sys._getframe())
        assert mine["thing"] is thing
        return mine

    assert "thing" in run()


def test_census_ends_in_its_time_and_says_that_it_was_cut_short():
    many = [torch.zeros(1) for _ in range(50_000)]
    started = time.thread_time()

    found = subject.take_census(LIKE_CUDA, limit_s=0.1)

    assert not found["is_complete"]
    assert len(found["sizes"]) < len(many)
    assert time.thread_time() - started < 2  # whole it takes many times the limit


def test_log_takes_censuses_after_the_second_step_and_where_the_peak_rises(tmp_path, monkeypatch):
    peaks = iter([100, 100, 200])
    stats = SimpleNamespace(
        memory_stats_as_nested_dict=lambda: {"allocated_bytes": {"all": {"peak": next(peaks)}}}
    )
    cuda = SimpleNamespace(device_count=lambda: 1, memory_allocated=lambda: 0, memory=stats)
    like_cuda = SimpleNamespace(**{**vars(LIKE_CUDA), "cuda": cuda})
    taken = []
    monkeypatch.setattr(
        "fragdoctor.recording.census_log.take_census",
        lambda torch, step, **_: taken.append(step) or subject.take_census(torch, step, 0.0),
    )
    log = CensusLog(like_cuda)
    log.begin()
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    for _ in range(4):
        optimizer.step()
    log.stop()
    optimizer.step()
    log.write(str(tmp_path / "census.json"))

    assert taken == [2, 4, 4]


def test_request_to_a_program_that_recorded_nothing_is_answered_with_a_census(tmp_path):
    def dump(path: str) -> None:
        Path(path).write_bytes(b"")

    cuda = SimpleNamespace(
        device_count=lambda: 1,
        memory=SimpleNamespace(_dump_snapshot=dump, _snapshot=None),
        memory_stats=lambda device: {"reserved_bytes.all.peak": 4 * N},
    )
    like_cuda = SimpleNamespace(**{**vars(LIKE_CUDA), "cuda": cuda})
    agent = Agent()
    agent.buffer.append(new())

    Recorder(Options(str(tmp_path)), like_cuda).on_request()

    (written,) = tmp_path.glob("*/census.json")
    (census,) = json.loads(written.read_text())["censuses"]
    assert address(agent.buffer[0]) in census["addresses"]


def test_log_is_not_compiled_with_the_optimizer_that_calls_it():
    callbacks: list[Any] = ["dynamo"]

    def set_eval_frame(callback: Any) -> Any:
        callbacks.append(callback)
        return callbacks[-2]

    native = SimpleNamespace(eval_frame=SimpleNamespace(set_eval_frame=set_eval_frame))

    with uncompiled(SimpleNamespace(_C=SimpleNamespace(_dynamo=native))):
        assert callbacks[-1] is None

    assert callbacks == ["dynamo", None, "dynamo"]
    assert CensusLog._on_step._torchdynamo_disable is True  # type: ignore[attr-defined]


def test_modules_are_never_walked_through():
    module = types.ModuleType("elsewhere")
    module.kept = [new(), new()]  # type: ignore[attr-defined]

    owner = owner_of(address(module.kept[0]))

    assert owner is None  # the module is in no table of modules


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(N, 2) for _ in range(2))
        self.head = torch.nn.Linear(N, 2)
        self.head.weight = self.layers[0].weight


class Noted:
    """Names models as the notes of their allocations do."""

    def name_of(self, model: Any) -> str:
        return type(model).__name__


def test_parts_of_a_model_have_their_modules_where_these_are_noted():
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    (model.head(torch.ones(N)) + model.layers[1](torch.ones(N))).sum().backward()
    optimizer.step()
    weight, inner = model.head.weight, model.layers[1].weight

    found = subject.take_census(LIKE_CUDA, limit_s=30.0, modules=Noted())

    def path(tensor: Any) -> str:
        part = found["parts"][found["addresses"].index(address(tensor))]
        return found["paths"][part] if part >= 0 else ""

    assert path(inner) == path(inner.grad) == "Tied.layers.1"
    assert path(optimizer.state[inner]["exp_avg"]) == "Tied.layers.1"
    assert path(weight) == path(weight.grad) == "Tied.layers.0"
    assert path(model.head.bias) == "Tied.head"


def test_parts_have_no_modules_where_none_are_noted():
    model = Tied()

    found = subject.take_census(LIKE_CUDA, limit_s=30.0)

    assert found["paths"] == []
    assert set(found["parts"]) == {-1}
    del model
