// The trace of a device as allocator operations, and the state that they start from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "allocator_types.h"
#include "undone.h"

namespace fragdoctor {

enum class OpKind : std::uint8_t {
  malloc = 0,
  free = 1,          // done at once
  free_pending = 2,  // requested; waits for other streams until `complete`
  complete = 3,
  empty_cache = 4,   // not recorded: inferred from freed segments
  pool_drop = 5,     // a private pool is gone, with its cached memory (MemPool destructor)
  pool_release = 6,  // a private pool is gone; a later flush returns its memory
  failed = 7,        // a request that ended in `oom`; its size is the rounded one
};

// `id` is the block that it concerns, in the numbering of `Lives`.
// Kept small, and plain so that Python can see and edit a list of them in place: a long trace has
// millions. Streams and pools are dense numbers below 2^16 (checked where a trace is made).
struct Op {
  std::uint64_t size = 0;  // requested bytes, for malloc and failed
  std::uint32_t id = 0;    // 0 if it concerns no block
  std::uint32_t row = 0;   // row of the event it comes from
  std::uint16_t stream = 0;
  std::uint16_t pool = 0;
  OpKind kind = OpKind::malloc;
};

// Operations that are owned elsewhere.
class OpSpan {
 public:
  OpSpan() = default;
  OpSpan(const Op* data, std::size_t n) : data_(data), n_(n) {}
  OpSpan(const std::vector<Op>& ops) : data_(ops.data()), n_(ops.size()) {}  // NOLINT: a view
  const Op* begin() const { return data_; }
  const Op* end() const { return data_ + n_; }
  std::size_t size() const { return n_; }
  const Op& operator[](std::size_t i) const { return data_[i]; }

 private:
  const Op* data_ = nullptr;
  std::size_t n_ = 0;
};

// A recorded segment event that a replay under the recorded settings has to reproduce.
struct SegmentRecord {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  std::uint32_t row = 0;
  Action action = Action::segment_alloc;
};

// How segments that went before an allocation are explained (see build_ops).
struct Inference {
  // A request that would have raised reserved memory above this may have failed first, and the
  // frees before it are its flush. 0 means the highest value that reserved memory ever had.
  std::uint64_t limit_bytes = 0;
  bool is_collecting = false;  // garbage collection explains frees before an alloc
  // Sorted: first rows of frees known to come from a call; rows of free_completed known to have
  // happened inside the flush of the next request although they follow their free_requested.
  std::vector<std::uint32_t> empty_cache_rows;
  std::vector<std::uint32_t> late_rows;
};

struct TraceOps {
  std::vector<Op> ops;
  std::vector<SegmentRecord> records;
  std::size_t n_ids = 0;
  std::uint32_t n_pools = 0;  // private pools
  std::uint64_t n_inferred_empty_cache = 0;
  std::uint64_t n_flushed = 0;  // allocations that a flush saved, and failed requests
  // A failed request needed this much in total: capacity is below the lowest of these.
  std::uint64_t lowest_need_bytes = UNLIMITED;
  std::uint64_t peak_reserved_bytes = 0;
};

// The initial state as seeds of the model.
struct InitialState {
  std::vector<SeedSegment> segments;
  // For each segment and block: the allocation's ID, or NO_BLOCK if it is free or unmapped.
  std::vector<std::vector<std::uint32_t>> ids;
  std::vector<std::uint32_t> pending;  // ids of blocks whose free was requested before
  std::vector<std::uint64_t> order;    // see Allocator::set_seed_order
};

TraceOps build_ops(const TraceView& trace, const UndoneTrace& undone, const Settings& settings,
                   const Inference& inference);

// `device_total_bytes` bounds the reservations of expandable segments; 0 means unknown.
InitialState initial_state(const TraceView& trace, const UndoneTrace& undone,
                           const Settings& settings, std::uint64_t device_total_bytes);

}  // namespace fragdoctor
