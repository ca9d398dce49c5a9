"""The table of commands: what each is called, its one line of help, and its two examples."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from fragdoctor.cli.analyze import analyze
from fragdoctor.cli.check import check
from fragdoctor.cli.compare import compare
from fragdoctor.cli.estimate import estimate
from fragdoctor.cli.estimate_options import EstimateOptions, asked_of, older_parameters
from fragdoctor.cli.explain import explain
from fragdoctor.cli.export import export
from fragdoctor.cli.fit import FitOptions, fit
from fragdoctor.cli.front_page import FRONT_PAGE
from fragdoctor.cli.init_ci import InitCiOptions, init_ci
from fragdoctor.cli.oom import oom
from fragdoctor.cli.pack import PackOptions, pack
from fragdoctor.cli.parameters import command_of, command_with, parameters_of
from fragdoctor.cli.rehearse import RehearseOptions, rehearse
from fragdoctor.cli.run import run
from fragdoctor.cli.simulate import simulate
from fragdoctor.cli.tool_server import ToolServerOptions, mcp
from fragdoctor.cli.view import view
from fragdoctor.report import escape

FORMATS_OF_SUFFIXES: Final = (
    (".html", "html"),
    (".htm", "html"),
    (".speedscope.json", "speedscope"),
    (".json", "json"),
    (".json", "trace"),
    (".md", "markdown"),
    (".txt", "text"),
    (".sarif", "sarif"),
    (".xml", "junit"),
    (".csv", "csv"),
    (".parquet", "parquet"),
    (".pickle", "snapshot"),
)
"""What the name of a file says about its format; the first that the command has counts."""


class _Group(TyperGroup):
    """The command ``fragdoctor`` itself, whose help is the front page."""

    def get_help(self, ctx: Any) -> str:  # noqa: ARG002 - typer's signature
        """Return the front page."""
        return FRONT_PAGE.rstrip("\n")


class _Command(TyperCommand):
    """A command that takes the format from the name of its report, and says what it wrote."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; return its exit code."""
        given = ctx.get_parameter_source("output_format")
        if given is not None and given.name != "COMMANDLINE":
            self._format_from_name(ctx)
        code = super().invoke(ctx)
        if "output_format" in ctx.params and not ctx.params.get("quiet"):
            written = [report.partition("=")[2] for report in ctx.params.get("report") or ()]
            for name in (ctx.params.get("output"), *written):
                if name is not None and os.path.isfile(name):  # noqa: PTH113 - never raises
                    sys.stderr.write(f"Wrote {escape.terminal(str(name))}\n")
        return code

    def _format_from_name(self, ctx: Any) -> None:
        option: Any = next(p for p in self.params if p.name == "output_format")
        output = str(ctx.params.get("output") or "").lower()
        for suffix, name in FORMATS_OF_SUFFIXES:
            if output.endswith(suffix) and name in option.type.choices:
                ctx.params["output_format"] = name
                return


app = typer.Typer(
    name="fragdoctor",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _add(
    call: Callable[..., int], text: str, examples: Sequence[str], note: str = "", **settings: Any
) -> None:
    """Add a command: its function, its line of help, its examples, and what follows them."""
    lines = "\n".join(f"  {line}" for line in examples)
    app.command(
        settings.pop("name", None) or call.__name__,
        cls=_Command,
        help=text,
        epilog=f"\b\nExamples:\n{lines}{note}",
        context_settings=settings or None,
    )(call)


_add(
    analyze,
    "Diagnose a memory snapshot, message, statistics or log, of one rank or of many",
    [
        "fragdoctor analyze snapshot.pickle oom.txt --capacity 24GiB",
        "fragdoctor analyze job/ --workers 8 --format html -o job.html",
    ],
)
_add(
    run,
    "Run a program under the recorder and diagnose what it leaves",
    [
        "fragdoctor run train.py --epochs 3",
        "fragdoctor run -o bundles --zip -- torchrun --nproc-per-node 8 train.py",
    ],
    "\n\n\b\nThe report goes to standard error; output and exit code stay the program's.\n"
    "Only a program that succeeds with nothing to record (no torch, no CUDA) ends in 2.",
    allow_interspersed_args=False,
)
_add(
    command_of(RehearseOptions, rehearse),
    "Run a program without a GPU and say what its memory would do",
    [
        "fragdoctor rehearse train.py --gpu h100 -- --epochs 1 --batch-size 32",
        "fragdoctor rehearse -m package.train --fits-on 24GiB",
        "fragdoctor rehearse train.py --gpu 24GiB --batch 1..512 -- --batch-size {batch}",
    ],
    "\n\n\b\nThe program needs PyTorch 2.6 or newer and no GPU; what it computes is made up.\n"
    "Exit code 0: it fits; 1: it runs out of memory; 2: it cannot be rehearsed.",
    name="rehearse",
)
_add(
    oom,
    "Diagnose a pasted out-of-memory message or a whole log",
    [
        "fragdoctor oom train.log",
        "python train.py 2>&1 | fragdoctor oom -",
    ],
)
_add(
    check,
    "Fail in CI where memory got worse or breaks a budget",
    [
        "fragdoctor check snapshots/ --max-peak 70GiB --max-pinned 5%",
        "fragdoctor check snapshots/ --baseline memory.json --report sarif=out.sarif",
    ],
)
_add(
    command_of(InitCiOptions, init_ci),
    "Write a workflow that rehearses each change without a GPU",
    [
        "fragdoctor init-ci train.py --fits-on 24GiB -- --epochs 1",
        "fragdoctor init-ci -m package.train --gitlab --gpu-runner gpu",
    ],
    name="init-ci",
)
_add(
    simulate,
    "Replay a snapshot's trace under other settings and capacities",
    [
        'fragdoctor simulate snapshot.pickle --conf "expandable_segments:True"',
        "fragdoctor simulate snapshot.pickle --sweep --capacity 24GiB --format json",
    ],
)
_add(
    view,
    "Explore a snapshot in the browser, with what-ifs replayed live",
    [
        "fragdoctor view snapshot.pickle",
        "fragdoctor view snapshot.pickle oom.txt --no-browser --port 8000",
    ],
)
_add(
    compare,
    "Say what changed between two runs, or how several grow",
    [
        "fragdoctor compare before.pickle after.pickle --fail-on-growth 2%",
        "fragdoctor compare step*.pickle --steps 100,200,300 --capacity 24GiB",
    ],
)
_add(
    command_with(
        [*parameters_of(EstimateOptions), *older_parameters()],
        lambda **values: estimate(asked_of(**values)),
    ),
    "Say before a run whether it fits, and what would make it fit",
    [
        "fragdoctor estimate config.json --gpu a100-40g --batch 4 --seq 2048 --dtype bf16",
        "fragdoctor estimate --params 7B --gpu 24GiB --lora 16 --explain",
    ],
    name="estimate",
)
_add(
    command_of(FitOptions, fit),
    "Say from recordings at several batch sizes which batch fits",
    [
        "fragdoctor fit batch2.pickle batch4.pickle batch8.pickle --gpu 24GiB",
        "fragdoctor fit a.pickle b.pickle --batches 16,32 --capacity 70GiB --explain",
    ],
    name="fit",
)
_add(
    command_of(PackOptions, pack),
    "Say how many processes share a GPU",
    [
        "fragdoctor pack --per-process 6GB --gpu 24GiB",
        "fragdoctor pack snapshot.pickle --gpu a100-80g --processes 4",
    ],
    name="pack",
)
_add(
    export,
    "Write a snapshot as tables, a trace, stacks, or redacted",
    [
        "fragdoctor export snapshot.pickle --format trace -o trace.json",
        "fragdoctor export snapshot.pickle --format snapshot --redact -o shared.pickle",
    ],
)
_add(
    command_of(ToolServerOptions, mcp),
    "Serve the doctor as tools of a coding agent (Model Context Protocol)",
    [
        "fragdoctor mcp --root .",
        "fragdoctor mcp --redact --allow-rehearse",
    ],
    name="mcp",
)
_add(
    explain,
    "List the rules, or explain one by its code",
    [
        "fragdoctor explain",
        "fragdoctor explain FD101",
    ],
)


@app.callback()
def _root() -> None:
    """Keep commands under one name even when there is only one."""
