"""Failures that are not about device memory, and on-chip shared memory that only sounds so."""

from __future__ import annotations

from typing import Final

from fragdoctor.readers.wordings import names
from fragdoctor.readers.wordings.base import Wording, compile_squeezed


def _negative(sub_kind: str, literal: str, pattern: str = "", backend: str = "cuda") -> Wording:
    return Wording(
        sub_kind,
        names.NEGATIVE,
        backend,
        literal,
        compile_squeezed(pattern or literal.replace("(", r"\(").replace(")", r"\)")),
        is_device_oom=False,
        sub_kind=sub_kind,
        is_marker=True,
    )


NEGATIVES: Final = (
    _negative("device-assert", "device-sideasserttriggered"),
    _negative("device-assert", "cudaerrorassert"),
    _negative("illegal-access", "illegalmemoryaccess"),
    _negative("illegal-access", "cudaerrorillegaladdress"),
    _negative("illegal-access", "misalignedaddress"),
    _negative("launch-resources", "toomanyresourcesrequestedforlaunch"),
    _negative("launch-failure", "unspecifiedlaunchfailure"),
    _negative("launch-failure", "error:invalidconfigurationargument"),
    _negative("no-kernel-image", "nokernelimageisavailable"),
    _negative("driver-init", "driverinitializationfailed"),
    _negative("driver-init", "notcompiledwithcudaenabled"),
    _negative("driver-init", "nocuda-capabledevice"),
    _negative("driver-init", "nonvidiadriveronyoursystem"),
    _negative("driver-init", "cudaerror:invaliddeviceordinal"),
    _negative("driver-init", "cudaerror:initializationerror"),
    _negative("driver-init", "driverversionisinsufficient"),
    _negative("cudnn-execution", "cudnn_status_execution_failed"),
    _negative("cudnn-execution", "cudnn_status_mapping_error"),
    _negative("cudnn-execution", "cudnn_status_bad_param"),
    _negative("cublas-execution", "cublas_status_execution_failed"),
    _negative("cublas-execution", "cublas_status_invalid_value"),
    _negative("cublas-execution", "cublas_status_internal_error"),
    _negative("cublas-execution", "cublas_status_not_supported"),
    _negative("collective-timeout", "collectiveoperationtimeout"),
    _negative("nccl-error", "ncclsystemerror"),
    _negative("nccl-error", "ncclinternalerror"),
    _negative("nccl-error", "ncclremoteerror"),
    _negative("nccl-error", "ncclinvalidusage"),
    _negative("nccl-error", "ncclunhandledcudaerror"),
    _negative("shape-mismatch", "shapescannotbemultiplied"),
    _negative("shape-mismatch", "mustmatchthesizeoftensor"),
    _negative("disk-full", "nospaceleftondevice", backend="cpu"),
    _negative("file-limit", "toomanyopenfiles", backend="cpu"),
    _negative("segfault", "signal11(sigsegv)", backend="cpu"),
)

WORDINGS: Final = (
    Wording(
        "triton-shared-memory",
        names.SHARED_MEMORY,
        "cuda",
        "outofresource:",
        compile_squeezed(
            r"(?:outofresources:)?outofresource:(?:sharedmemory|tensormemory|threads|registers)"
        ),
        back=16,
        is_device_oom=False,
        sub_kind="on-chip",
        group="triton",
    ),
    Wording(
        "ptxas-shared-memory",
        names.SHARED_MEMORY,
        "cuda",
        "toomuchshareddata",
        compile_squeezed(r"usestoomuchshareddata"),
        back=4,
        is_device_oom=False,
        sub_kind="on-chip",
    ),
    *NEGATIVES,
)
