#include "block_pool.h"

#include <algorithm>
#include <iterator>

namespace fragdoctor {
namespace {

constexpr std::size_t MAX_CHUNK = 2 * FreeSet::MIN_CHUNK;

}  // namespace

void FreeSet::insert(const Entry& entry) {
  ++size_;
  if (chunks_.empty()) {
    chunks_.push_back({std::move(spare_), entry.is_releasable});
    chunks_.back().entries.assign(1, entry);
    return;
  }
  auto [at, index] = lower_bound(entry.key);
  if (at == chunks_.size()) index = chunks_[--at].entries.size();
  Chunk& chunk = chunks_[at];
  std::vector<Entry>& entries = chunk.entries;
  entries.insert(entries.begin() + static_cast<std::ptrdiff_t>(index), entry);
  chunk.n_releasable += entry.is_releasable;
  if (entries.size() <= MAX_CHUNK) return;
  const auto half = entries.begin() + static_cast<std::ptrdiff_t>(entries.size() / 2);
  Chunk upper{{half, entries.end()}};
  for (const Entry& one : upper.entries) upper.n_releasable += one.is_releasable;
  entries.erase(half, entries.end());
  chunk.n_releasable -= upper.n_releasable;
  chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(at) + 1, std::move(upper));
}

bool FreeSet::erase(const FreeKey& key) {
  const Position p = lower_bound(key);
  if (at_end(p) || key < at(p).key) return false;
  erase(p);
  return true;
}

void FreeSet::erase(const Position& p) {
  Chunk& chunk = chunks_[p.chunk];
  chunk.n_releasable -= at(p).is_releasable;
  chunk.entries.erase(chunk.entries.begin() + static_cast<std::ptrdiff_t>(p.index));
  --size_;
  if (!chunk.entries.empty()) return;
  spare_ = std::move(chunk.entries);
  chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(p.chunk));
}

void FreeSet::replace(const Position& p, const Entry& entry) {
  const FreeKey& key = entry.key;
  const std::size_t next = p.chunk + 1;
  if ((p.chunk > 0 && key < chunks_[p.chunk - 1].entries.back().key) ||
      (next < chunks_.size() && chunks_[next].entries.front().key < key)) {
    erase(p);
    insert(entry);
    return;
  }
  Chunk& chunk = chunks_[p.chunk];
  chunk.n_releasable += entry.is_releasable;
  chunk.n_releasable -= at(p).is_releasable;
  std::vector<Entry>& entries = chunk.entries;
  const auto old = entries.begin() + static_cast<std::ptrdiff_t>(p.index);
  // Most stay where they are, and nearly all others within a few places.
  auto to = old;
  for (; to != entries.begin() && key < (to - 1)->key; --to) *to = *(to - 1);
  if (to == old)
    for (; to + 1 != entries.end() && (to + 1)->key < key; ++to) *to = *(to + 1);
  *to = entry;
}

void FreeSet::forward(Position& p) const {
  if (++p.index < chunks_[p.chunk].entries.size()) return;
  ++p.chunk;
  p.index = 0;
}

bool FreeSet::find_releasable(Position& p) const {
  while (!at_end(p)) {
    if (chunks_[p.chunk].n_releasable == 0) p = {p.chunk + 1, 0};
    else if (at(p).is_releasable) return true;
    else forward(p);
  }
  return false;
}

bool FreeSet::backward(Position& p) const {
  if (p.index > 0) {
    --p.index;
    return true;
  }
  if (p.chunk == 0) return false;
  --p.chunk;
  p.index = chunks_[p.chunk].entries.size() - 1;
  return true;
}

}  // namespace fragdoctor
