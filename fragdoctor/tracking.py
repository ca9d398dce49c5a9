"""The report of a failure as files, handed to the experiment trackers in use.

Weights & Biases, MLflow and Comet keep the report's files as artifacts of the run. TensorBoard,
which shows no pages, gets the report as text, and the files are put into its log directory. Each
tracker is recognized by the module of its objects; none is imported here.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from fragdoctor.errors import FragdoctorError

FOLDER: Final = "gpu-memory"
"""The name under which a tracker keeps the files."""


class ReportFiles(NamedTuple):
    """A report in three forms, next to the bundle that it is about."""

    page: Path
    data: Path
    text: Path


def write_report(bundle: Path) -> ReportFiles:
    """Diagnose a bundle; return the report's files, which are written next to it.

    Raises:
        FragdoctorError: the bundle cannot be read.
        OSError: a file cannot be written.
    """
    from fragdoctor.api import diagnose  # noqa: PLC0415 - numpy is heavy
    from fragdoctor.report.base import RenderOptions, render  # noqa: PLC0415

    diagnosis = diagnose(bundle)
    files = ReportFiles(*(bundle.with_name(f"{bundle.name}{s}") for s in (".html", ".json", ".md")))
    for path, form in zip(files, ("html", "json", "markdown"), strict=True):
        path.write_text(render("analyze", form, diagnosis, RenderOptions()), encoding="utf-8")
    return files


def hand_over(bundle: Path, known: Iterable[Any] = ()) -> None:
    """Write the report on a bundle and give it to the trackers; print errors, but raise nothing.

    Args:
        bundle: the recording of the failure.
        known: runs, experiments, writers, or the wrappers that frameworks put around them, in
            addition to the runs that the libraries themselves report as active.
    """
    try:
        files = write_report(bundle)
    except (FragdoctorError, OSError) as e:
        _say(f"no report of {bundle}: {e}")
        return
    _say(f"the report is {files.page}")
    done: set[str] = set()
    for found in (*known, *active_runs()):
        for kind, tracker in _trackers_in(found):
            if kind not in done:
                done.add(kind)
                try:
                    _TAKERS[kind][1](tracker, files)
                except Exception as e:  # noqa: BLE001 - the program's own failure matters more
                    _say(f"{kind} did not take the report: {type(e).__name__}: {e}")


def active_runs() -> Iterator[Any]:
    """Yield the runs that the trackers imported by the program are writing."""
    for module, ask in _ASK.items():
        if module in sys.modules:
            try:
                run = ask(sys.modules[module])
            except Exception:  # noqa: BLE001, S112 - another version, which is left out
                continue
            if run is not None:
                yield run


_ASK: Final[Mapping[str, Callable[[Any], Any]]] = {
    "wandb": lambda wandb: wandb.run,
    "mlflow": lambda mlflow: mlflow.active_run(),
    "comet_ml": lambda comet_ml: comet_ml.get_running_experiment(),
}


def _trackers_in(found: Any) -> Iterator[tuple[str, Any]]:
    """Yield the trackers in a run, or in a wrapper of Lightning, accelerate or the Trainer."""
    run_id = getattr(found, "run_id", None)
    inner = (getattr(found, name, None) for name in ("experiment", "tracker", "tb_writer"))
    for one in (found, *inner):
        kind = type(one).__module__.partition(".")[0]
        if kind == "mlflow":
            info = getattr(one, "info", None)
            yield kind, run_id if info is None else info.run_id
        elif kind in _TAKERS and hasattr(one, _TAKERS[kind][0]):
            yield kind, one


def _wandb(run: Any, files: ReportFiles) -> None:
    artifact = sys.modules["wandb"].Artifact(f"{FOLDER}-{run.id}", type=FOLDER)
    for path in files:
        artifact.add_file(str(path))
    run.log_artifact(artifact)


def _mlflow(run_id: str, files: ReportFiles) -> None:
    client = sys.modules["mlflow"].MlflowClient()
    for path in files:
        client.log_artifact(run_id, str(path), FOLDER)


def _comet(experiment: Any, files: ReportFiles) -> None:
    for path in files:
        experiment.log_asset(str(path), file_name=f"{FOLDER}/{path.name}")


def _tensorboard(writer: Any, files: ReportFiles) -> None:
    place = Path(getattr(writer, "log_dir", None) or writer.logdir) / FOLDER
    place.mkdir(exist_ok=True)
    for path in files:
        shutil.copy(path, place)
    writer.add_text(FOLDER, files.text.read_text(encoding="utf-8"))
    writer.flush()


_TAKERS: Final[Mapping[str, tuple[str, Callable[[Any, ReportFiles], None]]]] = {
    "wandb": ("log_artifact", _wandb),
    "mlflow": ("", _mlflow),  # its runs have no methods
    "comet_ml": ("log_asset", _comet),
    **dict.fromkeys(("torch", "tensorboardX"), ("add_text", _tensorboard)),
}
"""Module -> the method by which its trackers are recognized, and what hands them the report."""


def _say(text: str) -> None:
    print(f"fragdoctor: {text}", file=sys.stderr)  # noqa: T201 - in the program of the user
