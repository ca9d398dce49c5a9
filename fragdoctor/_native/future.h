// What comes after the recorded operations: the rest of a step, then whole steps over and over.
//
// The continuation of a trace names a block by its slot (the place of its allocation in a step) and
// the step that made it, so one template serves any number of steps: a free says in which slot and
// how many steps ago its block was made. A block also knows how long it lives, so it goes at the
// end of its last step even if the template that follows is not the one that frees it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "allocator.h"
#include "trace_ops.h"

namespace fragdoctor {

constexpr std::int32_t KEPT = -1;      // never freed: a leak, or a block that stays for good
constexpr std::int32_t REPLACED = -2;  // freed when its slot is allocated again

struct FutureOp {
  std::uint64_t size = 0;   // requested bytes, for malloc
  std::int64_t growth = 0;  // bytes by which the size rises each step
  std::uint32_t slot = 0;
  std::int32_t age =
      0;  // malloc: steps that the block lives, or KEPT, REPLACED; frees: steps since
  std::uint16_t stream = 0;
  std::uint16_t pool = 0;
  OpKind kind = OpKind::malloc;
};

// A block of the recorded part that the future frees: made `born` <= 0 steps from the current step,
// with an age as above.
struct Holding {
  std::uint32_t id = 0;  // as operations name it
  std::uint32_t slot = 0;
  std::int32_t born = 0;
  std::int32_t age = 0;
};

// Template 0 finishes the current step (step 0); then `cycle` follows again and again.
struct Future {
  const FutureOp* ops = nullptr;
  std::vector<std::uint32_t> first;  // by template, plus one for the end
  std::vector<std::int32_t> origin;  // step that a template was recorded in; 0 = current step
  std::vector<std::uint8_t> counts;  // whether it is a step of the program (evaluation is not)
  std::vector<std::uint32_t> cycle;
  std::vector<Holding> held;
  std::uint32_t n_slots = 0;
};

struct LookOnLimits {
  std::uint64_t max_steps = 100;  // after the current one
  std::uint64_t max_ops = 0;
  bool stops_at_repetition = true;
};

struct LookOn {
  bool has_failed = false;
  bool repeats = false;        // the layout at a cycle's end equals that of the cycle before
  std::uint64_t n_done = 0;    // program steps that were finished, including the current one
  std::uint64_t n_played = 0;  // the same, counting evaluation too
  std::uint64_t failed_bytes = 0, failed_op = 0;
  // After each step, and the highest value within it.
  std::vector<std::uint64_t> reserved, allocated, peak_reserved, peak_allocated;
};

// Continue from an allocator that has served the recorded part. `blocks` and `tickets` are by ID.
LookOn look_on(Allocator& allocator, const std::vector<BlockId>& blocks,
               const std::vector<Ticket>& tickets, const Future& future,
               const LookOnLimits& limits);

}  // namespace fragdoctor
