"""Tests with limits that need no GPU, in a pytest of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

TESTS = """
import os, pytest
torch = pytest.importorskip("torch")
rehearsed = pytest.mark.limit_gpu_memory("20 MiB", rehearse=True)

@pytest.fixture(scope="module")
def data():
    yield torch.ones(1 << 20, device="cuda")
    open(os.environ["LEFT_BY_TEARDOWN"], "a").write("x")

@rehearsed
def test_fits(data):
    for _ in range(5):  # steps that repeat do not end a test
        torch.optim.SGD([torch.ones(4, device="cuda", requires_grad=True)], 0.1).step()

@rehearsed
@pytest.mark.parametrize("size", [40], ids=["a/b[1]"])
def test_too_large(data, size):
    torch.ones(size << 18, device="cuda")

@pytest.mark.limit_gpu_memory("1 GiB", rehearse=True, gpu="600MiB")
def test_gpu_is_full():
    torch.ones(200 << 20, device="cuda")

@rehearsed
@pytest.mark.xfail(strict=True, raises=ZeroDivisionError)
def test_expected():
    1 / 0

@rehearsed
def test_skipped():
    pytest.skip("not today")

@pytest.mark.limit_gpu_leaks(rehearse=True)
def test_leaks():
    global kept
    kept = torch.ones(1 << 18, device="cuda")

def test_plain():
    assert not torch.cuda.is_available()
"""


@pytest.fixture
def _torch() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: what runs without one is not shown")


@pytest.mark.usefixtures("_torch", "prepared")
def test_rehearsed_tests_report_as_if_they_ran_here(pytester, monkeypatch) -> None:
    monkeypatch.setenv("LEFT_BY_TEARDOWN", str(pytester.path / "left"))
    pytester.makepyfile(test_it=TESTS)

    result = pytester.runpytest_inprocess(
        "-p", "no:randomly", "-p", "no:xdist", "-ra", "--durations=0"
    )

    result.assert_outcomes(passed=2, failed=3, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_too_large?a/b?1??*",
            "The test is limited to 20.00 MiB of GPU memory but used 44.00 MiB at its peak.",
            "*OutOfMemoryError: CUDA out of memory. Tried to allocate 800.00 MiB.*",
            "The test is limited to 0 B of leaked GPU memory but kept 1.00 MiB.",
            "SKIPPED ?1? *not today",
        ]
    )
    assert not (pytester.path / "left").exists()  # what a rehearsed test writes is led away


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ('"1 GiB", gpu="l4"', "gpu is only for rehearse=True"),
        ('"1 GiB", rehearse="yes"', "takes rehearse=True"),
    ],
)
def test_wrong_arguments_are_found_before_anything_runs(pytester, arguments, sentence) -> None:
    pytester.makepyfile(
        f"import pytest\n@pytest.mark.limit_gpu_memory({arguments})\ndef test_it():\n    pass"
    )

    result = pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:xdist")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{sentence}*"])


def test_sessions_without_limits_load_nothing_but_the_plugin() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import fragdoctor.capture.pytest_plugin;"
        "print(*sorted(m for m in set(sys.modules) - before if m.startswith('fragdoctor')))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == [
        "fragdoctor", "fragdoctor.capture", "fragdoctor.capture.pytest_plugin",
    ]  # fmt: skip
