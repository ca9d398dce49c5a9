// Blocks, segments and free sets of the allocator model, and what the driver has left.
#include <algorithm>

#include "allocator.h"
#include "rounding.h"

namespace fragdoctor {

BlockId Allocator::new_block(std::uint64_t address, std::uint64_t size, std::uint32_t segment) {
  BlockId id;
  if (unused_blocks_.empty()) {
    id = static_cast<BlockId>(blocks_.size());
    blocks_.emplace_back();
  } else {
    id = unused_blocks_.back();
    unused_blocks_.pop_back();
  }
  const Segment& s = segments_[segment];
  Block& block = blocks_[id];
  block = Block{};
  block.address = address;
  block.size = size;
  block.counter = next_block_counter_++;
  block.segment = segment;
  block.pool = s.pool;
  block.stream = s.stream;
  block.expandable = s.page != 0;
  block.in_use = true;
  return id;
}

void Allocator::delete_block(BlockId id) {
  blocks_[id].in_use = false;
  unused_blocks_.push_back(id);
}

void Allocator::splice(BlockId id, BlockId before, BlockId after) {
  Block& block = blocks_[id];
  block.prev = before;
  block.next = after;
  if (before != NO_BLOCK) {
    blocks_[before].next = id;
  } else {
    segments_[block.segment].head = id;
  }
  if (after != NO_BLOCK) blocks_[after].prev = id;
}

std::uint32_t Allocator::new_segment(std::uint64_t address, std::uint64_t size, std::uint32_t pool,
                                     std::uint32_t stream, std::uint64_t page) {
  std::uint32_t index;
  if (unused_segments_.empty()) {
    index = static_cast<std::uint32_t>(segments_.size());
    segments_.emplace_back();
  } else {
    index = unused_segments_.back();
    unused_segments_.pop_back();
  }
  Segment& segment = segments_[index];
  segment = Segment{address, size, page, next_segment_counter_++, NO_BLOCK, pool, stream, true};
  segment.head = new_block(address, size, index);
  return index;
}

void Allocator::delete_segment(std::uint32_t index) {
  space_.release(segments_[index].address);
  segments_[index].in_use = false;
  unused_segments_.push_back(index);
}

FreeKey Allocator::key_of(const Block& block) const {
  switch (config_.era) {
    case Era::address: return {block.size, block.address, 0};
    case Era::block_counter: return {block.size, block.counter, 0};
    case Era::segment_counter: break;
  }
  return {block.size, segments_[block.segment].counter, block.address};
}

void Allocator::insert_free(BlockId id) {
  free_set(blocks_[id].pool, blocks_[id].stream).insert(free_entry(id));
}

void Allocator::insert_free(BlockId id, FreeSet& set, const FreeSet::Position& instead_of) {
  set.replace(instead_of, free_entry(id));
}

FreeSet::Entry Allocator::free_entry(BlockId id) {
  Block& block = blocks_[id];
  block.gc_base = pools_[block.pool].get_free_blocks_call_count;
  return {key_of(block), id, is_releasable(block)};
}

// Whether a flush would return something of a free block. A block is taken out of the set and put
// back whenever it changes, so the set can keep the answer.
bool Allocator::is_releasable(const Block& block) const {
  if (!block.expandable) return !is_split(block);
  const auto [from, to] = pages_within(block);
  return from < to;
}

void Allocator::erase_free(BlockId id) {
  const Block& block = blocks_[id];
  free_set(block.pool, block.stream).erase(key_of(block));
}

std::uint64_t Allocator::place(std::uint64_t size, bool is_reservation, std::uint32_t stream,
                               bool is_small) {
  if (placement_ != nullptr) {
    const std::uint64_t wanted = placement_->place(size, is_reservation, stream, is_small);
    if (wanted != 0 && wanted % MIN_BLOCK == 0 && space_.take_at(wanted, size)) return wanted;
  }
  return space_.take(is_reservation ? RESERVATION_BASE : SEGMENT_BASE, size);
}

void Allocator::move_segments(const std::unordered_map<std::uint64_t, std::uint64_t>& to,
                              const AddressSpace& space) {
  space_ = space;
  for (Segment& segment : segments_) {
    const auto found = segment.in_use ? to.find(segment.address) : to.end();
    if (found == to.end()) continue;
    const std::uint64_t by = found->second - segment.address;  // modulo 2^64
    segment.address += by;
    for (BlockId id = segment.head; id != NO_BLOCK; id = blocks_[id].next) blocks_[id].address += by;
  }
  for (BlockPool& pool : pools_)
    for (FreeSet& set : pool.free)
      set.rename([this](BlockId id) { return key_of(blocks_[id]); });
}

void Allocator::add_reserved(std::uint64_t bytes) {
  counters_.reserved += bytes;
  counters_.peak_reserved = std::max(counters_.peak_reserved, counters_.reserved);
}

bool Allocator::charge(std::uint64_t bytes) {
  const std::uint64_t physical = round_up(bytes, DRIVER_PAGE);
  if (physical > driver_free_bytes()) {
    lowest_refused_ = std::min(lowest_refused_, driver_used_ + physical);
    return false;
  }
  driver_used_ += physical;
  highest_granted_ = std::max(highest_granted_, driver_used_);
  return true;
}

void Allocator::uncharge(std::uint64_t bytes) { driver_used_ -= round_up(bytes, DRIVER_PAGE); }

std::uint64_t Allocator::driver_free_bytes() const {
  return config_.capacity_bytes > driver_used_ ? config_.capacity_bytes - driver_used_ : 0;
}

std::size_t Allocator::state_bytes() const {
  std::size_t n_free = 0;
  for (const BlockPool& pool : pools_)
    for (const FreeSet& set : pool.free) n_free += set.size();
  return blocks_.size() * sizeof(Block) + segments_.size() * sizeof(Segment) +
         n_free * sizeof(FreeSet::Entry) + tickets_.size() * sizeof(BlockId);
}

void Allocator::emit(Action action, const Block& block, std::uint64_t address, std::uint64_t size) {
  if (observer_ == nullptr) return;
  const BlockPool& pool = pools_[block.pool];
  observer_->on_event({action, address, size, block.stream, pool.owner, block.size, pool.is_small});
}

}  // namespace fragdoctor
