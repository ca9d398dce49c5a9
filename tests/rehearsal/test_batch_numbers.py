"""The number that makes a batch is found by what it does, and divided where it stands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rehearsal_stage import PREPARED, Stage

from fragdoctor.model.rehearsal import Rehearsal
from fragdoctor.rehearsal import runner
from fragdoctor.rehearsal.divided_numbers import divided
from fragdoctor.rehearsal.prescription.batch_numbers import BatchNumber, batch_numbers, of_rows
from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
from fragdoctor.rehearsal.programs import Program

pytest.importorskip("torch")  # the programs are rehearsed with it

BATCH_OF = """
import sys
import torch
from torch import nn
class Size:
    width = 256
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def trained(rows=2048):
    x = torch.randn(rows, 256, device="cuda")
    return model(x).square().mean()
"""
LOOP = """
for step in range(40):
    trained().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ACCUMULATED = """
for i in range(40):
    (trained() / 2).backward()
    if (i + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def program(path: Path, *args: str) -> Program:
    return Program(str(path), is_module=False, args=args, pythons=[sys.executable])


def rehearsed(
    path: Path, *treatments: str, args: tuple[str, ...] = (), observes: bool = False
) -> Rehearsal:
    unlimited = rehearsed_gpu("h100", None, is_unlimited=True)
    conditions = RehearsalConditions(gpu=unlimited, treatments=treatments, observes=observes)
    snapshot = path.with_name("s.pickle")
    return runner.rehearse(program(path, *args), conditions, snapshot, None, PREPARED)


def test_a_number_is_divided_in_the_program_and_in_its_arguments(tmp_path: Path) -> None:
    written, given = tmp_path / "written.py", tmp_path / "given.py"
    written.write_text(BATCH_OF + LOOP)
    given.write_text(BATCH_OF + LOOP.replace("trained()", "trained(int(sys.argv[1]))"))
    by_hand = tmp_path / "by_hand.py"
    by_hand.write_text(BATCH_OF.replace("2048", "1024") + ACCUMULATED)
    row = (BATCH_OF + LOOP).split("\n").index("def trained(rows=2048):") + 1
    expected = rehearsed(by_hand).peak_allocated_bytes

    in_source = rehearsed(written, "accumulate:2:", f"batch-number:2:{row}.17")
    in_arguments = rehearsed(given, "accumulate:2:", "batch-number:2:@0", args=("2048",))

    assert in_source.peak_allocated_bytes == expected
    assert in_arguments.peak_allocated_bytes == expected
    assert rehearsed(written).peak_allocated_bytes > expected


@pytest.mark.parametrize(
    ("file", "text", "read"),
    [
        ("sizes.py", "rows = 2048\n", "from sizes import rows"),
        (
            "sizes.yaml",
            "train:\n  rows: 2048  # a step\n",
            "rows = int(open(__file__[:-8] + 'sizes.yaml').read().split()[2])",
        ),
    ],
)
def test_a_number_is_divided_in_a_file_that_the_program_reads(
    file: str, text: str, read: str, tmp_path: Path
) -> None:
    sizes, path, by_hand = (tmp_path / name for name in (file, "train.py", "by_hand.py"))
    sizes.write_text(text)
    path.write_text(BATCH_OF.replace("def trained(rows=2048)", f"{read}\ndef trained()") + LOOP)
    by_hand.write_text(BATCH_OF.replace("2048", "1024") + ACCUMULATED)

    number = batch_numbers(program(path), [[2048]], [str(sizes)])[0]
    found = rehearsed(path, "accumulate:2:", number.spec(2), observes=True)

    line = text.split("\n")[-2].strip().replace("2048", "1024")
    assert number.lines(2) == [f"{line}  # {file}:{text.count(chr(10))}"]
    assert found.peak_allocated_bytes == rehearsed(by_hand).peak_allocated_bytes
    assert str(sizes) in found.traits["files"]
    assert sizes.read_text() == text


def test_what_is_called_a_batch_comes_first_and_then_what_is_as_large(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "width, rows = 64, 32\nTRAIN_BATCH = 8\n"
        "def f(n, depth=32): x = randn(32, 5), zeros(32)\n"
        "parser.add_argument('--epochs', default=7)\nmask = 0x20\n"
    )

    found = batch_numbers(program(path, "--size", "32"), [[32]])

    assert [(one.name, one.value) for one in found] == [
        ("TRAIN_BATCH", 8), ("--size", 32), ("rows", 32),
    ]  # fmt: skip
    assert found[0].lines(2) == ["TRAIN_BATCH = 4  # line 2"]
    assert found[1].lines(4) == ["--size 8  # in the arguments"]
    alike = batch_numbers(program(path), [[32]])
    assert [one.places for one in alike] == [("2.14",), ("1.18",), ("3.15",)]


def test_numbers_of_a_loop_are_not_those_of_the_model_before_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("net = Linear(64, 64)\nwhile True:\n    x = randn(64, 5), zeros(64)\n")

    found = [one.places for one in batch_numbers(program(path), [[64]])]

    assert ("3.14", "3.28") in found
    assert ("1.13", "1.17") in found


def test_other_files_are_searched_if_they_are_beside_the_program_and_small(tmp_path: Path) -> None:
    path, data, far = tmp_path / "a/train.py", tmp_path / "a/data.json", tmp_path / "far.json"
    path.parent.mkdir()
    path.write_text("")
    setting = '{\n  "batch": 64\n}\n'
    far.write_text(setting)
    data.write_text(setting)
    files = [str(data), str(far), str(path.with_name("gone.yaml"))]

    (found,) = batch_numbers(program(path), [[64]], files)

    assert (found.name, found.value, found.file) == ("batch", 64, str(data))
    assert found.lines(2) == ['"batch": 32  # data.json:2']
    data.write_text(setting + " " * 2**20)
    assert not batch_numbers(program(path), [[64]], files)


def test_equal_numbers_of_one_function_are_one(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("a = f(6)\ndef g():\n    é = 'ä', randn(32, 5), zeros((32,))\n    h(b=2)\n")

    found, *_ = batch_numbers(program(path), [[32]])

    assert found.lines(2) == ["é = 'ä', randn(16, 5), zeros((16,))  # line 3"]


CHOSEN = """
import torch
from torch import nn
model = nn.Linear(512, 4096).cuda().eval()
shape = (16, 512)
with torch.no_grad():
    for turn in range(9):
        n = [64, 1, 256][turn % 3]
        model(torch.randn(n, 512, device="cuda"))
"""


def test_numbers_of_a_list_are_divided_together(tmp_path: Path) -> None:
    path, by_hand = tmp_path / "serve.py", tmp_path / "by_hand.py"
    path.write_text(CHOSEN)
    by_hand.write_text(CHOSEN.replace("[64, 1, 256]", "[16, 1, 64]"))
    traits = rehearsed(path, observes=True).traits

    number = batch_numbers(program(path), traits["rows"])[0]
    part = rehearsed(path, number.spec(4), observes=True)
    found = of_rows(number, 4, traits, part.traits)

    assert traits["rows"][0] == [1, 64, 256]
    assert found is not None
    assert (found.size, found.is_count, found.axis) == (256, False, 0)
    assert found.lines(4) == ["n = [16, 1, 64][turn % 3]  # line 8"]
    assert part.peak_allocated_bytes == rehearsed(by_hand).peak_allocated_bytes
    # One of a shape is a number of rows by chance.
    assert all(one.values != (16, 512) for one in batch_numbers(program(path), [[16]]))


@pytest.mark.parametrize("text", [b"x = (", b"\xff\xfe", b"x = 32\0", b"(" * 5000])
def test_what_is_no_program_has_no_numbers(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(text)

    assert batch_numbers(program(path), [[32]]) == []
    assert batch_numbers(program(tmp_path / "none.py"), [[32]]) == []


def test_only_a_number_that_still_stands_there_is_divided() -> None:
    assert divided(b"a = 64\nb = 6_4, 64", 4, ["2.4", "2.9", "1.0"]) == b"a = 64\nb = 16, 16"


COUNTED = (
    BATCH_OF
    + """
x = torch.randn(4096, 256, device="cuda")
n_batches = 2
for step in range(20):
    for part in x.chunk(n_batches):
        model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)
COUNTED_TWICE = COUNTED.replace("n_batches = 2", "n_batches = 4").replace(
    "for part in x.chunk(n_batches):", "for i, part in enumerate(x.chunk(n_batches)):"
)


def test_number_of_batches_is_multiplied(tmp_path: Path) -> None:
    path, by_hand = tmp_path / "train.py", tmp_path / "by_hand.py"
    path.write_text(COUNTED)
    by_hand.write_text(
        COUNTED_TWICE.replace("optimizer.s", "i % 2 and optimizer.s").replace(
            "optimizer.z", "i % 2 and optimizer.z"
        )
    )
    traits = rehearsed(path, observes=True).traits

    number = next(one for one in batch_numbers(program(path), traits["rows"]) if one.value == 2)
    whole = rehearsed(path, "accumulate:2:", number.spec(2), observes=True)
    found = of_rows(number, 2, traits, whole.traits)

    assert traits["rows"] == [[2048], [256]]
    assert found is not None
    assert (found.size, found.is_count, found.axis) == (2048, True, 0)
    assert found.lines(4) == ["n_batches = 8  # line 14"]
    treated = rehearsed(path, "accumulate:2:", found.spec(2))
    assert treated.peak_allocated_bytes == rehearsed(by_hand).peak_allocated_bytes


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ([[32, 2], [64]], [[32, 2], [16]], (64, False, 1)),
        ([[32], [64]], [[8, 32], [64]], (32, False, 0)),
        ([[192, 640], [9]], [[48, 160], [9]], (64, False, 0)),
        ([[32], [64]], [[8, 30], [64]], None),
        ([[32], [64]], [[128], [64]], (32, True, 0)),
        ([[32], [64]], [[32], [64]], None),
    ],
)
def test_rows_are_along_the_dimension_that_a_number_divides(
    before: list[list[int]], after: list[list[int]], found: tuple[int, bool, int] | None
) -> None:
    whole, part = ({"n_parameters": 1, "rows": rows} for rows in (before, after))

    one = of_rows(BatchNumber("n", (64,), ("1.0",)), 4, whole, part)

    assert (one and (one.size, one.is_count, one.axis)) == found


SEQUENCE_FIRST = """
import torch
from torch import nn
length, columns = 40, int("64")
size, width = 64, 256
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRUCell(width, 256), nn.Linear(256, 2048)
    def forward(self, x):
        h, made = x.new_zeros(x.shape[1], 256), []
        for one in x:
            h = self.rnn(one, h)
            made.append(h)
        return self.out(torch.stack(made))
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(length, size, width, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_rows_after_the_steps_of_a_sequence_are_a_batch(stage: Stage) -> None:
    stage.script(SEQUENCE_FIRST)

    done = stage.run("--cure", "--fits-on", "110MiB", "--format", "json", "train.py")

    found = json.loads(done.stdout)
    split = [one for one in found["tried"] if one["treatments"][0]["code"] == "accumulate"]
    assert split[0]["fits"]
    assert split[0]["treatments"][0]["title"].startswith("batch ")
    assert split[0]["numerics"] == "exact"
    lines = split[0]["treatments"][0]["lines"]
    assert any(line.startswith("size, width = ") and "# line 5" in line for line in lines)


def test_batch_that_the_program_makes_is_accumulated(stage: Stage) -> None:
    stage.script(BATCH_OF.replace("2048", "16384").replace("= 256", "= 16384") + LOOP)

    done = stage.run("--cure", "--fits-on", "200MiB", "--format", "json", "train.py")

    found = json.loads(done.stdout)
    split = [one for one in found["tried"] if one["treatments"][0]["code"] == "accumulate"]
    assert [one["treatments"][0]["title"] for one in split] == [
        "batch 4096 x 4 accumulated", "batch 8192 x 2 accumulated",
    ]  # fmt: skip
    assert [one["fits"] for one in split] == [True, False]
    assert split[0]["numerics"] == "exact"
    # The width of the class is as large, comes first, and changes no rows.
    assert "def trained(rows=4096):  # line 9" in split[0]["treatments"][0]["lines"]


SERVING = """
import torch
from torch import nn
MAX_BATCH = 64
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2))).cuda().eval()
waiting = [[0.5] * 1024 for _ in range(6 * 64)]
with torch.inference_mode():
    while waiting:
        batch, waiting = waiting[:MAX_BATCH], waiting[MAX_BATCH:]
        x = torch.tensor(batch, device="cuda")
        answers = model(x[:, None].expand(-1, 256, -1)).cpu()
"""


def test_batch_of_a_program_that_does_not_train_is_made_smaller(stage: Stage) -> None:
    stage.script(SERVING)

    done = stage.run("--cure", "--fits-on", "150MiB", "--format", "json", "train.py")
    found = json.loads(done.stdout)

    assert found["tried"][0]["fits"]
    one = found["tried"][0]["treatments"][0]
    assert one["title"] == "batches of 32 where nothing is trained"
    assert one["lines"] == ["MAX_BATCH = 32  # line 4"]
    assert one["numerics"] == "exact"


KEPT = """
import torch
from torch import nn
batch_size = 1024
model = nn.Linear(256, 4096).cuda().eval()
kept = []
with torch.no_grad():
    for step in range(8):
        kept.append(model(torch.randn(batch_size, 256, device="cuda")))
"""


def test_results_that_are_kept_are_not_said_to_shrink_with_the_batch(stage: Stage) -> None:
    """A loop of as many rounds would compute less."""
    stage.script(KEPT)

    done = stage.run("--cure", "--fits-on", "90MiB", "--format", "json", "train.py")
    found = json.loads(done.stdout)

    assert [found["tried"][0]["fits"], found["needs_bytes"] > 90 * 2**20] == [True, True]
    codes = [part["code"] for one in found["tried"] for part in one["treatments"]]
    assert codes[0] == "held-on-host"
    assert "evaluation-batch" not in codes
