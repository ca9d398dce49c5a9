// Private pools: memory of CUDA graphs and of torch.cuda.MemPool.
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
  release_blocks(2 * pool);
  release_blocks(2 * pool + 1);
}

void Allocator::context_begin(std::uint32_t pool) { contexts_.push_back(pool); }

void Allocator::context_end() {
  if (!contexts_.empty()) contexts_.pop_back();
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
