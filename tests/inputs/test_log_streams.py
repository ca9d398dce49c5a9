"""Prefixes, ranks, line numbers, and the cost of long texts."""

from __future__ import annotations

import time

import pytest

from fragdoctor.inputs.log_cleaning import plain_lines, rank_in, split_prefix
from fragdoctor.inputs.log_streams import LogStream, windows
from fragdoctor.inputs.messages import WORDINGS, find_messages
from fragdoctor.inputs.wordings.wording import Needles, needle_of

MESSAGE = (
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 158.00 MiB. GPU 1 has a"
    " total capacity of 23.69 GiB of which 115.69 MiB is free. Process 7 has 1.00 GiB memory in use"
)
LINE = "2024-06-01 10:22:17,413 INFO train.py:88] epoch 3 step 1234 loss 0.713 max mem 12345 MB\n"


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[rank3]: ", 3),
        ("[default7]:", 7),
        ("(VllmWorker rank=5 pid=1090) ", 5),
        ("[Rank 2] ", 2),
        ("[node0:4]: ", 4),
        ("[1,6]<stderr>:", 6),
        ("(RayTrainWorker pid=123, ip=10.0.0.1) ", None),
        ("2024-06-01 10:22:17 ERROR ", None),
        ("local_rank: 4 ", None),
    ],
)
def test_prefix_gives_its_rank(prefix, rank):
    assert rank_in(prefix) == rank


@pytest.mark.parametrize(
    "prefix",
    [
        "> ",
        "│ ",
        "[rank3]: ",
        "vllm-1  | ERROR 11-18 18:07:28 engine.py:366] ",
        "2024-06-01T10:22:17.41Z worker-0 stderr: ",
        "(VllmWorker rank=3 pid=1090) ERROR 06-05 06:18:13 [multiproc_executor.py:470] ",
        "Nov 21 17:18:41 node7 python[4242]: ",
        "[2026-02-24T20:21:58Z] (EngineCore_DP0 pid=6940) ",
    ],
)
def test_prefix_is_split_off(prefix):
    assert split_prefix(prefix + "already allocated; 1.00 GiB free")[1].startswith("already")


def test_escaped_and_marked_up_line_becomes_plain():
    assert plain_lines(r"a \"b\"\nc") == ['a "b"', "c"]
    assert plain_lines("<b>x</b> &gt;&gt; y\x1b[0m\x00") == ["x >> y"]
    assert plain_lines("File <module>") == ["File <module>"]


def test_stream_leads_back_to_lines_and_text():
    (window,) = windows("first line\n[rank2]: second\tline here\n", bool)
    (stream,) = window.streams()
    at = stream.squeezed.find("line", 9)

    assert isinstance(stream, LogStream)
    assert stream.line_at(at) == 2
    assert stream.rank_at(at) == 2
    assert stream.text(at, at + 8) == "line here"


@pytest.mark.slow
def test_long_log_gives_each_message_once_with_its_line():
    n = 9000
    text = LINE * n + MESSAGE + "\n" + LINE * n + (MESSAGE + "\n") * 3000 + LINE * 10

    log = find_messages(text)

    assert [m.line for m in log.messages] == [n + 1, *range(2 * n + 2, 2 * n + 3002)]
    assert {m.rank for m in log.messages} == {1}
    assert log.n_lines == 2 * n + 3011


def test_long_log_with_a_wrapped_message_gives_all_figures():
    words = MESSAGE.replace("[rank1]: ", "").split(" ")
    wrapped = "\n".join(" ".join(words[i : i + 4]) for i in range(0, len(words), 4))

    log = find_messages(LINE * 5000 + wrapped + "\n" + LINE * 5000)

    (message,) = log.messages
    assert (message.line, message.device_index) == (5001, 1)
    assert [p.pid for p in message.other_processes] == [7]


def seconds(text):
    start = time.process_time()
    find_messages(text)
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit",
    [
        "[",
        "<",
        "\\",
        "1",
        "> ",
        "\x1b[31;",
        "out of memory ",
        "(GPU 0; 1.00 GiB free; ",
        "raise ValueError('CUDA out of memory ",
        "Tried to allocate 1.00 GiB ",
        MESSAGE,
    ],
)
def test_pathological_line_takes_time_in_proportion_to_its_size(unit):
    small = seconds(unit * (75_000 // len(unit)))
    large = seconds(unit * (300_000 // len(unit)))

    assert large < 9 * small + 0.5
    assert small < 30  # what looks at the beginning of a text only may be slow there


def test_garbage_is_read_without_an_error():
    garbage = bytes(range(256)) * 2000

    log = find_messages((garbage + MESSAGE.encode("utf-16") + garbage).decode("utf-8", "replace"))

    assert log.n_lines > 1


def test_every_wording_is_looked_for():
    needles = Needles(wording.pattern for wording in WORDINGS)
    long = [needle for needle, _ in (needle_of(w.pattern) for w in WORDINGS) if len(needle) > 9]

    assert [text for text in long if not needles.may_be_in(f"x{text}y")] == []
    assert needles.may_be_in("exitedwithcode137")
    assert not needles.may_be_in("loss0.137offtheallocator")


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: cuFFT error: CUFFT_INTERNAL_ERROR",
        "One of the subprocesses has abruptly died during map operation",
        "no CUDA-capable device is detected",
    ],
)
def test_a_long_log_is_read_like_its_only_message(message):
    quiet = "".join(f"step {n}: loss {1 / (n + 1):.6f}\n" for n in range(15_000))

    (found,) = find_messages(f"{quiet}{message}\n{quiet}").messages

    assert found.variant == find_messages(message).messages[0].variant


def test_long_quiet_part_keeps_line_numbers_and_the_lines_above_a_message():
    quiet = [f"{'step' * (n % 40)} {n}" for n in range(40_000)]
    text = "\n".join([*quiet, "CUDA out of memory", "end"])

    found = [window.lines for window in windows(text, lambda part: "outofmemory" in part)]

    assert len(found) == 1
    numbered = [(line.number, line.raw) for line in found[0]]
    assert numbered == [
        *((n + 1, quiet[n]) for n in range(39_988, 40_000)),
        (40_001, "CUDA out of memory"),
        (40_002, "end"),
    ]
