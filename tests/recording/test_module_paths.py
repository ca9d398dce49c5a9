from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from fragdoctor.model.marks import MODULE_MARK  # noqa: E402
from fragdoctor.recording import module_paths  # noqa: E402
from fragdoctor.recording.module_paths import MARK, ModulePaths  # noqa: E402


class Notes:
    """The text that PyTorch keeps with allocations; ``seen`` has each that was there at a call."""

    def __init__(self) -> None:
        self.text = ""
        self.seen: list[str] = []

    def write(self, text: str) -> None:
        self.text = text

    @property
    def torch(self) -> SimpleNamespace:
        core = SimpleNamespace(
            _cuda_setMemoryMetadata=self.write, _cuda_getMemoryMetadata=lambda: self.text
        )
        return SimpleNamespace(_C=core, compiler=torch.compiler, nn=torch.nn, __version__="2.12")


@pytest.fixture
def notes():
    notes = Notes()
    paths = ModulePaths(notes.torch)
    yield notes
    paths.remove()


class Leaf(torch.nn.Module):
    def __init__(self, notes: Notes, *, fails: bool = False) -> None:
        super().__init__()
        self.notes, self.fails = notes, fails

    def forward(self, x):
        self.notes.seen.append(self.notes.text)
        if self.fails:
            raise ValueError("in the middle")
        return x


class Model(torch.nn.Module):
    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def test_module_paths_name_the_running_module_and_go_away_with_it(notes) -> None:
    Model(Leaf(notes), torch.nn.Sequential(Leaf(notes)))(1)

    assert notes.seen == [f"{MARK}Model.layers.0", f"{MARK}Model.layers.1.0"]
    assert notes.text == ""


def test_module_paths_the_caller_has_its_path_again_after_its_module(notes) -> None:
    outer = Leaf(notes)
    outer.inner = Leaf(notes)
    outer.forward = lambda x: (outer.inner(x), notes.seen.append(notes.text))

    outer(1)

    assert notes.seen == [f"{MARK}Leaf.inner", f"{MARK}Leaf"]


def test_module_paths_leave_out_the_names_of_wrappers(notes) -> None:
    wrapper = torch.nn.Sequential()
    wrapper.add_module("_orig_mod", Model(Leaf(notes)))

    wrapper(1)

    assert notes.seen == [f"{MARK}Model.layers.0"]


def test_module_paths_an_exception_leaves_nothing_behind(notes) -> None:
    model = Model(Leaf(notes, fails=True))
    with pytest.raises(ValueError, match="in the middle"):
        model(1)

    assert notes.text == ""
    Model(Leaf(notes))(1)
    assert notes.seen[-1] == f"{MARK}Model#2.layers.0"


def test_module_paths_keep_the_texts_of_the_program(notes) -> None:
    notes.text = "epoch 3"

    Model(Leaf(notes))(1)

    assert notes.seen == ["epoch 3"]
    assert notes.text == "epoch 3"


def test_module_paths_a_module_made_while_the_model_runs_goes_by_its_class(notes) -> None:
    model = torch.nn.Module()
    model.forward = Leaf(notes).__call__

    model(1)

    assert notes.seen == [f"{MARK}Leaf"]


def test_module_paths_hooks_set_in_the_middle_of_a_call_do_not_disturb_it() -> None:
    notes = Notes()
    kept = []
    model = torch.nn.Module()
    model.forward = lambda x: kept.append(ModulePaths(notes.torch))
    model.inner = Leaf(notes)

    model(1)
    model.forward = model.inner.__call__
    model(1)
    kept[0].remove()

    assert notes.seen == [f"{MARK}Module.inner"]


def test_module_paths_of_two_threads_do_not_mix(notes) -> None:
    other = threading.Thread(target=lambda: Model(Leaf(notes))(1))
    outer = torch.nn.Module()

    def forward(x):
        other.start()
        other.join()

    outer.forward = forward
    outer(1)

    assert notes.seen == [f"{MARK}Model.layers.0"]
    assert notes.text == ""


def test_module_paths_refuse_a_pytorch_that_keeps_no_texts() -> None:
    old = SimpleNamespace(_C=SimpleNamespace(), __version__="2.9.1")

    with pytest.raises(RuntimeError, match=r"PyTorch 2\.9\.1 .* needs 2\.10"):
        ModulePaths(old)


def test_module_paths_have_the_mark_that_the_reader_looks_for() -> None:
    assert module_paths.MARK == MODULE_MARK
