// Where loops turn, told from the stacks of a trace.
//
// Seen from the outside in, a stack is a path in the program's call tree: each frame stands below
// its caller, at one line. A program goes down the lines of a function; that it comes back to a
// line where it was before, without having left the function, is a loop that turns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fragdoctor {

// Distinct stacks, innermost frame first: stack s has frames[offsets[s]] to frames[offsets[s + 1]].
struct StacksView {
  std::size_t n = 0;
  const std::int64_t* offsets = nullptr;
  const std::int32_t* frames = nullptr;
};

// What a frame means for the path. Behind a `closed` frame a path ends (a library's own loops are
// none of the program's); `skipped` ones are looked through (decorators, C++ frames).
enum class FrameKind : std::uint8_t { open = 0, closed = 1, skipped = 2 };

struct FramesView {
  std::size_t n = 0;
  const std::uint8_t* kind = nullptr;
  const std::int32_t* function = nullptr;  // the same for frames of one function
  const std::uint64_t* line = nullptr;
};

constexpr std::int32_t NO_NODE = -1;

struct CallTree {
  // Nodes: a place in the tree. Node 0 is the root; a child comes after its parent. A frame of -1
  // is code of the parent's own line, without a call below it.
  std::vector<std::int32_t> parent, frame;
  // Visits: a stretch of events at one place; `visit_node` is the place.
  std::vector<std::int32_t> visit_event, visit_node;
  // Turns, by visit: at visit `turn_visit` the loop in node `turn_node` begins again, with its
  // child `turn_target`, after its child `turn_source`.
  std::vector<std::int32_t> turn_visit, turn_node, turn_target, turn_source;
};

// `stack[i]` is the stack of the i-th event, or -1; paths are followed to `max_depth` frames.
// Events whose outermost function is not `root` (other threads) and those without a path are no
// visits.
CallTree call_tree(const std::int32_t* stack, std::size_t n_events, const StacksView& stacks,
                   const FramesView& frames, std::int32_t root, std::size_t max_depth);

}  // namespace fragdoctor
