"""Inputs that grow in one dimension each, for tests of how the work grows with it.

Each entry is (command, name of the file, n, function of n that returns the file's bytes).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import builders
from builders import BASE, MIB, alloc, block, frame, free, oom, segment, segment_alloc

Make = Callable[[int], bytes]
_TRAINING: Final = [
    frame("/x/site-packages/torch/nn/modules/module.py", 7, "_call_impl"),
    frame("train.py", 9, "train"),
]
MESSAGE: Final = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 79.15 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process "
    "has 78.00 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and "
    "5.00 GiB is reserved by PyTorch but unallocated.\n"
)


def _recording(segments: list[dict[str, Any]], *traces: list[dict[str, Any]], **more: Any) -> bytes:
    data = builders.snapshot(*segments, events=traces[0] if traces else [])
    if len(traces) > 1:
        data["device_traces"] = list(traces)
    return builders.pickled(data | more)


def _one_segment(n_blocks: int, frames: list[Any] | None = None) -> dict[str, Any]:
    rows = [
        block(512, "active_allocated" if i % 2 else "inactive", frames=frames)
        for i in range(n_blocks)
    ]
    return segment(BASE, *rows, frames=frames)


def events(n: int) -> bytes:
    rows = [segment_alloc(BASE, 20 * MIB, frames=_TRAINING, time_us=0)]
    for i in range(n):
        rows.append(alloc(BASE, 512 * (1 + i % 7), frames=_TRAINING, time_us=3 * i))
        rows += free(BASE, 512 * (1 + i % 7), frames=_TRAINING, time_us=3 * i + 1)
    return _recording([segment(BASE, block(20 * MIB))], rows)


def live_blocks(n: int) -> bytes:
    rows = [segment_alloc(BASE, 512 * n, frames=_TRAINING, time_us=0)]
    rows += [alloc(BASE + 512 * i, 512, frames=_TRAINING, time_us=i) for i in range(n)]
    return _recording([_one_segment(n, _TRAINING)], rows)


def segments(n: int) -> bytes:
    found = [
        segment(BASE + 4 * MIB * i, block(512, "active_allocated"), block(2 * MIB - 512))
        for i in range(n)
    ]
    return _recording(found, [segment_alloc(s["address"], 2 * MIB, time_us=1) for s in found])


def pools(n: int) -> bytes:
    found = [
        segment(BASE + 4 * MIB * i, block(2 * MIB, "active_allocated"), pool=(i + 1, 0))
        for i in range(n)
    ]
    rows = [
        alloc(s["address"], 2 * MIB, time_us=i, pool=s["segment_pool_id"])
        for i, s in enumerate(found)
    ]
    return _recording(found, rows)


def streams(n: int) -> bytes:
    found = [
        segment(BASE + 4 * MIB * i, block(2 * MIB, "active_allocated"), stream=i) for i in range(n)
    ]
    rows = [alloc(s["address"], 2 * MIB, time_us=i, stream=i) for i, s in enumerate(found)]
    return _recording(found, rows)


def devices(n: int) -> bytes:
    traces = [
        [segment_alloc(BASE, 2 * MIB, time_us=1), alloc(BASE, 512, time_us=2)] for _ in range(n)
    ]
    found = [
        segment(BASE, block(512, "active_allocated"), block(2 * MIB - 512), device=i)
        for i in range(n)
    ]
    return _recording(found, *traces)


def depth_of_stacks(n: int) -> bytes:
    stack = [frame(f"f{i % 50}.py", i, f"work_{i}") for i in range(n)]
    rows = [alloc(BASE + 512 * i, 512, frames=stack, time_us=i) for i in range(20)]
    return _recording([_one_segment(20, stack)], rows)


def distinct_stacks(n: int) -> bytes:
    stacks = [[frame("train.py", i, "step"), frame("train.py", 3, "main")] for i in range(n)]
    rows = [alloc(BASE + 512 * i, 512, frames=s, time_us=i) for i, s in enumerate(stacks)]
    return _recording([_one_segment(n)], rows)


def distinct_names(n: int) -> bytes:
    stacks = [[frame(f"/a/{i}/m.py", 1, f"eval_{i}")] for i in range(n)]
    rows = [alloc(BASE + 512 * i, 512, frames=s, time_us=i) for i, s in enumerate(stacks)]
    return _recording([_one_segment(n)], rows)


def distinct_sizes(n: int) -> bytes:
    rows = []
    for i in range(n):
        rows.append(alloc(BASE, 512 * (i + 1), frames=_TRAINING, time_us=3 * i))
        rows += free(BASE, 512 * (i + 1), frames=_TRAINING, time_us=3 * i + 1)
    return _recording([segment(BASE, block(512 * n))], rows)


def failures(n: int) -> bytes:
    rows = [segment_alloc(BASE, 2 * MIB, frames=_TRAINING, time_us=0)]
    for i in range(n):
        rows.append(alloc(BASE, 512, frames=_TRAINING, time_us=3 * i))
        rows.append(oom(2 * MIB + 512 * i, MIB, frames=_TRAINING, time_us=3 * i + 1))
        rows += free(BASE, 512, frames=_TRAINING, time_us=3 * i + 2)
    return _recording([segment(BASE, block(2 * MIB))], rows)


def annotations(n: int) -> bytes:
    notes = [
        {"device": 0, "time_us": 2 * i + at, "name": f"ProfilerStep#{i}", "stage": stage}
        for i in range(n)
        for at, stage in ((0, "START"), (1, "END"))
    ]
    rows = [alloc(BASE + 512 * i, 512, frames=_TRAINING, time_us=40 * i) for i in range(40)]
    return _recording([_one_segment(40)], rows, external_annotations=notes)


def notes(n: int) -> bytes:
    rows = [
        alloc(BASE + 512 * i, 512, time_us=i, user_metadata=f"u{i}", compile_context=f"{i}/0")
        for i in range(n)
    ]
    return _recording([_one_segment(n)], rows)


def module_paths(n: int) -> bytes:
    """Return a recording of so many modules; of fewer than 200 each has a row of its own."""
    rows = [
        alloc(BASE + 512 * i, 512, time_us=i, user_metadata=f"nn.Module: {name}.layers.{i}.mlp")
        for i, name in ((i, "model" if i % 2 else f"part_{i}") for i in range(n))
    ]
    return _recording([_one_segment(n)], rows)


def depth_of_modules(n: int) -> bytes:
    path = "nn.Module: " + ".".join(f"{i % 10}.block" for i in range(n))
    rows = [alloc(BASE + 512 * i, 512, time_us=i, user_metadata=path) for i in range(20)]
    return _recording([_one_segment(20)], rows)


def steps(n: int) -> bytes:
    inside = frame("train.py", 5, "step")
    rows = [segment_alloc(BASE, 20 * MIB, frames=_TRAINING, time_us=0)]
    for i in range(n):
        forward = [frame("train.py", 7, "forward"), inside]
        backward = [frame("/x/site-packages/torch/_tensor.py", 3, "backward"), inside]
        update = [frame("/x/site-packages/torch/optim/adamw.py", 3, "step"), inside]
        for j, stack in enumerate((forward, backward, update)):
            rows.append(alloc(BASE + MIB * j, MIB, frames=stack, time_us=10 * i + j))
        for j in range(3):
            rows += free(BASE + MIB * j, MIB, frames=backward, time_us=10 * i + 5 + j)
    rows.append(oom(30 * MIB, MIB, frames=_TRAINING, time_us=10 * n))
    return _recording([segment(BASE, block(20 * MIB))], rows)


def holes_and_flushes(n: int) -> bytes:
    """Return a recording with n holes of 512 bytes, and a flush for every ten of them."""
    pages = [BASE + 2 * MIB * i for i in range(-(-n // 2048))]
    found = [
        segment(at, *[block(512, "active_allocated" if i % 2 else "inactive") for i in range(4096)])
        for at in pages
    ]
    rows = []
    for i in range(n // 10):
        at, size = BASE + (1 << 40) + 40 * MIB * i, 20 * MIB
        rows += [segment_alloc(at, size), alloc(at, size), *free(at, size)]
        rows.append(builders.segment_free(at, size))
    return _recording(found, [*rows, oom(MIB, MIB)])


def nested_json(n: int) -> bytes:
    return b'{"segments": ' + b'{"a": [' * n + b"]}" * n + b"}"


def nested_pickle(n: int) -> bytes:
    return b"\x80\x04" + b"]" * n + b"a" * (n - 1) + b"."


def settings(n: int) -> bytes:
    conf = builders.settings(
        PYTORCH_CUDA_ALLOC_CONF=",".join(f"key_{i}:[{i},{i}]" for i in range(n))
    )
    return _recording([_one_segment(4)], [alloc(BASE, 512, time_us=1)], allocator_settings=conf)


def unknown_keys(n: int) -> bytes:
    more = {f"key_{i}": [{"deep": i}] for i in range(n)}
    return _recording([_one_segment(4)], [alloc(BASE, 512, time_us=1)], **more)


def snapshot_as_json(n: int) -> bytes:
    data = builders.snapshot(_one_segment(n), events=[alloc(BASE, 512, time_us=1)] * n)
    return json.dumps(data).encode()


def messages(n: int) -> bytes:
    return (MESSAGE * n).encode()


def messages_of_ranks(n: int) -> bytes:
    return "".join(f"[rank{i}]: {MESSAGE}" for i in range(n)).encode()


def message_of_processes(n: int) -> bytes:
    others = "".join(f"Process {i} has 1.00 GiB memory in use. " for i in range(n))
    return MESSAGE.replace("Including", others + "Including").encode()


def plain_log(n: int) -> bytes:
    return "".join(f"step {i} loss {i / 7:.3f} memory 1.0 GiB\n" for i in range(n)).encode()


def trials(n: int) -> bytes:
    told = "".join(
        f"[I 2024-01-01 10:00:{i % 60:02}] Trial {i} finished with value: 1.0\n"
        f"GPU memory allocated: {i}.0 MiB\nTrial {i} failed\n{MESSAGE}"
        for i in range(n)
    )
    return told.encode()


def processes(n: int) -> bytes:
    told = "".join(f"(worker pid={i}) memory allocated: {i} MiB\n{MESSAGE}" for i in range(n))
    return told.encode()


def restarts(n: int) -> bytes:
    line = "Restarting worker group\nWatchdog caught collective operation timeout\n"
    return ((line + MESSAGE) * n).encode()


def progress_bars(n: int) -> bytes:
    return (MESSAGE + "".join(f" {i % 100}%|##| {i}/9999 [00:01]\r" for i in range(n))).encode()


def in_one_line(text: str) -> Make:
    """Return a file of n repetitions of a text in one line, with a message before and after."""
    return lambda n: (MESSAGE + text * n + "\n" + MESSAGE).encode("utf-8", "surrogatepass")


def in_lines(text: str) -> Make:
    """Return a file of n lines of a text, with a message before and after."""
    return lambda n: (MESSAGE + (text + "\n") * n + MESSAGE).encode("utf-8", "surrogatepass")


def stats_list(n: int) -> bytes:
    return json.dumps(
        [{"allocated_bytes.all.current": i, "num_ooms": 0} for i in range(n)]
    ).encode()


def stats_lines(n: int) -> bytes:
    return "".join(
        json.dumps({"step": i, "allocated_bytes.all.current": i, "num_ooms": 0}) + "\n"
        for i in range(n)
    ).encode()


def stats_of_devices(n: int) -> bytes:
    return json.dumps(
        {f"cuda:{i}": {"allocated_bytes.all.current": i, "num_ooms": 0} for i in range(n)}
    ).encode()


def stats_keys(n: int) -> bytes:
    return json.dumps(
        {"allocated_bytes.all.current": 1, **{f"active_bytes.x{i}.peak": i for i in range(n)}}
    ).encode()


def summaries(n: int) -> bytes:
    table = "| PyTorch CUDA memory summary, device ID 0 | CUDA OOMs: 0 | cudaMalloc retries: 0 |\n"
    row = "| Allocated memory | 1 KiB | 2 KiB | 3 KiB | 4 KiB |\n"
    return ("Cur Usage Peak Usage\n" + (table + row) * n).encode()


def page(middle: bytes) -> Make:
    """Return an HTML page with n repetitions of something in its list of snapshots."""
    return lambda n: b"<html><script>local_files = [" + middle * n


def page_entries(n: int) -> bytes:
    entry = b'{"name": "a", "base64": "gARdlC4="}'
    return b"<html><script>local_files = [" + b",".join([entry] * n) + b"]</script></html>"


Entry = tuple[str, str, int, Make]
RECORDINGS: Final[tuple[tuple[Make, int], ...]] = (
    (events, 80), (live_blocks, 80), (segments, 80), (pools, 80), (streams, 80),
    (devices, 16), (depth_of_stacks, 80), (distinct_stacks, 80), (distinct_names, 80),
    (distinct_sizes, 80), (failures, 60), (annotations, 80), (notes, 80), (settings, 80),
    (unknown_keys, 80), (snapshot_as_json, 80), (module_paths, 320), (depth_of_modules, 80),
    (steps, 40), (nested_json, 80), (nested_pickle, 80),
)  # fmt: skip
TEXTS: Final[tuple[tuple[str, Make, int], ...]] = (
    *((f.__name__, f, 40) for f in (
        messages, messages_of_ranks, message_of_processes, plain_log, trials, processes, restarts,
        progress_bars, stats_list, stats_lines, stats_keys, summaries, page_entries,
    )),
    ("stats_of_devices", stats_of_devices, 30),
    *((f"{text[:8]!r} in one line", in_one_line(text), 1000) for text in (
        " ", "\t", "\r", "\\", "\\n", "\x1b[", "\x1b[0;", "[", "(", "<", "<b ", "&amp;", "&", ">",
        "│", "─", "1", "1,", "a", "a.", "'", '"', ":", "=", "-", "-9)", "cuda error ", "killed ",
        "out of memory ", "oom", "tried to allocate ", "2.00 gib ", "process 1 has 1 gib ",
        "memory in use ", "already allocated ", "trial 1 ", "run 3/", "epoch ", "step 1 ",
        "allocated: 3 mib ", "10:00:00 ", "2024-01-01 ", "[rank0]: ", "pid=1 ", "assertion` ",
        "%|", "memory summary, device id ", "{", "[{", '{"num_ooms"', "\u0130", "\ud800",
    )),
    *((f"lines of {text!r}", in_lines(text), 80) for text in (
        "", " ", "│ x", "> > x", "a | b", "[rank1]: x", "INFO:root: oom", "(a pid=3) killed",
        "Cur Usage Peak Usage", "memory summary, device ID 1 | OOMs: 1",
        '{"num_ooms": 1, "step": 2}', "x" * 200, "Traceback (most recent call last):",
        '  File "a.py", line 1, in f', "CUDA error: out of memory", "GPU memory used: 3 GiB",
    )),
    *((f"page of {text!r}", page(text), 1000) for text in (
        b" ", b"{", b'{"name": ', b'{ "name" : "a",', b"\\", b'"', b"]", b"local_files = [",
    )),
)  # fmt: skip

# What a second recording, and a moment of the trace, are looked up in.
FURTHER: Final = (
    (events, 80), (live_blocks, 80), (distinct_stacks, 80), (module_paths, 320), (steps, 40),
    (failures, 60), (annotations, 80),
)  # fmt: skip


def entries() -> list[Entry]:
    """Return all files: a recording goes through every command that takes one."""
    found: list[Entry] = [
        (command, f.__name__, n, f)
        for f, n in RECORDINGS
        for command in ("analyze", "simulate", "export")
    ]
    found += [("analyze", name, n, make) for name, make, n in TEXTS]
    found += [(c, f.__name__, n, f) for c in ("moment", "continue") for f, n in FURTHER]
    return found
