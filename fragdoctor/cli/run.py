"""``fragdoctor run``: a program under the recorder, and the diagnosis of what it left."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fragdoctor.capture.recording.record_options import DEFAULT_MAX_ENTRIES
from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK, USAGE
from fragdoctor.errors import ConfigError, FragdoctorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fragdoctor.capture.launcher import Reached
    from fragdoctor.cli.cure import RecordedRun
    from fragdoctor.inputs.folders import FoundBundle
    from fragdoctor.model.diagnosis import Diagnosis, Recommendation
    from fragdoctor.report.base import RenderOptions

_MOST_NAMED = 20
_MOST_CONTINUED = 3


class StackMode(StrEnum):
    """Which frames each event is recorded with."""

    PYTHON = "python"
    ALL = "all"


Words = Annotated[
    list[str],
    typer.Argument(
        metavar="[--] COMMAND [ARGS]...",
        help="A command, a script (train.py), or with -m a module, and its arguments",
    ),
]


def run(
    words: Words,
    is_module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a module, as python -m does")
    ] = False,
    max_entries: Annotated[
        int, options.option("--max-entries", "N", "Keep the last N events of a GPU", min=1)
    ] = DEFAULT_MAX_ENTRIES,
    stacks: Annotated[
        StackMode, typer.Option("--stacks", help="Record Python frames, or C++ frames too")
    ] = StackMode.PYTHON,
    module_paths: Annotated[
        bool,
        typer.Option(
            "--module-paths",
            help="Record which module of the model allocates (layers.3.mlp); PyTorch 2.10+; "
            "a few microseconds a module call",
        ),
    ] = False,
    no_census: Annotated[
        bool, typer.Option("--no-census", help="Do not look up which names hold memory")
    ] = False,
    no_sources: Annotated[
        bool, typer.Option("--no-sources", help="Put no lines of source into the bundle")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="DIR", help="Write bundles here, not to fragdoctor-NAME-TIME"
        ),
    ] = None,
    as_zip: Annotated[
        bool, typer.Option("--zip", help="Leave each bundle as one zip file")
    ] = False,
    cure: Annotated[
        bool,
        typer.Option(
            "--cure",
            help="After an out-of-memory error run it again under the best settings, "
            "at most three times",
        ),
    ] = False,
    no_diagnosis: Annotated[
        bool, typer.Option("--no-diagnosis", help="Name the bundles, print no diagnosis")
    ] = False,
    no_rehearse: Annotated[
        bool,
        typer.Option(
            "--no-rehearse", help="After an out-of-memory error try no changes in rehearsals"
        ),
    ] = False,
    rehearse_time: Annotated[
        str,
        options.option("--rehearse-time", "TIME", "Try changes for this long: 30s, 5m"),
    ] = "2m",
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """Run a program under the recorder and diagnose the bundle that explains most.

    Everything is said on standard error after the program ended: its own output stays as it was.
    The exit code is the program's (of its last run), 128 + n for a signal, as in a shell. Only
    where the program succeeded and nothing could be recorded it is 2: the recording that was asked
    for failed.
    """
    from fragdoctor.capture.launcher import command_of, environment_of, launch, read_status
    from fragdoctor.capture.recording.arming import note
    from fragdoctor.capture.recording.record_options import Options, from_environment
    from fragdoctor.cli.cure import RecordedRun, environment_with, rerun
    from fragdoctor.inputs.folders import find_bundles

    look = console.render_options(quiet=quiet, verbose=verbose, no_color=no_color, on_stderr=True)
    command = command_of(words, is_module=is_module)
    directory = _directory(output, words, is_module=is_module)
    if outer := from_environment(os.environ):
        note(outer, "inner")

    environ = dict(os.environ)

    def recorded(place: Path, setting: str = "") -> tuple[RecordedRun, Reached]:
        before = {found.path for found in find_bundles(place)}
        with tempfile.TemporaryDirectory(prefix="fragdoctor-") as temporary:
            status = Path(temporary) / "status"
            status.touch()
            recording = Options(
                directory=str(place),
                max_entries=max_entries,
                stacks=stacks.value,
                module_paths=module_paths,
                census=not no_census,
                sources=not no_sources,
                status=str(status),
                command=tuple(command),
            )
            changed = environment_with(environ, setting) if setting else environ
            ended = launch(command, environment_of(recording, changed))
            reached = read_status(status)
        bundles = [found for found in find_bundles(place) if found.path not in before]
        return RecordedRun(ended, _packed(bundles) if as_zip else bundles, setting), reached

    def again(setting: str, place: Path) -> RecordedRun:
        _rewind_input(start)
        return recorded(place, setting)[0]

    start = _start_of_input()
    first, reached = recorded(directory)
    code = first.ended.code
    if not first.bundles:
        _say(reached.why_nothing(code))
        return code if code != OK else USAGE
    diagnosis = None
    if cure or not no_diagnosis:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # see app.main; not before the program
        diagnosis = _diagnosed(first.bundles[0].path)
    if diagnosis is not None and not no_diagnosis:
        from fragdoctor.report.base import render

        sys.stderr.write(f"\n{render('analyze', 'text', diagnosis, look)}\n")
    _name(first.bundles, reached)
    if first.failure is not None and diagnosis is not None and not (no_diagnosis or no_rehearse):
        _follow(first.failure.path, diagnosis, command, rehearse_time, look)
    if cure:
        code = rerun(first, diagnosis, again, directory, _say)
    return code


def _start_of_input() -> int | None:
    """Return where standard input stands, None where it cannot be read twice (a pipe)."""
    try:
        return os.lseek(0, 0, os.SEEK_CUR)
    except OSError:
        return None


def _rewind_input(start: int | None) -> None:
    if start is not None:
        os.lseek(0, start, os.SEEK_SET)


def _directory(output: Path | None, words: Sequence[str], *, is_module: bool) -> Path:
    """Return where bundles go, absolute; nothing is made before there is a bundle.

    Raises:
        ConfigError: something else than a directory has that name, or it cannot be written to.
    """
    if output is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        base = Path.cwd() / f"fragdoctor-{_program(words, is_module=is_module)}-{stamp}"
        place, n = base, 1
        while place.exists():
            n += 1
            place = base.with_name(f"{base.name}-{n}")
    else:
        place = output.absolute()
    if place.exists() and not place.is_dir():
        raise ConfigError(f"{output} is a file.", hint="Give -o a directory.")
    home = next(p for p in (place, *place.parents) if p.exists())
    if not os.access(home, os.W_OK):
        raise ConfigError(f"{home} cannot be written to.", hint="Choose another place with -o.")
    return place


def _program(words: Sequence[str], *, is_module: bool) -> str:
    """Return a name for the program: its script or module rather than the interpreter."""
    name = words[0]
    if not is_module:
        name = next((w for w in words if w.endswith(".py")), name)
    stem = Path(name).name.removesuffix(".py")
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._") else "-" for c in stem)
    return kept.strip("-.")[:40] or "program"


def _packed(bundles: Sequence[FoundBundle]) -> list[FoundBundle]:
    from fragdoctor.inputs.folders import FoundBundle, pack

    found = []
    for bundle in bundles:
        try:
            found.append(FoundBundle(pack(bundle.path), bundle.facts))
        except OSError as e:
            _say(f"{bundle.path} could not be packed: {e.strerror or e}.")
            found.append(bundle)
    return found


def _diagnosed(path: Path) -> Diagnosis | None:
    """Return the diagnosis of a bundle; that it cannot be read is no failure of the program."""
    from fragdoctor.diagnosis.pipeline import diagnose
    from fragdoctor.inputs.cases import read_bundle

    try:
        with console.Progress("Replaying") as progress:
            return diagnose(read_bundle(path), progress=progress.update)
    except FragdoctorError as e:
        _say(f"The bundle cannot be diagnosed: {e.message} {e.hint}".rstrip())
        return None


def _follow(
    bundle: Path, diagnosis: Diagnosis, command: Sequence[str], seconds: str, look: RenderOptions
) -> None:
    """Rehearse the command that failed, and say what would have let it end.

    That it cannot be rehearsed costs a sentence; Ctrl-C ends it.
    """
    from fragdoctor.cli.rehearse_after import follow
    from fragdoctor.inputs.cases import read_bundle
    from fragdoctor.report.base import render
    from fragdoctor.report.views.advice import wins

    _say("")
    _say(f"Rehearsing it on the CPU for at most {seconds}, to try changes (--no-rehearse).")
    try:
        with console.Progress("Rehearsing") as progress:
            found = follow(
                read_bundle(bundle), diagnosis, command, seconds,
                lambda title: progress.show(f"Rehearsing {title}", 0, 0),
            )  # fmt: skip
    except FragdoctorError as e:
        _say(f"No change could be tried: {e.message}")
        return
    except KeyboardInterrupt:
        _say("The rehearsal was ended.")
        return
    continued = found.diagnosis
    decided = [one for one in continued.recommendations if _is_decided(one)]
    _say("")
    for one in decided[:_MOST_CONTINUED]:
        _say(f"Continued with the rehearsal, {one.title}: {wins(one, continued)}")
    sys.stderr.write(f"\n{render('prescription', 'text', found.prescription, look)}\n")


def _is_decided(one: Recommendation) -> bool:
    from fragdoctor.model.simulation import OutlookState

    outlook = one.predicted.outlook
    return outlook is not None and outlook.state is not OutlookState.OPEN


def _name(bundles: Sequence[FoundBundle], reached: Reached) -> None:
    """Name every bundle and the next command to type."""
    first = _shown(bundles[0].path)
    if len(bundles) == 1:
        _say(f"Recorded in {first}")
    else:
        _say(f"Recorded in {len(bundles)} bundles, the one that explains most first:")
        for found in bundles[:_MOST_NAMED]:
            _say(f"  {_shown(found.path)}")
        if len(bundles) > _MOST_NAMED:
            _say(f"  and {len(bundles) - _MOST_NAMED} more")
    by_process: dict[tuple[str, int | None], int] = {}
    for found in bundles:  # each bundle counts up to its own time
        key = (found.facts.host, found.facts.pid)
        by_process[key] = max(by_process.get(key, 0), found.facts.n_skipped)
    if skipped := sum(by_process.values()):
        _say(f"{skipped} further out-of-memory errors left no bundle of their own.")
    for problem in reached.problems[:3]:
        _say(f"Not recorded: {problem}")
    _say(f"Next: fragdoctor analyze {shlex.quote(first)} --format html -o report.html")


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _say(text: str) -> None:
    from fragdoctor.report import escape

    sys.stderr.write(f"{escape.terminal(text)}\n")
    sys.stderr.flush()
