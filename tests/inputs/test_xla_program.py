"""What XLA prints of a compiled program that does not fit."""

from __future__ import annotations

from fragdoctor.inputs.xla_program import xla_program

GIB = 1 << 30

# xla/service/buffer_assignment.cc: Stats::ToString, BufferAssignment::ToVerboseString
REPORT = """BufferAssignment stats:
             parameter allocation:    1.50GiB
              constant allocation:         0B
        maybe_live_out allocation:    2.00GiB
     preallocated temp allocation:    4.50GiB
                 total allocation:    8.00GiB
Peak buffers:
\tBuffer 1:
\t\tSize: 2.00GiB
\t\tEntry Parameter Subshape: f32[1]
\t\tShape: (f32[16,128], s32[])
\t\t==========================

\tBuffer 2:
\t\tSize: 1.00GiB
\t\tShape: f32[99]
"""


def test_parts_and_total_are_read_and_what_is_nothing_is_left_out():
    fields, parts = xla_program(f"some lines\n{REPORT}")

    assert {p.name: p.n_bytes / GIB for p in parts} == {
        "arguments": 1.5, "outputs": 2.0, "temporaries": 4.5
    }  # fmt: skip
    assert fields == {
        "program_bytes": 8 * GIB,
        "largest_buffer_bytes": 2 * GIB,
        "largest_buffer": "(f32[16,128],",
    }


def test_report_that_was_cut_gives_what_it_still_has():
    _, parts = xla_program(REPORT)

    assert xla_program(REPORT.partition("Peak")[0]) == ({"program_bytes": 8 * GIB}, parts)
    assert xla_program(REPORT.partition("total")[0]) == ({}, ())
    assert xla_program("a text without any program") == ({}, ())
