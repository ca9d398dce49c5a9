"""``fragdoctor rehearse``: the unchanged program, without a GPU, with its real memory."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import FINDINGS, OK
from fragdoctor.errors import ConfigError
from fragdoctor.units import format_size

if TYPE_CHECKING:
    from fragdoctor.model.rehearsal import Rehearsal, RehearsalResult
    from fragdoctor.rehearse.launch import Conditions, Program
    from fragdoctor.report.base import RenderOptions

_OF_DIAGNOSES: Final = ("sarif", "junit", "github")
MAX_DEVICES: Final = 64
GPUS_OF_A_NODE: Final = 8
ASSUMED: Final = ("nonzero", "unique")


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseOptions:
    """What is asked about a program."""

    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [-- ARGS]...",
            help="A script (train.py), or with -m a module; its own arguments follow --",
        ),
    ]
    is_module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a module, as python -m does")
    ] = False
    gpu: options.OneGpu = None
    capacity: options.Capacity = None
    unlimited: Annotated[
        bool, typer.Option("--unlimited", help="Never run out of memory, to learn the need")
    ] = False
    fits_on: Annotated[
        int | None,
        typer.Option(
            "--fits-on",
            parser=options.size,
            metavar="SIZE",
            help="Exit with 1 unless it fits where PyTorch can have this much",
        ),
    ] = None
    conf: Annotated[
        str | None,
        typer.Option(
            "--conf", metavar="SETTINGS", help="Set PYTORCH_CUDA_ALLOC_CONF for the program"
        ),
    ] = None
    torch_version: options.TorchVersion = None
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            metavar="N",
            help="Stop after N optimizer steps; without it, when their memory repeats",
        ),
    ] = None
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, max=MAX_DEVICES, metavar="N", help="Show it N such GPUs"),
    ] = None
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size", min=1, metavar="N", help="Rehearse one rank of N, as torchrun starts it"
        ),
    ] = None
    rank: Annotated[
        int | None,
        typer.Option("--rank", min=0, metavar="R", help="Choose the rank for --world-size; else 0"),
    ] = None
    python: Annotated[
        str | None,
        typer.Option(
            "--python", metavar="PATH", help="Choose the program's Python; else the one on PATH"
        ),
    ] = None
    snapshot: Annotated[
        Path | None,
        typer.Option(
            "--snapshot", metavar="FILE", help="Leave the memory snapshot here, not beside you"
        ),
    ] = None
    assume: Annotated[
        list[str] | None,
        typer.Option(
            "--assume",
            metavar="KIND=SHARE",
            help="Assume how much nonzero (and masks) or unique keep: nonzero=0.5; else all",
            show_default=False,
        ),
    ] = None
    allow_writes: Annotated[
        bool,
        typer.Option("--allow-writes", help="Let the program change files, as it does by itself"),
    ] = False
    output_format: options.Format = options.ReportFormat.TEXT
    output: options.Output = None
    force: options.Force = False
    quiet: options.Quiet = False
    verbose: options.Verbose = False
    no_color: options.NoColor = False


def rehearse(chosen: RehearseOptions) -> int:
    """Rehearse a program, print the diagnosis of its memory, and fail where it does not fit."""
    look = console.render_options(
        quiet=chosen.quiet,
        verbose=chosen.verbose,
        no_color=chosen.no_color,
        to_file=chosen.output is not None,
    )
    console.check_output(chosen.output, force=chosen.force, inputs=chosen.words[:1])
    program, conditions = _asked(chosen)
    result = _judged(program, conditions, _snapshot_path(chosen, program))
    console.write_report(
        _report(result, chosen.output_format.value, look), chosen.output, force=chosen.force
    )
    return OK if result.rehearsal.fits else FINDINGS


def _asked(chosen: RehearseOptions) -> tuple[Program, Conditions]:
    """Return what to run, and how.

    Raises:
        ConfigError: there is no such program, or options exclude each other.
    """
    from fragdoctor.rehearse.launch import Conditions, Program, pythons
    from fragdoctor.rehearse.machines import rehearsed_gpu

    limits = {
        "--capacity": chosen.capacity,
        "--fits-on": chosen.fits_on,
        "--unlimited": chosen.unlimited or None,
    }
    given = [name for name, value in limits.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other.", hint="Give one of them.")
    if chosen.gpu and len(chosen.gpu) > 1:
        raise ConfigError("A program is rehearsed on one kind of GPU.", hint="Give --gpu once.")
    target, *args = chosen.words
    if not chosen.is_module and not Path(target).is_file():
        raise ConfigError(f"{target} does not exist.", hint="Check the path of the script.")
    gpu = rehearsed_gpu(
        chosen.gpu[0] if chosen.gpu else None,
        chosen.capacity or chosen.fits_on,
        is_unlimited=chosen.unlimited,
    )
    program = Program(target, chosen.is_module, args, pythons(chosen.python))
    rank, world_size, n_devices = _place_in_run(chosen)
    conditions = Conditions(
        gpu=gpu,
        n_devices=n_devices,
        rank=rank,
        world_size=world_size,
        conf=chosen.conf,
        torch_version=chosen.torch_version or "",
        n_steps=chosen.steps,
        assumed_shares=_shares(chosen.assume or []),
        allows_writes=chosen.allow_writes,
        shows_output=chosen.verbose,
    )
    if chosen.conf is not None:
        from fragdoctor.model.settings import parse_conf

        parse_conf(chosen.conf)
    return program, conditions


def _place_in_run(chosen: RehearseOptions) -> tuple[int | None, int, int]:
    """Return which rank it is, of how many, and how many GPUs it sees on its machine.

    Raises:
        ConfigError: there is no such rank.
    """
    if chosen.world_size is None:
        if chosen.rank is not None:
            raise ConfigError("--rank needs --world-size.", hint="Say of how many ranks it is one.")
        started = os.environ.get("LOCAL_WORLD_SIZE", "")
        seen = int(started) if started.isdecimal() and "RANK" in os.environ else 1
        return None, 1, chosen.devices or min(max(seen, 1), MAX_DEVICES)
    rank, world_size = chosen.rank or 0, chosen.world_size
    if rank >= world_size:
        raise ConfigError(
            f"There is no rank {rank} of {world_size}.",
            hint=f"Ranks are counted from 0; the last is {world_size - 1}.",
        )
    return rank, world_size, chosen.devices or min(world_size, GPUS_OF_A_NODE)


def _shares(values: list[str]) -> dict[str, float]:
    """Return what ``--assume`` says.

    Raises:
        ConfigError: it says it in another way.
    """
    found = {}
    for value in values:
        kind, _, share = value.partition("=")
        try:
            found[kind] = float(share)
        except ValueError:
            found[kind] = -1.0
        if kind not in ASSUMED or not 0 <= found[kind] <= 1:
            raise ConfigError(
                f"{value!r} is no assumption.",
                hint=f"Write for example nonzero=0.5; kinds are {' and '.join(ASSUMED)}.",
            )
    return found


def _snapshot_path(chosen: RehearseOptions, program: Program) -> Path:
    """Return where the snapshot goes; nothing of the user's is overwritten.

    Raises:
        ConfigError: it cannot be written there.
    """
    if chosen.snapshot is not None:
        console.check_output(chosen.snapshot, force=chosen.force, inputs=[program.target])
        return chosen.snapshot
    stem = Path(program.target).name.removesuffix(".py").rpartition(".")[2] or "program"
    place, n = Path(f"{stem}-rehearsal.pickle"), 1
    while place.exists():
        n += 1
        place = Path(f"{stem}-rehearsal-{n}.pickle")
    if not os.access(Path.cwd(), os.W_OK):
        raise ConfigError(
            "The snapshot cannot be written to this folder.", hint="Choose a place: --snapshot FILE"
        )
    return place


def _judged(program: Program, conditions: Conditions, snapshot: Path) -> RehearsalResult:
    from fragdoctor.rehearse.judge import judge
    from fragdoctor.rehearse.launch import ProgramFailed

    with console.Progress("Rehearsing") as progress:
        try:
            found = _rehearsed(program, conditions, snapshot, progress)
        except ProgramFailed as err:
            progress.clear()
            _pass_on(err.output)
            raise
        return judge(found)


def _rehearsed(
    program: Program, conditions: Conditions, snapshot: Path, progress: console.Progress
) -> Rehearsal:
    from fragdoctor.rehearse import launch

    def on_step(number: int, allocated_bytes: int) -> None:
        progress.show(f"Rehearsed step {number}, {format_size(allocated_bytes)} allocated", 0, 0)

    return launch.rehearse(program, conditions, snapshot, on_step)


def _pass_on(output: str) -> None:
    """Print what a program said last, safe for a terminal."""
    from fragdoctor.report import escape

    for line in output.splitlines():
        sys.stderr.write(f"{escape.terminal(line)}\n")


def _report(result: RehearsalResult, name: str, look: RenderOptions) -> str:
    from fragdoctor.report.base import render

    if name in _OF_DIAGNOSES:
        return render("analyze", name, result.diagnosis, look)
    return render("rehearse", name, result, look)
