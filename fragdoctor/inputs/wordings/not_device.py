"""Failures of host memory, killed processes, and failures that only sound like device memory."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from fragdoctor.inputs.wordings.wording import (
    HOST,
    NEGATIVE,
    SHARED_MEMORY,
    Wording,
    alone,
    ends_line,
    only_where,
    where,
)

_OF_CGROUP: Final = where(
    r"mem_cgroup_o|memorycgroup|constraint_memcg", 1000, 4000, sub_kind="cgroup-kill"
)
"""Signs that a container or job hit its limit, not that the machine was full (Linux,
mm/memcontrol.c)."""

_host = partial(Wording, kind=HOST, backend="cpu", is_device_oom=False)
_kill = partial(_host, sub_kind="oom-killer", group="kill")
_shm = partial(_host, sub_kind="dev-shm", group="shm")
_pinned = partial(_host, "pinned-host", sub_kind="pinned-host")

KILLS: Final = (
    _kill("exit-code", r"\(?exitcode:?-9(?!\d)\)?"),
    _kill("exit-code", r"(?:non-zero)?exitstatus-9(?!\d)"),
    _kill("exit-code", r"(?:exitswith)?returncode[=:]?-9(?!\d)"),
    _kill("exit-code", r"signal9\(sigkill\)"),
    _kill(
        "exit-code",
        r"(?:exit(?:ed|s)?(?:with)?(?:exit)?(?:code|status)|(?:exit)?(?:code|status)|exited)"
        r"[:=(]{0,2}\"?137(?!\d)",
    ),
    _kill("sigkill", r"diedwith<?signals\.sigkill:9"),
    _kill(
        "sigkill",
        r"(?:died|killed|terminated|receivedsignal|exited)(?:with|by|on|due|to|the)?(?:signal)?"
        r":?\(?(?:<?signals\.)?sigkill",
    ),
    _kill(
        "kernel",
        r"(?:outofmemory|memorycgroupoutofmemory):?killedprocess\d{1,9}",
        refine=_OF_CGROUP,
    ),
    _kill("kernel", r"oom-kill:constraint", refine=_OF_CGROUP),
    _kill("kernel", r"invokedoom-killer", refine=_OF_CGROUP),
    # Slurm, Kubernetes; runc, libcontainer/process_linux.go
    _kill("slurm", r"oom[-_]?kill(?:event|ed)(?:\(memorylimittoolow\?\))?"),
    # Slurm to 19.05, slurmd/common/proctrack and jobacct_gather; OpenPBS, mom_main.c; LSF, bhist
    _kill("slurm", r"(?:job|step)[\d._a-z]{1,30}exceededmemorylimit(?:\(\d{1,15}>\d{1,15}\))?"),
    _kill("slurm", r"=>>pbs:jobkilled:(?:v?mem|pmem|pvmem)[\d.kmgb]{1,20}exceededlimit"),
    _kill("slurm", r"term_memlimit"),
    # Kubernetes, pkg/kubelet/eviction/helpers.go: nodeLowMessageFmt
    _host("evicted", r"(?:thenodewas)?lowonresource:memory", "evicted", group="kill"),
    _kill("killed", r"killed", refine=alone),
    _kill("killed", r"(?:line\d{1,6}:\d{1,9}|zsh:|\[\d{1,3}\][+-]?(?:\d{1,9})?)killed"),
    _kill("killed", r"(?:it/s|s/it)\]killed", refine=ends_line),
)


_NO_SPACE: Final = r"(?:[,:]{0,2}(?:error)?:?nospaceleftondevice)?"

HOST_MEMORY: Final[tuple[Wording, ...]] = (
    # c10/core/impl/alloc_cpu.cpp, as built by Microsoft's compiler
    _host(
        "cpu-allocator",
        r"defaultcpuallocator:notenoughmemory:(?:youtriedtoallocate<requested_bytes>)?",
        "windows-commit",
    ),
    _host(
        "cpu-allocator",
        r"defaultcpuallocator:(?:can'?tallocatememory|notenoughmemory|[a-z']{1,60}):?"
        r"(?:youtriedtoallocate<requested_bytes>)?",
        "cpu-allocator",
    ),
    # aten/src/TH/THGeneral.cpp of PyTorch 0.4 and 1.0
    _host(
        "cpu-allocator",
        r"torch:notenoughmemory:youtriedtoallocate<requested_bytes>",
        "cpu-allocator",
    ),
    _shm(
        "dataloader-bus-error",
        r"dataloaderworker(?:\(pid\(?s?\)?:?[\d,]{1,60}\))?iskilledbysignal:buserror"
        r"(?:\.itispossiblethatdataloader'?sworkersareoutofsharedmemory)?",
    ),
    _shm(
        "dataloader-bus-error",
        r"unexpectedbuserrorencounteredinworker"
        r"(?:\.thismightbecausedbyinsufficientsharedmemory)?",
    ),
    # NCCL's src/include/shm.h (to 2.12) and src/misc/shmutils.cc (since 2.13)
    *(
        _shm("nccl-shm", said)
        for said in (
            r"calltoposix_fallocatefailed[,:]{0,2}(?:error)?:?nospaceleftondevice",
            r"failedtoextend/dev/shm/[\w.-]{1,80}to(?P<requested_bytes>COUNT)bytes" + _NO_SPACE,
            r"errorwhilecreatingsharedmemorysegment[/\w.-]{0,100}\(size\d{1,15}\)" + _NO_SPACE,
        )
    ),
    _shm("shared-memory-full", r"dataloader'?sworkersareoutofsharedmemory"),
    # aten/src/ATen/MapAllocator.cpp; on Windows the page file backs shared memory, and error 1455
    # is ERROR_COMMITMENT_LIMIT
    _shm(
        "torch-shm",
        r"unableto(?:writetofile|resizefile)<[^<>]{1,120}>(?:totherightsize)?:nospaceleftondevice",
    ),
    _shm("torch-shm", r"unabletoallocatesharedmemory\(shm\)forfile<[^<>]{1,120}>"),
    # Linux's limit of 65,530 mappings is reached before the memory is with pieces below a megabyte.
    *(
        _host(
            name,
            rf"unabletommap(?P<requested_bytes>\d{{{digits}}})bytesfromfile<[^<>]{{0,120}}>"
            r":cannotallocatememory(?:\(12\))?",
            name,
        )
        for name, digits in (("mappings", "1,6"), ("cannot-map", "7,20"))
    ),
    _host(
        "page-file",
        r"couldn'?t(?:open|create|map)[a-z]{4,40}:?<torch_\w{1,80}>,errorcode:[<]1455>",
        "page-file",
    ),
    _host(
        "dataloader-killed",
        r"dataloaderworker(?:\(pid\(?s?\)?:?[\d,]{1,60}\))?iskilledbysignal:killed",
        "oom-killer",
    ),
    _host(
        "dataloader-killed",
        r"dataloaderworker\(pid\(?s?\)?:?[\d,]{1,60}\)exitedunexpectedlywithexitcode-?9",
        "oom-killer",
    ),
    # torch/utils/data/dataloader.py, _try_get_data: an exit code means the worker's own error
    _host(
        "dataloader-gone",
        r"dataloaderworker\(pid\(?s?\)?:?[\d,]{1,60}\)exitedunexpectedly(?!withexit)",
        "worker-gone",
        # a script without "if __name__ == '__main__'" starts itself again in each worker
        refine=only_where("bootstrappingphase|segmentationfault", 8000, 2000, is_there=False),
        group="workers",
    ),
    # batchgenerators 0.21 to 0.25, nondet_multi_threaded_augmenter.py; nnunetv2 2.0 to 2.6,
    # utilities/file_path_utilities.py, inference/predict_from_raw_data.py, preprocessing
    _host(
        "workers-gone",
        r"(?:someof|some|one(?:ormore)?(?:of)?)?(?:the|our|your)?background(?:workers?|processes)"
        r"(?:arenolongeralive|died|ismissing|is6feetunder)",
        "worker-gone",
        group="workers",
    ),
    # datasets 2.14 to 4.4, utils/py_utils.py: iflatmap_unordered
    _host(
        "workers-gone",
        r"(?:oneofthe)?subprocesseshasabruptlydiedduringmapoperation",
        "worker-gone",
        group="workers",
    ),
    # Notebooks: Colab and Kaggle print the reason; Jupyter and VS Code do not say why.
    _host("colab", r"crashedafterusingallavailableram", "notebook"),
    _host("kaggle", r"triedtoallocatemorememorythanisavailable", "notebook"),
    _host("jupyter", r"(?:the)?kernelappearstohavedied", "kernel-died"),
    _host("vscode", r"(?:the)?kernelcrashedwhileexecutingcode", "kernel-died"),
    # Ollama 0.1.33 to 0.12, llm/server.go
    _host("ollama", r"modelrequiresmoresystemmemory\(<requested_bytes>\)thanisavailable", "ollama"),
    # Ray 2.0 to 2.50, core_worker: a worker that is gone, with possible reasons
    _host(
        "ray-worker",
        r"(?:therearesome)?potentialrootcauses\.\(1\)theprocessiskilledbysigkillbyoomkiller"
        r"(?:duetohighmemoryusage)?",
        "ray-worker",
        group="ray",
    ),
    *KILLS,
    _host("page-file", r"(?:\[?winerror1455\]?:?)?thepagingfileistoosmall", "page-file"),
    # the number is the same in every language: Python's and Rust's errors of Windows
    _host("page-file", r"\[?(?:winerror|oserror)1455\]?", "page-file"),
    _host(
        "ray-memory",
        r"(?:taskwaskilledduetothenode|node|worker\(s\)(?:were)?killed[a-z]{0,20})?runninglowonmemory",
        "ray-memory",
        group="ray",
    ),
    # ray/_private/memory_monitor.py of Ray 0.6 to 1.13
    _host("ray-memory", r"rayoutofmemoryerror:", "ray-memory"),
    _host(
        "ray-memory",
        r"workers?\(?[^()]{0,60}\)?killedduetomemorypressure",
        "ray-memory",
        group="ray",
    ),
    _host(
        "numpy", r"(?:memoryerror:)?unabletoallocate<requested_bytes>foranarraywithshape", "numpy"
    ),
    _host(
        "errno-12",
        r"(?:oserror:|\[?errno12\]?:?|fork:|mmap[a-z()]{0,20}:){1,8}cannotallocatememory",
        "cannot-allocate",
    ),
    _host(
        "paddle-host",
        r"failtoallocmemoryof(?P<requested_bytes>COUNT)size,?errorcodeis12",
        "cpu-allocator",
    ),
    _host(
        "bad-alloc",
        r"(?:afterthrowinganinstanceof'|what\(\):|error:|exception:)std::bad_alloc(?!:)",
        "bad-alloc",
        group="bad_alloc",
    ),
    _host(
        "memory-error",
        r"(?<![a-z.])(?<!of-)memoryerror(?::(?!std::bad_alloc:|cuda|unabletoallocate\d))?",
        "python-memory-error",
        refine=ends_line,
        may_be_prose=True,
        group="python",
    ),
    _host(
        "jvm-heap",
        r"java\.lang\.outofmemoryerror(?::(?:javaheapspace|gcoverheadlimitexceeded|metaspace"
        r"|directbuffermemory|unabletocreate[a-z]{0,20}thread))?",
        "jvm-heap",
        group="jvm",
    ),
    _pinned(r"failedtoalloc<requested_bytes>onhost:(?:cuda_error_out_of_memory)?(?::outofmemory)?"),
    # ggml/src/ggml-cuda/ggml-cuda.cu: ggml_cuda_host_malloc; continues with ordinary memory
    _host(
        "ggml-pinned",
        r"failedtoallocate<requested_bytes>ofpinnedmemory:outofmemory",
        "ggml-pinned",
        is_warning=True,
    ),
    _pinned(r"(?:couldnot|failedto)allocatepinnedhostmemoryofsize:?(?P<requested_bytes>COUNT)"),
    _pinned(r"cudahostalloc[a-z()]{0,40}:outofmemory"),
    _pinned(
        r"(?:cuda|hip|cu)(?:mallochost|hostmalloc|hostalloc|memhostalloc|memallochost)[\w&*,()]{0,60}"
        r"(?:failed|returned)(?:witherror|error)?[\d:,(]{0,6}outofmemory"
    ),
)


_NOT_MEMORY: Final = {
    "device-assert": "device-sideasserttriggered cudaerrorassert",
    "illegal-access": "illegalmemoryaccess cudaerrorillegaladdress misalignedaddress",
    "launch-resources": "toomanyresourcesrequestedforlaunch",
    "launch-failure": "unspecifiedlaunchfailure error:invalidconfigurationargument",
    "no-kernel-image": "nokernelimageisavailable",
    "driver-init": "driverinitializationfailed notcompiledwithcudaenabled nocuda-capabledevice "
    "nonvidiadriveronyoursystem cudaerror:invaliddeviceordinal driverversionisinsufficient",
    "forked": "cudaerror:initializationerror error(3):initializationerror "
    "re-initializecudainforkedsubprocess",
    # cudaErrorUnknown, as PyTorch, its THC and programs print it; CUDA_ERROR_UNKNOWN of cuInit
    "driver-state": "error999:unknownerror error(999):unknownerror error=999:unknownerror "
    "cudaerror:unknownerror cudaunknownerror-thismaybe cuinit:cuda_error_unknown "
    "unsupporteddisplaydriver driver/libraryversionmismatch",
    "cudnn-execution": "cudnn_status_execution_failed cudnn_status_mapping_error "
    "cudnn_status_bad_param",
    "cublas-execution": "cublas_status_execution_failed cublas_status_invalid_value "
    "cublas_status_internal_error cublas_status_not_supported",
    "collective-timeout": "collectiveoperationtimeout",
    "nccl-error": "ncclsystemerror ncclinternalerror ncclremoteerror ncclinvalidusage "
    "ncclunhandledcudaerror",
    "shape-mismatch": "shapescannotbemultiplied mustmatchthesizeoftensor",
}
"""What errors say that are no lack of memory, by what they are; squeezed text has no blanks."""
_NOT_OF_GPU: Final = {
    "disk-full": "nospaceleftondevice",
    "file-limit": "toomanyopenfiles",
    "segfault": "signal11(sigsegv) killedbysignal:segmentationfault",
    # ggml/src/ggml.c of 2023: a fixed-size pool for a graph's tensors
    "fixed-pool": "notenoughspaceinthecontext'smemorypool notenoughspaceinthescratchmemorypool",
}
NEGATIVES: Final = tuple(
    Wording(
        sub_kind,
        re.escape(said),
        sub_kind,
        kind=NEGATIVE,
        backend=backend,
        is_device_oom=False,
        is_marker=True,
    )
    for backend, table in (("cuda", _NOT_MEMORY), ("cpu", _NOT_OF_GPU))
    for sub_kind, all_said in table.items()
    for said in all_said.split()
)

_on_chip = partial(Wording, sub_kind="on-chip", kind=SHARED_MEMORY, is_device_oom=False)

NOT_DEVICE_MEMORY: Final = (
    _on_chip(
        "triton-shared-memory",
        r"(?:outofresources:)?outofresource:(?:sharedmemory|tensormemory|threads|registers)"
        r"(?:,required:\d{1,12},,?hardwarelimit(?:ation)?:\d{1,12})?",
        group="triton",
    ),
    # torch/_inductor/runtime/triton_heuristics.py: OutOfMemoryError("out of resource: NAME ...")
    _on_chip(
        "triton-shared-memory",
        r"outofresource:\w{1,80}?required:\d{1,12}hardwarelimit:\d{1,12}",
        group="triton",
    ),
    _on_chip("ptxas-shared-memory", r"usestoomuchshareddata"),
    *NEGATIVES,
)
