// The closed sets of words that snapshots use, each with its number: files, traces, the allocator
// model and Python (model.snapshot; a test compares) all number them the same way.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fragdoctor {

enum class Action : std::uint8_t {
  alloc = 0,
  free_requested = 1,
  free_completed = 2,
  segment_alloc = 3,
  segment_free = 4,
  segment_map = 5,
  segment_unmap = 6,
  snapshot = 7,
  oom = 8,
  annotate = 9,
  other = 10,  // from a newer PyTorch
};
constexpr const char* ACTION_NAMES[] = {
    "alloc",       "free_requested", "free_completed", "segment_alloc", "segment_free",
    "segment_map", "segment_unmap",  "snapshot",       "oom",           "annotate",
};

constexpr bool is_block_action(Action a) { return a <= Action::free_completed; }
constexpr bool is_segment_action(Action a) {
  return a >= Action::segment_alloc && a <= Action::segment_unmap;
}
constexpr bool is_segment_gain(Action a) {
  return a == Action::segment_alloc || a == Action::segment_map;
}
constexpr bool is_segment_loss(Action a) {
  return a == Action::segment_free || a == Action::segment_unmap;
}

enum class BlockState : std::uint8_t {
  inactive = 0,
  allocated = 1,
  pending_free = 2,
  other = 3,     // from a newer PyTorch
  unmapped = 4,  // part of a model reservation without memory; never in a file
};
constexpr const char* STATE_NAMES[] = {"inactive", "active_allocated", "active_pending_free"};

enum class SegmentType : std::uint8_t { small = 0, large = 1, unknown = 2 };
constexpr const char* TYPE_NAMES[] = {"small", "large"};

}  // namespace fragdoctor
