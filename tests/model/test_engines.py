"""The words of programs with allocators of their own."""

from __future__ import annotations

import pytest
from oom_messages import message

from fragdoctor.model.engines import ANY_PROGRAM, ENGINES, Need, asked_bytes, engine_of


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_engine_has_a_source_a_mark_and_words_for_every_need(engine):
    assert engine.source
    assert engine.speaks or engine.logs
    for need in Need:
        title, change = engine.advice(need)
        assert title
        assert change
        assert "torch.cuda" not in change


def test_llama_cpp_under_ollama_is_ollama():
    plain = message(kind="ggml", text="cudaMalloc failed: out of memory")
    served = message(kind="ggml", intro="ollama[77]: ", text="cudaMalloc failed: out of memory")

    assert [engine_of(m).name for m in (plain, served)] == ["llama.cpp", "Ollama"]  # type: ignore[union-attr]


def test_pytorchs_allocator_is_no_engine_whatever_stands_around_it():
    assert engine_of(message(around="2025 INFO ollama started", text="CUDA out of memory.")) is None
    assert ANY_PROGRAM not in ENGINES


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("OOM when allocating tensor with shape[2,1024] and type float on /device:GPU:0", 8192),
        ("OOM when allocating tensor with shape[2,1024] and type half on /device:GPU:0", 4096),
        ("OOM when allocating tensor with shape[2,1024]", 8192),
        ("failed to allocate memory", None),
    ],
)
def test_shape_of_tensorflow_is_a_size(text, n_bytes):
    assert asked_bytes(message(kind="tf", backend="tf", text=text)) == n_bytes
