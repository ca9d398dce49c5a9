"""Messages quoted by other exceptions, of other frameworks, and of the host's pinned memory."""

from __future__ import annotations

import pytest

from fragdoctor.inputs.messages import find_messages

DEVICE = {
    "quoted": "ValueError: worker 3 died: 'CUDA error: out of memory'",
    "in another sentence": "RuntimeError: Engine start failed (HIP error: out of memory)",
    "Ray alone": "ray.exceptions.RayTaskError(OutOfMemoryError): ray::Fit.run() (pid=7)",
    "Ray and below": "ray.exceptions.RayTaskError(OutOfMemoryError): ray::f() (pid=7)\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB.",
    "Ray, bare": "ray.exceptions.RayTaskError(RuntimeError): ray::f() (pid=7, ip=10.1.1.1)\n"
    "RuntimeError: CUDA error: out of memory",
}
PADDLE = (
    "Expected allocating <= available, but received allocating:6442450944 > available:2147483648.",
    "EnforceNotMet: enforce allocating <= available failed, 6442450944 > 2147483648",
)
PINNED = (
    "bfc_allocator.cc:479] Allocator (gpu_host_bfc) ran out of memory trying to allocate 6.00GiB",
    "cuda_driver.cc:1018] failed to alloc 6442450944 bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
    "W gpu_host_allocator.h:44] could not allocate pinned host memory of size: 6442450944",
)


@pytest.mark.parametrize("name", DEVICE)
def test_message_of_the_device_is_found_once(name: str) -> None:
    (message,) = find_messages(DEVICE[name]).messages

    assert message.is_device_oom


@pytest.mark.parametrize("text", PADDLE)
def test_check_of_paddle_gives_its_figures(text: str) -> None:
    (message,) = find_messages(text).messages

    assert message.backend == "paddle"
    assert (message.requested_bytes, message.free_bytes) == (6 << 30, 2 << 30)


@pytest.mark.parametrize("text", PINNED)
def test_pinned_memory_is_that_of_the_host(text: str) -> None:
    (message,) = find_messages(text).messages

    assert (message.is_device_oom, message.sub_kind) == (False, "pinned-host")
    assert message.requested_bytes == 6 << 30


@pytest.mark.parametrize(
    "text",
    [
        'If you see "CUDA error: out of memory", lower the batch size.',
        "# common errors: you may get CUDA error: out of memory when the batch is too large",
    ],
)
def test_advice_about_a_message_is_none(text: str) -> None:
    assert [m for m in find_messages(text).messages if m.is_device_oom] == []
