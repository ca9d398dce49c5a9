"""What ``fragdoctor --help`` prints: written by hand, and shown without loading any library.

``tests/cli/test_front_page.py`` holds it to the commands and options that exist.
"""

from __future__ import annotations

from typing import Final

FRONT_PAGE: Final = """\
Usage: fragdoctor COMMAND [ARGS]...  or  fragdoctor FILE...

  Say why a PyTorch program ran out of GPU memory, and what will help

Commands:
  analyze    Diagnose a memory snapshot, message, statistics or log
  run        Run a program under the recorder and diagnose what it leaves
  attach     Diagnose a program while it runs, and let it go on
  rehearse   Run a program without a GPU and say what its memory would do
  oom        Diagnose a pasted out-of-memory message or a whole log
  check      Fail in CI where memory got worse or breaks a budget
  init-ci    Write a workflow that rehearses each change without a GPU
  simulate   Replay a snapshot's trace under other settings and capacities
  view       Explore a snapshot in the browser, with what-ifs replayed live
  compare    Say what changed between two runs, or how several grow
  estimate   Say before a run whether it fits, and what would make it fit
  pack       Say how many processes share a GPU
  export     Write a snapshot as tables, a trace, stacks, or redacted
  mcp        Serve the doctor as tools of a coding agent
  explain    Explain a rule or a word such as stranded, or list them all

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
