#include "trace_undo.h"

#include <algorithm>
#include <stdexcept>

#include "address_ids.h"
#include "range_table.h"
#include "rounding.h"

namespace fragdoctor {

namespace {

constexpr std::uint64_t ABSURD = 1ULL << 56;  // no device has 64 PiB
constexpr std::uint8_t STATE_ALLOCATED = 1, STATE_PENDING = 2;  // model.snapshot.BlockState
constexpr std::uint8_t KIND_SMALL = 0, KIND_UNKNOWN = 2;        // model.snapshot.SegmentType

enum class Life : std::uint8_t { unknown, free, live, pending };

// What is known of one address while the trace is read.
struct Site {
  std::uint64_t end_size = 0;  // size of the block in the final segments; 0 = none
  std::uint32_t last_alloc = UndoneTrace::NO_ID;  // row
  Life now = Life::unknown;
  Life at_start = Life::unknown;  // free where it stays unknown
};

struct Live {
  std::uint64_t size = 0;
  Life life = Life::free;
};

class Undo {
 public:
  Undo(const TraceView& trace, const FinalState& end, const Settings& settings,
       const WantedTotals& wanted)
      : trace_(trace), end_(end), settings_(settings), wanted_(wanted) {
    if (trace.n >= UndoneTrace::NO_ID || end.n_blocks >= UndoneTrace::NO_ID)
      throw std::length_error("more than 4 billion events or blocks");
  }

  UndoneTrace run() {
    undo_segments();
    number_addresses();
    match_end();
    place_initial_blocks();
    go_forward();
    if (sizes_refined_) go_forward();
    compare_end();
    return std::move(out_);
  }

 private:
  void count(Contradiction what) { ++out_.contradictions[static_cast<std::size_t>(what)]; }
  std::uint64_t rounded(std::uint64_t size) const { return round_size(settings_, size); }
  bool is_range(std::uint64_t start, std::uint64_t size) const {
    return size > 0 && size < ABSURD && start <= UNLIMITED - size;
  }
  std::uint32_t stream_at(std::size_t row) const {
    return trace_.stream[row] < 0 ? 0 : static_cast<std::uint32_t>(trace_.stream[row]);
  }

  void undo_segments();
  void undo_segment_event(std::size_t row);
  Range range_of_event(std::size_t row);
  void number_addresses();
  void match_end();
  void place_initial_blocks();
  std::uint64_t block_size(std::uint64_t requested, std::uint64_t gap, bool is_expandable) const;
  void go_forward();
  void start_forward();
  void forward_block_event(std::size_t row);
  void forward_segment_event(std::size_t row);
  std::int32_t pool_at(std::size_t row);
  std::uint64_t size_of_alloc(std::size_t row);
  void refine_neighbour(std::uint64_t address);
  void compare_end();

  const TraceView& trace_;
  const FinalState& end_;
  const Settings& settings_;
  const WantedTotals wanted_;
  UndoneTrace out_;
  RangeTable ranges_;
  AddressIds ids_;
  std::vector<Site> sites_;
  std::vector<Live> live_;  // by id, while going forward
  std::uint64_t allocated_ = 0, active_ = 0, reserved_ = 0;
  SortedChunks<std::uint32_t> large_;    // live blocks of native large segments -> id
  // By id of an initial block whose size is a guess: its index + 1. Empty if there is none.
  std::vector<std::uint32_t> guessed_;
  bool sizes_refined_ = false;
  bool pools_are_known_ = true;
};

// ---- segments, backwards ---------------------------------------------------------------------

void Undo::undo_segments() {
  for (std::size_t i = 0; i < end_.n_segments; ++i) {
    const std::uint64_t start = end_.segment_address[i], size = end_.segment_size[i];
    if (!is_range(start, size)) {
      count(Contradiction::bad_size);
      continue;
    }
    Range range;
    range.end = start + size;
    range.stream = end_.segment_stream[i] < 0 ? 0 : static_cast<std::uint32_t>(end_.segment_stream[i]);
    range.pool = std::max(end_.segment_pool[i], 0);
    range.is_expandable = end_.segment_expandable[i] != 0;
    range.is_small = end_.segment_kind[i] == KIND_UNKNOWN ? size == SMALL_BUFFER
                                                          : end_.segment_kind[i] == KIND_SMALL;
    if (!ranges_.add(start, range)) count(Contradiction::segment_overlap);
  }
  for (std::size_t row = trace_.n; row-- > 0;) undo_segment_event(row);
  ranges_.for_each([this](std::uint64_t start, const Range& r) {
    out_.segments.push_back({start, r.end - start, r.stream, r.pool, r.is_small, r.is_expandable});
    reserved_ += r.end - start;
  });
  out_.initial_reserved = static_cast<std::int64_t>(reserved_);
}

void Undo::undo_segment_event(std::size_t row) {
  const std::uint8_t action = trace_.action[row];
  if (action < event::SEGMENT_ALLOC || action > event::SEGMENT_UNMAP) return;
  const std::uint64_t start = trace_.address[row], size = trace_.size[row];
  if (!is_range(start, size)) return count(Contradiction::bad_size);
  const bool came = action == event::SEGMENT_ALLOC || action == event::SEGMENT_MAP;
  const bool is_expandable = action == event::SEGMENT_MAP || action == event::SEGMENT_UNMAP;
  if (came) {
    if (!ranges_.remove(start, start + size, is_expandable)) count(Contradiction::segment_absent);
  } else if (!ranges_.add(start, range_of_event(row))) {
    count(Contradiction::segment_overlap);
  }
}

// An event says neither pool class nor, before 2.12, the pool: a native small segment is the only
// one of 2 MiB; pages of one reservation touch, so a touching range tells; else the page size does.
Range Undo::range_of_event(std::size_t row) {
  const std::uint64_t start = trace_.address[row], size = trace_.size[row];
  const std::uint8_t action = trace_.action[row];
  Range range;
  range.end = start + size;
  range.stream = stream_at(row);
  range.pool = std::max(trace_.pool[row], 0);
  range.is_expandable = action == event::SEGMENT_MAP || action == event::SEGMENT_UNMAP;
  range.is_small = size == SMALL_BUFFER;
  if (range.is_expandable) {
    const Range* beside = ranges_.touching(start, range.end);
    if (beside != nullptr && beside->stream == range.stream) {
      range.is_small = beside->is_small;
      if (trace_.pool[row] < 0) range.pool = beside->pool;
    } else {
      range.is_small = settings_.large_segment_bytes == 0 || size % settings_.large_segment_bytes != 0;
    }
  }
  return range;
}

// ---- which blocks were there at the start ----------------------------------------------------

void Undo::number_addresses() {
  out_.id.assign(trace_.n, UndoneTrace::NO_ID);
  for (std::size_t row = 0; row < trace_.n; ++row) {
    const std::uint8_t action = trace_.action[row];
    if (trace_.pool[row] < 0) pools_are_known_ = false;
    if (action > event::FREE_COMPLETED) continue;
    if (!is_range(trace_.address[row], trace_.size[row])) {
      count(Contradiction::bad_size);
      continue;
    }
    const std::uint32_t id = ids_.id_of(trace_.address[row]);
    if (id == sites_.size()) sites_.emplace_back();
    Site& site = sites_[id];
    if (action == event::ALLOC) {
      if (site.now == Life::live || site.now == Life::pending) count(Contradiction::alloc_over_live);
      site.now = Life::live;
      site.last_alloc = static_cast<std::uint32_t>(row);
    } else if (action == event::FREE_REQUESTED) {
      if (site.now == Life::free || site.now == Life::pending) {
        count(Contradiction::free_of_free);
        continue;
      }
      if (site.now == Life::unknown) site.at_start = Life::live;
      site.now = Life::pending;
    } else {
      if (site.now == Life::free) {
        count(Contradiction::free_of_free);
        continue;
      }
      if (site.now == Life::live) count(Contradiction::completed_unrequested);
      if (site.now == Life::unknown) site.at_start = Life::pending;
      site.now = Life::free;
    }
    out_.id[row] = id;
  }
}

void Undo::match_end() {
  std::vector<bool> seen(sites_.size(), false);
  for (std::size_t i = 0; i < end_.n_blocks; ++i) {
    const std::uint8_t state = end_.block_state[i];
    if (state != STATE_ALLOCATED && state != STATE_PENDING) continue;
    if (!is_range(end_.block_address[i], end_.block_size[i])) {
      count(Contradiction::bad_size);
      continue;
    }
    const std::uint32_t id = ids_.id_of(end_.block_address[i]);
    if (id == sites_.size()) {
      sites_.emplace_back();
      seen.push_back(false);
    }
    Site& site = sites_[id];
    const Life life = state == STATE_PENDING ? Life::pending : Life::live;
    if (site.now == Life::unknown) {
      site.at_start = site.now = life;
    } else if (site.now != life) {
      count(Contradiction::end_differs);
      if (site.now == Life::free) continue;
    }
    seen[id] = true;
    site.end_size = end_.block_size[i];
  }
  for (std::size_t id = 0; id < sites_.size(); ++id)
    if ((sites_[id].now == Life::live || sites_[id].now == Life::pending) && !seen[id])
      count(Contradiction::end_differs);
  out_.n_ids = sites_.size();
}

// The block's size where the file lost it. Small-pool and expandable blocks are cut to size; in
// native large segments a rest of up to 1 MiB stays with the block (should_split), and an oversize
// block is never cut. `gap`: bytes to the next live block or the end of the segment.
std::uint64_t Undo::block_size(std::uint64_t requested, std::uint64_t gap,
                               bool is_expandable) const {
  const std::uint64_t size = rounded(requested);
  if (gap < size) return gap;
  if (is_expandable || size <= SMALL_SIZE) return size;
  const std::uint64_t slack =
      size >= settings_.max_split_bytes ? settings_.max_non_split_rounding_bytes : SMALL_SIZE;
  return gap - size <= slack ? gap : size;
}

void Undo::place_initial_blocks() {
  // Requested sizes of blocks that the trace frees stand in their first free row.
  std::vector<InitialBlock> found;
  std::vector<bool> taken(sites_.size(), false);
  const auto add = [&](std::uint32_t id, std::uint64_t requested, std::uint64_t known_size) {
    if (taken[id]) return;
    taken[id] = true;
    found.push_back({ids_.address_of(id), known_size, requested, id,
                     sites_[id].at_start == Life::pending, known_size > 0});
  };
  for (std::size_t row = 0; row < trace_.n; ++row) {
    const std::uint32_t id = out_.id[row];
    if (id == UndoneTrace::NO_ID || trace_.action[row] == event::ALLOC) continue;
    const Life life = sites_[id].at_start;
    if (life == Life::live || life == Life::pending) {
      const bool until_end = sites_[id].last_alloc == UndoneTrace::NO_ID && sites_[id].end_size > 0;
      add(id, trace_.size[row], until_end ? sites_[id].end_size : 0);
    }
  }
  for (std::size_t i = 0; i < end_.n_blocks; ++i) {
    const std::uint32_t id = ids_.lookup(end_.block_address[i]);
    if (id == AddressIds::ABSENT || sites_[id].last_alloc != UndoneTrace::NO_ID) continue;
    if (sites_[id].end_size == 0 || sites_[id].at_start == Life::unknown) continue;
    add(id, end_.block_requested[i], sites_[id].end_size);
  }
  std::sort(found.begin(), found.end(),
            [](const InitialBlock& a, const InitialBlock& b) { return a.address < b.address; });
  std::uint64_t low = 0;  // end of the block before
  std::vector<bool> dropped(sites_.size(), false);
  for (std::size_t i = 0; i < found.size(); ++i) {
    InitialBlock block = found[i];
    const Range* range = ranges_.find(block.address);
    if (range == nullptr || block.address < low) {
      count(range == nullptr ? Contradiction::block_outside_segments : Contradiction::blocks_overlap);
      dropped[block.id] = true;
      continue;
    }
    std::uint64_t limit = range->end;
    if (i + 1 < found.size()) limit = std::min(limit, found[i + 1].address);
    const std::uint64_t gap = limit - block.address;
    if (block.size_is_known && block.size > gap) count(Contradiction::blocks_overlap);
    block.size = block.size_is_known
                     ? std::min(block.size, gap)
                     : block_size(block.requested, gap, range->is_expandable);
    low = block.address + block.size;
    out_.blocks.push_back(block);
    if (!block.size_is_known && !range->is_expandable && block.size > SMALL_SIZE && block.size < gap) {
      if (guessed_.empty()) guessed_.assign(sites_.size(), 0);
      guessed_[block.id] = static_cast<std::uint32_t>(out_.blocks.size());
    }
  }
  // Rows of a dropped block, up to its first alloc, have nothing to act on.
  for (std::size_t row = 0; row < trace_.n; ++row) {
    const std::uint32_t id = out_.id[row];
    if (id == UndoneTrace::NO_ID || !dropped[id]) continue;
    if (trace_.action[row] == event::ALLOC) dropped[id] = false;
    else out_.id[row] = UndoneTrace::NO_ID;
  }
}

// ---- forward again: block sizes and totals ---------------------------------------------------

std::int32_t Undo::pool_at(std::size_t row) {
  if (trace_.pool[row] >= 0) return trace_.pool[row];
  if (pools_are_known_) return 0;
  const Range* range = ranges_.find(trace_.address[row]);
  return range == nullptr ? 0 : range->pool;
}

void Undo::forward_segment_event(std::size_t row) {
  const std::uint8_t action = trace_.action[row];
  const std::uint64_t start = trace_.address[row], size = trace_.size[row];
  if (!is_range(start, size)) return;
  const bool is_expandable = action == event::SEGMENT_MAP || action == event::SEGMENT_UNMAP;
  if (action == event::SEGMENT_ALLOC || action == event::SEGMENT_MAP) {
    ranges_.add(start, range_of_event(row));
    reserved_ += size;
  } else {
    ranges_.remove(start, start + size, is_expandable);
    reserved_ -= size;
  }
  out_.reserved_steps.rows.push_back(static_cast<std::uint32_t>(row));
  out_.reserved_steps.bytes.push_back(static_cast<std::int64_t>(reserved_));
}

// A block was handed out at `address` while the guessed block before it was live: the free block
// that it was cut from began there, so that is where the guessed one ends.
void Undo::refine_neighbour(std::uint64_t address) {
  const auto* before = address == 0 ? nullptr : large_.at_or_below(address - 1);
  if (before == nullptr) return;
  const std::uint32_t index = guessed_[before->value];
  if (index == 0) return;
  InitialBlock& block = out_.blocks[index - 1];
  guessed_[before->value] = 0;
  const std::uint64_t size = address - block.address;
  if (size > block.size && size - block.size <= SMALL_SIZE) {
    block.size = size;
    sizes_refined_ = true;
  }
}

std::uint64_t Undo::size_of_alloc(std::size_t row) {
  const std::uint64_t address = trace_.address[row];
  const Site& site = sites_[out_.id[row]];
  const std::uint64_t size = rounded(trace_.size[row]);
  const bool until_end = site.last_alloc == row && site.end_size > 0;
  if (size <= SMALL_SIZE) return until_end ? site.end_size : size;
  const Range* range = ranges_.find(address);
  if (range == nullptr || range->is_expandable) return until_end ? site.end_size : size;
  const auto* next = large_.at_or_above(address);
  const std::uint64_t limit =
      next == nullptr ? range->end : std::min(range->end, next->key);
  if (!guessed_.empty()) refine_neighbour(address);
  large_.insert(address, out_.id[row]);
  return until_end ? site.end_size : block_size(trace_.size[row], limit - address, false);
}

void Undo::forward_block_event(std::size_t row) {
  const std::uint32_t id = out_.id[row];
  Live& live = live_[id];
  if (trace_.action[row] == event::ALLOC) {
    if (live.life != Life::free) {  // a contradiction, counted already: the old block is gone
      active_ -= live.size;
      if (live.life == Life::live) allocated_ -= live.size;
      large_.erase(trace_.address[row]);
    }
    live.size = size_of_alloc(row);
    live.life = Life::live;
    allocated_ += live.size;
    active_ += live.size;
  } else {
    if (live.life == Life::live) allocated_ -= live.size;
    live.life = Life::pending;
    if (trace_.action[row] == event::FREE_COMPLETED) {
      active_ -= live.size;
      live.life = Life::free;
      if (live.size > SMALL_SIZE) large_.erase(trace_.address[row]);
    }
  }
  if (wanted_.block_bytes) out_.block_bytes[row] = live.size;
}

void Undo::start_forward() {
  if (wanted_.block_bytes) out_.block_bytes.assign(trace_.n, 0);
  if (!pools_are_known_) out_.pool.assign(trace_.n, 0);
  sizes_refined_ = false;
  ranges_ = RangeTable();
  large_ = SortedChunks<std::uint32_t>();
  live_.assign(sites_.size(), Live{});
  allocated_ = active_ = 0;
  reserved_ = static_cast<std::uint64_t>(out_.initial_reserved);
  for (const InitialSegment& s : out_.segments)
    ranges_.add(s.address, {s.address + s.size, s.stream, s.pool, s.is_small, s.is_expandable});
  for (const InitialBlock& b : out_.blocks) {
    live_[b.id] = {b.size, b.is_pending ? Life::pending : Life::live};
    active_ += b.size;
    if (!b.is_pending) allocated_ += b.size;
    if (b.size > SMALL_SIZE) large_.insert(b.address, b.id);
  }
  out_.initial_allocated = static_cast<std::int64_t>(allocated_);
  out_.initial_active = out_.peak_active = static_cast<std::int64_t>(active_);
  out_.reserved_steps = ReservedSteps();
  out_.reserved_steps.initial = out_.initial_reserved;
}

void Undo::go_forward() {
  start_forward();
  if (wanted_.allocated) out_.allocated.resize(trace_.n);
  if (wanted_.active) out_.active.resize(trace_.n);
  if (wanted_.reserved) out_.reserved.resize(trace_.n);
  for (std::size_t row = 0; row < trace_.n; ++row) {
    const std::uint8_t action = trace_.action[row];
    if (action >= event::SEGMENT_ALLOC && action <= event::SEGMENT_UNMAP)
      forward_segment_event(row);
    else if (out_.id[row] != UndoneTrace::NO_ID)
      forward_block_event(row);
    if (!pools_are_known_) out_.pool[row] = pool_at(row);
    out_.peak_active = std::max(out_.peak_active, static_cast<std::int64_t>(active_));
    if (wanted_.allocated) out_.allocated[row] = static_cast<std::int64_t>(allocated_);
    if (wanted_.active) out_.active[row] = static_cast<std::int64_t>(active_);
    if (wanted_.reserved) out_.reserved[row] = static_cast<std::int64_t>(reserved_);
  }
}

void Undo::compare_end() {
  std::uint64_t allocated = 0, active = 0, reserved = 0;
  for (std::size_t i = 0; i < end_.n_blocks; ++i) {
    if (!is_range(end_.block_address[i], end_.block_size[i])) continue;
    const std::uint8_t state = end_.block_state[i];
    if (state == STATE_ALLOCATED) allocated += end_.block_size[i];
    if (state == STATE_ALLOCATED || state == STATE_PENDING) active += end_.block_size[i];
  }
  for (std::size_t i = 0; i < end_.n_segments; ++i)
    if (is_range(end_.segment_address[i], end_.segment_size[i])) reserved += end_.segment_size[i];
  out_.allocated_error = static_cast<std::int64_t>(allocated_ - allocated);
  out_.active_error = static_cast<std::int64_t>(active_ - active);
  out_.reserved_error = static_cast<std::int64_t>(reserved_ - reserved);
}

}  // namespace

std::int64_t ReservedSteps::after(std::size_t row) const {
  const auto next = std::upper_bound(rows.begin(), rows.end(), row);
  return next == rows.begin() ? initial
                              : bytes[static_cast<std::size_t>(next - rows.begin()) - 1];
}

std::int64_t ReservedSteps::peak() const {
  std::int64_t peak = initial;
  for (const std::int64_t reserved : bytes) peak = std::max(peak, reserved);
  return peak;
}

UndoneTrace undo_trace(const TraceView& trace, const FinalState& end, const Settings& settings,
                       const WantedTotals& wanted) {
  return Undo(trace, end, settings, wanted).run();
}

}  // namespace fragdoctor
