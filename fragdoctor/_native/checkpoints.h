// States that the replays of one list of operations went through, for later replays to start from.
//
// What-ifs begin alike: another capacity changes nothing before the first request that it decides,
// a max_split_size nothing before the first block that it concerns, an edit nothing before the
// first operation that it changes. The allocator notes what would have made a difference
// (Allocator::is_same_under), so a replay may start from any state that it would reach itself; the
// result is the same to the byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "allocator.h"
#include "replay.h"
#include "trace_ops.h"

namespace fragdoctor {

// A replay as it stood after its first operations.
struct Checkpoint {
  std::size_t n_done;
  Allocator allocator;
  std::vector<std::pair<std::uint32_t, BlockId>> blocks;  // by allocation id
  std::vector<std::pair<std::uint32_t, Ticket>> tickets;  // by allocation id
  std::vector<bool> pool_is_gone;
  std::uint64_t flush_work;
  std::uint64_t n_live;
  ReplayResult result;

  std::size_t size_bytes() const {
    return allocator.state_bytes() + blocks.size() * sizeof(blocks[0]) +
           tickets.size() * sizeof(tickets[0]);
  }
};

// Shared by threads.
class Checkpoints {
 public:
  // Fewer operations than `min_apart` are replayed faster than a state is copied.
  explicit Checkpoints(OpSpan ops, std::size_t min_apart = 4096)
      : ops_(ops), min_apart_(min_apart) {}

  // The last state, after at most `most` operations, that a replay of `ops` under these conditions
  // goes through too; null if there is none. `fits`: only states before any failure.
  std::shared_ptr<const Checkpoint> furthest(OpSpan ops, const Config& config, std::size_t most,
                                             bool fits) const;
  // Whether a replay of these operations leaves states for others.
  bool takes(OpSpan ops) const;
  // After how many operations a replay that has done some leaves its next state.
  std::size_t next_after(std::size_t n_done) const;
  void add(Checkpoint&& checkpoint);
  void clear();

 private:
  OpSpan ops_;
  std::size_t min_apart_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Checkpoint>> kept_;  // the most operations first
  std::size_t size_bytes_ = 0;
};

}  // namespace fragdoctor
