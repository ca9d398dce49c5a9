// Expandable segments: reservations of address space whose pages are mapped on demand.
#include <algorithm>

#include "allocator.h"
#include "rounding.h"

namespace fragdoctor {

// Address space of one expandable segment before it is rounded up to pages: 9/8 of the device's
// memory, so that pages unmapped early in a segment can be mapped again at its end, or less if the
// settings say so.
std::uint64_t Allocator::reservation_bytes() const {
  const std::uint64_t total = config_.device_total_bytes;
  const std::uint64_t most = total + total / 8;
  if (settings_.reservation_bytes > 0) return std::min(settings_.reservation_bytes, most);
  if (settings_.reservation_fraction <= 0.0) return most;
  const double wanted = settings_.reservation_fraction * static_cast<double>(total);
  return std::min(static_cast<std::uint64_t>(wanted), most);
}

// A free or unmapped block that can provide `size` contiguous bytes; a new reservation if there is
// none, and NO_BLOCK if even the address space is used up.
BlockId Allocator::find_expandable_block(std::uint32_t pool, std::uint32_t stream,
                                         std::uint64_t size) {
  const auto allocatable = [this](BlockId id) {
    if (id == NO_BLOCK) return false;
    const Block& block = blocks_[id];
    return !block.allocated && block.event_count == 0 && !block.has_stream_uses;
  };
  const auto has_room = [&](BlockId id) {
    std::uint64_t bytes = 0;
    for (; bytes < size && allocatable(id); id = blocks_[id].next) bytes += blocks_[id].size;
    return bytes >= size;
  };
  const auto& unmapped = pools_[pool].unmapped;
  for (auto it = unmapped.lower_bound({stream, 0});
       it != unmapped.end() && it->first.first == stream; ++it) {
    BlockId candidate = it->second;
    if (allocatable(blocks_[candidate].prev)) candidate = blocks_[candidate].prev;
    if (has_room(candidate)) return candidate;
  }
  const bool is_small = pools_[pool].is_small;
  const std::uint64_t page = is_small ? SMALL_BUFFER : settings_.large_segment_bytes;
  const std::uint64_t bytes = std::max(round_up(reservation_bytes(), page), page);
  // Seen on 2.15: if no reservation can hold a request, none is made. 2.12 makes one in vain.
  if (config_.era == Era::segment_counter && size > bytes) return NO_BLOCK;
  const std::uint64_t address = place(bytes, true, stream, is_small);
  if (address == 0) return NO_BLOCK;
  const BlockId id = segments_[new_segment(address, bytes, pool, stream, page)].head;
  blocks_[id].mapped = false;
  pools_[pool].unmapped.emplace(std::make_pair(stream, address), id);
  return id;
}

// Map pages for the first `size` bytes of an unmapped block: either all of the pages, or none.
bool Allocator::map_block(BlockId id, std::uint64_t size) {
  const std::uint64_t page = segments_[blocks_[id].segment].page;
  const std::uint64_t bytes = round_up(size, page);
  const std::uint64_t physical = bytes / page * round_up(page, DRIVER_PAGE);
  if (bytes > blocks_[id].size || !charge(physical)) return false;
  const std::uint64_t address = blocks_[id].address;
  auto& unmapped = pools_[blocks_[id].pool].unmapped;
  unmapped.erase({blocks_[id].stream, address});
  blocks_[id].mapped = true;
  if (bytes < blocks_[id].size) {
    const BlockId rest = new_block(address + bytes, blocks_[id].size - bytes, blocks_[id].segment);
    blocks_[rest].mapped = false;
    splice(rest, id, blocks_[id].next);
    unmapped.emplace(std::make_pair(blocks_[rest].stream, blocks_[rest].address), rest);
    blocks_[id].size = bytes;
  }
  try_merge(id, blocks_[id].prev);
  try_merge(id, blocks_[id].next);
  insert_free(id);
  add_reserved(bytes);
  ++counters_.n_map;
  emit(Action::segment_map, blocks_[id], address, bytes);
  return true;
}

BlockId Allocator::try_allocate_expandable(const Request& request) {
  BlockId id = find_expandable_block(request.pool, request.stream, request.size);
  if (id == NO_BLOCK) return NO_BLOCK;
  if (!blocks_[id].mapped && !map_block(id, std::min(blocks_[id].size, request.size))) {
    return NO_BLOCK;
  }
  while (blocks_[id].size < request.size) {
    const BlockId next = blocks_[id].next;
    if (next == NO_BLOCK) return NO_BLOCK;  // the request exceeds the whole reservation
    const std::uint64_t missing = request.size - blocks_[id].size;
    if (!map_block(next, std::min(missing, blocks_[next].size))) return NO_BLOCK;
    id = next;  // it has absorbed the free block before it
  }
  erase_free(id);
  return id;
}

// The offsets in the segment between which the whole pages of a block lie, if any.
std::pair<std::uint64_t, std::uint64_t> Allocator::pages_within(const Block& block) const {
  const Segment& segment = segments_[block.segment];
  return {round_up(block.address - segment.address, segment.page),
          (block.address + block.size - segment.address) / segment.page * segment.page};
}

// Return the whole pages inside a free mapped block; the parts before and after stay free.
void Allocator::unmap_block(BlockId id) {
  const Segment& segment = segments_[blocks_[id].segment];
  const std::uint64_t page = segment.page;
  const auto [from, to] = pages_within(blocks_[id]);
  const std::uint64_t start = segment.address + from;
  const std::uint64_t bytes = to - from;
  erase_free(id);
  if (start > blocks_[id].address) {
    const BlockId before =
        new_block(blocks_[id].address, start - blocks_[id].address, blocks_[id].segment);
    splice(before, blocks_[id].prev, id);
    insert_free(before);
  }
  const std::uint64_t end = blocks_[id].address + blocks_[id].size;
  if (end > start + bytes) {
    const BlockId after = new_block(start + bytes, end - start - bytes, blocks_[id].segment);
    splice(after, id, blocks_[id].next);
    insert_free(after);
  }
  blocks_[id].address = start;
  blocks_[id].size = bytes;
  blocks_[id].mapped = false;
  try_merge(id, blocks_[id].prev);
  try_merge(id, blocks_[id].next);
  const Block& block = blocks_[id];
  pools_[block.pool].unmapped.emplace(std::make_pair(block.stream, block.address), id);
  uncharge(bytes / page * round_up(page, DRIVER_PAGE));
  ++sync_epoch_;  // the device is synchronized before pages go
  counters_.reserved -= bytes;
  ++counters_.n_unmap;
  emit(Action::segment_unmap, block, start, bytes);
}

void Allocator::release_expandable_segment(BlockId id) {
  const Block& block = blocks_[id];
  pools_[block.pool].unmapped.erase({block.stream, block.address});
  delete_segment(block.segment);
  delete_block(id);
}

}  // namespace fragdoctor
