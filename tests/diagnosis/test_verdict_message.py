"""Every kind of message gets its own honest verdict."""

from __future__ import annotations

import pytest
from oom_messages import GIB, MIB, case_of, log_of, message, new_style, old_style, process

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import Case, OomLog
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.report.base import RenderOptions, render


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (new_style("48.00 MiB", "2.93 GiB", "12.00 MiB", "2.91 GiB", "7.31 MiB"), Cause.CAPACITY),
        (new_style("500.00 MiB", "3.81 GiB", "488.00 MiB", "2.67 GiB", "673.42 MiB"),
         Cause.FRAGMENTATION),
        (new_style("384.00 MiB", "16.00 GiB", "13.07 GiB", "2.91 GiB", "17.46 MiB",
                   allowed="3.20 GiB"), Cause.MEMORY_LIMIT),
        (new_style("128.00 MiB", "8.00 GiB", "68.00 MiB", "1.10 GiB", "20.34 MiB",
                   processes=process(4242, "6.35 GiB"), own="1.59 GiB"), Cause.OTHER_PROCESS),
        (new_style("200.00 MiB", "500.00 MiB", "140.00 MiB", "360.00 MiB", "0 bytes",
                   pools="180.00 MiB"), Cause.PRIVATE_POOLS),
        (new_style("16.00 MiB", "39.56 GiB", "33.56 MiB", "37.50 GiB", "1.41 GiB"),
         Cause.CAPACITY),
        (new_style("16.00 MiB", "39.56 GiB", "833.56 MiB", "36.70 GiB", "1.41 GiB"), Cause.UNKNOWN),
        (old_style("1.50 GiB", "23.69 GiB", "17.80 GiB", "1.06 GiB", "21.40 GiB"),
         Cause.FRAGMENTATION),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", Cause.SIZE_BUG),
        (("CUDA out of memory. Tried to allocate 130674.91 GiB (GPU 0; 10.91 GiB total capacity; "
         "1.10 GiB already allocated; 8.00 GiB free; 1.20 GiB reserved in total by PyTorch)"),
         Cause.SIZE_BUG),
        (("torch.OutOfMemoryError: CUDA out of memory. Allocation was preemptively rejected "
         "because it would exceed per_process_memory_fraction limit. Requested size: 600.00 MiB"),
         Cause.MEMORY_LIMIT),
        (("RuntimeError: MPS backend out of memory (MPS allocated: 16.90 GB, other allocations: "
         "380.00 MB, max allowed: 18.13 GB). Tried to allocate 1.00 GB on private pool."),
         Cause.MEMORY_LIMIT),
        (("RuntimeError: MPS backend out of memory (MPS allocated: 5.00 GB, other allocations: "
         "14.00 GB, max allowed: 18.13 GB). Tried to allocate 500.00 MB on private pool."),
         Cause.NON_PYTORCH_MEMORY),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
         Cause.CAPACITY),
        ("RuntimeError: CUDA error: out of memory", Cause.UNKNOWN),
        ("RuntimeError: CUDA error: device-side assert triggered", Cause.NOT_MEMORY),
        ("Out of memory: Killed process 812 (python)", Cause.HOST_MEMORY),
        (("ValueError: No available memory for the cache blocks. Try increasing "
         "`gpu_memory_utilization` when initializing the engine."), Cause.CAPACITY),
    ],
)  # fmt: skip
def test_diagnose_message_gives_its_cause(text, cause):
    verdict = diagnose(case_of(text)).verdict

    assert cause is verdict.cause
    assert verdict.summary.endswith(".")


def test_diagnose_text_without_a_failure_is_not_memory():
    diagnosis = diagnose(Case(oom=OomLog(messages=(), n_lines=12)))

    assert Cause.NOT_MEMORY is diagnosis.verdict.cause
    assert "12 lines" in diagnosis.verdict.summary
    assert not diagnosis.recommendations


def test_diagnose_several_messages_is_about_the_primary_one():
    consequence = message(kind="nccl", requested_bytes=None)
    first = message(requested_bytes=2 * GIB, total_bytes=GIB, line=30)
    log = OomLog(messages=(consequence, first), primary=1)

    diagnosis = diagnose(Case(oom=log))

    assert Cause.CAPACITY is diagnosis.verdict.cause
    said = render("analyze", "text", diagnosis, RenderOptions())
    assert [line.split()[:2] for line in said.splitlines() if "judged" in line] == [
        ["judged", "30"]
    ]


def test_diagnose_nothing_at_all_is_unknown():
    assert Cause.UNKNOWN is diagnose(Case()).verdict.cause


def test_diagnose_unprintable_figure_of_nvml_is_ignored():
    log = log_of(
        message(
            requested_bytes=200 * MIB,
            total_bytes=8 * GIB,
            free_bytes=0,
            allocated_bytes=int(7.5 * GIB),
            reserved_bytes=int(7.5 * GIB),
            reserved_unallocated_bytes=0,
            process_bytes=1 << 64,
        )
    )

    verdict = diagnose(Case(oom=log)).verdict

    assert (verdict.cause, verdict.confidence) == (Cause.CAPACITY, Confidence.PROVEN)


def test_diagnose_warning_of_a_framework_is_no_failure():
    log = log_of(
        message(kind="tf", backend="tf", is_warning=True, requested_bytes=GIB, device_index=None)
    )

    verdict = diagnose(Case(oom=log)).verdict

    assert "warns" in verdict.summary
    assert Cause.HEALTHY in verdict.also


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: Allocation on device",
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":830',
    ],
)
def test_refusal_without_figures_is_most_likely_a_full_gpu(text):
    diagnosis = diagnose(case_of(text))

    assert diagnosis.verdict.cause is Cause.CAPACITY
    assert diagnosis.verdict.confidence is Confidence.POSSIBLE
    assert diagnosis.recommendations[0].code == "smaller-batch"


def test_host_memory_is_saved_in_the_words_of_what_ran_out():
    ray = "ray.memory_monitor.RayOutOfMemoryError: More than 95% of the memory on node x is used"
    pinned = (
        '  File "a.py", line 9, in f\n    t.pin_memory()\nRuntimeError: CUDA error: out of memory'
    )

    assert "@ray.remote" in diagnose(case_of(ray)).recommendations[0].change
    assert "pin_memory=False" in diagnose(case_of(pinned)).recommendations[0].change


def test_table_of_a_full_gpu_says_less_than_what_the_program_was_doing():
    table = (
        "|   0  GTX 1080  Off  | 0:1.0  On |  N/A |\n| 58%  70C  P2  67W | 8108MiB / 8111MiB |\n"
    )
    error = "RuntimeError: cuda runtime error (2) : out of memory\n"
    frames = 'Traceback (most recent call last):\n  File "a.py", line 9, in evaluate\n    f(x)\n'

    bare, told = diagnose(case_of(table + error)), diagnose(case_of(table + frames + error))

    assert bare.verdict.cause is Cause.OTHER_PROCESS
    assert told.verdict.cause is Cause.CAPACITY
    assert "while an evaluation ran" in told.verdict.summary


def test_limit_with_room_on_the_device_is_nobody_elses_doing() -> None:
    others = process(4242, "5.00 GiB")
    text = new_style(
        "384.00 MiB", "16.00 GiB", "7.00 GiB", "2.91 GiB", "17.46 MiB",
        processes=others, own="3.50 GiB", allowed="3.20 GiB",
    )  # fmt: skip

    diagnosis = diagnose(case_of(text))

    assert diagnosis.verdict.cause is Cause.MEMORY_LIMIT
    assert Cause.OTHER_PROCESS not in diagnosis.verdict.also
    assert "FD501" not in {f.code for f in diagnosis.findings}
    assert "free-other-process" not in {r.code for r in diagnosis.recommendations}
    report = render("analyze", "text", diagnosis, RenderOptions())
    assert "384.00 MiB requested, 279.50 MiB left of the 3.20 GiB allowed." in " ".join(
        report.split()
    )
    assert "Memory  GPU 0, 3.20 GiB allowed" in report


@pytest.mark.parametrize(
    ("told", "cause", "title"),
    [
        (
            "My notebook works once; when I run the cell again it is CUDA out of memory.",
            Cause.LEAK,
            "Free what the earlier run left before the next one starts",
        ),
        (
            "I use an app, and its VRAM is not released when it is idle.",
            Cause.LEAK,
            "Free what is no longer needed before the next thing is loaded",
        ),
        (
            "I call model.cuda(3), and still get CUDA out of memory as it also uses GPU 0.",
            Cause.OTHER_PROCESS,
            "Hide the other GPUs from the program",
        ),
        (
            "CUDA out of memory with batch 1; before I start, 6 GB of memory are already used.",
            Cause.OTHER_PROCESS,
            "Stop the other processes on this GPU",
        ),
        (
            "I train on 4 GPUs, and the first GPU takes twice the memory of the others.",
            Cause.CAPACITY,
            "Run one process per GPU, and keep the others off the first GPU",
        ),
        (
            "I find that memory grows linearly with the number of workers.",
            Cause.HOST_MEMORY,
            "Let the DataLoader workers share the data, or use fewer of them",
        ),
        (
            "I find that memory grows linearly with the number of workers of gunicorn.",
            Cause.HOST_MEMORY,
            "Use less RAM, or add more",
        ),
    ],
)
def test_memory_that_is_held_from_before_or_elsewhere(told, cause, title):
    result = diagnose(case_of(f"{told}\n"))

    assert result.verdict.cause is cause
    assert result.recommendations[0].title == title


def test_title_above_a_message_without_its_first_words_hides_no_figures():
    result = diagnose(
        case_of(
            "CUDA out of memory\n\n`OutOfMemoryError: . Tried to allocate 30.00 MiB (GPU 0; "
            "4.00 GiB total capacity; 3.21 GiB already allocated; 0 bytes free; 3.30 GiB reserved "
            "in total by PyTorch)`\n"
        )
    )

    assert result.verdict.confidence is Confidence.LIKELY
    assert "30.00 MiB" in result.verdict.summary
