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
    program = xla_program(f"some lines\n{REPORT}")

    assert program is not None
    assert program.total_bytes == 8 * GIB
    assert {p.name: p.n_bytes / GIB for p in program.parts} == {
        "arguments": 1.5, "outputs": 2.0, "temporaries": 4.5
    }  # fmt: skip
    assert (program.largest_bytes, program.largest) == (2 * GIB, "(f32[16,128],")


def test_report_that_was_cut_gives_what_it_still_has():
    whole = xla_program(REPORT)
    cut = xla_program(REPORT.partition("Peak")[0])

    assert whole is not None
    assert cut is not None
    assert (cut.total_bytes, cut.parts) == (whole.total_bytes, whole.parts)
    assert cut.largest_bytes is None
    assert xla_program(REPORT.partition("total")[0]) is None
    assert xla_program("a text without any program") is None
