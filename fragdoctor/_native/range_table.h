// Memory ranges that a device has reserved, as they come and go in a trace.
#pragma once

#include <cstdint>

#include "sorted_chunks.h"
#include "undone.h"

namespace fragdoctor {

struct Range {
  std::uint64_t end = 0;
  SegmentKind kind;
};

class RangeTable {
 public:
  // Add [start, range.end). Expandable ranges merge with adjacent ones of their kind. Return
  // false, changing nothing, if it is empty or overlaps an existing one.
  bool add(std::uint64_t start, Range range) {
    if (start >= range.end) return false;
    const auto* below = ranges_.at_or_below(start);
    if (below != nullptr && below->value.end > start) return false;
    const auto* above = ranges_.at_or_above(start);
    if (above != nullptr && above->key < range.end) return false;
    std::uint64_t first = start;
    if (range.kind.is_expandable) {
      if (above != nullptr && above->key == range.end && above->value.kind == range.kind) {
        range.end = above->value.end;
        ranges_.erase(above->key);
        below = ranges_.at_or_below(start);
      }
      if (below != nullptr && below->value.end == start && below->value.kind == range.kind)
        first = below->key;
    }
    ranges_.insert(first, range);
    return true;
  }

  // Remove [start, end): a whole range, or a part of an expandable one. Return false, changing
  // nothing, if it is not there.
  bool remove(std::uint64_t start, std::uint64_t end, bool is_expandable) {
    const auto* entry = ranges_.at_or_below(start);
    if (entry == nullptr || start >= end || entry->value.end < end) return false;
    const std::uint64_t first = entry->key;
    Range range = entry->value;
    if (range.kind.is_expandable != is_expandable) return false;
    if (!is_expandable && (first != start || range.end != end)) return false;
    ranges_.erase(first);
    if (end < range.end) ranges_.insert(end, range);
    range.end = start;
    if (first < start) ranges_.insert(first, range);
    return true;
  }

  // The range that holds `address`, or null. Valid until the next change.
  const Range* find(std::uint64_t address) {
    const auto* entry = ranges_.at_or_below(address);
    return entry != nullptr && address < entry->value.end ? &entry->value : nullptr;
  }

  // An expandable range that touches [start, end), or null.
  const Range* touching(std::uint64_t start, std::uint64_t end) {
    const auto* below = ranges_.at_or_below(start);
    if (below != nullptr && below->value.kind.is_expandable && below->value.end == start)
      return &below->value;
    const auto* above = ranges_.at_or_above(end);
    if (above != nullptr && above->key == end && above->value.kind.is_expandable)
      return &above->value;
    return nullptr;
  }

  template <class Function>
  void for_each(Function&& f) const {
    ranges_.for_each(f);
  }

 private:
  SortedChunks<Range> ranges_;
};

}  // namespace fragdoctor
