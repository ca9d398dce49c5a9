"""The line that asked, from the traceback above a message."""

from __future__ import annotations

from pathlib import Path

import pytest
from oom_snapshots import full

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.messages import find_messages
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import BundleFacts, Case
from fragdoctor.model.finding import Location
from fragdoctor.report.base import RenderOptions, render

SAMPLES = Path(__file__).parents[2] / "sample_snapshots"
TRUTH = Path(__file__).parents[1] / "truth"

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 498.00 MiB. GPU 0 has a total "
    "capacity of 3.90 GiB of which 488.00 MiB is free. Process 7 has 3.40 GiB memory in use. Of "
    "the allocated memory 2.67 GiB is allocated by PyTorch, and 673.42 MiB is reserved by PyTorch "
    "but unallocated."
)
PYTHON = f"""\
Traceback (most recent call last):
  File "/app/train.py", line 9, in <module>
    main()
  File "/app/train.py", line 5, in main
    loss = model(x)
           ^^^^^^^^
  File "/opt/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{MESSAGE}
"""
IPYTHON = f"""\
---------------------------------------------------------------------------
OutOfMemoryError                          Traceback (most recent call last)
Cell In[7], line 3
      1 model = Net().cuda()
      2 for x in loader:
----> 3     loss = model(x)

File ~/venv/lib/python3.11/site-packages/torch/nn/modules/module.py:1553, in Module._call(self, *args)
   1552 else:
-> 1553     return self._call_impl(*args, **kwargs)

{MESSAGE.removeprefix("torch.")}
"""  # noqa: E501 - as it is printed
OLDER = """\
Traceback (most recent call last):
  File "/app/other.py", line 1, in load
    raise KeyError("x")
KeyError: 'x'

During handling of the above exception, another exception occurred:

"""


@pytest.mark.parametrize(
    "text",
    [
        PYTHON,
        f"{OLDER}{PYTHON}",
        PYTHON.replace("\n", "\r\n"),
        "".join(f"[rank0]: {line}\n" for line in PYTHON.splitlines()),
        f"ERROR - {MESSAGE}\nmore\n{PYTHON}",
    ],
    ids=["plain", "after-another", "windows", "ranks", "repeated"],
)
def test_report_names_the_line_that_asked_and_quotes_it(text):
    told = diagnose(Case(oom=find_messages(text)))

    assert told.failure.location == Location("/app/train.py", 5, "main")
    said = render("analyze", "text", told, RenderOptions(120)).splitlines()
    assert said[0] == (
        "Out of memory on GPU 0 at train.py:5 in main: 498.00 MiB requested, 488.00 MiB free."
    )
    assert said[1] == "  5 | loss = model(x)"


def test_failure_of_a_segment_says_so_where_the_request_itself_would_have_fitted():
    told = diagnose(Case(snapshot=read_snapshot(SAMPLES / "leak_oom.pickle.gz")))
    page = render("analyze", "html", told, RenderOptions(120))

    assert (told.failure.requested_bytes, told.failure.segment_bytes) == (2 << 20, 20 << 20)
    said = render("analyze", "text", told, RenderOptions(120)).splitlines()[0]
    assert said.endswith("2.00 MiB requested (a segment of 20.00 MiB), 10.00 MiB free.")
    assert '<dt>missing</dt><dd>10.00 MiB</dd><dd class="from">of a segment of 20.00 MiB' in page


def test_cell_of_a_notebook_is_the_line_that_asked():
    told = diagnose(Case(oom=find_messages(IPYTHON)))

    assert told.failure.location == Location("Cell In[7]", 3, "")
    assert told.failure.source_text == "loss = model(x)"


def test_source_at_hand_is_quoted_where_it_is_mapped(tmp_path):
    (tmp_path / "src").mkdir()
    body = "\n" * 3 + "def main():\n    loss = model(x)  # here\n"
    (tmp_path / "src" / "train.py").write_text(body)
    told = diagnose(Case(oom=find_messages(PYTHON)))
    here = RenderOptions(120, source_root=str(tmp_path), path_map=(("/app", "src"),))

    for form in ("text", "markdown", "html"):
        assert "loss = model(x)  # here" in render("analyze", form, told, here), form
    assert "# here" not in render("analyze", "text", told, RenderOptions(120))

    (tmp_path / "src" / "train.py").write_text(body.replace("loss = model(x)", "print()"))

    assert "loss = model(x)" in render("analyze", "text", told, here)  # as it was when it failed


def test_library_that_fails_without_figures_is_not_said_to_be_out_of_memory():
    text = PYTHON.replace(MESSAGE, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED")

    told = diagnose(Case(oom=find_messages(text)))

    first = render("analyze", "text", told, RenderOptions(120)).splitlines()[0]
    assert first == "Failed at train.py:5 in main."


def test_device_beside_that_of_the_verdict_has_no_bar_on_the_first_screen():
    told = diagnose(Case(snapshot=read_snapshot(SAMPLES / "two_devices_oom.pickle")))

    said = render("analyze", "text", told, RenderOptions(100))

    assert len([line for line in said.splitlines() if line.startswith("Memory  GPU")]) == 1


def test_line_that_asked_is_that_of_the_exception_where_the_event_has_no_stack():
    inner = Location("/site-packages/torch/autograd/graph.py", 882, "_engine_run_backward")
    lines = inner, Location("/app/pinn.py", 14, "residual"), Location("/app/pinn.py", 20, "main")

    def asked(**more):
        bundle = BundleFacts("oom", oom_device=0, traceback=lines)
        return diagnose(Case(snapshot=full(**more), bundle=bundle)).failure.location

    assert asked(frames=[]) == lines[1]
    assert asked().basename == "train.py"


@pytest.mark.parametrize(
    ("recording", "line", "forward_line"),
    [
        ("bert_mlm_accum@60", "bert_mlm_accum.py:49", "bert_mlm_accum.py:48"),
        ("lstm_tbptt@60", "lstm_tbptt.py:40", "lstm_tbptt.py:39"),
        ("wgan_gp@75", "wgan_gp.py:37", ""),
    ],
    ids=["nothing freed yet", "nothing freed yet, after another pass", "keeps its graph"],
)
def test_failure_in_a_backward_pass_is_where_the_program_calls_it(recording, line, forward_line):
    failure = diagnose(Case(snapshot=read_snapshot(TRUTH / f"{recording}.pickle.gz"))).failure

    assert failure is not None
    assert failure.location is not None
    assert f"{failure.location.basename}:{failure.location.line}" == line
    near = failure.backward_of
    assert ("" if near is None else f"{near.basename}:{near.line}") == forward_line
