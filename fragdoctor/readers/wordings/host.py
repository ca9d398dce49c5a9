"""Host memory: the CPU allocator, kills, shared memory, page file, other runtimes' heaps."""

from __future__ import annotations

from typing import Final

from fragdoctor.readers.wordings.base import Wording
from fragdoctor.readers.wordings.base import host_wording as _host
from fragdoctor.readers.wordings.kills import WORDINGS as KILLS

WORDINGS: Final[tuple[Wording, ...]] = (
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
    *KILLS,
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
