"""The texts of the commands: their names, lines of help, and examples.

``fragdoctor --help`` prints them without loading any library.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Command(NamedTuple):
    """A command.

    Attributes:
        name: its name, which its module in ``fragdoctor.cli`` shares.
        text: its line of help; the front page leaves out the part in brackets.
        example: how it is mostly used.
        other_example: how else.
        note: the text after the examples.
        may_mix_options: whether options may come after arguments.
    """

    name: str
    text: str
    example: str
    other_example: str
    note: str = ""
    may_mix_options: bool = True


COMMANDS: Final = (
    Command(
        "analyze",
        "Diagnose a memory snapshot, message, statistics or log (of one rank or of many)",
        "fragdoctor analyze snapshot.pickle oom.txt --at step:3",
        "fragdoctor analyze job/ --workers 8 --format html -o job.html",
    ),
    Command(
        "run",
        "Run a program under the recorder and diagnose what it leaves",
        "fragdoctor run train.py --epochs 3",
        "fragdoctor run -o bundles --zip -- torchrun --nproc-per-node 8 train.py",
        "\n\n\b\nThe report goes to standard error; output and exit code stay the program's.\n"
        "A successful program with nothing to record (no torch, no CUDA) exits with 2.",
        may_mix_options=False,
    ),
    Command(
        "attach",
        "Diagnose a program while it runs, and let it keep running",
        "fragdoctor attach 4711",
        "fragdoctor attach 4711 --wait 10 --format html -o now.html",
        "\n\n\b\nThe program runs under fragdoctor run, or both in Python 3.14. Linux only.",
    ),
    Command(
        "rehearse",
        "Run a program without a GPU and say what its memory would do",
        "fragdoctor rehearse train.py --gpu h100 -- --epochs 1 --batch-size 32",
        "fragdoctor rehearse -m train --gpu 24GiB --batch 1..512 -- --batch {batch}",
        "\n\n\b\nThe program needs PyTorch 2.6 or newer, no GPU; what it computes is made up.\n"
        "Exit code 0: it fits; 1: it runs out of memory; 2: it cannot be rehearsed.",
    ),
    Command(
        "oom",
        "Diagnose a pasted out-of-memory message or a whole log",
        "fragdoctor oom train.log",
        "python train.py 2>&1 | fragdoctor oom -",
    ),
    Command(
        "check",
        "Fail in CI where memory got worse or breaks a budget",
        "fragdoctor check snapshots/ --max-peak 70GiB --max-stranded 5%",
        "fragdoctor check snapshots/ --baseline memory.json --report sarif=out.sarif",
    ),
    Command(
        "init-ci",
        "Write a workflow that rehearses each change without a GPU",
        "fragdoctor init-ci train.py --fits-on 24GiB -- --epochs 1",
        "fragdoctor init-ci -m package.train --gitlab --gpu-runner gpu",
    ),
    Command(
        "simulate",
        "Replay a snapshot's trace under other settings and capacities",
        'fragdoctor simulate snapshot.pickle --conf "expandable_segments:True"',
        "fragdoctor simulate snapshot.pickle --sweep --capacity 1.2x --format json",
    ),
    Command(
        "view",
        "Explore a snapshot in the browser, with what-ifs replayed live",
        "fragdoctor view snapshot.pickle",
        "fragdoctor view snapshot.pickle oom.txt --no-browser --port 8000",
    ),
    Command(
        "compare",
        "Say what changed between two runs, or how several grow",
        "fragdoctor compare before.pickle after.pickle --fail-on-growth 2%",
        "fragdoctor compare step*.pickle --steps 100,200,300 --capacity 24GiB",
    ),
    Command(
        "estimate",
        "Say before a run whether it fits, and what would make it fit",
        "fragdoctor estimate llama-3.1-8b --gpu rtx-4090 --lora 16 --dtype bf16",
        "fragdoctor estimate qlora.yml --gpu rtx-4090",
    ),
    Command(
        "pack",
        "Say how many processes share a GPU",
        "fragdoctor pack --per-process 6GB --gpu 24GiB",
        "fragdoctor pack snapshot.pickle --gpu a100-80g --processes 4",
    ),
    Command(
        "export",
        "Write a snapshot as tables, a trace, stacks, or redacted",
        "fragdoctor export snapshot.pickle --format trace -o trace.json",
        "fragdoctor export run.pickle --format snapshot --redact -o shared.pickle",
    ),
    Command(
        "mcp",
        "Serve fragdoctor as tools for a coding agent (Model Context Protocol)",
        "fragdoctor mcp --root .",
        "fragdoctor mcp --redact --allow-rehearse",
    ),
    Command(
        "explain",
        "Explain a rule or a word such as stranded, or list them all",
        "fragdoctor explain stranded",
        "fragdoctor explain FD101",
    ),
)

_LISTED: Final = "\n".join(f"  {c.name:<10} {c.text.partition(' (')[0]}" for c in COMMANDS)

FRONT_PAGE: Final = f"""\
Usage: fragdoctor COMMAND [ARGS]...  or  fragdoctor FILE...

  Say why a PyTorch program ran out of GPU memory, and what will help

Commands:
{_LISTED}

Options:
  --version  Print the version
  -h, --help Show this message
  --install-completion  Complete commands and options with Tab in this shell

Examples:
  fragdoctor run train.py --epochs 3
  fragdoctor snapshot.pickle
  python train.py 2>&1 | fragdoctor oom -

Exit codes:
  0 done   1 findings at or above --fail-on   2 usage or unreadable input
  3 input refused as hostile or over a limit   70 internal error
  130 interrupted   141 the reader of the output went away

More about a command: fragdoctor COMMAND --help
"""
