"""Write the documentation's gallery of failures, from recordings in ``sample_snapshots``.

    python tools/gallery.py         # writes docs/gallery/

The recordings are diagnosed, so the pages show what fragdoctor says; a test keeps them up to date.
``mkdocs build`` adds an interactive page for each recording (``tools/docs_pages.py``).
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from fragdoctor.api import diagnose_fleet
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.cases import read_case
from fragdoctor.model.case import Overrides
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, render
from fragdoctor.report.views.advice import brief_cure, command
from fragdoctor.report.views.job import advice_of, title
from fragdoctor.report.words import verdict_name
from fragdoctor.units import format_size

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "docs" / "gallery"
SAMPLES: Final = "sample_snapshots"
_SHOWN: Final = RenderOptions(width=80)


class Kind(NamedTuple):
    """A kind of failure.

    Attributes:
        name: name of the kind's page.
        title: the failure in the words of someone who runs into it.
        program: what the recorded program does, in one sentence.
        files: the recording and the files that go with it; a folder holds the ranks of a job.
        cured: a recording of the same program after the cure, or "" if there is none.
    """

    name: str
    title: str
    program: str
    files: tuple[str, ...]
    cured: str = ""


KINDS: Final = (
    Kind(
        "fragmentation",
        "There is enough free, in the wrong pieces",
        "A small GPT is trained with a new sequence length in each step.",
        ("fragmentation_oom.pickle", "fragmentation_oom.txt"),
        cured="fragmentation_cured.pickle.gz",
    ),
    Kind(
        "small-holes",
        "Many small holes, one large tensor",
        "Of 100 tensors of 4 MiB every other one is freed; then one of 100 MiB is wanted.",
        ("small_holes_oom.pickle",),
    ),
    Kind(
        "batch-too-large",
        "The batch is too large",
        "A model is given a batch that its GPU cannot hold, whatever the settings.",
        ("capacity_oom.pickle", "capacity_oom.txt"),
    ),
    Kind(
        "first-optimizer-step",
        "It fails in the first optimizer step",
        "Forward and backward pass fit; then AdamW makes its state.",
        ("optimizer_state_oom.pickle",),
    ),
    Kind(
        "leak",
        "Memory grows from step to step",
        "A validation loop without `no_grad()` sums up losses, and keeps their graphs with them.",
        ("leak_oom.pickle.gz",),
    ),
    Kind(
        "memory-fraction",
        "Out of memory, and the GPU is nearly empty",
        "`torch.cuda.set_per_process_memory_fraction(0.2)` stands somewhere in the program.",
        ("memory_limit_oom.pickle", "memory_limit_oom.txt"),
    ),
    Kind(
        "other-process",
        "Somebody else is on the GPU",
        "Another process holds 6.35 GiB of the 8 GiB.",
        (
            "other_process_oom.pickle",
            "other_process_oom.txt",
            "other_process_oom.stats.json",
        ),
    ),
    Kind(
        "private-pool",
        "Free memory that only a private pool may use",
        "Half of a `MemPool` is free, and an ordinary tensor does not fit beside it.",
        ("private_pool_oom.pickle", "private_pool_oom.txt"),
    ),
    Kind(
        "kv-cache",
        "A KV cache that grows by torch.cat",
        "Each token copies the cache into one that is longer; the allocator retries 17 times.",
        ("kvcache_retries.pickle.gz",),
    ),
    Kind(
        "caught",
        "The error was caught, and it fails again",
        "Three out-of-memory errors are caught, and the work is tried again with a smaller size.",
        ("caught_ooms.pickle",),
    ),
    Kind(
        "one-of-two-gpus",
        "One of two GPUs is full",
        "GPU 1 is full while GPU 0 is nearly empty.",
        ("two_devices_oom.pickle",),
    ),
    Kind(
        "one-rank",
        "One rank of a job runs out",
        "Four ranks train; rank 2 is fed longer sequences than the others.",
        ("ranks",),
    ),
)


class Shown(NamedTuple):
    """A kind of failure with fragdoctor's diagnosis.

    Attributes:
        kind: the kind of failure.
        cause: the cause in a few words.
        cure: the first thing to try, a command or a sentence.
        text: the kind's page in the documentation, in Markdown.
        page: the kind's interactive page, in HTML.
    """

    kind: Kind
    cause: str
    cure: str
    text: str
    page: str


def gallery() -> Iterator[Shown]:
    """Yield each kind with its diagnosis."""
    with contextlib.chdir(ROOT):
        for kind in KINDS:
            inputs = [f"{SAMPLES}/{name}" for name in kind.files]
            yield _job(kind, inputs) if Path(inputs[0]).is_dir() else _run(kind, inputs)


def _run(kind: Kind, inputs: Sequence[str]) -> Shown:
    found = diagnose(read_case(inputs, Overrides()))
    codes = list(dict.fromkeys(f"`{f.code}`" for f in found.findings))
    return Shown(
        kind,
        verdict_name(found.verdict),
        brief_cure(found),
        "\n".join(
            [
                *_start(kind),
                *_message(inputs),
                *_report(render("analyze", "text", found, _SHOWN), inputs),
                f"The rules that found it: {', '.join(codes)}.",
                "",
                *_before_and_after(found, kind.cured),
                *_screen(kind),
            ]
        ),
        render("analyze", "html", found, _SHOWN),
    )


def _job(kind: Kind, inputs: Sequence[str]) -> Shown:
    found = diagnose_fleet(inputs)
    first, _ = advice_of(found)[0]
    text = render("fleet", "text", found, _SHOWN)
    return Shown(
        kind,
        title(found),
        command(first.setting) or first.title,
        "\n".join([*_start(kind), *_report(text, inputs), *_screen(kind)]),
        render("fleet", "html", found, _SHOWN),
    )


def _start(kind: Kind) -> list[str]:
    return [f"# {kind.title}", "", kind.program, ""]


def _message(inputs: Sequence[str]) -> list[str]:
    """Return PyTorch's message, if it is among the input files."""
    texts = [Path(name).read_text("utf-8").strip() for name in inputs if name.endswith(".txt")]
    wrapped = "\n".join(textwrap.wrap(texts[0], 80)) if texts else ""
    return ["## What PyTorch says", "", *_fenced(wrapped)] if texts else []


def _report(text: str, inputs: Sequence[str]) -> list[str]:
    line = f"    fragdoctor {' '.join(inputs)}"
    return ["## What fragdoctor says", "", line, "", *_fenced(text.strip("\n"))]


def _fenced(text: str) -> list[str]:
    return ["```text", *(escape.visible(line) for line in text.splitlines()), "```", ""]


def _before_and_after(found: Diagnosis, cured: str) -> list[str]:
    """Return a table of the recorded run and its cure, or nothing if the cure was not replayed."""
    cure = found.recommendations[0]
    if cure.predicted.method != "replay":
        return []
    before = next(f for f in found.devices if f.device == found.verdict.device)
    rows = [
        ("as recorded", "failed", before.peak_reserved_bytes, None),
        (f"replayed with the cure: {cure.title[0].lower()}{cure.title[1:]}",
         cure.predicted.promise.value, cure.predicted.peak_reserved_bytes,
         cure.predicted.margin_bytes),
    ]  # fmt: skip
    if cured:
        (after,) = diagnose(read_case([f"{SAMPLES}/{cured}"], Overrides())).devices
        ended = "failed" if after.ooms else "came to its end"
        rows.append((f"run again with it: {cured}", ended, after.peak_reserved_bytes, None))
    return [
        "## Before and after",
        "",
        "| | the run | reserved at most | to spare |",
        "| --- | --- | ---: | ---: |",
        *(f"| {escape.markdown(name)} | {said} | {_size(peak)} | {_size(spare)} |"
          for name, said, peak, spare in rows),
        "",
    ]  # fmt: skip


def _size(n_bytes: int | None) -> str:
    return "" if n_bytes is None else format_size(n_bytes)


def _screen(kind: Kind) -> list[str]:
    """Return the placeholder at which the site shows the interactive page."""
    return ["## The page", "", f"<!-- page: {kind.name} -->", ""]


def index(shown: Sequence[Shown]) -> str:
    """Return the page that lists all kinds."""
    rows = [f"| [{one.kind.title}]({one.kind.name}.md) | {one.cause} | {_cure(one.cure)} |"
            for one in shown]  # fmt: skip
    return "\n".join(
        [
            "# Gallery of failures",
            "",
            f"{len(shown)} kinds of failure and what fragdoctor says about each. The recordings",
            f"are in `{SAMPLES}`: allocator and messages are those of PyTorch 2.12.1, the device",
            "is simulated.",
            "",
            "| what happens | what it is | the first thing to try |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _cure(cure: str) -> str:
    return f"`{cure}`" if cure.startswith("export ") else escape.markdown(cure)


def texts(shown: Sequence[Shown]) -> dict[str, str]:
    """Return the files of ``docs/gallery`` by name."""
    return {"index.md": index(shown), **{f"{one.kind.name}.md": one.text for one in shown}}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in texts([*gallery()]).items():
        (FOLDER / name).write_text(text, encoding="utf-8")
