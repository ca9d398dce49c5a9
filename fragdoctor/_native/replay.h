// Runs the operations of a trace through the allocator model.
//
// As a baseline, it places new segments where the file recorded them and compares what the model
// does with what the file says; as a what-if, it runs the same requests under other settings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "allocator.h"
#include "future.h"
#include "trace_ops.h"

namespace fragdoctor {

class Checkpoints;

// What a replay starts from and plays; shared by any number of replays, never changed.
struct ReplayInput {
  OpSpan ops;
  const InitialState* initial = nullptr;
  std::size_t n_ids = 0;
  std::uint32_t n_pools = 0;
  Checkpoints* checkpoints = nullptr;  // of replays with the same initial state; null = none
};

// What the file says about the run; only for baselines.
struct Recording {
  const std::vector<SegmentRecord>* records = nullptr;
  const TraceView* trace = nullptr;
  const FinalState* end = nullptr;
};

struct ReplayResult {
  static constexpr std::int64_t NO_ROW = -1;

  Counters counters;  // peaks count from the initial state
  bool fits = true;
  std::int64_t first_oom_row = NO_ROW;
  std::uint64_t first_oom_bytes = 0;  // as asked
  std::uint64_t n_requests = 0;
  std::uint64_t driver_calls = 0;
  std::uint64_t n_bad_seeds = 0;  // initial segments that are inconsistent
  // Up to this capacity (exclusive), the run would have been exactly the same.
  std::uint64_t same_below_bytes = UNLIMITED;
  bool is_cut_short = false;  // stopped at the first failing request, as requested
};

struct Comparison {
  std::uint64_t n_recorded = 0;  // segment events in the file
  std::uint64_t n_emitted = 0;   // segment events of the model
  std::uint64_t n_equal = 0;     // same action, address and size, at the same operation, in order
  std::uint64_t n_requests = 0;
  std::uint64_t n_same_address = 0;
  std::uint64_t n_failed_recorded = 0;  // requests that the file says failed
  std::uint64_t n_failed_agreed = 0;
  std::uint64_t n_failed_invented = 0;  // requests that failed in the model only
  std::uint64_t n_layout = 0;           // blocks of the final layout, on the larger side
  std::uint64_t n_layout_equal = 0;     // same address, size and state
  std::int64_t first_difference_row = ReplayResult::NO_ROW;
  // First rows of frees that the file has before a request and that the model did not make.
  std::vector<std::uint32_t> unexplained_frees;
  // Rows of free_completed just before a request for which the file shows a flush but which the
  // model served from its cache: the block may have been pending until that flush.
  std::vector<std::uint32_t> early_completions;
};

struct ReplayOptions {
  bool stop_at_oom = false;  // stop at the first failing request
  // Blocks older than the trace are requested anew, in order of address, as if the settings had
  // been in force from the start; otherwise they stay where they were, in their old segments.
  bool remake_initial = false;
};

ReplayResult replay(const ReplayInput& input, const Config& config, const ReplayOptions& options);

// A run after its first operations, which may continue in several ways. The operations after them
// (a failing request, and the frees of its unwinding) belong to the recorded end only.
struct PlayedRun {
  ReplayResult recorded;  // result of all operations
  Allocator allocator;
  std::vector<BlockId> blocks;  // by allocation id
  std::vector<Ticket> tickets;  // by allocation id; only where frees are pending
};

PlayedRun play(const ReplayInput& input, const Config& config, bool remake_initial,
               std::size_t n_past);

// Continue with a future. The future is not played if a request of the past failed.
LookOn look_on(const PlayedRun& run, const Future& future, const LookOnLimits& limits);

// What the allocator would have written if the replayed run had been recorded from its start.
struct SimulatedRecording {
  std::vector<TraceEvent> events;
  std::vector<SegmentView> segments;
};

ReplayResult replay_and_record(const ReplayInput& input, const Config& config,
                               SimulatedRecording& recording);

// Replay with segments placed as recorded, and infer from the addresses that were handed out the
// order in which the blocks older than the trace were made.
std::vector<std::uint64_t> learn_seed_order(const ReplayInput& input, const Config& config,
                                            const Recording& recording);

// Replay with segments placed as recorded, and compare. If `max_ops` is less than the number of
// operations, play only that many and leave out the final layout.
ReplayResult replay_recorded(const ReplayInput& input, const Config& config,
                             const Recording& recording, Comparison& comparison,
                             std::size_t max_ops);

}  // namespace fragdoctor
