#include "block_pool.h"

#include <algorithm>
#include <iterator>

namespace fragdoctor {
namespace {

constexpr std::size_t MAX_CHUNK = 128;

bool entry_below(const FreeSet::Entry& entry, const FreeKey& key) { return entry.key < key; }

}  // namespace

// The first chunk that may hold the key: the first whose last key is not below it.
std::size_t FreeSet::chunk_of(const FreeKey& key) const {
  const auto it =
      std::partition_point(chunks_.begin(), chunks_.end(),
                           [&](const std::vector<Entry>& chunk) { return chunk.back().key < key; });
  return static_cast<std::size_t>(it - chunks_.begin());
}

void FreeSet::insert(const FreeKey& key, BlockId block) {
  ++size_;
  if (chunks_.empty()) {
    chunks_.emplace_back(std::move(spare_));
    chunks_.back().assign(1, Entry{key, block});
    return;
  }
  const std::size_t at = std::min(chunk_of(key), chunks_.size() - 1);
  std::vector<Entry>& chunk = chunks_[at];
  chunk.insert(std::lower_bound(chunk.begin(), chunk.end(), key, entry_below), Entry{key, block});
  if (chunk.size() <= MAX_CHUNK) return;
  const auto half = chunk.begin() + static_cast<std::ptrdiff_t>(chunk.size() / 2);
  std::vector<Entry> upper(half, chunk.end());
  chunk.erase(half, chunk.end());
  chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(at) + 1, std::move(upper));
}

bool FreeSet::erase(const FreeKey& key) {
  const std::size_t at = chunk_of(key);
  if (at == chunks_.size()) return false;
  std::vector<Entry>& chunk = chunks_[at];
  const auto it = std::lower_bound(chunk.begin(), chunk.end(), key, entry_below);
  if (it == chunk.end() || key < it->key) return false;
  erase(Position{at, static_cast<std::size_t>(it - chunk.begin())});
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
  if (key < old->key) {
    const auto at = std::lower_bound(chunk.begin(), old, key, entry_below);
    std::move_backward(at, old, old + 1);
    *at = {key, block};
  } else {
    const auto at = std::lower_bound(old + 1, chunk.end(), key, entry_below);
    std::move(old + 1, at, old);
    *(at - 1) = {key, block};
  }
}

FreeSet::Position FreeSet::lower_bound(const FreeKey& key) const {
  const std::size_t at = chunk_of(key);
  if (at == chunks_.size()) return {at, 0};
  const std::vector<Entry>& chunk = chunks_[at];
  const auto it = std::lower_bound(chunk.begin(), chunk.end(), key, entry_below);
  return {at, static_cast<std::size_t>(it - chunk.begin())};
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
