// The state at the oldest event of a trace, as seeds of the allocator model.
#include <algorithm>

#include "rounding.h"
#include "trace_ops.h"

namespace fragdoctor {
namespace {

class Seeder {
 public:
  Seeder(const TraceView& trace, const UndoneTrace& undone, const Settings& settings,
         std::uint64_t total)
      : trace_(trace), undone_(undone), settings_(settings), total_(total) {}

  InitialState run() {
    find_bases();
    for (std::size_t i = 0; i < undone_.initial_segments.size();) i = seed(i);
    for (std::size_t i = 0; i < undone_.initial_blocks.size(); ++i)
      if (undone_.initial_blocks[i].is_pending)
        out_.pending.push_back(static_cast<std::uint32_t>(i));
    return std::move(out_);
  }

 private:
  // A range of a segment_map event. Small requests map one page of 2 MiB, large ones more.
  struct Span {
    std::uint64_t start, end;
    std::uint32_t stream;
    bool is_small() const { return end - start == SMALL_BUFFER; }
    bool is_of(const InitialSegment& s) const {
      return stream == s.kind.stream && is_small() == s.kind.is_small;
    }
  };

  void find_bases();
  std::size_t seed(std::size_t first);
  std::size_t end_of_reservation(std::size_t first) const;
  std::uint64_t lowest_page(const InitialSegment& first, std::uint64_t floor) const;
  std::uint64_t highest_page(const InitialSegment& last, std::uint64_t ceiling) const;
  void fill(SeedSegment& seed, std::vector<std::uint32_t>& ids, std::uint64_t start,
            std::uint64_t end);
  static void add(SeedSegment& seed, std::vector<std::uint32_t>& ids, std::uint64_t size,
                  std::uint64_t requested, BlockState state, std::uint32_t id) {
    if (size == 0) return;
    seed.blocks.push_back({size, requested, state});
    ids.push_back(id);
  }

  const TraceView& trace_;
  const UndoneTrace& undone_;
  const Settings& settings_;
  std::uint64_t total_;
  InitialState out_;
  std::vector<Span> mapped_;    // ranges of segment_map events, by start
  std::size_t next_block_ = 0;  // into undone_.initial_blocks
};

void Seeder::find_bases() {
  bool any = false;
  for (const InitialSegment& s : undone_.initial_segments) any = any || s.kind.is_expandable;
  if (!any) return;
  for (std::size_t row = 0; row < trace_.n; ++row) {
    if (trace_.action_at(row) != Action::segment_map) continue;
    const std::uint64_t start = trace_.address[row], size = trace_.size[row];
    if (size == 0 || start > UNLIMITED - size || trace_.stream[row] < 0) continue;
    mapped_.push_back({start, start + size, static_cast<std::uint32_t>(trace_.stream[row])});
  }
  std::sort(mapped_.begin(), mapped_.end(),
            [](const Span& a, const Span& b) { return a.start < b.start; });
}

// One reservation serves a pool class of a stream: neighbors of one kind belong together.
std::size_t Seeder::end_of_reservation(std::size_t first) const {
  const InitialSegment& a = undone_.initial_segments[first];
  std::size_t next = first + 1;
  const std::uint64_t reach = total_ > 0 ? total_ + total_ / 8 : UNLIMITED;
  while (next < undone_.initial_segments.size()) {
    const InitialSegment& b = undone_.initial_segments[next];
    if (!b.kind.is_expandable || !(b.kind == a.kind)) break;
    if (b.address + b.size - a.address > reach) break;
    ++next;
  }
  return next;
}

// Pages below the first one mapped now that the trace shows to belong to it.
std::uint64_t Seeder::lowest_page(const InitialSegment& first, std::uint64_t floor) const {
  const std::uint64_t page = first.kind.is_small ? SMALL_BUFFER : settings_.large_segment_bytes;
  auto it = std::lower_bound(mapped_.begin(), mapped_.end(), first.address,
                             [](const Span& s, std::uint64_t at) { return s.start < at; });
  std::uint64_t lowest = first.address;
  while (it != mapped_.begin()) {
    --it;
    if (it->start < floor || !it->is_of(first)) break;
    if ((first.address - it->start) % page != 0 || (it->end - it->start) % page != 0) break;
    if (total_ > 0 && first.address - it->start > total_ + total_ / 8) break;
    lowest = std::min(lowest, it->start);
  }
  return lowest;
}

std::uint64_t Seeder::highest_page(const InitialSegment& last, std::uint64_t ceiling) const {
  const std::uint64_t page = last.kind.is_small ? SMALL_BUFFER : settings_.large_segment_bytes;
  std::uint64_t highest = last.address + last.size;
  auto it = std::lower_bound(mapped_.begin(), mapped_.end(), last.address,
                             [](const Span& s, std::uint64_t at) { return s.start < at; });
  for (; it != mapped_.end() && it->end <= ceiling; ++it) {
    if (!it->is_of(last) || (it->end - it->start) % page != 0) break;
    if ((it->start - last.address) % page != 0) break;
    highest = std::max(highest, it->end);
  }
  return highest;
}

void Seeder::fill(SeedSegment& seed, std::vector<std::uint32_t>& ids, std::uint64_t start,
                  std::uint64_t end) {
  std::uint64_t at = start;
  const auto& blocks = undone_.initial_blocks;
  while (next_block_ < blocks.size() && blocks[next_block_].address < start) ++next_block_;
  for (; next_block_ < blocks.size() && blocks[next_block_].address < end; ++next_block_) {
    const InitialBlock& b = blocks[next_block_];
    add(seed, ids, b.address - at, 0, BlockState::inactive, NO_BLOCK);
    add(seed, ids, b.size, b.requested, BlockState::allocated,
        static_cast<std::uint32_t>(next_block_));
    at = b.address + b.size;
  }
  add(seed, ids, end - at, 0, BlockState::inactive, NO_BLOCK);
}

std::size_t Seeder::seed(std::size_t first) {
  const InitialSegment& s = undone_.initial_segments[first];
  SeedSegment seed;
  std::vector<std::uint32_t> ids;
  seed.stream = s.kind.stream;
  seed.pool = static_cast<std::uint32_t>(std::max(s.kind.pool, 0));
  seed.is_small = s.kind.is_small;
  seed.is_expandable = s.kind.is_expandable;
  std::size_t next = first + 1;
  if (!s.kind.is_expandable) {
    seed.address = s.address;
    seed.size = s.size;
    fill(seed, ids, s.address, s.address + s.size);
  } else {
    next = end_of_reservation(first);
    const std::uint64_t page = s.kind.is_small ? SMALL_BUFFER : settings_.large_segment_bytes;
    const std::uint64_t floor =
        out_.segments.empty() ? 0 : out_.segments.back().address + out_.segments.back().size;
    std::uint64_t ceiling =
        next < undone_.initial_segments.size() ? undone_.initial_segments[next].address : UNLIMITED;
    seed.page_bytes = page;
    seed.address = lowest_page(s, floor);
    std::uint64_t end = highest_page(undone_.initial_segments[next - 1], ceiling);
    // The first page above that the trace assigns to another owner bounds the reservation too.
    auto foreign = std::lower_bound(mapped_.begin(), mapped_.end(), end,
                                    [](const Span& m, std::uint64_t at) { return m.start < at; });
    if (foreign != mapped_.end()) ceiling = std::min(ceiling, foreign->start);
    const std::uint64_t total = total_ > 0 ? total_ : 1ULL << 40;
    const std::uint64_t whole = round_up(total + total / 8, page);
    if (seed.address <= UNLIMITED - whole) ceiling = std::min(ceiling, seed.address + whole);
    if (ceiling > end) end += (ceiling - end) / page * page;
    seed.size = end - seed.address;
    std::uint64_t at = seed.address;
    for (std::size_t i = first; i < next; ++i) {
      const InitialSegment& part = undone_.initial_segments[i];
      add(seed, ids, part.address - at, 0, BlockState::unmapped, NO_BLOCK);
      fill(seed, ids, part.address, part.address + part.size);
      at = part.address + part.size;
    }
    add(seed, ids, end - at, 0, BlockState::unmapped, NO_BLOCK);
  }
  out_.segments.push_back(std::move(seed));
  out_.ids.push_back(std::move(ids));
  return next;
}

}  // namespace

InitialState initial_state(const TraceView& trace, const UndoneTrace& undone,
                           const Settings& settings, std::uint64_t device_total_bytes) {
  return Seeder(trace, undone, settings, device_total_bytes).run();
}

}  // namespace fragdoctor
