"""Code that people quote: what a loop keeps, and calls whose graph nothing uses."""

from __future__ import annotations

import time

import pytest

from fragdoctor.inputs.quoted_code import quoted_code
from fragdoctor.model.case import QuotedCode

FORWARD = "out = net(batch.to(device))"
TRAINED = f"""\
for batch, label in loader:
    opt.zero_grad()
    {FORWARD}
    error = criterion(out, label)
    error.backward()
    opt.step()
"""
KEEPS = {
    "a sum": "    total += error\n",
    "a sum that is written out": "    total = total + error\n",
    "a list": "    errors.append(error)\n",
    "a part of a list": "    rows.append((label, error))\n",
    "a dict": "    by_label[label] = error\n",
    "a joined tensor": "    outs = torch.cat([outs, out])\n",
    "a copy that has its graph": "    outs.append(out.cpu())\n",
}
KEEPS_NOT = {
    "a number": "    total += error.item()\n",
    "a converted number": "    errors.append(float(error))\n",
    "a detached tensor": "    outs.append(out.detach())\n",
    "an array": "    outs.append(out.detach().cpu().numpy())\n",
    "an index": "    _, best = out.max(1)\n    hits += (best == label).sum()\n",
    "what one round makes": "    parts = []\n    for p in (0, 1):\n        parts.append(out[p])\n",
}


@pytest.mark.parametrize("line", KEEPS.values(), ids=KEEPS)
def test_a_loop_keeps_what_it_adds_with_its_graph(line):
    assert quoted_code(TRAINED + line).kept


@pytest.mark.parametrize("line", KEEPS_NOT.values(), ids=KEEPS_NOT)
def test_a_loop_keeps_no_graph_of_what_is_detached(line):
    assert quoted_code(TRAINED + line) == QuotedCode()


@pytest.mark.parametrize(
    "quoted",
    [
        "```python\n{}```\n",
        "> {}",
        ">>> {}",
        "In [3]: {}",
        " 12 {}",
        "---> 12 {}",
    ],
)
def test_marks_before_the_lines_are_no_code(quoted):
    lines = (TRAINED + "    history.append(error)\n").splitlines(keepends=True)
    text = (
        "".join(map(quoted.format, lines)) if "```" not in quoted else quoted.format("".join(lines))
    )

    assert quoted_code(f"It stops with an error:\n{text}").kept == "history"


def test_one_backward_pass_after_the_loop_needs_all_that_it_adds_up():
    code = """\
for sample in loader:
    loss = 0
    for step in sample:
        loss += criterion(model(step), step)
    loss.backward()
"""
    assert quoted_code(code) == QuotedCode()


def test_a_state_that_goes_from_round_to_round_keeps_all_rounds():
    code = "while True:\n    y, state = encoder(x, state)\n"

    assert quoted_code(code).kept == "state"


def test_what_a_model_collects_from_its_layers_ends_with_its_call():
    code = """\
class Pyramid(nn.Module):
    def forward(self, x):
        levels = []
        for backbone in self.parts:
            x = backbone(x)
            levels.append(x)
        return levels
"""
    assert quoted_code(code) == QuotedCode()


def test_a_call_that_nothing_goes_back_through_has_a_graph_for_nothing():
    code = "for image in images:\n    {}pred = unet(image.cuda())\n"

    assert quoted_code(code.format("")).unused_graph == "pred = unet(image.cuda())"
    assert not quoted_code(code.format("with torch.no_grad():\n        ")).unused_graph
    assert not quoted_code(f"{code.format('')}    loss.backward()\n").unused_graph


@pytest.mark.parametrize("guard", ["", "@torch.no_grad()\n"])
def test_an_evaluation_beside_training_code_needs_no_graph(guard):
    loop = f"def evaluate(net, loader):\n    for batch in loader:\n        {FORWARD}\n"

    assert quoted_code(f"{TRAINED}\n{guard}{loop}").evaluated_graph == ("" if guard else FORWARD)


def test_a_branch_without_a_backward_pass_is_an_evaluation():
    code = """\
for i, x in enumerate(loader):
    if i % 50 == 0:
        score = net(held_out)
    else:
        net(x).mean().backward()
"""
    assert quoted_code(code).evaluated_graph == "score = net(held_out)"


def test_the_lines_of_a_traceback_are_no_code():
    text = (
        '  File "a.py", line 3, in run\n    out = model(x)\n  File "b.py", line 9, in g\n    f(x)\n'
    )

    assert quoted_code(text) == QuotedCode()


@pytest.mark.parametrize(
    "line",
    [
        "a = " + "-" * 380 + "1",
        "f(" + "[" * 190 + "]" * 190 + ")",
        "(" * 5000,
        "x = '\\d'",
        "\0 = 1(",
    ],
)
def test_hostile_lines_take_little_time_and_no_warning(line, recwarn):
    began = time.process_time()

    assert quoted_code(f"{line}\n" * 400) == QuotedCode()
    assert time.process_time() - began < 5
    assert not recwarn.list
