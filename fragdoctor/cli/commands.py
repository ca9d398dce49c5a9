"""The table of commands: what each is called, its one line of help, and its two examples."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from fragdoctor.cli.analyze import analyze
from fragdoctor.cli.check import check
from fragdoctor.cli.compare import compare
from fragdoctor.cli.estimate import estimate
from fragdoctor.cli.estimate_options import EstimateOptions, asked_of, older_parameters
from fragdoctor.cli.explain import explain
from fragdoctor.cli.export import export
from fragdoctor.cli.fit import FitOptions, fit
from fragdoctor.cli.front_page import FRONT_PAGE
from fragdoctor.cli.oom import oom
from fragdoctor.cli.pack import PackOptions, pack
from fragdoctor.cli.parameters import command_of, command_with, parameters_of
from fragdoctor.cli.rehearse import RehearseOptions, rehearse
from fragdoctor.cli.run import run
from fragdoctor.cli.simulate import simulate


class _Group(TyperGroup):
    """The command ``fragdoctor`` itself, whose help is the front page."""

    def get_help(self, ctx: Any) -> str:  # noqa: ARG002 - typer's signature
        """Return the front page."""
        return FRONT_PAGE.rstrip("\n")


app = typer.Typer(
    name="fragdoctor",
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _examples(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"\b\nExamples:\n{body}"


app.command(
    "analyze",
    help="Diagnose a memory snapshot, message, statistics or log, of one rank or of many",
    epilog=_examples(
        "fragdoctor analyze snapshot.pickle oom.txt --capacity 24GiB",
        "fragdoctor analyze job/ --workers 8 --format html -o job.html",
    ),
)(analyze)
app.command(
    "run",
    help="Run a program under the recorder and diagnose what it leaves",
    epilog=_examples(
        "fragdoctor run train.py --epochs 3",
        "fragdoctor run -o bundles --zip -- torchrun --nproc-per-node 8 train.py",
    )
    + "\n\n\b\nThe report goes to standard error; output and exit code stay the program's.\n"
    "Only a program that succeeds with nothing to record (no torch, no CUDA) ends in 2.",
    context_settings={"allow_interspersed_args": False},
)(run)
app.command(
    "rehearse",
    help="Run a program without a GPU and say what its memory would do",
    epilog=_examples(
        "fragdoctor rehearse train.py --gpu h100 -- --epochs 1 --batch-size 32",
        "fragdoctor rehearse -m package.train --fits-on 24GiB",
    )
    + "\n\n\b\nThe script needs PyTorch 2.6 or newer and no GPU; what it computes is made up.\n"
    "Exit code 0: it fits; 1: it runs out of memory; 2: it cannot be rehearsed.",
)(command_of(RehearseOptions, rehearse))
app.command(
    "oom",
    help="Diagnose a pasted out-of-memory message or a whole log",
    epilog=_examples(
        "fragdoctor oom train.log",
        "python train.py 2>&1 | fragdoctor oom -",
    ),
)(oom)
app.command(
    "check",
    help="Fail in CI where memory got worse or breaks a budget",
    epilog=_examples(
        "fragdoctor check snapshots/ --max-peak 70GiB --max-pinned 5%",
        "fragdoctor check snapshots/ --baseline memory.json --report sarif=out.sarif",
    ),
)(check)
app.command(
    "simulate",
    help="Replay a snapshot's trace under other settings and capacities",
    epilog=_examples(
        'fragdoctor simulate snapshot.pickle --conf "expandable_segments:True"',
        "fragdoctor simulate snapshot.pickle --sweep --capacity 24GiB --format json",
    ),
)(simulate)
app.command(
    "compare",
    help="Say what changed between two runs, or how several grow",
    epilog=_examples(
        "fragdoctor compare before.pickle after.pickle --fail-on-growth 2%",
        "fragdoctor compare step*.pickle --steps 100,200,300 --capacity 24GiB",
    ),
)(compare)
app.command(
    "estimate",
    help="Say before a run whether it fits, and what would make it fit",
    epilog=_examples(
        "fragdoctor estimate config.json --gpu a100-40g --batch 4 --seq 2048 --dtype bf16",
        "fragdoctor estimate --params 7B --gpu 24GiB --lora 16 --explain",
    ),
)(
    command_with(
        [*parameters_of(EstimateOptions), *older_parameters()],
        lambda **values: estimate(asked_of(**values)),
    )
)
app.command(
    "fit",
    help="Say from recordings at several batch sizes which batch fits",
    epilog=_examples(
        "fragdoctor fit batch2.pickle batch4.pickle batch8.pickle --gpu 24GiB",
        "fragdoctor fit a.pickle b.pickle --batches 16,32 --capacity 70GiB --explain",
    ),
)(command_of(FitOptions, fit))
app.command(
    "pack",
    help="Say how many processes share a GPU",
    epilog=_examples(
        "fragdoctor pack --per-process 6GB --gpu 24GiB",
        "fragdoctor pack snapshot.pickle --gpu a100-80g --processes 4",
    ),
)(command_of(PackOptions, pack))
app.command(
    "export",
    help="Write a snapshot as tables, a trace, stacks, or redacted",
    epilog=_examples(
        "fragdoctor export snapshot.pickle --format trace -o trace.json",
        "fragdoctor export snapshot.pickle --format snapshot --redact -o shared.pickle",
    ),
)(export)
app.command(
    "explain",
    help="List the rules, or explain one by its code",
    epilog=_examples("fragdoctor explain", "fragdoctor explain FD101"),
)(explain)


@app.callback()
def _root() -> None:
    """Keep commands under one name even when there is only one."""
