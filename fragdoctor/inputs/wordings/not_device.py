"""Host memory, processes that were killed, and failures that only sound like device memory."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.inputs.log_streams import LogStream
from fragdoctor.inputs.wordings.wording import (
    NEGATIVE,
    SHARED_MEMORY,
    Fields,
    Refine,
    Wording,
    compile_squeezed,
)
from fragdoctor.inputs.wordings.wording import host_wording as _host

_SUB_KIND: Final = "oom-killer"


def _alone(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Keep a bare "Killed" that is a line of its own, as a shell prints it."""
    is_alone = not stream.before(match.start()) and not stream.after(match.end())
    return fields if is_alone else None


def _of_cgroup(fields: Fields, match: re.Match[str], stream: LogStream) -> Fields | None:
    """Tell a limit of a container or a job from a full machine (Linux, mm/memcontrol.c)."""
    around = stream.squeezed[max(0, match.start() - 1000) : match.end() + 4000]
    is_limited = (
        "mem_cgroup_o" in around or "memorycgroup" in around or "constraint_memcg" in around
    )
    return fields | ({"sub_kind": "cgroup-kill"} if is_limited else {})


def _kill(
    variant: str, literal: str, pattern: str, back: int = 0, refine: Refine | None = None
) -> Wording:
    return _host(variant, _SUB_KIND, literal, pattern, back, group="kill", refine=refine)


KILLS: Final = (
    _kill("exit-code", "exitcode:-9", r"\(?exitcode:-9(?!\d)\)?", 1),
    _kill("exit-code", "signal9", r"signal9\(sigkill\)"),
    _kill("exit-code", "exitstatus-9", r"(?:non-zero)?exitstatus-9(?!\d)", 8),
    _kill("exit-code", "exitcode-9", r"exitcode-9(?!\d)"),
    _kill("exit-code", "returncode", r"(?:exitswith)?returncode[=:]?-9(?!\d)", 9),
    _kill(
        "exit-code",
        "137",
        r"(?:exit(?:ed|s)?(?:with)?(?:exit)?(?:code|status)|(?:exit)?(?:code|status)|exited)"
        r"[:=(]{0,2}\"?137(?!\d)",
        24,
    ),
    _kill("sigkill", "sigkill:9", r"diedwith<?signals\.sigkill:9", 18),
    _kill(
        "sigkill",
        "sigkill",
        r"(?:died|killed|terminated|receivedsignal|exited)(?:with|by|on|due|to|the)?(?:signal)?"
        r":?\(?(?:<?signals\.)?sigkill",
        34,
    ),
    _kill(
        "kernel",
        "killedprocess",
        r"(?:outofmemory|memorycgroupoutofmemory):?killedprocess\d{1,9}",
        26,
        refine=_of_cgroup,
    ),
    _kill("kernel", "oom-kill:constraint", r"oom-kill:constraint", refine=_of_cgroup),
    _kill("kernel", "invokedoom-killer", r"invokedoom-killer", refine=_of_cgroup),
    _kill("slurm", "killevent", r"oom[-_]killevent", 4),
    _kill("slurm", "oomkilled", r"oomkilled"),
    # runc, libcontainer/process_linux.go
    _kill(
        "slurm", "oom-killed", r"(?:containerinitwas)?oom-killed(?:\(memorylimittoolow\?\))?", 16
    ),
    # Slurm to 19.05, slurmd/common/proctrack and jobacct_gather; OpenPBS, mom_main.c; LSF, bhist
    _kill(
        "slurm",
        "exceededmemorylimit",
        r"(?:job|step)[\d._a-z]{1,30}exceededmemorylimit(?:\(\d{1,15}>\d{1,15}\))?",
        34,
    ),
    _kill(
        "slurm",
        "jobkilled:",
        r"=>>pbs:jobkilled:(?:v?mem|pmem|pvmem)[\d.kmgb]{1,20}exceededlimit",
        7,
    ),
    _kill("slurm", "term_memlimit", r"term_memlimit"),
    # Kubernetes, pkg/kubelet/eviction/helpers.go: nodeLowMessageFmt
    _host(
        "evicted",
        "evicted",
        "lowonresource:memory",
        r"(?:thenodewas)?lowonresource:memory",
        10,
        group="kill",
    ),
    _host("killed", _SUB_KIND, "killed", r"killed", group="kill", refine=_alone),
    _kill("killed", "killed", r"line\d{1,6}:\d{1,9}killed", 24),
    _kill("killed", "killed", r"\[\d{1,3}\][+-]?(?:\d{1,9})?killed", 16),
)


HOST_MEMORY: Final[tuple[Wording, ...]] = (
    # c10/core/impl/alloc_cpu.cpp says it so where it was built by Microsoft's compiler
    _host("cpu-allocator", "windows-commit", "defaultcpuallocator:notenoughmemory",
          r"defaultcpuallocator:notenoughmemory:(?:youtriedtoallocate<requested_bytes>)?"),
    _host("cpu-allocator", "cpu-allocator", "defaultcpuallocator:",
          r"defaultcpuallocator:(?:can'?tallocatememory|notenoughmemory|[a-z']{1,60}):?"
          r"(?:youtriedtoallocate<requested_bytes>)?"),
    # aten/src/TH/THGeneral.cpp of PyTorch 0.4 and 1.0
    _host("cpu-allocator", "cpu-allocator", "torch:notenoughmemory:",
          r"torch:notenoughmemory:youtriedtoallocate<requested_bytes>"),
    _host("dataloader-bus-error", "dev-shm", "buserror",
          r"dataloaderworker(?:\(pid\(?s?\)?:?[\d,]{1,60}\))?iskilledbysignal:buserror"
          r"(?:\.itispossiblethatdataloader'?sworkersareoutofsharedmemory)?", 100, group="shm"),
    _host("dataloader-bus-error", "dev-shm", "buserrorencounteredinworker",
          r"unexpectedbuserrorencounteredinworker"
          r"(?:\.thismightbecausedbyinsufficientsharedmemory)?", 10, group="shm"),
    # NCCL's src/include/shm.h (to 2.12) and src/misc/shmutils.cc (since 2.13)
    _host("nccl-shm", "dev-shm", "nospaceleftondevice",
          r"(?:calltoposix_fallocatefailed|error:failedtoextend/dev/shm/[\w.-]{1,80}to"
          r"(?P<requested_bytes>COUNT)bytes|unabletowritetofile</torch_\w{1,80}>"
          r"|errorwhilecreatingsharedmemorysegment[/\w.-]{0,100}\(size(?P<_size>\d{1,15})\))"
          r"[,:]{0,2}(?:error)?:?nospaceleftondevice", 190, group="shm"),
    _host("nccl-shm", "dev-shm", "creatingsharedmemorysegment",
          r"errorwhilecreatingsharedmemorysegment[/\w.-]{0,100}"
          r"\(size(?P<requested_bytes>COUNT)\)", 10, group="shm"),
    _host("shared-memory-full", "dev-shm", "workersareoutofsharedmemory",
          r"dataloader'?sworkersareoutofsharedmemory", 12, group="shm"),
    _host("dataloader-killed", "oom-killer", "iskilledbysignal:killed",
          r"dataloaderworker(?:\(pid\(?s?\)?:?[\d,]{1,60}\))?iskilledbysignal:killed", 100),
    _host("dataloader-killed", "oom-killer", "exitedunexpectedly",
          r"dataloaderworker\(pid\(?s?\)?:?[\d,]{1,60}\)exitedunexpectedlywithexitcode-?9", 60),
    # batchgenerators 0.21 to 0.25, nondet_multi_threaded_augmenter.py; nnunetv2 2.0 to 2.6,
    # utilities/file_path_utilities.py and inference/predict_from_raw_data.py
    _host("workers-gone", "worker-gone", "backgroundworkers",
          r"(?:someof|some|oneormoreof|oneormore)?(?:the|our)?backgroundworkers"
          r"(?:arenolongeralive|died)", 24, group="workers"),
    # Notebooks: Colab's and Kaggle's own words; Jupyter's and VS Code's do not say why.
    _host("colab", "notebook", "usingallavailableram", r"crashedafterusingallavailableram", 12),
    _host("kaggle", "notebook", "allocatemorememorythanisavailable",
          r"triedtoallocatemorememorythanisavailable", 7),
    _host("jupyter", "kernel-died", "kernelappearstohavedied",
          r"(?:the)?kernelappearstohavedied", 3),
    _host("vscode", "kernel-died", "kernelcrashedwhileexecuting",
          r"(?:the)?kernelcrashedwhileexecutingcode", 3),
    # Ollama 0.1.33 to 0.12, llm/server.go
    _host("ollama", "ollama", "requiresmoresystemmemory",
          r"modelrequiresmoresystemmemory\(<requested_bytes>\)thanisavailable", 5),
    # Ray 2.0 to 2.50, core_worker: a worker that is gone, with reasons that it may have had
    _host("ray-worker", "ray-worker", "potentialrootcauses",
          r"(?:therearesome)?potentialrootcauses\.\(1\)theprocessiskilledbysigkillbyoomkiller"
          r"(?:duetohighmemoryusage)?", 12, group="ray"),
    *KILLS,
    _host("page-file", "page-file", "pagingfileistoosmall",
          r"(?:\[?winerror1455\]?:?)?thepagingfileistoosmall", 18),
    _host("page-file", "page-file", "winerror1455", r"\[?winerror1455\]?", 1),
    _host("ray-memory", "ray-memory", "runninglowonmemory",
          r"(?:taskwaskilledduetothenode|node|worker\(s\)(?:were)?killed[a-z]{0,20})?runninglowonmemory",
          40, group="ray"),
    # ray/_private/memory_monitor.py of Ray 0.6 to 1.13
    _host("ray-memory", "ray-memory", "rayoutofmemoryerror:", r"rayoutofmemoryerror:"),
    _host("ray-memory", "ray-memory", "killedduetomemorypressure",
          r"workers?\(?[^()]{0,60}\)?killedduetomemorypressure", 70, group="ray"),
    _host("numpy", "numpy", "unabletoallocate",
          r"(?:memoryerror:)?unabletoallocate<requested_bytes>foranarraywithshape", 12),
    _host("errno-12", "cannot-allocate", "cannotallocatememory",
          r"(?:oserror:|\[?errno12\]?:?|fork:|mmap[a-z()]{0,20}:){1,8}cannotallocatememory", 40),
    _host("paddle-host", "cpu-allocator", "failtoallocmemoryof",
          r"failtoallocmemoryof(?P<requested_bytes>COUNT)size,?errorcodeis12"),
    _host("bad-alloc", "bad-alloc", "std::bad_alloc",
          r"(?:afterthrowinganinstanceof'|what\(\):|error:|exception:)std::bad_alloc(?!:)", 30,
          group="bad_alloc"),
    _host("memory-error", "python-memory-error", "memoryerror",
          r"(?<![a-z.])memoryerror(?:$|:(?!std::bad_alloc:|cuda|unabletoallocate\d))",
          may_be_prose=True, group="python"),
    _host("jvm-heap", "jvm-heap", "java.lang.outofmemoryerror",
          r"java\.lang\.outofmemoryerror(?::(?:javaheapspace|gcoverheadlimitexceeded|metaspace"
          r"|directbuffermemory|unabletocreate[a-z]{0,20}thread))?", group="jvm"),
    _host("pinned-host", "pinned-host", "bytesonhost:",
          r"failedtoalloc<requested_bytes>onhost:(?:cuda_error_out_of_memory)?(?::outofmemory)?",
          40),
    _host("pinned-host", "pinned-host", "pinnedhostmemoryofsize",
          r"(?:couldnot|failedto)allocatepinnedhostmemoryofsize:?(?P<requested_bytes>COUNT)", 24),
    _host("pinned-host", "pinned-host", "cudahostalloc", r"cudahostalloc[a-z()]{0,40}:outofmemory"),
    _host("pinned-host", "pinned-host", "outofmemory",
          r"(?:cuda|hip|cu)(?:mallochost|hostmalloc|hostalloc|memhostalloc|memallochost)[\w&*,()]{0,60}"
          r"(?:failed|returned)(?:witherror|error)?[\d:,(]{0,6}outofmemory", 120),
)  # fmt: skip


def _negative(sub_kind: str, literal: str, pattern: str = "", backend: str = "cuda") -> Wording:
    return Wording(
        sub_kind,
        NEGATIVE,
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
    _negative("segfault", "killedbysignal:segmentationfault", backend="cpu"),
    # ggml/src/ggml.c of 2023: memory of fixed size that a graph takes its tensors from
    _negative("fixed-pool", "notenoughspaceinthecontext'smemorypool", backend="cpu"),
    _negative("fixed-pool", "notenoughspaceinthescratchmemorypool", backend="cpu"),
)


NOT_DEVICE_MEMORY: Final = (
    Wording(
        "triton-shared-memory",
        SHARED_MEMORY,
        "cuda",
        "outofresource:",
        compile_squeezed(
            r"(?:outofresources:)?outofresource:(?:sharedmemory|tensormemory|threads|registers)"
            r"(?:,required:\d{1,12},,?hardwarelimit(?:ation)?:\d{1,12})?"
        ),
        back=16,
        is_device_oom=False,
        sub_kind="on-chip",
        group="triton",
    ),
    Wording(
        "ptxas-shared-memory",
        SHARED_MEMORY,
        "cuda",
        "toomuchshareddata",
        compile_squeezed(r"usestoomuchshareddata"),
        back=4,
        is_device_oom=False,
        sub_kind="on-chip",
    ),
    *NEGATIVES,
)
