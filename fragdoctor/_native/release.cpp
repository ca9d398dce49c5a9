// What the allocator gives back to the driver: garbage collection and the two release paths.
#include <algorithm>

#include "allocator.h"
#include "rounding.h"

namespace fragdoctor {

// Return one unsplit cudaMalloc'ed block.
void Allocator::release_block(BlockId id) {
  erase_free(id);
  const Block& block = blocks_[id];
  uncharge(block.size);
  counters_.reserved -= block.size;
  ++counters_.n_free;
  emit(Action::segment_free, block, block.address, block.size);
  delete_segment(block.segment);
  delete_block(id);
}

// Return cached blocks older than the average until reserved memory is below the threshold. Rounds
// are never cut short: every block at or above the average age of its round goes.
void Allocator::garbage_collect() {
  const auto threshold = static_cast<std::uint64_t>(settings_.garbage_collection_threshold *
                                                    static_cast<double>(allowed_));
  if (counters_.reserved <= threshold) return;
  const std::uint64_t target = counters_.reserved - threshold;
  constexpr std::uint32_t LARGE = 1;
  const std::uint64_t calls = pools_[LARGE].get_free_blocks_call_count;
  std::vector<BlockId> eligible;
  std::uint64_t total_age = 0;
  for (const FreeSet& set : pools_[LARGE].free) {
    for (auto p = set.begin(); set.find_releasable(p); set.forward(p)) {
      const Block& block = blocks_[set[p]];
      if (block.expandable) continue;
      eligible.push_back(set[p]);
      total_age += calls - block.gc_base;
    }
  }
  std::uint64_t reclaimed = 0;
  bool any = true;
  while (reclaimed < target && any && !eligible.empty()) {
    const double average = static_cast<double>(total_age) / static_cast<double>(eligible.size());
    std::vector<BlockId> kept;
    any = false;
    for (const BlockId id : eligible) {
      const std::uint64_t age = calls - blocks_[id].gc_base;
      if (static_cast<double>(age) < average) {
        kept.push_back(id);
        continue;
      }
      any = true;
      reclaimed += blocks_[id].size;
      total_age -= age;
      release_block(id);
    }
    eligible = std::move(kept);
  }
}

// With a max_split_size: return one oversize block that could hold the request, or the largest
// ones until their sum could. Return whether it is worth asking the driver again.
bool Allocator::release_available(const Request& request) {
  const std::uint64_t limit = settings_.max_split_bytes;
  const FreeSet& set = free_set(request.pool, request.stream);
  if (limit == UNLIMITED) {
    auto last = set.lower_bound(UNLIMITED);
    if (set.backward(last))
      largest_splittable_ = std::max(largest_splittable_, blocks_[set[last]].size);
    return false;
  }
  const std::uint64_t wanted = std::max(request.size, limit);
  auto p = set.lower_bound(wanted);
  // Oversize blocks are never split, unless the limit was lowered at run time: then PyTorch would
  // free a pointer inside a segment. The model leaves such blocks alone.
  const auto is_whole = [this](const Block& block) {
    return !block.expandable && !is_split(block);
  };
  if (!set.at_end(p) && is_whole(blocks_[set[p]])) {
    release_block(set[p]);
    return true;
  }
  std::vector<BlockId> released;
  std::uint64_t bytes = 0;
  while (bytes < wanted && set.backward(p)) {
    const Block& block = blocks_[set[p]];
    if (block.size < limit) break;
    if (!is_whole(block)) continue;
    bytes += block.size;
    released.push_back(set[p]);
  }
  for (const BlockId id : released) release_block(id);
  return bytes >= wanted;
}

// Return every unsplit free block of a pool, of all streams, and every free page.
void Allocator::release_blocks(std::uint32_t pool) {
  std::vector<BlockId> whole;
  std::vector<BlockId> expandable;
  for (const FreeSet& set : pools_[pool].free) {
    for (auto p = set.begin(); set.find_releasable(p); set.forward(p))
      (blocks_[set[p]].expandable ? expandable : whole).push_back(set[p]);
  }
  for (const BlockId id : whole) release_block(id);
  for (const BlockId id : expandable) {
    unmap_block(id);
    if (!is_split(blocks_[id])) release_expandable_segment(id);
  }
}

// The whole flush: wait for everything pending, then return everything that is free.
void Allocator::release_cached() {
  synchronize_and_free_events();
  release_blocks(1);
  release_blocks(0);
  for (std::uint32_t pool = 1; pool < private_pools_.size(); ++pool) {
    if (private_pools_[pool].use_count > 0) continue;
    release_blocks(2 * pool);
    release_blocks(2 * pool + 1);
  }
}

}  // namespace fragdoctor
