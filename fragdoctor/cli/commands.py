"""The table of commands: what each is called, its one line of help, and its two examples."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from fragdoctor.cli.front_page import FRONT_PAGE
from fragdoctor.cli.options import GENERAL, HEADINGS, command_of
from fragdoctor.errors import ConfigError
from fragdoctor.frozen import frozen
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

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take what follows another program's command for options of that command."""
        if self.name == "rehearse":
            from fragdoctor.rehearsal.programs import LAUNCHERS

            first = self._first_word(args)
            if first < len(args) and Path(args[first]).name in LAUNCHERS:
                args = [*args[:first], "--", *args[first:]]
        return super().parse_args(ctx, args)

    def _first_word(self, args: list[str]) -> int:
        """Return the place of the first word that is neither an option nor the value of one."""
        options: list[Any] = [p for p in self.params if p.param_type_name == "option"]
        valued = {name for option in options if not option.is_flag for name in option.opts}
        first = 0
        while first < len(args) and args[first].startswith("-"):
            first += 2 if args[first] in valued else 1
        return first

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options in groups."""
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        options: list[Any] = [p for p in self.get_params(ctx) if p not in arguments]
        for option in options:
            if isinstance(option.default, int) and not option.default:  # 0 stands for unset
                option.show_default = False
        groups = [(heading, [o for o in options if _heading(o) == heading]) for heading in HEADINGS]
        for heading, group in (("Arguments", arguments), *groups):
            records = [record for p in group if (record := p.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; return its exit code."""
        given = ctx.get_parameter_source("output_format")
        if given is not None and given.name != "COMMANDLINE":
            self._format_from_name(ctx, is_chosen=given.name != "DEFAULT")
        code = super().invoke(ctx)
        if "output_format" in ctx.params and not ctx.params.get("quiet"):
            written = [(ctx.params["output_format"], ctx.params.get("output"))]
            written += [
                (r.partition("=")[0], r.partition("=")[2]) for r in ctx.params.get("report") or ()
            ]
            for form, name in written:
                if name is not None and os.path.isfile(name):  # noqa: PTH113 - never raises
                    sys.stderr.write(f"Wrote {escape.terminal(str(name))} ({form})\n")
        return code

    def _format_from_name(self, ctx: Any, *, is_chosen: bool) -> None:
        output = Path(str(ctx.params.get("output") or ""))
        option: Any = next(p for p in self.params if p.name == "output_format")
        for suffix, name in FORMATS_OF_SUFFIXES:
            if output.name.lower().endswith(suffix) and name in option.type.choices:
                ctx.params["output_format"] = name
                return
        if output.suffix and not is_chosen:
            raise ConfigError(
                f"fragdoctor {self.name} writes no {output.suffix} files.",
                hint="Name the file .html, .json or .md, or choose with --format: "
                f"{', '.join(option.type.choices)}.",
            )


def _heading(option: Any) -> str:
    """Return what an option stands under in the help; typer's own ``--help`` does not say."""
    if "--help" in option.opts:
        return GENERAL
    return getattr(option, "rich_help_panel", None) or HEADINGS[0]


@frozen
class Command:
    """A command.

    Attributes:
        name: its verb, and that of its module in ``fragdoctor.cli``.
        text: its line of help.
        examples: two.
        note: what follows them.
        settings: of the context in which it is parsed.
    """

    name: str
    text: str
    examples: Sequence[str]
    note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def add_to(self, app: typer.Typer) -> None:
        """Load the command and add it: the function of its module that has its name.

        It takes a class of options, or ``command`` stands for it.
        """
        name = self.name.replace("-", "_")
        module = import_module(f"fragdoctor.cli.{name}")
        call: Callable[..., int] = vars(module).get("command") or command_of(vars(module)[name])
        lines = "\n".join(f"  {line}" for line in self.examples)
        app.command(
            self.name,
            cls=_Command,
            help=self.text,
            epilog=f"\b\nExamples:\n{lines}{self.note}",
            context_settings=dict(self.settings),
        )(call)


def group_of(names: Collection[str]) -> Any:
    """Return the command ``fragdoctor`` with some of its commands; no others are loaded."""
    app = typer.Typer(
        name="fragdoctor",
        cls=_Group,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    for command in COMMANDS:
        if command.name in names:
            command.add_to(app)
    app.callback()(_root)
    return typer.main.get_command(app)


def whole_group() -> Any:
    """Return the command ``fragdoctor`` with all of its commands."""
    return group_of([command.name for command in COMMANDS])


def _root() -> None:
    """Keep commands under one name even when there is only one."""


COMMANDS: Final = (
    Command(
        "analyze",
        "Diagnose a memory snapshot, message, statistics or log, of one rank or of many",
        [
            "fragdoctor analyze snapshot.pickle oom.txt --at step:3",
            "fragdoctor analyze job/ --workers 8 --format html -o job.html",
        ],
    ),
    Command(
        "run",
        "Run a program under the recorder and diagnose what it leaves",
        [
            "fragdoctor run train.py --epochs 3",
            "fragdoctor run -o bundles --zip -- torchrun --nproc-per-node 8 train.py",
        ],
        "\n\n\b\nThe report goes to standard error; output and exit code stay the program's.\n"
        "A program that succeeds with nothing to record (no torch, no CUDA) ends in 2.",
        settings={"allow_interspersed_args": False},
    ),
    Command(
        "attach",
        "Diagnose a program while it runs, and let it go on",
        [
            "fragdoctor attach 4711",
            "fragdoctor attach 4711 --wait 10 --format html -o now.html",
        ],
        "\n\n\b\nThe program runs under fragdoctor run, or both in Python 3.14. Linux only.",
    ),
    Command(
        "rehearse",
        "Run a program without a GPU and say what its memory would do",
        [
            "fragdoctor rehearse train.py --gpu h100 -- --epochs 1 --batch-size 32",
            "fragdoctor rehearse -m train --gpu 24GiB --batch 1..512 -- --batch {batch}",
        ],
        "\n\n\b\nThe program needs PyTorch 2.6 or newer, no GPU; what it computes is made up.\n"
        "Exit code 0: it fits; 1: it runs out of memory; 2: it cannot be rehearsed.",
    ),
    Command(
        "oom",
        "Diagnose a pasted out-of-memory message or a whole log",
        [
            "fragdoctor oom train.log",
            "python train.py 2>&1 | fragdoctor oom -",
        ],
    ),
    Command(
        "check",
        "Fail in CI where memory got worse or breaks a budget",
        [
            "fragdoctor check snapshots/ --max-peak 70GiB --max-stranded 5%",
            "fragdoctor check snapshots/ --baseline memory.json --report sarif=out.sarif",
        ],
    ),
    Command(
        "init-ci",
        "Write a workflow that rehearses each change without a GPU",
        [
            "fragdoctor init-ci train.py --fits-on 24GiB -- --epochs 1",
            "fragdoctor init-ci -m package.train --gitlab --gpu-runner gpu",
        ],
    ),
    Command(
        "simulate",
        "Replay a snapshot's trace under other settings and capacities",
        [
            'fragdoctor simulate snapshot.pickle --conf "expandable_segments:True"',
            "fragdoctor simulate snapshot.pickle --sweep --capacity 1.2x --format json",
        ],
    ),
    Command(
        "view",
        "Explore a snapshot in the browser, with what-ifs replayed live",
        [
            "fragdoctor view snapshot.pickle",
            "fragdoctor view snapshot.pickle oom.txt --no-browser --port 8000",
        ],
    ),
    Command(
        "compare",
        "Say what changed between two runs, or how several grow",
        [
            "fragdoctor compare before.pickle after.pickle --fail-on-growth 2%",
            "fragdoctor compare step*.pickle --steps 100,200,300 --capacity 24GiB",
        ],
    ),
    Command(
        "estimate",
        "Say before a run whether it fits, and what would make it fit",
        [
            "fragdoctor estimate llama-3.1-8b --gpu rtx-4090 --lora 16 --dtype bf16",
            "fragdoctor estimate qlora.yml --gpu rtx-4090",
        ],
    ),
    Command(
        "pack",
        "Say how many processes share a GPU",
        [
            "fragdoctor pack --per-process 6GB --gpu 24GiB",
            "fragdoctor pack snapshot.pickle --gpu a100-80g --processes 4",
        ],
    ),
    Command(
        "export",
        "Write a snapshot as tables, a trace, stacks, or redacted",
        [
            "fragdoctor export snapshot.pickle --format trace -o trace.json",
            "fragdoctor export run.pickle --format snapshot --redact -o shared.pickle",
        ],
    ),
    Command(
        "mcp",
        "Serve the doctor as tools of a coding agent (Model Context Protocol)",
        [
            "fragdoctor mcp --root .",
            "fragdoctor mcp --redact --allow-rehearse",
        ],
    ),
    Command(
        "explain",
        "Explain a rule or a word such as stranded, or list them all",
        [
            "fragdoctor explain stranded",
            "fragdoctor explain FD101",
        ],
    ),
)
