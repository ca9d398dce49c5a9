// The lives of segments while a trace is read forward. Pages of an expandable segment come and go
// in pieces, so a piece is cut if only a part of it goes.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "sorted_chunks.h"
#include "undone.h"

namespace fragdoctor {

class SegmentHistory {
 public:
  void begin(const std::vector<InitialSegment>& initial) {
    for (const InitialSegment& s : initial) insert({s.address, s.size, BEFORE, NEVER, s.kind});
  }

  // Memory that came. Anything that was in its place has gone: the trace does not say when.
  void add(const SegmentLife& piece) {
    const auto* entry = live_.at_or_below(piece.end() - 1);
    while (entry != nullptr && pieces_[entry->value].end() > piece.address) {
      close(entry->value, piece.start);
      entry = live_.at_or_below(piece.end() - 1);
    }
    insert(piece);
  }

  // Memory that went: a whole ordinary segment, or any pages of expandable ones.
  void remove(std::uint64_t start, std::uint64_t end, bool is_expandable, std::int32_t row) {
    if (!is_expandable) {
      const auto* entry = live_.at_or_below(start);
      if (entry == nullptr || entry->key != start) return;
      const SegmentLife& piece = pieces_[entry->value];
      if (piece.end() == end && !piece.kind.is_expandable) close(entry->value, row);
      return;
    }
    take_away(start, end, row, true);
  }

  // The piece that holds `address`, or null. Valid until the next change.
  const SegmentLife* find(std::uint64_t address) {
    const auto* entry = live_.at_or_below(address);
    if (entry == nullptr || address >= pieces_[entry->value].end()) return nullptr;
    return &pieces_[entry->value];
  }

  // An expandable piece that touches [start, end), or null.
  const SegmentLife* touching(std::uint64_t start, std::uint64_t end) {
    if (start > 0) {
      const SegmentLife* below = find(start - 1);
      if (below != nullptr && below->kind.is_expandable && below->end() == start) return below;
    }
    const SegmentLife* above = find(end);
    const bool touches = above != nullptr && above->kind.is_expandable && above->address == end;
    return touches ? above : nullptr;
  }

  // Make the end agree with the final segments (by address, free of overlaps). For a sound trace,
  // nothing changes; differences come or go at the last row.
  void settle(const std::vector<InitialSegment>& final, std::int32_t last_row) {
    std::uint64_t at = 0;
    for (const InitialSegment& s : final) {
      take_away(at, s.address, last_row, false);
      at = s.address + s.size;
    }
    take_away(at, UNLIMITED, last_row, false);
    for (const InitialSegment& s : final) {
      const std::uint64_t end = s.address + s.size;
      for (at = s.address; at < end;) {
        if (const SegmentLife* there = find(at)) {
          at = there->end();
          continue;
        }
        const auto* next = live_.at_or_above(at);
        const std::uint64_t until = next == nullptr || next->key > end ? end : next->key;
        insert({at, until - at, last_row, NEVER, s.kind});
        at = until;
      }
    }
  }

  std::uint64_t reserved() const { return reserved_; }
  std::vector<SegmentLife> take() { return std::move(pieces_); }

 private:
  void insert(const SegmentLife& piece) {
    live_.insert(piece.address, static_cast<std::uint32_t>(pieces_.size()));
    pieces_.push_back(piece);
    reserved_ += piece.size;
  }
  void close(std::uint32_t index, std::int32_t row) {
    SegmentLife& piece = pieces_[index];
    piece.done = row;
    reserved_ -= piece.size;
    live_.erase(piece.address);
  }
  // Close everything in [start, end).
  void take_away(std::uint64_t start, std::uint64_t end, std::int32_t row, bool only_expandable) {
    if (start >= end) return;
    const auto* entry = live_.at_or_below(end - 1);
    while (entry != nullptr && pieces_[entry->value].end() > start) {
      if (only_expandable && !pieces_[entry->value].kind.is_expandable) return;
      const std::uint64_t first = entry->key;
      cut(entry->value, start, end, row);
      if (first <= start) return;
      entry = live_.at_or_below(first - 1);
    }
  }
  // Close the part of a piece that lies in [start, end); the rest lives on.
  void cut(std::uint32_t index, std::uint64_t start, std::uint64_t end, std::int32_t row) {
    const SegmentLife whole = pieces_[index];
    close(index, row);
    SegmentLife& part = pieces_[index];
    part.address = start > whole.address ? start : whole.address;
    part.size = (end < whole.end() ? end : whole.end()) - part.address;
    const std::uint64_t part_end = part.end();
    const std::uint64_t before = part.address - whole.address;
    if (before > 0) insert({whole.address, before, whole.start, NEVER, whole.kind});
    if (part_end < whole.end())
      insert({part_end, whole.end() - part_end, whole.start, NEVER, whole.kind});
  }

  std::vector<SegmentLife> pieces_;
  SortedChunks<std::uint32_t> live_;  // by address -> index
  std::uint64_t reserved_ = 0;
};

}  // namespace fragdoctor
