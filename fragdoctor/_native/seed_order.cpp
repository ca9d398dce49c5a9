// The order of blocks older than a trace: what decided between equal ones is not recorded, but the
// recorded addresses show which one was taken.
#include "allocator.h"

namespace fragdoctor {
namespace {

constexpr unsigned SPACING = 20;  // room for blocks that turn out older than their neighbor
constexpr int MAX_EQUAL = 64;     // equal blocks to consider

}  // namespace

void Allocator::set_seed_order(const std::vector<std::uint64_t>& order) {
  const std::uint64_t n = next_block_counter_;
  std::vector<BlockId> free;
  for (BlockId id = 0; id < blocks_.size(); ++id) {
    const Block& block = blocks_[id];
    if (!block.in_use || !block.mapped || block.allocated || block.event_count > 0) continue;
    erase_free(id);
    free.push_back(id);
  }
  seed_origin_.clear();
  for (Block& block : blocks_) {
    if (!block.in_use) continue;
    const std::uint64_t seeded = block.counter;
    block.counter = seeded < order.size() ? order[seeded] : (seeded + 1) << SPACING;
    seed_origin_[block.counter] = static_cast<std::uint32_t>(seeded);
  }
  next_block_counter_ = seeded_below_ = (n + 1) << SPACING;
  for (const BlockId id : free) insert_free(id);
}

std::vector<std::uint64_t> Allocator::learned_seed_order() const {
  std::vector<std::uint64_t> order(seed_origin_.size());
  for (const auto& [counter, seeded] : seed_origin_)
    if (seeded < order.size()) order[seeded] = counter;
  return order;
}

FreeSet::Position Allocator::prefer_wanted(FreeSet& set, FreeSet::Position first) {
  const BlockId taken = set[first];
  const std::uint64_t size = blocks_[taken].size;
  if (config_.era != Era::block_counter || blocks_[taken].address == wanted_address_ ||
      blocks_[taken].counter >= seeded_below_ || blocks_[taken].expandable)
    return first;
  auto p = first;
  for (int i = 0; i < MAX_EQUAL; ++i) {
    set.forward(p);
    if (set.at_end(p)) return first;
    const BlockId id = set[p];
    if (blocks_[id].size != size || blocks_[id].counter >= seeded_below_) return first;
    if (blocks_[id].address != wanted_address_) continue;
    std::uint64_t older = blocks_[taken].counter;
    do {
      if (--older == 0) return first;
    } while (seed_origin_.count(older) > 0);
    const auto origin = seed_origin_.find(blocks_[id].counter);
    if (origin == seed_origin_.end()) return first;
    erase_free(id);
    seed_origin_[older] = origin->second;
    seed_origin_.erase(blocks_[id].counter);
    blocks_[id].counter = older;
    const std::uint64_t gc_base = blocks_[id].gc_base;
    insert_free(id);
    blocks_[id].gc_base = gc_base;
    return set.lower_bound(size);
  }
  return first;
}

}  // namespace fragdoctor
