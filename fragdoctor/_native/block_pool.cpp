#include "block_pool.h"

#include <algorithm>
#include <iterator>

namespace fragdoctor {
namespace {

constexpr std::size_t MAX_CHUNK = 128;

}  // namespace

void FreeSet::insert(const FreeKey& key, BlockId block) {
  ++size_;
  if (chunks_.empty()) {
    chunks_.emplace_back(std::move(spare_));
    chunks_.back().assign(1, Entry{key, block});
    return;
  }
  auto [at, index] = lower_bound(key);
  if (at == chunks_.size()) index = chunks_[--at].size();
  std::vector<Entry>& chunk = chunks_[at];
  chunk.insert(chunk.begin() + static_cast<std::ptrdiff_t>(index), Entry{key, block});
  if (chunk.size() <= MAX_CHUNK) return;
  const auto half = chunk.begin() + static_cast<std::ptrdiff_t>(chunk.size() / 2);
  std::vector<Entry> upper(half, chunk.end());
  chunk.erase(half, chunk.end());
  chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(at) + 1, std::move(upper));
}

bool FreeSet::erase(const FreeKey& key) {
  const Position p = lower_bound(key);
  if (at_end(p) || key < chunks_[p.chunk][p.index].key) return false;
  erase(p);
  return true;
}

void FreeSet::erase(const Position& p) {
  std::vector<Entry>& chunk = chunks_[p.chunk];
  chunk.erase(chunk.begin() + static_cast<std::ptrdiff_t>(p.index));
  --size_;
  if (!chunk.empty()) return;
  spare_ = std::move(chunk);
  chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(p.chunk));
}

void FreeSet::replace(const Position& p, const FreeKey& key, BlockId block) {
  const std::size_t next = p.chunk + 1;
  if ((p.chunk > 0 && key < chunks_[p.chunk - 1].back().key) ||
      (next < chunks_.size() && chunks_[next].front().key < key)) {
    erase(p);
    insert(key, block);
    return;
  }
  std::vector<Entry>& chunk = chunks_[p.chunk];
  const auto old = chunk.begin() + static_cast<std::ptrdiff_t>(p.index);
  // Most stay where they are, and nearly all others within a few places.
  auto at = old;
  for (; at != chunk.begin() && key < (at - 1)->key; --at) *at = *(at - 1);
  if (at == old)
    for (; at + 1 != chunk.end() && (at + 1)->key < key; ++at) *at = *(at + 1);
  *at = {key, block};
}

void FreeSet::forward(Position& p) const {
  if (++p.index < chunks_[p.chunk].size()) return;
  ++p.chunk;
  p.index = 0;
}

bool FreeSet::backward(Position& p) const {
  if (p.index > 0) {
    --p.index;
    return true;
  }
  if (p.chunk == 0) return false;
  --p.chunk;
  p.index = chunks_[p.chunk].size() - 1;
  return true;
}

}  // namespace fragdoctor
