"""``fragdoctor run``: run a program under the recorder, and diagnose the bundles that it leaves."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK, USAGE, say
from fragdoctor.errors import ConfigError, FragdoctorError
from fragdoctor.model.simulation import OutlookState
from fragdoctor.opening import first_free
from fragdoctor.recording.record_options import DEFAULT_MAX_ENTRIES, Options, from_environment
from fragdoctor.report.base import RenderOptions, render
from fragdoctor.units import parse_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fragdoctor.capture.launcher import Reached
    from fragdoctor.cli.cure import RecordedRun
    from fragdoctor.inputs.folders import FoundBundle
    from fragdoctor.model.diagnosis import Diagnosis, Recommendation

_MOST_NAMED = 20
_MOST_CONTINUED = 3


@options.taken
class RunOptions:
    """What to run, how to record it, and what to report."""

    words: list[str] = options.argument(
        "[--] COMMAND [ARGS]...",
        "A command, a script (train.py), or with -m a module, and its arguments",
    )
    is_module: bool = options.IS_MODULE
    max_entries: int = options.option(
        "N", "Keep the last N events of a GPU", default=DEFAULT_MAX_ENTRIES, min=1
    )
    stacks: Literal["python", "all"] = options.option(
        None, "Record Python frames, or C++ frames too", default="python"
    )
    module_paths: bool = options.flag(
        "Record which module of the model allocates (layers.3.mlp); PyTorch 2.10+; "
        "a few microseconds per module call"
    )
    no_census: bool = options.flag("Do not look up which names hold memory")
    no_sources: bool = options.flag("Put no lines of source into the bundle")
    listen: int | None = options.option(
        "PORT", "Write bundles on POST /record?seconds=N from this machine, after N s; Linux",
        default=None, min=1, max=65535,
    )  # fmt: skip
    output: Path | None = options.option(
        "DIR", "Write bundles here instead of fragdoctor-NAME-TIME", "-o", "--output",
        group=options.OUTPUT,
    )  # fmt: skip
    as_zip: bool = options.flag("Leave each bundle as one zip file", "--zip", group=options.OUTPUT)
    cure: bool = options.flag(
        "After an out-of-memory error, rerun it with the best settings, at most three times",
        group=options.CURE,
    )
    no_diagnosis: bool = options.flag("Name the bundles, print no diagnosis", group=options.OUTPUT)
    no_rehearse: bool = options.flag(
        "After an out-of-memory error, try no changes in rehearsals", group=options.CURE
    )
    rehearse_time: str = options.option(
        "TIME", "Rehearse and try changes for this long: 30s, 5m", default="5m", group=options.CURE
    )
    quiet: bool = options.QUIET
    verbose: bool = options.VERBOSE
    no_color: bool = options.NO_COLOR


def run(asked: RunOptions) -> int:
    """Run a program under the recorder and diagnose the bundle that explains the most.

    All messages go to standard error after the program ended, so its own output is unchanged. The
    exit code is the program's (from its last run), or 128 + n for a signal, as in a shell. Only if
    the program succeeded and nothing could be recorded is it 2: the requested recording failed.
    """
    from fragdoctor.capture.launcher import command_of, environment_of, launch, read_status
    from fragdoctor.cli.cure import RecordedRun, environment_with, rerun
    from fragdoctor.inputs.folders import find_bundles
    from fragdoctor.recording.arming import note

    look = console.look_of(asked, on_stderr=True)
    parse_seconds(asked.rehearse_time)  # a mistake in it is no surprise after hours
    command = command_of(asked.words, is_module=asked.is_module)
    directory = _directory(asked)
    if outer := from_environment(os.environ):
        note(outer, "inner")

    environ = dict(os.environ)
    _listen(asked.listen)

    def recorded(place: Path, setting: str = "") -> tuple[RecordedRun, Reached]:
        before = {found.path for found in find_bundles(place)}
        with tempfile.TemporaryDirectory(prefix="fragdoctor-") as temporary:
            status = Path(temporary) / "status"
            status.touch()
            recording = Options(
                directory=str(place),
                max_entries=asked.max_entries,
                stacks=asked.stacks,
                module_paths=asked.module_paths,
                census=not asked.no_census,
                sources=not asked.no_sources,
                status=str(status),
                command=tuple(command),
            )
            changed = environment_with(environ, setting) if setting else environ
            ended = launch(command, environment_of(recording, changed))
            reached = read_status(status)
        bundles = [found for found in find_bundles(place) if found.path not in before]
        return RecordedRun(ended, _packed(bundles) if asked.as_zip else bundles, setting), reached

    def again(setting: str, place: Path) -> RecordedRun:
        if start is not None:
            os.lseek(0, start, os.SEEK_SET)
        return recorded(place, setting)[0]

    start = _start_of_input()
    first, reached = recorded(directory)
    code = first.ended.code
    if not first.bundles:
        say(reached.why_nothing(first.ended))
        return code if code != OK else USAGE
    diagnosis = None
    if asked.cure or not asked.no_diagnosis:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # see app.main; not before the program
        diagnosis = _diagnosed(first.bundles[0].path)
    if diagnosis is not None and not asked.no_diagnosis:
        sys.stderr.write(f"\n{render('analyze', 'text', diagnosis, look)}\n")
    _name(first.bundles, reached)
    is_followed = not (asked.no_diagnosis or asked.no_rehearse)
    if first.failure is not None and diagnosis is not None and is_followed:
        failure = first.failure.path
        diagnosis = _followed(failure, diagnosis, command, asked.rehearse_time, look)
    if asked.cure:
        code = rerun(first, diagnosis, again, directory, say)
    return code


def _start_of_input() -> int | None:
    """Return the position of standard input, or None if it cannot be read twice (a pipe)."""
    try:
        return os.lseek(0, 0, os.SEEK_CUR)
    except OSError:
        return None


def _listen(port: int | None) -> None:
    if port is not None:
        from fragdoctor.capture.trigger import listen

        listen(port)


def _directory(asked: RunOptions) -> Path:
    """Return the absolute directory for bundles, which is not created before there is a bundle.

    Raises:
        ConfigError: the path is not a directory, or is not writable.
    """
    output = asked.output
    if output is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"fragdoctor-{_program(asked)}-{stamp}"
        place = first_free(Path.cwd(), name)
    else:
        place = output.absolute()
    if place.exists() and not place.is_dir():
        raise ConfigError(f"{output} is a file.", hint="Give -o a directory.")
    home = next(p for p in (place, *place.parents) if p.exists())
    if not os.access(home, os.W_OK):
        raise ConfigError(f"{home} cannot be written to.", hint="Choose another place with -o.")
    return place


def _program(asked: RunOptions) -> str:
    """Return a name for the program: that of its script or module, not of the interpreter."""
    name = asked.words[0]
    if not asked.is_module:
        name = next((w for w in asked.words if w.endswith(".py")), name)
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
            say(f"{bundle.path} could not be packed: {e.strerror or e}.")
            found.append(bundle)
    return found


def _diagnosed(path: Path) -> Diagnosis | None:
    """Return the diagnosis of a bundle, or None: a bad bundle is not the program's failure."""
    from fragdoctor.diagnosis.pipeline import diagnose
    from fragdoctor.inputs.cases import read_bundle

    try:
        with console.Progress("Replaying"):
            return diagnose(read_bundle(path))
    except FragdoctorError as e:
        say(f"The bundle cannot be diagnosed: {e.message} {e.hint}".rstrip())
        return None


def _followed(
    bundle: Path, diagnosis: Diagnosis, command: Sequence[str], seconds: str, look: RenderOptions
) -> Diagnosis:
    """Rehearse the command that failed, and say what would have let it finish.

    If it cannot be rehearsed, a sentence says so; Ctrl-C stops the rehearsal. Returns the diagnosis
    of the recording that the rehearsal continues, else the one of the recording alone.
    """
    from fragdoctor.cli.rehearse import follow
    from fragdoctor.inputs.cases import read_bundle
    from fragdoctor.report.views.advice import wins

    limit = f"for at most {seconds} (--no-rehearse)"
    say("", f"Rehearsing it on the CPU and trying changes, {limit}.")
    try:
        with console.Progress("Rehearsing") as progress:
            continued, prescription = follow(
                read_bundle(bundle), diagnosis, command, seconds,
                lambda title: progress.show(f"Rehearsing {title}", 0, 0),
            )  # fmt: skip
    except FragdoctorError as e:
        say(f"No change could be tried: {e.message} {e.hint}".rstrip())
        return diagnosis
    except KeyboardInterrupt:
        say("The rehearsal was stopped.")
        return diagnosis
    decided = [one for one in continued.recommendations if _state(one) is not OutlookState.OPEN]
    for one in decided[:_MOST_CONTINUED]:
        say(f"Continued with the rehearsal: {one.title}. {wins(one, continued)}")
    others = {*map(_state, continued.rejected)} - {OutlookState.OPEN}
    if others == {OutlookState.FAILS} and not decided:
        say("Continued with the rehearsal, no setting of the allocator lets it finish.")
    sys.stderr.write(f"\n{render('prescription', 'text', prescription, look)}\n")
    return continued


def _state(advice: Recommendation) -> OutlookState:
    outlook = advice.predicted.outlook
    return OutlookState.OPEN if outlook is None else outlook.state


def _name(bundles: Sequence[FoundBundle], reached: Reached) -> None:
    """Print the name of every bundle and the next command to type."""
    first = _shown(bundles[0].path)
    if len(bundles) == 1:
        say(f"Recorded in {first}")
    else:
        say(f"Recorded in {len(bundles)} bundles, the one that explains most first:")
        say(*(f"  {_shown(found.path)}" for found in bundles[:_MOST_NAMED]))
        if len(bundles) > _MOST_NAMED:
            say(f"  and {len(bundles) - _MOST_NAMED} more")
    by_process: dict[tuple[str, int | None], int] = {}
    for found in bundles:  # each bundle counts events up to its own time
        key = (found.facts.host, found.facts.pid)
        by_process[key] = max(by_process.get(key, 0), found.facts.n_skipped)
    if skipped := sum(by_process.values()):
        say(f"{skipped} further out-of-memory errors left no bundle of their own.")
    say(*(f"Not recorded: {problem}" for problem in reached.problems[:3]))
    say(f"Next: fragdoctor analyze {shlex.quote(first)} --format html -o report.html")


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
