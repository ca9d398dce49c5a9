"""The calls that led to a failure, as consoles, notebooks and loggers print them."""

from __future__ import annotations

import pytest

from fragdoctor.inputs.messages import find_messages

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
PLAIN = f"""Traceback (most recent call last):
  File "/job/fit.py", line 40, in <module>
    fit(net)
  File "/job/fit.py", line 12, in fit
    out = net(batch)
          ^^^^^^^^^^
{OOM}
"""


def test_heading_keeps_the_words_below_it():
    (message,) = find_messages(
        "RuntimeError: CUDA error: out of memory\nIn the validation."
    ).messages

    assert message.after == "In the validation."


def test_words_after_a_message_on_its_line_are_kept():
    (message,) = find_messages(f"{OOM} It fails with 16 GB left.\n").messages

    assert message.after == "It fails with 16 GB left."


def test_words_above_and_below_a_message_are_kept_in_their_order():
    (message,) = find_messages(f"I upscale a photo.\n{OOM}\nIt works for small ones.\n").messages

    assert message.around == "I upscale a photo."
    assert message.after == "It works for small ones."
    assert message.said.startswith("I upscale a photo.")
    assert message.said.endswith("It works for small ones.")


def test_words_below_a_traceback_of_its_own_are_kept_too():
    (message,) = find_messages(f"{PLAIN}It happens in the evaluation.\n").messages

    assert message.after.endswith("It happens in the evaluation.")


def test_traceback_that_was_folded_into_one_line_gives_its_frames():
    text = (
        "12:26 Traceback (most recent call last): File \u201c/a/server.py\u201d, line 71, in load "
        "model = load_model(name) File \u201c/a/models.py\u201d, line 472, in from_pretrained "
        f"return cls.load(**args) {OOM}\n"
    )

    (message,) = find_messages(text).messages

    assert [(f.file, f.line, f.function, f.code) for f in message.frames] == [
        ("/a/server.py", 71, "load", "model = load_model(name)"),
        ("/a/models.py", 472, "from_pretrained", "return cls.load(**args)"),
    ]


def test_box_of_rich_whose_top_was_cut_gives_its_source_lines():
    text = f"│ ❱ 231 │   │   return forward_call(*args) │\n╰──────╯\n{OOM}\n"

    (message,) = find_messages(text).messages

    assert [(f.line, f.code) for f in message.frames] == [(231, "return forward_call(*args)")]


def test_cells_of_ipython_whose_paths_were_cut_give_their_source_lines():
    text = f"     37 model.eval()\n---> 38 out = model(x)\n     39 out.sum()\n\n{OOM}\n"

    (message,) = find_messages(text).messages

    assert [(f.line, f.code) for f in message.frames] == [(38, "out = model(x)")]


def test_heading_of_ipython_without_the_error_is_a_failure():
    text = (
        "OutOfMemoryError                 Traceback (most recent call last)\n"
        "<ipython-input-5-0123456789ab> in <module>\n----> 1 trainer.train()\n"
    )

    (message,) = find_messages(text).messages

    assert message.is_device_oom
    assert message.frames[-1].code == "trainer.train()"


@pytest.mark.parametrize("arrow", ["----> 7", "-> 1150"])
def test_arrow_of_ipython_shrinks_as_line_numbers_grow(arrow):
    number = int(arrow.split()[1])
    frame = f"/site-packages/m.py in convert(t)\n   {number - 1}  a = 1\n{arrow}  return t.to(d)\n"
    text = f"{frame}\n{OOM}\n"

    (message,) = find_messages(text).messages

    assert (message.frames[-1].line, message.frames[-1].code) == (number, "return t.to(d)")


def test_frame_of_ipython_with_a_dozen_source_lines_is_read():
    below = "".join(f"    {8 + i}     a{i},\n" for i in range(9))
    text = f"File [m.py:7](http://host/m.py#line=6), in f(t)\n----> 7 x = g(\n{below}\n{OOM}\n"

    (message,) = find_messages(text).messages

    assert (message.frames[-1].function, message.frames[-1].code) == ("f", "x = g(")


def test_path_below_the_home_of_windows_is_no_escaped_text():
    text = (
        f"~\\env\\utils\\to_dense_adj.py in to_dense_adj(edges)\n---> 48 adj = zeros(n)\n\n{OOM}\n"
    )

    (message,) = find_messages(text).messages

    assert message.frames[-1].file == r"~\env\utils\to_dense_adj.py"


FORMS = {
    "python": PLAIN,
    "logged": "".join(f"2026-01-02 03:04:05,678 - ERROR - {line}\n" for line in PLAIN.split("\n")),
    "logged by a component": "".join(
        f"2026-01-02 03:04:05.678 [INFO] [Driver] {line}\n" for line in PLAIN.split("\n")
    ),
    "of a rank": "".join(f"[rank3]: {line}\n" for line in PLAIN.split("\n")),
    "IPython 8": f"""OutOfMemoryError                          Traceback (most recent call last)
Cell In[7], line 40
----> 40 fit(net)

File /job/fit.py:12, in fit(net)
     11 batch = batch.cuda()
---> 12 out = net(batch)
     13 out.sum()

{OOM}
""",
    "IPython 7": f"""/job/fit.py in fit(net)
     11 batch = batch.cuda()
---> 12 out = net(batch)

{OOM}
""",
    "Colab": f"""[/job/fit.py](https://localhost:8080/#) in fit(net)
     11 batch = batch.cuda()
---> 12 out = net(batch)

{OOM}
""",
    "TorchScript": f"""Traceback of TorchScript (most recent call last):
  File "/job/fit.py", line 12, in fit
    batch = batch.cuda()
    out = net(batch)
          ~~~ <--- HERE
    return out
{OOM}
""",
    "rich": f"""╭───── Traceback (most recent call last) ─────╮
│ /job/fit.py:12 in fit                       │
│                                             │
│   11 │   batch = batch.cuda()               │
│ ❱ 12 │   out = net(batch)                   │
╰─────────────────────────────────────────────╯
{OOM}
""",
    "pytest": f"""/job/fit.py:12: in fit
    out = net(batch)
{OOM}
""",
    "Windows": PLAIN.replace("/job/fit.py", "C:\\job\\nets\\fit.py"),
    "Windows, relative": PLAIN.replace("/job/fit.py", "nets\\torch\\fit.py"),
    "below": f"""Error occurred when executing Fit:

{OOM}

File "/job/fit.py", line 12, in fit
out = net(batch)
""",
}


@pytest.mark.parametrize("form", FORMS)
def test_traceback_in_any_form_gives_the_failing_line(form):
    (message,) = find_messages(FORMS[form]).messages
    frame = message.frames[-1]

    assert frame.file.endswith("fit.py")
    assert frame.code == "out = net(batch)"
    assert frame.function in ("fit", "")
    assert frame.line in (12, None)


def test_ranks_that_interleave_have_their_own_frames():
    lines = zip(
        PLAIN.split("\n"), PLAIN.replace("12, in fit", "13, in other").split("\n"), strict=True
    )
    text = "".join(f"[rank0]: {a}\n[rank1]: {b}\n" for a, b in lines)

    messages = find_messages(text).messages

    assert {m.rank: m.frames[-1].function for m in messages} == {0: "fit", 1: "other"}


def test_source_line_alone_above_a_message_is_a_frame():
    (message,) = find_messages(f"    return torch.cdist(a, b)\n    ~~~ <--- HERE\n{OOM}").messages

    assert [frame.code for frame in message.frames] == ["return torch.cdist(a, b)"]


def test_message_without_a_traceback_has_no_frames():
    (message,) = find_messages(f"epoch 3 done\nloading data: fine\n{OOM}\nbye\n").messages

    assert message.frames == ()


def test_second_failure_in_a_handler_is_told_from_the_first():
    text = (
        f"{PLAIN}\nDuring handling of the above exception, another exception occurred:\n\n{PLAIN}"
    )

    first, second = find_messages(text).messages

    assert (first.is_in_handler, second.is_in_handler) == (False, True)
    assert len(second.frames) == 2


def test_frames_do_not_come_from_a_traceback_that_another_exception_ended():
    text = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
        f"ValueError: no\nnext try\n{OOM}\n"
    )

    (message,) = find_messages(text).messages

    assert not [frame for frame in message.frames if frame.file == "a.py"]


def test_thousands_of_frames_are_bounded():
    frames = "".join(f'  File "deep.py", line {i}, in f\n    f({i})\n' for i in range(5000))

    (message,) = find_messages(f"Traceback (most recent call last):\n{frames}{OOM}\n").messages

    assert 0 < len(message.frames) <= 200
    assert message.frames[-1].line == 4999


def test_line_of_a_driver_is_not_where_a_worker_failed():
    passed_on = (
        'Traceback (most recent call last):\n  File "/job/main.py", line 9, in main\n'
        "    ray.get(x)\n"
        '  File "/env/ray/_private/worker.py", line 1012, in get_objects\n    raise value\n'
        f"ray.exceptions.RayTaskError(OutOfMemoryError): ray::f() (pid=7)\n{OOM}\n"
    )

    assert not [m.frames for m in find_messages(passed_on).messages if m.frames]


def test_frame_of_a_notebook_cell_is_read():
    cell = "<ipython-input-1-7c6f> in <cell line: 10>()\n---> 10 image = pipe(prompt)\n"

    (message,) = find_messages(f"{cell}\n{OOM}\n").messages

    assert (message.frames[-1].line, message.frames[-1].code) == (10, "image = pipe(prompt)")


def test_words_between_a_heading_and_its_traceback_are_kept():
    message = find_messages(f"CUDA out of memory\n\nIt was in a chat.\n{PLAIN}").messages[0]

    assert "It was in a chat." in message.after
    assert message.frames


def test_sentence_that_names_the_error_keeps_what_was_said_above_it():
    said = "I train on speech.\nThe validation fails with CUDA out of memory:"

    *_, message = find_messages(f"{said}\n{PLAIN}").messages

    assert "I train on speech. The validation fails" in message.said


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        (">>> torch.zeros(1).cuda()", "torch.zeros(1).cuda()"),
        (">>> x = net(y)", "x = net(y)"),
        ("This is what I get:", ""),
    ],
)
def test_line_typed_at_a_prompt_is_the_code_of_its_frame(typed, code):
    calls = f'{typed}\nTraceback (most recent call last):\n  File "<stdin>", line 1, in <module>\n'

    (message,) = find_messages(f"{calls}{OOM}\n").messages

    assert [frame.code for frame in message.frames] == [code]
