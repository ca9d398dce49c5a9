// Values that go into and come out of the allocator model.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "words.h"

namespace fragdoctor {

// PyTorch's hash tables (ska::flat_hash_map) are ordered by this hash.
constexpr std::uint64_t fibonacci_hash(std::uint64_t value) {
  return value * 11400714819323198485ULL;
}

using BlockId = std::uint32_t;
using Ticket = std::uint64_t;

constexpr BlockId NO_BLOCK = std::numeric_limits<BlockId>::max();
constexpr std::uint32_t NONE = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint64_t UNLIMITED = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t MIB = 1ULL << 20;

constexpr std::uint64_t MAX_REQUEST = 1ULL << 60;  // from this size on, PyTorch refuses outright
constexpr std::uint64_t MIN_BLOCK = 512;
constexpr std::uint64_t SMALL_SIZE = MIB;            // the small pool's largest rounded request
constexpr std::uint64_t SMALL_BUFFER = 2 * MIB;      // segment and page of the small pool
constexpr std::uint64_t MIN_LARGE_ALLOC = 10 * MIB;  // from this size on, one segment per request
constexpr std::uint64_t ROUND_LARGE = 2 * MIB;
constexpr std::uint64_t DRIVER_PAGE = 2 * MIB;  // granularity of physical memory

// How free blocks of equal size are ordered.
enum class Era : std::uint8_t {
  address = 0,          // up to 2.11
  block_counter = 1,    // 2.12
  segment_counter = 2,  // 2.13 and later: segment, then address
};

// Settings of PYTORCH_CUDA_ALLOC_CONF that affect device memory.
struct Settings {
  std::uint64_t max_split_bytes = UNLIMITED;
  std::uint64_t max_non_split_rounding_bytes = 20 * MIB;
  std::uint64_t large_segment_bytes = 20 * MIB;
  double garbage_collection_threshold = 0.0;
  bool expandable_segments = false;
  // Address space of one expandable segment: in bytes, or as a fraction (at most 9/8) of the
  // device's memory.
  std::uint64_t reservation_bytes = 0;
  double reservation_fraction = 0.0;  // 0 = 9/8
  std::array<std::uint32_t, 16> roundup_power2_divisions{};
};

struct Config {
  Settings settings;
  Era era = Era::block_counter;
  // What the driver has for PyTorch, counted in 2 MiB pages: cudaMalloc and cuMemCreate fail
  // exactly when it would be exceeded. Seeded segments count too.
  std::uint64_t capacity_bytes = UNLIMITED;
  // Total memory of the device: the base of fractions and of reservations; 0 = capacity_bytes,
  // or 1 TiB if that is unlimited.
  std::uint64_t device_total_bytes = 0;
  // Whether the device has more than that: how far a reservation goes on is not known then.
  bool device_total_is_least = false;
  double memory_fraction = -1.0;  // < 0: not set
  // Up to 2.9, a fraction of 1.0 counts as set; from 2.10 on, only values below 1 do.
  bool fraction_of_one_counts = false;
  std::uint32_t event_delay = 0;  // queries that a record_stream event answers with "not ready"
};

// What the allocator would write to its trace. Sizes are as in the trace: requested bytes for alloc
// and free_*, the rounded size for oom; for oom, the address holds the driver's free bytes.
struct TraceEvent {
  Action action;
  std::uint64_t address;
  std::uint64_t size;
  std::uint32_t stream;
  std::uint32_t pool;             // 0 = default
  std::uint64_t block_bytes = 0;  // rounded size of the block it concerns
  bool is_small = false;          // in the small pool
};

class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_event(const TraceEvent& event) = 0;
  // The free parts of split segments changed (PyTorch's inactive_split statistics).
  virtual void on_split(bool /*is_small*/, std::int64_t /*n_blocks*/, std::int64_t /*bytes*/) {}
};

// Where new segments go. Return 0 to leave the choice to the model (lowest free 2 MiB-aligned
// address: segments from 0x700000000000, reservations from 0x600000000000). An address that
// overlaps existing memory or is not a multiple of 512 is rejected: the model then chooses.
class Placement {
 public:
  virtual ~Placement() = default;
  virtual std::uint64_t place(std::uint64_t size, bool is_reservation, std::uint32_t stream,
                              bool is_small) = 0;
};

struct OomFigures {
  std::uint64_t requested_bytes = 0;  // as the caller asked for them
  std::uint64_t rounded_bytes = 0;
  std::uint64_t alloc_bytes = 0;  // what the message says
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;  // free in the driver, after the flush
  std::uint64_t allocated_bytes = 0;
  std::uint64_t reserved_bytes = 0;
  std::uint64_t private_free_bytes = 0;  // cached inside private pools
  bool fraction_is_set = false;
  std::uint64_t allowed_bytes = 0;
  std::uint64_t reserve_bytes = 0;  // per expandable segment; 0 = expandable segments are off
};

struct MallocResult {
  bool ok = false;
  BlockId block = NO_BLOCK;   // NO_BLOCK for a failure and for a request of 0 bytes
  std::uint64_t address = 0;  // figures of a failure: Allocator::last_oom()
};

struct Counters {
  std::uint64_t reserved = 0, allocated = 0, active = 0, requested = 0;
  std::uint64_t peak_reserved = 0, peak_allocated = 0, peak_active = 0, peak_requested = 0;
  std::uint64_t retries = 0, ooms = 0, sync_all_streams = 0;
  std::uint64_t n_malloc = 0, n_free = 0, n_map = 0, n_unmap = 0;  // successful driver calls
  std::uint64_t driver_calls() const { return n_malloc + n_free + n_map + n_unmap; }
};

// As large as a cache line: replays visit them at random.
struct Block {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  std::uint64_t requested = 0;  // stale if the block is free
  std::uint64_t counter = 0;    // when the block was made
  std::uint64_t gc_base = 0;
  BlockId prev = NO_BLOCK, next = NO_BLOCK;  // neighbors in the segment
  std::uint32_t segment = 0;
  std::uint32_t pool = 0;  // index of the BlockPool
  std::uint32_t stream = 0;
  std::uint32_t event_count : 27;
  bool in_use : 1;  // the arena slot holds a block
  bool allocated : 1;
  bool mapped : 1;
  bool has_stream_uses : 1;
  bool expandable : 1;

  Block()
      : event_count(0),
        in_use(false),
        allocated(false),
        mapped(true),
        has_stream_uses(false),
        expandable(false) {}
};

// A cudaMalloc'ed range (page 0), or the reservation of an expandable segment.
struct Segment {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  std::uint64_t page = 0;
  std::uint64_t counter = 0;
  BlockId head = NO_BLOCK;
  std::uint32_t pool = 0;
  std::uint32_t stream = 0;
  bool in_use = false;
};

struct SeedBlock {
  std::uint64_t size = 0;
  std::uint64_t requested = 0;
  // Seed a pending block as active_allocated and call free_pending() with its id.
  BlockState state = BlockState::inactive;
};

// A segment as it was before a trace. For an expandable one: the whole reservation, whose
// unmapped ranges are blocks in state `unmapped`.
struct SeedSegment {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  std::uint32_t stream = 0;
  std::uint32_t pool = 0;
  bool is_small = false;
  bool is_expandable = false;
  std::uint64_t page_bytes = 0;  // expandable only; 0 = from the settings
  std::vector<SeedBlock> blocks;
};

struct BlockView {
  std::uint64_t address, size, requested;
  BlockState state;
  BlockId id;
};

struct SegmentView {
  std::uint64_t address, size;
  std::uint32_t stream, pool;
  bool is_small, is_expandable;
  std::vector<BlockView> blocks;
};

}  // namespace fragdoctor
