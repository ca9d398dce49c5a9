// The state as a snapshot shows it, the state that a replay starts from, and self-checks.
#include <algorithm>
#include <utility>

#include "allocator.h"
#include "rounding.h"

namespace fragdoctor {

void Allocator::view_blocks(const Segment& segment, std::vector<SegmentView>& views) const {
  bool open = false;
  for (BlockId id = segment.head; id != NO_BLOCK; id = blocks_[id].next) {
    const Block& block = blocks_[id];
    if (!block.mapped) {
      open = false;
      continue;
    }
    if (!open) {
      const BlockPool& pool = pools_[segment.pool];
      views.push_back(
          {block.address, 0, segment.stream, pool.owner, pool.is_small, segment.page != 0, {}});
      open = true;
    }
    const bool pending = block.event_count > 0 || block.has_stream_uses;
    const BlockState state = block.allocated ? BlockState::allocated
                             : pending       ? BlockState::pending_free
                                             : BlockState::inactive;
    views.back().size += block.size;
    views.back().blocks.push_back({block.address, block.size, block.requested, state, id});
  }
}

std::vector<SegmentView> Allocator::layout() const {
  std::vector<SegmentView> views;
  for (const Segment& segment : segments_) {
    if (segment.in_use) view_blocks(segment, views);
  }
  std::sort(views.begin(), views.end(),
            [](const SegmentView& a, const SegmentView& b) { return a.address < b.address; });
  return views;
}

bool Allocator::seed_is_sound(const SeedSegment& seed) const {
  if (seed.size == 0 || seed.address % MIN_BLOCK != 0 || !pool_exists(seed.pool)) return false;
  std::uint64_t offset = 0;
  bool mapped = true;
  for (const SeedBlock& block : seed.blocks) {
    if (block.size == 0 || block.size > seed.size - offset) return false;
    if (block.state == BlockState::pending_free) return false;
    const bool is_mapped = block.state != BlockState::unmapped;
    if (!is_mapped && !seed.is_expandable) return false;
    const bool on_page = !seed.is_expandable || offset % seed.page_bytes == 0;
    if (offset > 0 && is_mapped != mapped && !on_page) return false;
    mapped = is_mapped;
    offset += block.size;
  }
  return offset == seed.size &&
         (!seed.is_expandable || (seed.page_bytes > 0 && seed.size % seed.page_bytes == 0));
}

bool Allocator::seed_segment(const SeedSegment& given, std::vector<BlockId>* ids) {
  SeedSegment seed = given;
  if (seed.is_expandable && seed.page_bytes == 0) {
    seed.page_bytes = seed.is_small ? SMALL_BUFFER : settings_.large_segment_bytes;
  }
  if (!seed_is_sound(seed) || !space_.take_at(seed.address, seed.size)) return false;
  const std::uint32_t pool = 2 * seed.pool + (seed.is_small ? 0 : 1);
  const std::uint32_t segment = new_segment(seed.address, seed.size, pool, seed.stream,
                                            seed.is_expandable ? seed.page_bytes : 0);
  std::vector<BlockId> made;
  std::uint64_t address = seed.address;
  for (const SeedBlock& part : seed.blocks) {
    const bool is_first = made.empty();
    const BlockId id = is_first ? segments_[segment].head : new_block(address, part.size, segment);
    blocks_[id].size = part.size;
    blocks_[id].requested = part.requested;
    if (!is_first) splice(id, made.back(), NO_BLOCK);
    made.push_back(id);
    address += part.size;
  }
  std::uint64_t mapped = 0;
  for (std::size_t i = 0; i < made.size(); ++i) {
    place_seed_block(made[i], seed.blocks[i].state);
    if (seed.blocks[i].state != BlockState::unmapped) mapped += seed.blocks[i].size;
  }
  if (ids != nullptr) ids->insert(ids->end(), made.begin(), made.end());
  // Whatever a recording says is there is there, even if it exceeds the capacity.
  const std::uint64_t page = seed.is_expandable ? seed.page_bytes : seed.size;
  driver_used_ += mapped / page * round_up(page, DRIVER_PAGE);
  return true;
}

void Allocator::place_seed_block(BlockId id, BlockState state) {
  Block& block = blocks_[id];
  if (state == BlockState::unmapped) {
    block.mapped = false;
    pools_[block.pool].unmapped.emplace(std::make_pair(block.stream, block.address), id);
    return;
  }
  add_reserved(block.size);
  if (state == BlockState::inactive) {
    insert_free(id);
    return;
  }
  block.allocated = true;
  Observer* const observer = std::exchange(observer_, nullptr);
  account_alloc(block);
  observer_ = observer;
}

const char* Allocator::check_segment(const Segment& segment, Counters& sums) const {
  std::uint64_t address = segment.address;
  BlockId before = NO_BLOCK;
  for (BlockId id = segment.head; id != NO_BLOCK; id = blocks_[id].next) {
    const Block& block = blocks_[id];
    if (!block.in_use) return "a segment links a deleted block";
    if (block.prev != before) return "neighbours disagree";
    if (block.address != address) return "blocks do not tile their segment";
    if (block.size == 0) return "a block is empty";
    if (block.pool != segment.pool || block.stream != segment.stream) {
      return "a block is not of its segment's pool and stream";
    }
    const bool active = block.allocated || block.event_count > 0 || block.has_stream_uses;
    if (active && !block.mapped) return "an active block is not mapped";
    if (before != NO_BLOCK && !active && block.mapped == blocks_[before].mapped) {
      const Block& prev = blocks_[before];
      if (!prev.allocated && prev.event_count == 0 && !prev.has_stream_uses) {
        return "two free neighbours are not merged";
      }
    }
    if (block.mapped) sums.reserved += block.size;
    if (block.allocated) sums.allocated += block.size;
    if (active) {
      sums.active += block.size;
      sums.requested += block.requested;
    } else if (block.mapped) {
      ++sums.n_free;
    }
    address += block.size;
    before = id;
  }
  return address == segment.address + segment.size ? nullptr : "blocks do not fill their segment";
}

const char* Allocator::check() const {
  Counters sums;
  for (const Segment& segment : segments_) {
    if (!segment.in_use) continue;
    if (const char* wrong = check_segment(segment, sums)) return wrong;
  }
  if (sums.reserved != counters_.reserved) return "reserved is not the sum of the segments";
  if (sums.allocated != counters_.allocated) return "allocated is not the sum of the blocks";
  if (sums.active != counters_.active) return "active is not the sum of the blocks";
  if (sums.requested != counters_.requested) return "requested is not the sum of the blocks";
  std::uint64_t n_free = 0;
  for (const BlockPool& pool : pools_) {
    for (const FreeSet& set : pool.free) {
      for (auto p = set.begin(); !set.at_end(p); set.forward(p)) {
        const Block& block = blocks_[set[p]];
        if (!block.in_use || block.allocated || !block.mapped)
          return "a free set holds a used block";
        if (set.at(p).is_releasable != is_releasable(block))
          return "a free set is wrong about what a flush would return";
        ++n_free;
      }
    }
  }
  return n_free == sums.n_free ? nullptr : "the free sets do not hold the free blocks";
}

}  // namespace fragdoctor
