// A sorted map from addresses to small values, in chunks of bounded length: searches are binary,
// an insertion moves at most one chunk, and nothing is allocated per element. It is for tables that
// a hostile file may grow to millions of entries, where one sorted vector would be quadratic.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fragdoctor {

template <class Value>
class SortedChunks {
 public:
  struct Entry {
    std::uint64_t key;
    Value value;
  };

  // Insert or replace.
  void insert(std::uint64_t key, const Value& value) {
    if (chunks_.empty()) {
      chunks_.push_back({Entry{key, value}});
      size_ = 1;
      return;
    }
    auto& chunk = chunks_[chunk_of(key)];
    auto it = std::lower_bound(chunk.begin(), chunk.end(), key, less_key);
    if (it != chunk.end() && it->key == key) {
      it->value = value;
      return;
    }
    chunk.insert(it, Entry{key, value});
    ++size_;
    if (chunk.size() > MAX_CHUNK) split(chunk_of(key));
  }

  bool erase(std::uint64_t key) {
    if (chunks_.empty()) return false;
    const std::size_t c = chunk_of(key);
    auto& chunk = chunks_[c];
    auto it = std::lower_bound(chunk.begin(), chunk.end(), key, less_key);
    if (it == chunk.end() || it->key != key) return false;
    chunk.erase(it);
    --size_;
    if (chunk.empty()) chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(c));
    return true;
  }

  // The entry with the largest key <= `key`, or null. Pointers are valid until the next change.
  Entry* at_or_below(std::uint64_t key) {
    if (chunks_.empty()) return nullptr;
    auto& chunk = chunks_[chunk_of(key)];
    auto it = std::upper_bound(chunk.begin(), chunk.end(), key, key_less);
    return it == chunk.begin() ? nullptr : &*(it - 1);
  }

  // The entry with the smallest key >= `key`, or null.
  Entry* at_or_above(std::uint64_t key) {
    if (chunks_.empty()) return nullptr;
    const std::size_t c = chunk_of(key);
    auto& chunk = chunks_[c];
    auto it = std::lower_bound(chunk.begin(), chunk.end(), key, less_key);
    if (it != chunk.end()) return &*it;
    return c + 1 < chunks_.size() ? &chunks_[c + 1].front() : nullptr;
  }

  std::size_t size() const { return size_; }

  template <class Function>
  void for_each(Function&& f) const {
    for (const auto& chunk : chunks_)
      for (const Entry& e : chunk) f(e.key, e.value);
  }

 private:
  static constexpr std::size_t MAX_CHUNK = 256;
  static bool less_key(const Entry& e, std::uint64_t key) { return e.key < key; }
  static bool key_less(std::uint64_t key, const Entry& e) { return key < e.key; }

  // The last chunk whose first key is <= key; the first chunk if there is none.
  std::size_t chunk_of(std::uint64_t key) const {
    std::size_t low = 0, high = chunks_.size();
    while (high - low > 1) {
      const std::size_t mid = low + (high - low) / 2;
      if (chunks_[mid].front().key <= key) low = mid;
      else high = mid;
    }
    return low;
  }

  void split(std::size_t c) {
    auto& chunk = chunks_[c];
    const auto half = chunk.begin() + static_cast<std::ptrdiff_t>(chunk.size() / 2);
    std::vector<Entry> upper(half, chunk.end());
    chunk.erase(half, chunk.end());
    chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(c + 1), std::move(upper));
  }

  std::vector<std::vector<Entry>> chunks_;  // none is empty
  std::size_t size_ = 0;
};

}  // namespace fragdoctor
