// The trace of a device as operations of the allocator, and the state that they start from.
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
  empty_cache = 4,   // not recorded: inferred from segments that went
  pool_drop = 5,     // a private pool has gone and its cached memory with it (MemPool destructor)
  pool_release = 6,  // a private pool has gone; a later flush returns its memory
  failed = 7,        // a request that ended in `oom`; its size is the rounded one
};

// `id` is the block it is about, in the numbering of `Lives`.
// Kept small, and plain so that Python can see and edit a list of them in place: a long trace has
// millions. Streams and pools are dense numbers below 2^16 (checked where a trace is made).
struct Op {
  std::uint64_t size = 0;  // requested bytes, of malloc and failed
  std::uint32_t id = 0;    // 0 where it is about no block
  std::uint32_t row = 0;   // of the event it comes from
  std::uint16_t stream = 0;
  std::uint16_t pool = 0;
  OpKind kind = OpKind::malloc;
};

// Operations that somebody else owns.
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

// A recorded segment event, which a replay at the recorded settings has to reproduce.
struct SegmentRecord {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  std::uint32_t row = 0;
  Action action = Action::segment_alloc;
};

// How segments that went before an allocation are explained (see build_ops).
struct Inference {
  // A request that would have lifted reserved memory above this may have failed first, and the
  // frees before it are its flush. 0 = the highest that reserved memory ever was.
  std::uint64_t limit_bytes = 0;
  bool is_collecting = false;  // garbage collection explains frees before an alloc
  // Sorted: first rows of frees known to be of a call; rows of free_completed known to have
  // happened inside the flush of the next request although they follow their free_requested.
  std::vector<std::uint32_t> empty_cache_rows;
  std::vector<std::uint32_t> late_rows;
};

struct TraceOps {
  std::vector<Op> ops;
  std::vector<SegmentRecord> records;
  std::size_t n_ids = 0;
  std::uint32_t n_pools = 0;  // private ones
  std::uint64_t n_inferred_empty_cache = 0;
  std::uint64_t n_flushed = 0;  // allocations that a flush rescued, and failed requests
  // A request that failed wanted this much in all: capacity lies below the lowest of them.
  std::uint64_t lowest_need_bytes = UNLIMITED;
  std::uint64_t peak_reserved_bytes = 0;
};

// The initial state as seeds of the model.
struct InitialState {
  std::vector<SeedSegment> segments;
  // Per segment and block: the allocation's id, or NO_BLOCK where it is free or unmapped.
  std::vector<std::vector<std::uint32_t>> ids;
  std::vector<std::uint32_t> pending;  // ids of blocks whose free was requested before
  std::vector<std::uint64_t> order;    // see Allocator::set_seed_order
};

TraceOps build_ops(const TraceView& trace, const UndoneTrace& undone, const Settings& settings,
                   const Inference& inference);

// `device_total_bytes` bounds reservations of expandable segments; 0 = not known.
InitialState initial_state(const TraceView& trace, const UndoneTrace& undone,
                           const Settings& settings, std::uint64_t device_total_bytes);

}  // namespace fragdoctor
