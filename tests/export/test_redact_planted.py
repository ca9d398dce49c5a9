"""A word of the user's in every place where a snapshot has text: none is in any redacted export."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any

import builders
import pytest
from builders import BASE, MIB, alloc, block, frame, segment, segment_alloc
from cli_fixtures import run as run  # noqa: PLC0414 - a fixture
from command_line import Run

FILES = (
    "{}", "/home/{}/{}.py", r"C:\Users\{}\{}.py", "~/{}/x.py", "file:///{}/{}.py",
    "<ipython-input-{}-{}>", "/tmp/ipykernel_12/{}.py", "<{} {}>", "<frozen {}.{}>",
    "/a/{}/{}.zip/x.py", "/usr/lib/python3.11/json/{}.py", "/usr/lib/python3.11/{}/{}.py",
    "/usr/lib/python{}/{}.py",
    # in and beside folders that are called like PyTorch's
    "/home/{}/torch/nn/{}.py", "/home/torch/{}/torch/nn/{}.py", "{}/optim/{}.py",
    r"~/{}/torch\optim\{}.py", "/usr/lib/python3.11/site-packages/torch/{}/{}.py",
    "/x/site-packages/torch/nn/{}_{}.py", r"/x/site-packages/torch\{}\{}.py",
    "/x/site-packages/torch.py/{}", "/x/site-packages/{}/{}.py",
    "/x/site-packages/transformers/{}/{}.py",
    # of C++
    "/home/{}/c10/{}.cpp", "/x/aten/{}/{}.cu", "/x/csrc/{}/{}.h", "/x/torch/csrc/{}/{}.cpp",
    "/x/c10/cuda/{}/{}CUDACachingAllocator.cpp", "/x/c10/{}/{}/CUDACachingAllocator.cpp",
    "lib{}.so.{}", "libtorch_{}.so", r"\\server\{}\{}.cu",
)  # fmt: skip
FUNCTIONS = (
    "{}", "{}.step", "multi_tensor_{}", "_single_tensor_{}", "eval_{}", "loss_{}", "<lambda {}>",
    "Optimizer.step#{}", "at::native::{}", "void {}<float>(int)",
    "std::shared_ptr<acme::{}>::get()",
    "c10::{}::malloc", "c10::cuda::malloc(acme::{})", "torch::autograd::Engine::thread_main({})",
    "torch::autograd::Engine::thread_{}", "{}::torch::autograd::Engine::evaluate_{}", "THP{}",
    "Py_{}", "cuda::{}", "operator()<{}>",
)  # fmt: skip
METADATA = (
    "{}", "nn.Module: {}", "nn.Module: model.{}.layers.3.{}.mlp", "nn.Module: {}Head",
    "nn.Module: layers.3.mlp {}", " nn.Module: encoder.{}", "step=3;{}",
)  # fmt: skip
FORMATS = ("snapshot", "csv", "trace", "speedscope")


class _Words:
    """Words that occur nowhere else."""

    def __init__(self) -> None:
        self._chance = random.Random(1)
        self.given: list[str] = []

    def one(self) -> str:
        self.given.append("zq" + "".join(self._chance.choices(string.ascii_lowercase, k=9)))
        return self.given[-1]

    def into(self, text: str) -> str:
        return text.format(*(self.one() for _ in range(text.count("{}"))))


def planted() -> tuple[bytes, list[str]]:
    words = _Words()
    rows: list[dict[str, Any]] = [segment_alloc(BASE, 20 * MIB, time_us=0)]
    for i, (file, function) in enumerate((f, g) for f in FILES for g in FUNCTIONS):
        place = frame(words.into(file), i, words.into(function))
        note = words.into(METADATA[i % len(METADATA)])
        more = {"user_metadata": note, "compile_context": words.one()}
        rows.append(alloc(BASE + 512 * i, 512, frames=[place], time_us=i, **more))
    conf = f"expandable_segments:True,{words.one()}:4,backend:{words.one()},a:[{words.one()}"
    data = builders.snapshot(segment(BASE, block(20 * MIB)), events=rows)
    data["allocator_settings"] = builders.settings(PYTORCH_CUDA_ALLOC_CONF=conf)
    data["allocator_settings"] |= {words.one(): 3, words.one(): words.one()}
    data |= {words.one(): {words.one(): words.one()}}
    data["segments"][0][words.one()] = words.one()
    data["external_annotations"] = [
        {"device": 0, "time_us": 3, "name": words.into(name), "stage": words.into(stage)}
        for name, stage in (
            ("Optimizer.step#{}.step", "START"),
            ("{}", "{}"),
            ("## {}", "END"),
            ("fragdoctor.no_grad#{}", "START"),
            ("fragdoctor.backward{}", "END"),
        )
    ]
    return builders.pickled(data), words.given


@pytest.mark.parametrize("form", FORMATS)
def test_no_planted_word_is_in_a_redacted_export(form: str, run: Run, tmp_path: Path) -> None:
    data, words = planted()
    source, target = tmp_path / "a.pickle", tmp_path / "out"
    source.write_bytes(data)

    outcome = run("export", str(source), "--redact", "--format", form, "-o", str(target))

    assert outcome.code == 0, outcome.err
    written = target.read_bytes()
    assert len(words) > 2000
    assert len(written) > 10_000
    assert [word for word in words if word.encode() in written] == []
    if form == "snapshot":  # what holds the memory is named after modules where there are any
        report = tmp_path / "report.json"
        assert run("analyze", str(target), "-o", str(report)).code == 0
        assert [word for word in words if word in report.read_text()] == []


def test_the_planted_words_are_in_an_export_that_is_not_redacted(run: Run, tmp_path: Path) -> None:
    data, words = planted()
    source, target = tmp_path / "a.pickle", tmp_path / "out"
    source.write_bytes(data)

    assert run("export", str(source), "--format", "snapshot", "-o", str(target)).code == 0

    found = [word for word in words if word.encode() in target.read_bytes()]
    assert len(found) > 0.99 * len(words)
