// Free blocks of one pool, in the order in which the allocator tries them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "allocator_types.h"

namespace fragdoctor {

// Order within one stream: size, then the tie-break of the era (tie_b only if tie_a is equal).
struct FreeKey {
  std::uint64_t size;
  std::uint64_t tie_a;
  std::uint64_t tie_b;
  bool operator<(const FreeKey& o) const {
    if (size != o.size) return size < o.size;
    if (tie_a != o.tie_a) return tie_a < o.tie_a;
    return tie_b < o.tie_b;
  }
};

// A sorted set in chunks of bounded length: searches are binary, insertions move little memory,
// and nothing is allocated per element.
class FreeSet {
 public:
  static constexpr std::size_t MIN_CHUNK = 64;  // of a chunk that was just split
  struct Entry {
    FreeKey key;
    BlockId block;
    bool is_releasable;
  };
  // A position; valid until the set changes.
  struct Position {
    std::size_t chunk = 0;
    std::size_t index = 0;
  };

  void insert(const Entry& entry);
  // Remove the element with exactly this key. Return whether it was there.
  bool erase(const FreeKey& key);
  void erase(const Position& p);
  // Replace the element at a position with another one, keeping the order: usually close by.
  void replace(const Position& p, const Entry& entry);
  Position lower_bound(std::uint64_t size) const {
    return first_not([size](const FreeKey& key) { return key.size < size; });
  }
  Position lower_bound(const FreeKey& key) const {
    return first_not([&key](const FreeKey& other) { return other < key; });
  }
  // Give the elements new keys, which order them alike.
  template <class Key>
  void rename(Key&& key_of) {
    for (Chunk& chunk : chunks_)
      for (Entry& entry : chunk.entries) entry.key = key_of(entry.block);
  }
  Position begin() const { return {}; }
  bool at_end(const Position& p) const { return p.chunk >= chunks_.size(); }
  // Step forward, to the end if necessary; step back, returning false at the beginning.
  void forward(Position& p) const;
  bool backward(Position& p) const;
  // Go on to the next releasable element, from here on; return whether there is one. Chunks without
  // any are skipped: flushes must not take as long as there are holes.
  bool find_releasable(Position& p) const;
  const Entry& at(const Position& p) const { return chunks_[p.chunk].entries[p.index]; }
  BlockId operator[](const Position& p) const { return at(p).block; }
  bool empty() const { return chunks_.empty(); }
  std::size_t size() const { return size_; }

 private:
  struct Chunk {
    std::vector<Entry> entries;
    std::size_t n_releasable = 0;
  };

  template <class Below>
  Position first_not(Below&& below) const {
    const auto chunk = std::partition_point(
        chunks_.begin(), chunks_.end(),
        [&](const Chunk& one) { return below(one.entries.back().key); });
    if (chunk == chunks_.end()) return {chunks_.size(), 0};
    const std::vector<Entry>& entries = chunk->entries;
    const auto entry = std::partition_point(entries.begin(), entries.end(),
                                            [&](const Entry& one) { return below(one.key); });
    return {static_cast<std::size_t>(chunk - chunks_.begin()),
            static_cast<std::size_t>(entry - entries.begin())};
  }

  std::vector<Chunk> chunks_;  // none is empty
  std::vector<Entry> spare_;   // memory of the last chunk that became empty
  std::size_t size_ = 0;
};

struct BlockPool {
  bool is_small = false;
  std::uint32_t owner = 0;  // private pool, 0 = default
  std::uint64_t get_free_blocks_call_count = 0;
  std::vector<FreeSet> free;  // by stream
  // Unmapped blocks of expandable segments, by (stream, address).
  std::map<std::pair<std::uint32_t, std::uint64_t>, BlockId> unmapped;
};

struct PrivatePool {
  std::uint32_t use_count = 1;  // live graphs and MemPool objects; at 0 a flush may empty it
  bool use_on_oom = false;
  bool no_split = false;
};

}  // namespace fragdoctor
