// A trace undone: the life of every block and segment, and the totals after every event.
//
// A snapshot holds the segments at its end and the events that led there. Undoing the events gives
// the state before the oldest one; going forward again gives the true size of every block. Files
// are hostile: inconsistencies are counted and resolved in the simplest way that agrees with the
// end, never followed. O(n log n) time; memory in proportion to the events and blocks.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "allocator_types.h"
#include "trace_view.h"

namespace fragdoctor {

// Rows of changes before the first event, and of changes that have not happened by the last one.
constexpr std::int32_t BEFORE = -1;
constexpr std::int32_t NEVER = std::numeric_limits<std::int32_t>::max();
constexpr std::uint32_t NO_LIFE = std::numeric_limits<std::uint32_t>::max();

// Ways in which a trace and the segments can contradict each other.
enum class Contradiction : std::uint8_t {
  alloc_over_live = 0,     // a block handed out where one was live: its frees are missing
  free_of_free,            // freed while free, or requested twice: an alloc is missing
  completed_unrequested,   // free_completed without free_requested (skip_actions)
  never_completed,         // free_requested without free_completed, yet the block is gone
  segment_overlap,         // memory that came while it was there
  segment_absent,          // memory that went while it was not there
  block_outside_segments,  // a live block that lies in no segment
  blocks_overlap,          // two live blocks share bytes
  end_differs,             // the trace and the segments disagree on what is live at the end
  bad_size,                // a size or range beyond 64 bits, or absurd
  count
};

// Every block that lived at some time. A block is allocated in state k (after k events) iff
// start < k <= free, and active iff start < k <= done.
//
// The first `n_initial` are blocks from before the trace, by address; then come the blocks that the
// trace allocates, in its order, up to `n_regular`: a replay's operation names its block by this
// number. The remaining ones do not fit the segments and are only counted: blocks from before the
// trace that overlap or lie outside, and final blocks whose allocation is missing.
struct Lives {
  std::vector<std::int32_t> start, free, done;
  std::vector<std::int32_t> named;   // first row about it; NEVER: only the final segments name it
  std::vector<std::uint64_t> size;   // of the block: rounded, or longer if the rest was not cut off
  std::vector<std::uint32_t> block;  // row of its final block; NO_BLOCK if it is gone
  std::size_t n_initial = 0, n_regular = 0;

  std::size_t size_of_all() const { return start.size(); }
  bool is_active_at(std::size_t life, std::int32_t state) const {
    return start[life] < state && state <= done[life];
  }
};

struct SegmentKind {
  std::uint32_t stream = 0;
  std::int32_t pool = 0;
  bool is_small = false;
  bool is_expandable = false;

  bool operator==(const SegmentKind& o) const {
    return stream == o.stream && pool == o.pool && is_small == o.is_small &&
           is_expandable == o.is_expandable;
  }
};

// An ordinary segment, or pages of an expandable one that came and went together.
struct SegmentLife {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  std::int32_t start = BEFORE;
  std::int32_t done = NEVER;
  SegmentKind kind;

  std::uint64_t end() const { return address + size; }
};

struct InitialSegment {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  SegmentKind kind;
};

struct InitialBlock {
  std::uint64_t address = 0;
  std::uint64_t size = 0;  // as rounded by the allocator
  std::uint64_t requested = 0;
  bool is_pending = false;     // free_requested before the trace began
  bool size_is_known = false;  // it is in the final segments; else rounded, or bounded by gaps
};

// An end (or beginning) of a life at a row that concerns another block: its own event is missing.
struct SilentChange {
  std::int32_t row = 0;
  std::uint32_t life = NO_LIFE;
};

// Reserved memory over a trace: it changes only at segment events, which are few.
struct ReservedSteps {
  std::int64_t initial = 0;
  std::vector<std::int32_t> rows;   // ascending
  std::vector<std::int64_t> bytes;  // after each of these rows

  std::int64_t after(std::size_t row) const;
  std::int64_t before(std::size_t row) const { return row == 0 ? initial : after(row - 1); }
};

// The highest value of a total, and the first state (number of events) that has it.
struct Peak {
  std::int64_t bytes = 0;
  std::int64_t state = 0;
};

struct UndoneTrace {
  Lives lives;
  // Per event. `life`: the block that an alloc or free_* row concerns; NO_LIFE for other rows and
  // for rows to be ignored. `pool`: the event's own pool, or else that of the segment at its
  // address; empty if every event has its own.
  std::vector<std::uint32_t> life;
  std::vector<std::int32_t> pool;
  std::vector<SegmentLife> segments;
  std::vector<SilentChange> silent;  // by row
  // The state before the first event. Contiguous pages of one kind are one segment; blocks are the
  // first `lives.n_initial` lives.
  std::vector<InitialSegment> initial_segments;
  std::vector<InitialBlock> initial_blocks;
  ReservedSteps reserved;
  std::int64_t initial_allocated = 0, initial_active = 0;
  Peak peak_allocated, peak_active, peak_reserved;
  // Allocated, active and reserved bytes in every MARK_APART-th state, to walk from.
  std::vector<std::array<std::int64_t, 3>> marks;
  std::array<std::uint64_t, static_cast<std::size_t>(Contradiction::count)> contradictions{};
  // Events that must have happened but are missing: alloc, free_requested, free_completed.
  std::array<std::uint64_t, 3> missing{};
};

// Throws std::length_error for more than 2^31 - 2 events, blocks or segments.
UndoneTrace undo_trace(const TraceView& trace, const FinalState& end, const Settings& settings);

// ---- queries on the undone trace --------------------------------------------------------------

enum class Total : std::uint8_t { allocated = 0, active = 1, reserved = 2 };

constexpr std::size_t MARK_APART = 4096;

// Call visit(state, allocated, active, reserved) for every state from that of a mark to `last`.
template <class Visit>
void walk_totals(const UndoneTrace& undone, std::size_t mark, std::size_t last, Visit&& visit) {
  const Lives& lives = undone.lives;
  const std::size_t first = mark * MARK_APART;
  // Unsigned: sums over nonsense may wrap.
  auto allocated = static_cast<std::uint64_t>(undone.marks[mark][0]),
       active = static_cast<std::uint64_t>(undone.marks[mark][1]);
  std::int64_t reserved = undone.marks[mark][2];
  auto silent = static_cast<std::size_t>(
      std::partition_point(
          undone.silent.begin(), undone.silent.end(),
          [&](const SilentChange& one) { return one.row < static_cast<std::int32_t>(first); }) -
      undone.silent.begin());
  auto step = static_cast<std::size_t>(
      std::lower_bound(undone.reserved.rows.begin(), undone.reserved.rows.end(),
                       static_cast<std::int32_t>(first)) -
      undone.reserved.rows.begin());
  const auto tell = [&](std::size_t state) {
    visit(state, static_cast<std::int64_t>(allocated), static_cast<std::int64_t>(active), reserved);
  };
  tell(first);
  const auto change = [&](std::uint32_t life, std::int32_t row) {
    const std::uint64_t size = lives.size[life];
    if (lives.start[life] == row) {
      allocated += size;
      active += size;
    }
    if (lives.free[life] == row) allocated -= size;
    if (lives.done[life] == row) active -= size;
  };
  for (std::size_t i = first; i < last; ++i) {
    const auto row = static_cast<std::int32_t>(i);
    if (undone.life[i] != NO_LIFE) change(undone.life[i], row);
    for (; silent < undone.silent.size() && undone.silent[silent].row == row; ++silent)
      change(undone.silent[silent].life, row);
    for (; step < undone.reserved.rows.size() && undone.reserved.rows[step] == row; ++step)
      reserved = undone.reserved.bytes[step];
    tell(i + 1);
  }
}

// The same for every state from 0 to n.
template <class Visit>
void walk_totals(const TraceView& trace, const UndoneTrace& undone, Visit&& visit) {
  walk_totals(undone, 0, trace.n, visit);
}

// One total in every state: n + 1 values.
std::vector<std::int64_t> total_column(const TraceView& trace, const UndoneTrace& undone,
                                       Total which);

// The three totals in some ascending states: (allocated, active, reserved) one after another.
std::vector<std::int64_t> totals_at(const TraceView& trace, const UndoneTrace& undone,
                                    const std::int64_t* states, std::size_t n_states);

// The lowest and highest value of a total in each stretch of states. Stretch i begins at starts[i]
// (ascending from 0) and ends where the next one begins.
struct Envelope {
  std::vector<std::int64_t> low, high;
};
Envelope envelope(const TraceView& trace, const UndoneTrace& undone, Total which,
                  const std::int64_t* starts, std::size_t n_starts);

// The device after some number of events. Segments, live and free blocks are sorted by address;
// contiguous pages of one expandable segment form one segment, as in a snapshot.
struct DeviceLayout {
  std::vector<std::uint64_t> segment_address, segment_bytes;
  std::vector<SegmentKind> segment_kind;
  std::vector<std::uint32_t> live;  // life
  std::vector<std::int32_t> live_segment;
  std::vector<std::uint64_t> free_address, free_bytes;
  std::vector<std::int32_t> free_segment;
};
DeviceLayout layout_at(const TraceView& trace, const FinalState& end, const UndoneTrace& undone,
                       std::int32_t state);

// The address of a block.
inline std::uint64_t address_of(const TraceView& trace, const FinalState& end, const Lives& lives,
                                std::size_t life) {
  return lives.named[life] == NEVER ? end.block_address[lives.block[life]]
                                    : trace.address[static_cast<std::size_t>(lives.named[life])];
}

}  // namespace fragdoctor
