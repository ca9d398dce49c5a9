// PyTorch's CUDA caching allocator, reproduced exactly, without a GPU.
//
// One class for everything: rehearsals from Python, golden cases, replay of recorded traces. It
// mirrors PyTorch's CUDACachingAllocator decision by decision (which free block, where a split
// falls, what a flush returns); functions have the names they have there. It knows nothing of
// Python, never throws on allocator conditions, and runs in one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "address_space.h"
#include "allocator_types.h"
#include "block_pool.h"

namespace fragdoctor {

class Allocator {
 public:
  explicit Allocator(const Config& config);

  // ---- what programs do ---------------------------------------------------------------------
  // Serve a request. Streams are dense numbers in the order of the stream handles (0 is the
  // default stream). `pool` is 0 or a private pool from pool_create(); the latter makes a capture
  // or MemPool context count as active for this call. A size of 0 succeeds with NO_BLOCK.
  MallocResult malloc(std::uint64_t size, std::uint32_t stream = 0, std::uint32_t pool = 0);
  // Free a block. If other streams used it (record_stream), it stays pending until they are done.
  void free(BlockId block);
  // Note that the block is also used on another stream (ignored if that is its own stream).
  void record_stream(BlockId block, std::uint32_t stream);
  void empty_cache();
  void synchronize();  // the device is idle: record_stream events are done when next checked
  // set_per_process_memory_fraction: allowed = floor(fraction * device_total_bytes).
  void set_fraction(double fraction);
  // Change settings at run time, as torch.cuda.memory._set_allocator_settings does.
  void set_settings(const Settings& settings);

  // ---- frees whose completion the caller knows (replay of a trace) ---------------------------
  // free_requested now; the block becomes reusable at complete(), or at an earlier flush.
  Ticket free_pending(BlockId block);
  // free_completed. Return false (and do nothing) if a flush has already completed it.
  bool complete(Ticket ticket);

  // ---- private pools --------------------------------------------------------------------------
  // Create a private pool with use count 1 (a live graph or MemPool object).
  std::uint32_t pool_create(bool use_on_oom = false, bool no_split = false);
  bool pool_exists(std::uint32_t pool) const { return pool < private_pools_.size(); }
  void pool_retain(std::uint32_t pool);
  // Drop one use; at 0 the pool is freeable: every flush returns its cached memory, and so does
  // this call if `flush` is set (as when a MemPool object is dropped).
  void pool_release(std::uint32_t pool, bool flush = false);
  MallocResult malloc_at(std::uint64_t address, std::uint64_t size);
  // While a context is active (torch.cuda.use_mem_pool or a graph capture; they nest), malloc()
  // with pool 0 goes to the innermost pool. A capture has no event processing and no flush; up to
  // 2.12, use_mem_pool has neither, and malloc() into a private pool counts as inside one.
  void context_begin(std::uint32_t pool, bool is_capture = false);
  void context_end();

  // ---- initial state, before the first operation ----------------------------------------------
  // Place a segment with its blocks (they must tile it). Return false, changing nothing, if the
  // seed is not consistent (overlap, blocks that do not tile, pages not on page boundaries).
  // `ids`, if given, receives the block ID of every block of the seed, in order.
  bool seed_segment(const SeedSegment& segment, std::vector<BlockId>* ids = nullptr);

  // ---- the order in which seeded blocks were made -------------------------------------------
  // A recording does not state it, yet it decides between free blocks of equal size (era
  // block_counter). Set it after the last seed, by order of seeding (empty means that order).
  void set_seed_order(const std::vector<std::uint64_t>& order);
  // Where the next request was served in the recorded run (0 = unknown): among equal seeded blocks,
  // the one at this address is taken, and counts as older than the others from then on.
  void set_wanted_address(std::uint64_t address) { wanted_address_ = address; }
  std::vector<std::uint64_t> learned_seed_order() const;

  // ---- hooks (null = off) ---------------------------------------------------------------------
  void set_observer(Observer* observer) { observer_ = observer; }
  void set_placement(Placement* placement) { placement_ = placement; }

  // ---- state ------------------------------------------------------------------------------------
  const Counters& counters() const { return counters_; }
  const Settings& settings() const { return settings_; }
  const Config& config() const { return config_; }
  // Must be called before the next call: this is where the memory kept by private pools is counted,
  // block by block, and not at each failure, since a replay on too small a device fails very often.
  OomFigures last_oom() const;
  bool fraction_is_set() const { return fraction_is_set_; }
  std::uint64_t allowed_bytes() const { return allowed_; }
  std::uint64_t driver_free_bytes() const;
  // The smallest capacity at which the driver would have granted something it has refused so far;
  // below it, a larger capacity changes nothing. UNLIMITED if nothing was refused.
  std::uint64_t lowest_refused_bytes() const { return lowest_refused_; }
  // Whether everything so far would have happened under the conditions of `fresh` too. May say no
  // where it would have, never yes where it would not. Sizes are taken as rounded: the caller
  // compares roundup_power2_divisions.
  bool is_same_under(const Allocator& fresh) const;
  // Go on under the conditions of `fresh`, which nothing was asked of yet.
  void go_on_under(const Allocator& fresh);
  const AddressSpace& address_space() const { return space_; }
  // Move segments to other addresses, in an address space where these are taken. Era::address would
  // order blocks otherwise there, and expandable segments cannot be moved.
  void move_segments(const std::unordered_map<std::uint64_t, std::uint64_t>& to,
                     const AddressSpace& space);
  std::size_t state_bytes() const;  // roughly what a copy takes
  std::uint64_t address_of(BlockId block) const { return blocks_[block].address; }
  std::uint64_t size_of(BlockId block) const { return blocks_[block].size; }
  const Block& block(BlockId id) const { return blocks_[id]; }
  // Whether the ID names a block that is handed out and not yet freed.
  bool is_allocated(BlockId block) const {
    return block < blocks_.size() && blocks_[block].in_use && blocks_[block].allocated;
  }
  // Segments in address order as a snapshot lists them: one per cudaMalloc, and one per maximal
  // contiguous mapped range of an expandable segment.
  std::vector<SegmentView> layout() const;
  // Check every invariant (tiling, links, sets, sums). Return null, or what is wrong. For tests.
  const char* check() const;

  // Pure functions of the settings.
  std::uint64_t round_size(std::uint64_t size) const;
  std::uint64_t allocation_size(std::uint64_t rounded) const;

 private:
  struct Request {
    std::uint64_t size;        // rounded
    std::uint64_t alloc_size;  // what cudaMalloc would be asked for
    std::uint32_t stream;
    std::uint32_t pool;  // index into pools_
    BlockId block;
    // Position of the found block among the free ones; null = it is new and not among them.
    FreeSet* found_in = nullptr;
    FreeSet::Position found_at = {};
  };
  struct Event {
    BlockId block;
    std::uint32_t queries_left;
    std::uint64_t epoch;  // last synchronization when the event was recorded
  };

  // allocator.cpp: the order of malloc, splitting, merging, free
  bool get_free_block(Request& request);
  bool find_or_fetch(Request& request, bool underway);
  bool use_on_oom_pools(Request& request);
  bool alloc_block(Request& request, bool is_retry);
  bool cuda_malloc(Request& request);
  bool should_split(const Block& block, std::uint64_t size) const;
  BlockId take_block(const Request& request, std::uint64_t requested);
  void account_alloc(const Block& block);
  void account_free(const Block& block);
  void free_block(BlockId id);
  bool try_merge(BlockId dst, BlockId src, std::optional<FreeKey>* vacated = nullptr);
  void note_split(const Block& block, std::int64_t n_blocks, std::int64_t bytes);
  void record_oom(const Request& request, std::uint64_t requested);

  // private_pools.cpp
  bool in_capture() const;
  // Whether a request to this pool (0 = default) counts as made inside a capture.
  bool capture_underway(std::uint32_t pool) const {
    return contexts_.empty() ? pool != 0 && config_.era != Era::segment_counter : in_capture();
  }
  std::uint64_t private_free_bytes() const;

  // layout.cpp
  bool seed_is_sound(const SeedSegment& seed) const;
  void place_seed_block(BlockId id, BlockState state);
  void view_blocks(const Segment& segment, std::vector<SegmentView>& views) const;
  const char* check_segment(const Segment& segment, Counters& sums) const;

  // block_store.cpp: blocks, segments, free sets
  BlockId new_block(std::uint64_t address, std::uint64_t size, std::uint32_t segment);
  void delete_block(BlockId id);
  void splice(BlockId block, BlockId before, BlockId after);
  std::uint32_t new_segment(std::uint64_t address, std::uint64_t size, std::uint32_t pool,
                            std::uint32_t stream, std::uint64_t page);
  void delete_segment(std::uint32_t index);
  FreeSet& free_set(std::uint32_t pool, std::uint32_t stream) {
    std::vector<FreeSet>& sets = pools_[pool].free;
    if (stream >= sets.size()) sets.resize(stream + 1);
    return sets[stream];
  }
  FreeKey key_of(const Block& block) const;
  void insert_free(BlockId id);
  // The same, but replacing the element at a position of the set.
  void insert_free(BlockId id, FreeSet& set, const FreeSet::Position& instead_of);
  FreeSet::Entry free_entry(BlockId id);
  void erase_free(BlockId id);
  bool is_releasable(const Block& block) const;
  bool is_split(const Block& block) const {
    return block.prev != NO_BLOCK || block.next != NO_BLOCK;
  }
  std::uint64_t place(std::uint64_t size, bool is_reservation, std::uint32_t stream, bool is_small);
  void add_reserved(std::uint64_t bytes);
  bool charge(std::uint64_t bytes);  // take physical memory from the driver, in whole pages
  void uncharge(std::uint64_t bytes);
  void emit(Action action, const Block& block, std::uint64_t address, std::uint64_t size);

  // seed_order.cpp
  FreeSet::Position prefer_wanted(FreeSet& set, FreeSet::Position first);

  // release.cpp: garbage collection and the two release paths
  void garbage_collect();
  bool release_available(const Request& request);
  void release_cached();
  void release_blocks(std::uint32_t pool);
  void release_block(BlockId id);

  // events.cpp: cross-stream uses
  void insert_events(BlockId id);
  void insert_deferred_events();
  void process_events();
  void synchronize_and_free_events();
  void synchronize_and_free_events_of(std::uint32_t pool);
  void finish_event(BlockId id);

  // expandable.cpp
  std::uint64_t reservation_bytes() const;
  BlockId find_expandable_block(std::uint32_t pool, std::uint32_t stream, std::uint64_t size);
  bool map_block(BlockId id, std::uint64_t size);
  BlockId try_allocate_expandable(const Request& request);
  std::pair<std::uint64_t, std::uint64_t> pages_within(const Block& block) const;
  void unmap_block(BlockId id);
  void release_expandable_segment(BlockId id);

  Config config_;
  Settings settings_;
  bool fraction_is_set_ = false;
  std::uint64_t allowed_ = 0;
  Counters counters_;
  OomFigures last_oom_;  // all but private_free_bytes
  std::uint64_t driver_used_ = 0;
  std::uint64_t lowest_refused_ = UNLIMITED;
  // What decides whether other conditions would have made a difference: the most that the driver
  // granted, what the memory fraction let pass and what not, and the largest block that a
  // max_split_size would have kept from being split, or would have returned to the driver.
  std::uint64_t highest_granted_ = 0;
  std::uint64_t highest_allowed_ = 0;
  std::uint64_t lowest_disallowed_ = UNLIMITED;
  std::uint64_t largest_splittable_ = 0;
  std::uint64_t next_block_counter_ = 0;
  std::uint64_t next_segment_counter_ = 0;
  std::vector<Block> blocks_;
  std::vector<BlockId> unused_blocks_;
  std::vector<Segment> segments_;
  std::vector<std::uint32_t> unused_segments_;
  std::vector<BlockPool> pools_;  // 2 * pool: small, 2 * pool + 1: large
  std::vector<PrivatePool> private_pools_;
  struct Context {
    std::uint32_t pool;
    bool is_capture;
  };
  std::vector<Context> contexts_;                      // innermost last
  std::map<std::uint64_t, std::deque<Event>> events_;  // per using stream, oldest first
  std::uint64_t sync_epoch_ = 0;
  std::map<BlockId, std::vector<std::uint32_t>> stream_uses_;
  std::vector<BlockId> deferred_;
  std::vector<BlockId> tickets_;  // by ticket; NO_BLOCK once completed
  std::size_t first_open_ticket_ = 0;
  AddressSpace space_;
  std::uint64_t wanted_address_ = 0;
  std::uint64_t seeded_below_ = 0;  // counters of seeded blocks are below this
  std::unordered_map<std::uint64_t, std::uint32_t> seed_origin_;  // counter -> order of seeding
  Observer* observer_ = nullptr;
  Placement* placement_ = nullptr;
};

}  // namespace fragdoctor
