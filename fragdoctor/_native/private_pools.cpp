// Private pools: memory of CUDA graphs and of torch.cuda.MemPool.
#include <algorithm>

#include "allocator.h"

namespace fragdoctor {

std::uint32_t Allocator::pool_create(bool use_on_oom, bool no_split) {
  const auto id = static_cast<std::uint32_t>(private_pools_.size());
  private_pools_.push_back({1, use_on_oom, no_split});
  pools_.resize(pools_.size() + 2);
  pools_[2 * id].is_small = true;
  pools_[2 * id].owner = id;
  pools_[2 * id + 1].owner = id;
  return id;
}

void Allocator::pool_retain(std::uint32_t pool) { ++private_pools_[pool].use_count; }

void Allocator::pool_release(std::uint32_t pool, bool flush) {
  if (private_pools_[pool].use_count > 0) --private_pools_[pool].use_count;
  if (!flush || private_pools_[pool].use_count > 0) return;
  synchronize_and_free_events_of(pool);
  release_blocks(2 * pool);
  release_blocks(2 * pool + 1);
}

void Allocator::context_begin(std::uint32_t pool, bool is_capture) {
  contexts_.push_back({pool, is_capture || config_.era != Era::segment_counter});
}

void Allocator::context_end() {
  if (!contexts_.empty()) contexts_.pop_back();
}

bool Allocator::in_capture() const {
  return std::any_of(contexts_.begin(), contexts_.end(),
                     [](const Context& context) { return context.is_capture; });
}

// Hand out the part of a free block that begins at an address (setCheckpointPoolState: blocks that
// a graph's replay left there are in use again). A remaining front part stays free.
MallocResult Allocator::malloc_at(std::uint64_t address, std::uint64_t size) {
  const std::uint64_t rounded = round_size(size);
  for (BlockId id = 0; id < blocks_.size(); ++id) {
    const Block& block = blocks_[id];
    const bool is_free = block.in_use && block.mapped && !block.allocated &&
                         block.event_count == 0 && !block.has_stream_uses;
    if (!is_free || address < block.address ||
        address + rounded > block.address + block.size) {
      continue;
    }
    erase_free(id);
    if (const std::uint64_t skipped = address - block.address; skipped > 0) {
      const BlockId front = new_block(block.address, skipped, block.segment);
      const bool was_split = is_split(blocks_[id]);
      splice(front, blocks_[id].prev, id);
      blocks_[id].address += skipped;
      blocks_[id].size -= skipped;
      insert_free(front);
      const auto whole = static_cast<std::int64_t>(blocks_[id].size + skipped);
      note_split(blocks_[id], was_split ? 1 : 2, was_split ? 0 : whole);
    }
    const Request request{rounded, rounded, blocks_[id].stream, blocks_[id].pool, id};
    return {true, take_block(request, size), address};
  }
  return {};
}

// Bytes of private pools that no block in use covers: the "allocated in private pools" of the
// message, which despite its wording is cached memory.
std::uint64_t Allocator::private_free_bytes() const {
  if (private_pools_.size() == 1) return 0;
  std::uint64_t bytes = 0;
  for (const Block& block : blocks_) {
    if (block.in_use && block.mapped && !block.allocated && pools_[block.pool].owner != 0) {
      bytes += block.size;
    }
  }
  return bytes;
}

}  // namespace fragdoctor
