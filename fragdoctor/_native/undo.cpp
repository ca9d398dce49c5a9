#include <algorithm>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "address_ids.h"
#include "range_table.h"
#include "rounding.h"
#include "segment_history.h"
#include "undone.h"

namespace fragdoctor {
namespace {

// No device has 64 PiB. In files of many rows, smaller sizes are considered absurd, so that sums
// over all rows stay within 64 bits; 4 TiB never is.
constexpr std::uint64_t ABSURD = 1ULL << 56, NEVER_ABSURD = 1ULL << 42;

enum class State : std::uint8_t { unknown, free, live, pending };

// What is known about one address while the trace is read.
struct Site {
  State now = State::unknown;
  bool is_old = true;  // the present or last block here is from before the trace
  bool has_old = false;
  std::uint32_t alloc = 0;         // otherwise the number of the allocation
  std::uint32_t block = NO_BLOCK;  // the final block that is the last one here
  // The block from before the trace.
  std::uint32_t old_block = NO_BLOCK;
  std::int32_t old_named = NEVER, old_free = NEVER, old_done = NEVER;
};

constexpr std::uint32_t OLD = 1U << 31;  // in `life` while blocks have no numbers yet: a site

class Undo {
 public:
  Undo(const TraceView& trace, const FinalState& end, const Settings& settings)
      : trace_(trace), end_(end), settings_(settings) {
    if (trace.n >= OLD - 1 || end.n_blocks >= OLD - 1 || end.n_segments >= OLD - 1)
      throw std::length_error("more than 2 billion events, blocks or segments");
    const std::uint64_t n = trace.n + end.n_blocks + end.n_segments + 1;
    limit_ = std::min(ABSURD, std::max(NEVER_ABSURD, (std::uint64_t{1} << 62) / n));
    last_row_ = static_cast<std::int32_t>(trace.n) - 1;
  }

  UndoneTrace run() {
    undo_segments();
    read_events();
    match_end();
    number_lives();
    size_blocks();
    if (sizes_refined_) size_blocks();
    find_peaks();
    return std::move(out_);
  }

 private:
  enum Missing : std::size_t { ALLOC = 0, FREE_REQUESTED = 1, FREE_COMPLETED = 2 };

  void count(Contradiction what) { ++out_.contradictions[static_cast<std::size_t>(what)]; }
  void miss(Missing what) { ++out_.missing[what]; }
  std::uint64_t rounded(std::uint64_t size) const { return round_size(settings_, size); }
  bool is_range(std::uint64_t start, std::uint64_t size) const {
    return size > 0 && size <= limit_ && start < UNLIMITED - size;
  }
  static std::uint32_t stream_or_default(std::int32_t stream) {
    return stream < 0 ? 0 : static_cast<std::uint32_t>(stream);
  }

  // Segments, backwards.
  void undo_segments();
  void add_final_segments();
  void undo_segment_event(std::size_t row);
  template <class Table>
  SegmentKind kind_of_event(std::size_t row, Table& there) const;

  // Blocks: pairing events by address.
  void read_events();
  void read_alloc(Site& site, std::int32_t row);
  bool read_free_requested(Site& site, std::int32_t row);
  bool read_free_completed(Site& site, std::int32_t row);
  void set_free(Site& site, std::int32_t row) {
    (site.is_old ? site.old_free : free_[site.alloc]) = row;
  }
  void set_done(Site& site, std::int32_t row) {
    (site.is_old ? site.old_done : done_[site.alloc]) = row;
  }
  std::int32_t free_of(const Site& site) const {
    return site.is_old ? site.old_free : free_[site.alloc];
  }
  void match_end();
  void match_block(std::uint32_t block, std::uint32_t id);
  void end_at_last_row(Site& site, bool also_done);

  // Blocks: numbers, and sizes by going forward.
  void number_lives();
  void place_old_blocks();
  void append_life(std::int32_t start, std::int32_t free, std::int32_t done, std::int32_t named,
                   std::uint64_t size, std::uint32_t block);
  void append_misfit(std::uint32_t id);
  std::uint64_t block_size(std::uint64_t requested, std::uint64_t gap, bool is_expandable) const;
  void size_blocks();
  void forward_segment_event(std::size_t row, SegmentHistory& segments);
  std::uint64_t size_of_alloc(std::size_t row, SegmentHistory& segments);
  void refine_neighbour(std::uint64_t address);
  void find_peaks();

  const TraceView& trace_;
  const FinalState& end_;
  const Settings& settings_;
  std::uint64_t limit_ = 0;
  std::int32_t last_row_ = BEFORE;
  UndoneTrace out_;
  RangeTable ranges_;
  std::unordered_map<std::size_t, std::int32_t> final_pool_;  // of memory that came and stayed, by row
  std::vector<InitialSegment> final_segments_;  // the consistent ones, by address
  AddressIds ids_;
  std::vector<Site> sites_;
  bool has_requested_frees_ = false, pools_are_known_ = true;
  // By number of the allocation, in the order of the trace.
  std::vector<std::int32_t> start_, free_, done_;
  std::vector<std::uint32_t> final_block_;
  // Allocations that end at another block's row, or at no block's; final blocks without a place.
  std::vector<std::pair<std::int32_t, std::uint32_t>> silent_ends_;  // row, OLD | site or number
  std::vector<std::pair<std::uint32_t, std::int32_t>> unallocated_;  // final block, row
  std::vector<std::uint32_t> old_number_;  // by site: life of its block from before the trace
  SortedChunks<std::uint32_t> large_;      // live blocks of ordinary large segments -> life
  std::vector<std::uint8_t> is_guessed_;   // by initial life: whether its size is; empty if none is
  bool sizes_refined_ = false;
};

// ---- segments, backwards ---------------------------------------------------------------------

void Undo::add_final_segments() {
  for (std::size_t i = 0; i < end_.n_segments; ++i) {
    const std::uint64_t start = end_.segment_address[i], size = end_.segment_size[i];
    if (!is_range(start, size)) {
      count(Contradiction::bad_size);
      continue;
    }
    const auto type = static_cast<SegmentType>(end_.segment_kind[i]);
    Range range;
    range.end = start + size;
    range.kind.stream = stream_or_default(end_.segment_stream[i]);
    range.kind.pool = std::max(end_.segment_pool[i], 0);
    range.kind.is_expandable = end_.segment_expandable[i] != 0;
    range.kind.is_small = type == SegmentType::small || type == SegmentType::unknown
                              ? type == SegmentType::small || size == SMALL_BUFFER
                              : false;
    if (!ranges_.add(start, range)) count(Contradiction::segment_overlap);
  }
  ranges_.for_each([this](std::uint64_t start, const Range& r) {
    final_segments_.push_back({start, r.end - start, r.kind});
  });
}

void Undo::undo_segments() {
  add_final_segments();
  for (std::size_t row = trace_.n; row-- > 0;) undo_segment_event(row);
  std::uint64_t reserved = 0;
  ranges_.for_each([&](std::uint64_t start, const Range& r) {
    out_.initial_segments.push_back({start, r.end - start, r.kind});
    reserved += r.end - start;
  });
  out_.reserved.initial = static_cast<std::int64_t>(reserved);
}

void Undo::undo_segment_event(std::size_t row) {
  const Action action = trace_.action_at(row);
  if (!is_segment_action(action)) return;
  const std::uint64_t start = trace_.address[row], size = trace_.size[row];
  if (!is_range(start, size)) return count(Contradiction::bad_size);
  const bool is_expandable = action == Action::segment_map || action == Action::segment_unmap;
  if (is_segment_gain(action)) {
    const Range* there = trace_.pool[row] < 0 ? ranges_.find(start) : nullptr;
    if (there != nullptr && there->kind.pool > 0) final_pool_[row] = there->kind.pool;
    if (!ranges_.remove(start, start + size, is_expandable)) count(Contradiction::segment_absent);
  } else if (!ranges_.add(start, {start + size, kind_of_event(row, ranges_)})) {
    count(Contradiction::segment_overlap);
  }
}

// An event states neither its pool class nor, before 2.12, its pool. A native small segment is the
// only one of 2 MiB; pages of one reservation touch, so a touching range tells; else page size.
template <class Table>
SegmentKind Undo::kind_of_event(std::size_t row, Table& there) const {
  const Action action = trace_.action_at(row);
  const std::uint64_t start = trace_.address[row], size = trace_.size[row];
  SegmentKind kind;
  kind.stream = stream_or_default(trace_.stream[row]);
  kind.pool = std::max(trace_.pool[row], 0);
  kind.is_expandable = action == Action::segment_map || action == Action::segment_unmap;
  kind.is_small = size == SMALL_BUFFER;
  if (!kind.is_expandable) return kind;
  const auto* beside = there.touching(start, start + size);
  if (beside != nullptr && beside->kind.stream == kind.stream) {
    kind.is_small = beside->kind.is_small;
    if (trace_.pool[row] < 0) kind.pool = beside->kind.pool;
  } else {
    kind.is_small = settings_.large_segment_bytes == 0 || size % settings_.large_segment_bytes != 0;
  }
  return kind;
}

// ---- events to lives ---------------------------------------------------------------------------

void Undo::read_events() {
  std::size_t n_allocs = 0;
  for (std::size_t row = 0; row < trace_.n; ++row) {
    n_allocs += trace_.action_at(row) == Action::alloc;
    has_requested_frees_ |= trace_.action_at(row) == Action::free_requested;
    pools_are_known_ &= trace_.pool[row] >= 0;
  }
  start_.reserve(n_allocs);
  free_.reserve(n_allocs);
  done_.reserve(n_allocs);
  out_.life.assign(trace_.n, NO_LIFE);
  for (std::size_t i = 0; i < trace_.n; ++i) {
    const Action action = trace_.action_at(i);
    if (!is_block_action(action)) continue;
    if (!is_range(trace_.address[i], trace_.size[i])) {
      count(Contradiction::bad_size);
      continue;
    }
    const std::uint32_t id = ids_.id_of(trace_.address[i]);
    if (id == sites_.size()) sites_.emplace_back();
    Site& site = sites_[id];
    const auto row = static_cast<std::int32_t>(i);
    bool fits = true;
    if (action == Action::alloc) read_alloc(site, row);
    else if (action == Action::free_requested) fits = read_free_requested(site, row);
    else fits = read_free_completed(site, row);
    if (fits) out_.life[i] = site.is_old ? OLD | id : site.alloc;
    else count(Contradiction::free_of_free), miss(ALLOC);
  }
}

void Undo::read_alloc(Site& site, std::int32_t row) {
  if (site.now == State::live) {
    count(Contradiction::alloc_over_live);
    miss(FREE_REQUESTED);
    miss(FREE_COMPLETED);
    set_free(site, row);
    set_done(site, row);
    const auto id = static_cast<std::uint32_t>(&site - sites_.data());
    silent_ends_.emplace_back(row, site.is_old ? OLD | id : site.alloc);
  } else if (site.now == State::pending) {
    count(Contradiction::never_completed);
    miss(FREE_COMPLETED);
    set_done(site, free_of(site));
  }
  site.now = State::live;
  site.is_old = false;
  site.alloc = static_cast<std::uint32_t>(start_.size());
  start_.push_back(row);
  free_.push_back(NEVER);
  done_.push_back(NEVER);
}

bool Undo::read_free_requested(Site& site, std::int32_t row) {
  if (site.now == State::free || site.now == State::pending) return false;
  if (site.now == State::unknown) {
    site.has_old = true;
    site.old_named = row;
  }
  set_free(site, row);
  site.now = State::pending;
  return true;
}

bool Undo::read_free_completed(Site& site, std::int32_t row) {
  if (site.now == State::free) return false;
  if (site.now == State::unknown) {
    site.has_old = true;
    site.old_named = row;
    // Requested before the trace began; but if the trace has no such events, it was not recorded.
    if (has_requested_frees_ || row == 0) set_free(site, BEFORE);
    else site.now = State::live;
  }
  if (site.now == State::live) {
    count(Contradiction::completed_unrequested);
    miss(FREE_REQUESTED);
    set_free(site, row);
  }
  set_done(site, row);
  site.now = State::free;
  return true;
}

// The end of a block that the trace does not show: put it at the last row.
void Undo::end_at_last_row(Site& site, bool also_done) {
  set_free(site, last_row_);
  if (also_done) set_done(site, last_row_);
  if (!site.is_old && start_[site.alloc] == last_row_) return;  // that row is its own alloc
  const auto id = static_cast<std::uint32_t>(&site - sites_.data());
  silent_ends_.emplace_back(last_row_, site.is_old ? OLD | id : site.alloc);
}

void Undo::match_block(std::uint32_t block, std::uint32_t id) {
  Site& site = sites_[id];
  if (site.block != NO_BLOCK) return count(Contradiction::blocks_overlap);
  site.block = block;
  const bool is_pending = end_.state_of(block) != BlockState::allocated;
  if (site.now == State::unknown) {
    site.has_old = true;
    site.old_free = is_pending ? BEFORE : NEVER;
  } else if (site.now == State::free) {
    count(Contradiction::end_differs);
    miss(ALLOC);
    unallocated_.emplace_back(block, site.is_old ? site.old_done : done_[site.alloc]);
    return;
  } else if (site.now == State::pending && !is_pending) {
    count(Contradiction::end_differs);
    set_free(site, NEVER);
  } else if (site.now == State::live && is_pending) {
    count(Contradiction::end_differs);
    miss(FREE_REQUESTED);
    end_at_last_row(site, false);
  }
  if (site.is_old) site.old_block = block;
  else final_block_[site.alloc] = block;
}

void Undo::match_end() {
  final_block_.assign(start_.size(), NO_BLOCK);
  for (std::uint32_t i = 0; i < end_.n_blocks; ++i) {
    if (end_.state_of(i) == BlockState::inactive) continue;
    if (!is_range(end_.block_address[i], end_.block_size[i])) {
      count(Contradiction::bad_size);
      continue;
    }
    const std::uint32_t id = ids_.id_of(end_.block_address[i]);
    if (id == sites_.size()) sites_.emplace_back();
    match_block(i, id);
  }
  for (Site& site : sites_) {
    if (site.block != NO_BLOCK) continue;
    if (site.now == State::live) {
      count(Contradiction::end_differs);
      miss(FREE_REQUESTED);
      miss(FREE_COMPLETED);
      end_at_last_row(site, true);
    } else if (site.now == State::pending) {
      count(Contradiction::never_completed);
      miss(FREE_COMPLETED);
      set_done(site, free_of(site));
    }
  }
}

// ---- numbers, and the blocks from before the trace ---------------------------------------------

void Undo::append_life(std::int32_t start, std::int32_t free, std::int32_t done, std::int32_t named,
                       std::uint64_t size, std::uint32_t block) {
  Lives& l = out_.lives;
  l.start.push_back(start);
  l.free.push_back(free);
  l.done.push_back(done);
  l.named.push_back(named);
  l.size.push_back(size);
  l.block.push_back(block);
}

// The block's size if the file has lost it. Small-pool and expandable blocks are cut to size; in
// native large segments, a rest of up to 1 MiB stays with the block (should_split), and an oversize
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

// A block from before the trace that does not fit among the others.
void Undo::append_misfit(std::uint32_t id) {
  const Site& site = sites_[id];
  old_number_[id] = static_cast<std::uint32_t>(out_.lives.size_of_all());
  const std::uint64_t size =
      site.old_block != NO_BLOCK
          ? end_.block_size[site.old_block]
          : std::min(rounded(trace_.size[static_cast<std::size_t>(site.old_named)]), limit_);
  append_life(BEFORE, site.old_free, site.old_done, site.old_named, size, site.old_block);
}

void Undo::place_old_blocks() {
  std::vector<std::uint32_t> old;  // sites
  for (std::uint32_t id = 0; id < sites_.size(); ++id)
    if (sites_[id].has_old) old.push_back(id);
  std::sort(old.begin(), old.end(), [this](std::uint32_t a, std::uint32_t b) {
    return ids_.address_of(a) < ids_.address_of(b);
  });
  std::uint64_t low = 0;  // end of the block before
  std::vector<std::uint32_t> misfits;
  bool any_guessed = false;
  std::vector<std::uint8_t> guessed;
  for (std::size_t i = 0; i < old.size(); ++i) {
    const Site& site = sites_[old[i]];
    InitialBlock block;
    block.address = ids_.address_of(old[i]);
    block.is_pending = site.old_free == BEFORE;
    const Range* range = ranges_.find(block.address);
    if (range == nullptr || block.address < low) {
      count(range == nullptr ? Contradiction::block_outside_segments
                             : Contradiction::blocks_overlap);
      misfits.push_back(old[i]);
      continue;
    }
    std::uint64_t limit = range->end;
    if (i + 1 < old.size()) limit = std::min(limit, ids_.address_of(old[i + 1]));
    const std::uint64_t gap = limit - block.address;
    block.size_is_known = site.old_block != NO_BLOCK;
    if (block.size_is_known) {
      block.requested = end_.block_requested[site.old_block];
      block.size = end_.block_size[site.old_block];
      if (block.size > gap) count(Contradiction::blocks_overlap);
      block.size = std::min(block.size, gap);
    } else {
      block.requested = trace_.size[static_cast<std::size_t>(site.old_named)];
      block.size = block_size(block.requested, gap, range->kind.is_expandable);
    }
    low = block.address + block.size;
    const bool is_guess = !block.size_is_known && !range->kind.is_expandable &&
                          block.size > SMALL_SIZE && block.size < gap;
    any_guessed = any_guessed || is_guess;
    guessed.push_back(is_guess);
    old_number_[old[i]] = static_cast<std::uint32_t>(out_.initial_blocks.size());
    out_.initial_blocks.push_back(block);
    append_life(BEFORE, site.old_free, site.old_done, site.old_named, block.size, site.old_block);
  }
  if (any_guessed) is_guessed_ = std::move(guessed);
  out_.lives.n_initial = out_.initial_blocks.size();
  Lives& l = out_.lives;
  const std::size_t room = l.n_initial + start_.size() + misfits.size() + unallocated_.size();
  for (auto* column : {&l.start, &l.free, &l.done, &l.named}) column->reserve(room);
  l.size.reserve(room);
  l.block.reserve(room);
  l.start.insert(l.start.end(), start_.begin(), start_.end());
  l.free.insert(l.free.end(), free_.begin(), free_.end());
  l.done.insert(l.done.end(), done_.begin(), done_.end());
  l.named.insert(l.named.end(), start_.begin(), start_.end());
  l.block.insert(l.block.end(), final_block_.begin(), final_block_.end());
  l.size.resize(l.start.size(), 0);
  l.n_regular = l.start.size();
  for (const std::uint32_t id : misfits) append_misfit(id);
}

void Undo::number_lives() {
  old_number_.assign(sites_.size(), NO_LIFE);
  place_old_blocks();
  const auto n_initial = static_cast<std::uint32_t>(out_.lives.n_initial);
  const auto number = [&](std::uint32_t draft) {
    return (draft & OLD) != 0 ? old_number_[draft & ~OLD] : draft + n_initial;
  };
  for (std::uint32_t& life : out_.life)
    if (life != NO_LIFE) life = number(life);
  for (const auto& [row, draft] : silent_ends_) out_.silent.push_back({row, number(draft)});
  for (const auto& [block, row] : unallocated_) {
    const auto life = static_cast<std::uint32_t>(out_.lives.size_of_all());
    const bool is_pending = end_.state_of(block) != BlockState::allocated;
    const std::int32_t start = std::min(row, last_row_);
    append_life(start, is_pending ? start : NEVER, NEVER, NEVER, end_.block_size[block], block);
    out_.silent.push_back({start, life});
  }
  std::sort(out_.silent.begin(), out_.silent.end(),
            [](const SilentChange& a, const SilentChange& b) {
              return a.row != b.row ? a.row < b.row : a.life < b.life;
            });
  for (auto* column : {&start_, &free_, &done_}) std::vector<std::int32_t>().swap(*column);
  std::vector<std::uint32_t>().swap(final_block_);
  std::vector<Site>().swap(sites_);
}

// ---- forward: block sizes and the lives of segments ---------------------------------------------

void Undo::forward_segment_event(std::size_t row, SegmentHistory& segments) {
  const Action action = trace_.action_at(row);
  const std::uint64_t start = trace_.address[row], size = trace_.size[row];
  if (!is_range(start, size)) return;
  const auto at = static_cast<std::int32_t>(row);
  if (is_segment_gain(action)) {
    SegmentKind kind = kind_of_event(row, segments);
    if (const auto known = final_pool_.find(row); known != final_pool_.end()) kind.pool = known->second;
    segments.add({start, size, at, NEVER, kind});
  } else segments.remove(start, start + size, action == Action::segment_unmap, at);
  out_.reserved.rows.push_back(at);
  out_.reserved.bytes.push_back(static_cast<std::int64_t>(segments.reserved()));
}

// A block was handed out at `address` while the guessed block before it was live: the free block
// that it was cut from began there, so the guessed block ends there.
void Undo::refine_neighbour(std::uint64_t address) {
  const auto* before = address == 0 ? nullptr : large_.at_or_below(address - 1);
  if (before == nullptr || before->value >= is_guessed_.size()) return;
  if (!is_guessed_[before->value]) return;
  InitialBlock& block = out_.initial_blocks[before->value];
  is_guessed_[before->value] = 0;
  const std::uint64_t size = address - block.address;
  if (size > block.size && size - block.size <= SMALL_SIZE) {
    block.size = out_.lives.size[before->value] = size;
    sizes_refined_ = true;
  }
}

std::uint64_t Undo::size_of_alloc(std::size_t row, SegmentHistory& segments) {
  const std::uint64_t address = trace_.address[row];
  const std::uint32_t life = out_.life[row];
  const std::uint64_t size = std::min(rounded(trace_.size[row]), limit_);
  const std::uint32_t block = out_.lives.block[life];
  const std::uint64_t known = block == NO_BLOCK ? 0 : end_.block_size[block];
  if (size <= SMALL_SIZE) return known > 0 ? known : size;
  const SegmentLife* segment = segments.find(address);
  if (segment == nullptr || segment->kind.is_expandable) return known > 0 ? known : size;
  const auto* next = large_.at_or_above(address);
  const std::uint64_t limit = next == nullptr || next->key == address
                                  ? segment->end()
                                  : std::min(segment->end(), next->key);
  if (!is_guessed_.empty()) refine_neighbour(address);
  large_.insert(address, life);
  return known > 0 ? known : block_size(trace_.size[row], limit - address, false);
}

void Undo::size_blocks() {
  sizes_refined_ = false;
  SegmentHistory segments;
  segments.begin(out_.initial_segments);
  out_.reserved.rows.clear();
  out_.reserved.bytes.clear();
  large_ = SortedChunks<std::uint32_t>();
  if (!pools_are_known_) out_.pool.assign(trace_.n, 0);
  Lives& lives = out_.lives;
  for (std::uint32_t i = 0; i < lives.n_initial; ++i)
    if (lives.size[i] > SMALL_SIZE) large_.insert(out_.initial_blocks[i].address, i);
  for (std::size_t i = 0; i < trace_.n; ++i) {
    const Action action = trace_.action_at(i);
    const std::uint32_t life = out_.life[i];
    if (is_segment_action(action)) {
      forward_segment_event(i, segments);
    } else if (life != NO_LIFE) {
      if (action == Action::alloc) {
        if (!out_.silent.empty()) large_.erase(trace_.address[i]);
        lives.size[life] = size_of_alloc(i, segments);
      }
      if (lives.done[life] == static_cast<std::int32_t>(i) && lives.size[life] > SMALL_SIZE)
        large_.erase(trace_.address[i]);
    }
    if (pools_are_known_) continue;
    const SegmentLife* there = trace_.pool[i] >= 0 ? nullptr : segments.find(trace_.address[i]);
    out_.pool[i] = there == nullptr ? std::max(trace_.pool[i], 0) : there->kind.pool;
  }
  segments.settle(final_segments_, last_row_);
  const auto reserved = static_cast<std::int64_t>(segments.reserved());
  ReservedSteps& steps = out_.reserved;
  if ((steps.bytes.empty() ? steps.initial : steps.bytes.back()) != reserved && last_row_ >= 0) {
    steps.rows.push_back(last_row_);
    steps.bytes.push_back(reserved);
  }
  out_.segments = segments.take();
}

void Undo::find_peaks() {
  const Lives& lives = out_.lives;
  std::uint64_t allocated = 0, active = 0;
  for (std::size_t i = 0; i < lives.size_of_all(); ++i) {
    if (lives.start[i] != BEFORE) continue;
    active += lives.size[i];
    if (lives.free[i] != BEFORE) allocated += lives.size[i];
  }
  out_.initial_active = static_cast<std::int64_t>(active);
  out_.initial_allocated = static_cast<std::int64_t>(allocated);
  const auto raise = [](Peak& peak, std::int64_t bytes, std::size_t state) {
    if (bytes > peak.bytes) peak = {bytes, static_cast<std::int64_t>(state)};
  };
  out_.marks = {{out_.initial_allocated, out_.initial_active, out_.reserved.initial}};
  walk_totals(trace_, out_, [&](std::size_t state, std::int64_t a, std::int64_t b, std::int64_t c) {
    if (state == out_.marks.size() * MARK_APART) out_.marks.push_back({a, b, c});
    raise(out_.peak_allocated, a, state);
    raise(out_.peak_active, b, state);
    raise(out_.peak_reserved, c, state);
  });
}

}  // namespace

std::int64_t ReservedSteps::after(std::size_t row) const {
  const auto next = std::upper_bound(rows.begin(), rows.end(), static_cast<std::int32_t>(row));
  return next == rows.begin() ? initial : bytes[static_cast<std::size_t>(next - rows.begin()) - 1];
}

UndoneTrace undo_trace(const TraceView& trace, const FinalState& end, const Settings& settings) {
  return Undo(trace, end, settings).run();
}

}  // namespace fragdoctor
