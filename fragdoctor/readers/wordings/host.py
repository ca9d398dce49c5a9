"""Host memory: the CPU allocator, kills, shared memory, page file, other runtimes' heaps."""

from __future__ import annotations

from typing import Final

from fragdoctor.readers.wordings import names
from fragdoctor.readers.wordings.base import Wording, compile_squeezed


def _host(
    variant: str, sub_kind: str, literal: str, pattern: str, back: int = 0, *,
    group: str = "", may_be_prose: bool = False,
) -> Wording:  # fmt: skip
    return Wording(
        variant,
        names.HOST,
        "cpu",
        literal,
        compile_squeezed(pattern),
        back=back,
        is_device_oom=False,
        sub_kind=sub_kind,
        group=group,
        may_be_prose=may_be_prose,
    )


WORDINGS: Final = (
    _host("cpu-allocator", "cpu-allocator", "defaultcpuallocator:",
          r"defaultcpuallocator:(?:can'?tallocatememory|notenoughmemory|[a-z']{1,60}):?"
          r"(?:youtriedtoallocate<requested_bytes>)?"),
    _host("dataloader-bus-error", "dev-shm", "buserror",
          r"dataloaderworker(?:\(pid\(?s?\)?:?[\d,]{1,60}\))?iskilledbysignal:buserror"
          r"(?:\.itispossiblethatdataloader'?sworkersareoutofsharedmemory)?", 100, group="shm"),
    _host("shared-memory-full", "dev-shm", "workersareoutofsharedmemory",
          r"dataloader'?sworkersareoutofsharedmemory", 12, group="shm"),
    _host("dataloader-killed", "oom-killer", "iskilledbysignal:killed",
          r"dataloaderworker(?:\(pid\(?s?\)?:?[\d,]{1,60}\))?iskilledbysignal:killed", 100),
    _host("dataloader-killed", "oom-killer", "exitedunexpectedly",
          r"dataloaderworker\(pid\(?s?\)?:?[\d,]{1,60}\)exitedunexpectedlywithexitcode-?9", 60),
    _host("exit-code", "oom-killer", "exitcode:-9", r"\(?exitcode:-9\)?", 1, group="kill"),
    _host("exit-code", "oom-killer", "signal9", r"signal9\(sigkill\)", group="kill"),
    _host("exit-code", "oom-killer", "exitstatus-9", r"non-zeroexitstatus-9", 8, group="kill"),
    _host("exit-code", "oom-killer", "137",
          r"(?:exit(?:ed|s)?(?:with)?(?:exit)?(?:code|status)|(?:exit)?(?:code|status)|exited|exitcode)"
          r"[:=(]{0,2}\"?137(?!\d)", 24, group="kill"),
    _host("sigkill", "oom-killer", "sigkill:9", r"diedwith<?signals\.sigkill:9", 18, group="kill"),
    _host("sigkill", "oom-killer", "sigkill", r"(?:diedwith|killedby|terminatedby|receivedsignal:?|"
          r"(?:terminated|died|was(?:killed|terminated))(?:with|by)(?:signal)?)(?:signal)?\(?sigkill",
          34, group="kill"),
    _host("kernel", "oom-killer", "killedprocess",
          r"(?:outofmemory|memorycgroupoutofmemory):?killedprocess\d{1,9}", 26, group="kill"),
    _host("kernel", "oom-killer", "oom-killevent", r"oom[-_]killevent", group="kill"),
    _host("kernel", "oom-killer", "oom-kill:constraint", r"oom-kill:constraint", group="kill"),
    _host("kernel", "oom-killer", "invokedoom-killer", r"invokedoom-killer", group="kill"),
    _host("slurm", "oom-killer", "oomkill", r"(?:detected\d{1,9})?oom[-_]?kill(?:ed)?"
          r"(?:event|\(s\)|handler)?", 18, group="kill"),
    _host("kubernetes", "oom-killer", "oomkilled", r"oomkilled", group="kill"),
    _host("page-file", "page-file", "pagingfileistoosmall",
          r"(?:\[?winerror1455\]?:?)?thepagingfileistoosmall", 18),
    _host("page-file", "page-file", "winerror1455", r"\[?winerror1455\]?", 1),
    _host("ray-memory", "ray-memory", "runninglowonmemory",
          r"(?:taskwaskilledduetothenode|node|worker\(s\)(?:were)?killed[a-z]{0,20})?runninglowonmemory",
          40, group="ray"),
    _host("ray-memory", "ray-memory", "killedduetomemorypressure",
          r"workers?\(?[^()]{0,60}\)?killedduetomemorypressure", 70, group="ray"),
    _host("numpy", "numpy", "unabletoallocate",
          r"unabletoallocate<requested_bytes>foranarraywithshape"),
    _host("errno-12", "cannot-allocate", "cannotallocatememory",
          r"(?:oserror:|\[?errno12\]?:?|fork:|mmap[a-z()]{0,20}:)+cannotallocatememory", 40),
    _host("bad-alloc", "bad-alloc", "std::bad_alloc",
          r"(?:afterthrowinganinstanceof'|what\(\):|error:|exception:)std::bad_alloc(?!:)", 30,
          group="bad_alloc"),
    _host("memory-error", "python-memory-error", "memoryerror",
          r"(?<![a-z.])memoryerror(?:$|:)", may_be_prose=True, group="python"),
    _host("jvm-heap", "jvm-heap", "java.lang.outofmemoryerror",
          r"java\.lang\.outofmemoryerror(?::(?:javaheapspace|gcoverheadlimitexceeded|metaspace"
          r"|directbuffermemory|unabletocreate[a-z]{0,20}thread))?", group="jvm"),
    _host("pinned-host", "pinned-host", "cudahostalloc", r"cudahostalloc[a-z()]{0,40}:outofmemory"),
)  # fmt: skip
