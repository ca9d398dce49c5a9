"""The report of a failure in the hands of trackers: stand-ins, and real ones if installed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from stand_in_torch import fake_torch as fake_torch  # noqa: PLC0414 - a fixture

from fragdoctor.integrations import (
    AccelerateLog,
    lightning_callback,
    report_failures,
    trainer_callback,
)
from fragdoctor.tracking import FOLDER, hand_over, write_report

SAMPLE = Path(__file__).parents[1] / "sample_snapshots" / "small_holes_oom.pickle"
FORMS = [".html", ".json", ".md"]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return Path(shutil.copy(SAMPLE, tmp_path / "bundle"))


class Taken(list[str]):
    """The names of the files that a stand-in was given."""


def stand_in(module: str, method: str, taken: Taken) -> Any:
    """Return an object of a tracker's module that takes files by a method."""
    kind = type("Run", (), {"__module__": module, "id": "7"})

    def take(self: object, path: Any, **_: Any) -> None:
        taken.extend(path if isinstance(path, list) else [Path(path).suffix])

    setattr(kind, method, take)
    return kind()


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Stand for Weights & Biases with an active run."""
    taken = Taken()
    module: Any = ModuleType("wandb")

    class Artifact(list[str]):
        def __init__(self, name: str, type: str) -> None:  # noqa: A002 - its name
            super().__init__()
            assert (name, type) == (f"{FOLDER}-7", FOLDER)

        def add_file(self, path: str) -> None:
            self.append(Path(path).suffix)

    module.Artifact = Artifact
    module.run = stand_in("wandb.sdk.wandb_run", "log_artifact", taken)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return taken


def test_report_is_a_page_data_and_text_beside_the_bundle(bundle: Path) -> None:
    files = write_report(bundle)

    assert [path.suffix for path in files] == FORMS
    assert {path.parent for path in files} == {bundle.parent}
    assert files.page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert json.loads(files.data.read_text("utf-8"))["verdict"]["cause"]
    assert "small_holes" not in files.text.read_text("utf-8")


def test_active_run_takes_the_files(bundle: Path, wandb: Taken) -> None:
    hand_over(bundle)

    assert wandb == FORMS


def test_each_tracker_takes_them_once_wrapped_or_not(bundle: Path, wandb: Taken) -> None:
    comet = Taken()
    experiment = stand_in("comet_ml.experiment", "log_asset", comet)
    run = sys.modules["wandb"].run  # type: ignore[attr-defined]

    hand_over(bundle, [SimpleNamespace(experiment=run), SimpleNamespace(tracker=experiment), run])

    assert (wandb, comet) == (FORMS, FORMS)


def test_tensorboard_has_the_text_and_the_files_in_its_folder(bundle: Path, tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []
    kind = type("SummaryWriter", (), {"__module__": "torch.utils.tensorboard.writer"})
    writer: Any = kind()
    writer.log_dir = str(tmp_path)
    writer.add_text = lambda tag, text: said.append((tag, text))
    writer.flush = lambda: None

    hand_over(bundle, [SimpleNamespace(tb_writer=writer)])

    assert sorted(path.suffix for path in (tmp_path / FOLDER).iterdir()) == FORMS
    assert said[0][0] == FOLDER
    assert "Fragmentation" in said[0][1] or "Out of memory" in said[0][1]


def test_objects_that_take_nothing_are_passed_over(bundle: Path) -> None:
    hand_over(bundle, [None, 1, "wandb", SimpleNamespace(experiment=None, run_id="x")])


def test_trouble_is_said_and_never_raised(bundle: Path, wandb: Taken, capsys) -> None:
    module: Any = sys.modules["wandb"]
    module.Artifact = None
    comet: Any = ModuleType("comet_ml")
    sys.modules["comet_ml"] = comet  # has no running experiment to ask for
    try:
        hand_over(bundle)
        hand_over(bundle.with_name("nothing"))
    finally:
        del sys.modules["comet_ml"]

    said = capsys.readouterr().err
    assert "wandb did not take the report: TypeError" in said
    assert "no report of" in said


@pytest.fixture
def gpu(fake_torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand for PyTorch and the frameworks that are installed beside it."""
    for name, base in (("transformers", "TrainerCallback"), ("lightning.pytorch", "Callback")):
        module: Any = ModuleType(name)
        setattr(module, base, type(base, (), {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    return fake_torch


def test_failure_of_a_block_is_reported_and_goes_on(gpu, wandb, tmp_path) -> None:
    with pytest.raises(gpu.OutOfMemoryError), report_failures(tmp_path / "run"):
        gpu.alloc(200)

    assert wandb == FORMS


def test_other_failures_and_good_ends_are_not_reported(gpu, wandb, tmp_path) -> None:
    gpu.alloc(3)
    with report_failures(tmp_path / "run"):
        gpu.alloc(3)
    with pytest.raises(ValueError, match="mine"), report_failures(tmp_path / "run"):
        raise ValueError("mine")

    assert wandb == []
    assert not list(tmp_path.glob("*.html"))


def test_trainers_failure_is_reported_when_it_ends_the_program(gpu, wandb, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda *of: seen.append((of[1], list(wandb))))
    seen: list[Any] = []
    callback = trainer_callback(bundle=tmp_path / "run")
    callback.on_train_begin(None, None, None)
    try:
        gpu.alloc(200)
    except gpu.OutOfMemoryError as e:
        error = e

    sys.excepthook(type(error), error, None)

    assert seen == [(error, FORMS)]


def test_training_that_ends_leaves_the_hook_as_it_was(gpu, wandb, tmp_path) -> None:
    before = sys.excepthook
    callback = trainer_callback(bundle=tmp_path / "run")

    callback.on_train_begin(None, None, None)
    callback.on_train_begin(None, None, None)
    callback.on_step_end(None, None, SimpleNamespace(should_log=True))
    assert sys.excepthook is not before
    callback.on_train_end(None, None, None)

    assert sys.excepthook is before
    assert wandb == []


def test_loggers_of_lightning_and_trackers_of_accelerate_are_asked(gpu, tmp_path) -> None:
    comet, other = Taken(), Taken()
    logger = SimpleNamespace(experiment=stand_in("comet_ml.experiment", "log_asset", comet))
    tracker = SimpleNamespace(tracker=stand_in("comet_ml.experiment", "log_asset", other))
    callback = lightning_callback(bundle=tmp_path / "lightning")
    trainer = SimpleNamespace(loggers=[logger])

    callback.on_train_start(trainer, None)
    with pytest.raises(gpu.OutOfMemoryError) as caught:
        gpu.alloc(200)
    callback.on_exception(trainer, None, caught.value)
    with (
        pytest.raises(gpu.OutOfMemoryError),
        AccelerateLog(SimpleNamespace(trackers=[tracker]), bundle=tmp_path / "accelerate"),
    ):
        gpu.alloc(200)

    assert (comet, other) == (FORMS, FORMS)


def test_real_mlflow_keeps_the_files(bundle: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())

    with mlflow.start_run():
        hand_over(bundle)

    assert sorted(p.suffix for p in tmp_path.glob(f"mlruns/*/*/artifacts/{FOLDER}/*")) == FORMS
