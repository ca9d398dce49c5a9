// What a device looked like before its trace began, and after every event of it.
//
// A snapshot holds the segments at its end and the events that led there. Undoing the events gives
// the state at the oldest one; going forward again gives the true size of every block and the
// totals after every event. Files are hostile: what does not fit together is counted and left
// out, never followed. O(n log n) time, memory bounded by the number of events and blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "allocator_types.h"

namespace fragdoctor {

// The trace of one device. Streams are ranks of the stream handles (0 = lowest). Pools are 0 for
// the default pool, 1.. for private ones, and -1 where the event does not say.
struct TraceView {
  std::size_t n = 0;
  const std::uint8_t* action = nullptr;  // model.snapshot.Action
  const std::uint64_t* address = nullptr;
  const std::uint64_t* size = nullptr;
  const std::int32_t* stream = nullptr;
  const std::int32_t* pool = nullptr;
};

// The segments of that device and their blocks, as the snapshot lists them.
struct FinalState {
  std::size_t n_segments = 0;
  const std::uint64_t* segment_address = nullptr;
  const std::uint64_t* segment_size = nullptr;
  const std::int32_t* segment_stream = nullptr;
  const std::int32_t* segment_pool = nullptr;
  const std::uint8_t* segment_kind = nullptr;  // model.snapshot.SegmentType
  const std::uint8_t* segment_expandable = nullptr;
  std::size_t n_blocks = 0;
  const std::uint64_t* block_address = nullptr;
  const std::uint64_t* block_size = nullptr;
  const std::uint64_t* block_requested = nullptr;
  const std::uint8_t* block_state = nullptr;  // model.snapshot.BlockState
};

// Actions as the columns of a snapshot number them (model.snapshot.Action).
namespace event {
constexpr std::uint8_t ALLOC = 0, FREE_REQUESTED = 1, FREE_COMPLETED = 2, SEGMENT_ALLOC = 3,
                       SEGMENT_FREE = 4, SEGMENT_MAP = 5, SEGMENT_UNMAP = 6, SNAPSHOT = 7, OOM = 8;
}

// Ways in which a trace and the segments can contradict each other.
enum class Contradiction : std::uint8_t {
  alloc_over_live = 0,      // a block handed out twice at one address
  free_of_free,             // freed while free, or requested twice
  completed_unrequested,    // free_completed without free_requested (skip_actions)
  segment_overlap,          // memory that came while it was there
  segment_absent,           // memory that went while it was not there
  block_outside_segments,   // a live block that lies in no segment
  blocks_overlap,           // two live blocks share bytes
  end_differs,              // the trace and the segments disagree on what is live at the end
  bad_size,                 // a size or range beyond 64 bits, or absurd
  count
};

struct InitialSegment {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  std::uint32_t stream = 0;
  std::int32_t pool = 0;
  bool is_small = false;
  bool is_expandable = false;
};

struct InitialBlock {
  std::uint64_t address = 0;
  std::uint64_t size = 0;       // as the allocator rounded it
  std::uint64_t requested = 0;
  std::uint32_t id = 0;         // number of its address
  bool is_pending = false;      // free_requested before the trace began
  bool size_is_known = false;   // it is in the final segments; else rounded, or bounded by gaps
};

// Reserved memory over a trace: it changes at segment events only, which are few.
struct ReservedSteps {
  std::int64_t initial = 0;
  std::vector<std::uint32_t> rows;  // ascending
  std::vector<std::int64_t> bytes;  // after each of these rows

  std::int64_t after(std::size_t row) const;
  std::int64_t before(std::size_t row) const { return row == 0 ? initial : after(row - 1); }
  std::int64_t peak() const;
};

// Columns with a value for every event, which nobody needs most of the time: 8 bytes an event each.
struct WantedTotals {
  bool block_bytes = false, allocated = false, active = false, reserved = false;
};

struct UndoneTrace {
  static constexpr std::uint32_t NO_ID = 0xffffffffU;

  std::vector<InitialSegment> segments;  // by address; contiguous expandable pages are one entry
  std::vector<InitialBlock> blocks;      // by address; live or pending at the oldest event
  // Per event. `id` numbers the address of alloc and free_* rows; NO_ID where the row is to be
  // ignored. `pool` is the event's own pool, or else that of the segment at its address; empty
  // where every event has its own.
  std::vector<std::uint32_t> id;
  std::vector<std::int32_t> pool;
  // Per event, empty unless wanted. `block_bytes` is the block's size for alloc and free_* rows,
  // else 0; the others are totals after the event.
  std::vector<std::uint64_t> block_bytes;
  std::vector<std::int64_t> allocated, active, reserved;
  ReservedSteps reserved_steps;
  std::int64_t initial_allocated = 0, initial_active = 0, initial_reserved = 0;
  std::int64_t peak_active = 0;  // the initial state included
  // Trace minus segments at the end: 0 where they agree.
  std::int64_t allocated_error = 0, active_error = 0, reserved_error = 0;
  std::size_t n_ids = 0;
  std::array<std::uint64_t, static_cast<std::size_t>(Contradiction::count)> contradictions{};
};

UndoneTrace undo_trace(const TraceView& trace, const FinalState& end, const Settings& settings,
                       const WantedTotals& wanted = {});

}  // namespace fragdoctor
