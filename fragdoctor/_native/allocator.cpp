// The order of malloc and free: section by section, what PyTorch's allocator does.
#include "allocator.h"

#include <algorithm>
#include <cmath>

#include "rounding.h"

namespace fragdoctor {
namespace {

constexpr std::uint64_t DEFAULT_TOTAL = 1ULL << 40;

std::int64_t signed_size(std::uint64_t bytes) { return static_cast<std::int64_t>(bytes); }

}  // namespace

Allocator::Allocator(const Config& config) : config_(config), settings_(config.settings) {
  if (config_.device_total_bytes == 0) {
    config_.device_total_bytes =
        config_.capacity_bytes == UNLIMITED ? DEFAULT_TOTAL : config_.capacity_bytes;
  }
  pools_.resize(2);
  pools_[0].is_small = true;
  private_pools_.resize(1);
  if (config_.memory_fraction >= 0.0) set_fraction(config_.memory_fraction);
}

void Allocator::set_fraction(double fraction) {
  allowed_ = static_cast<std::uint64_t>(fraction * static_cast<double>(config_.device_total_bytes));
  fraction_is_set_ = fraction < 1.0 || config_.fraction_of_one_counts;
}

void Allocator::set_settings(const Settings& settings) { settings_ = settings; }

std::uint64_t Allocator::round_size(std::uint64_t size) const {
  return fragdoctor::round_size(settings_, size);
}

std::uint64_t Allocator::allocation_size(std::uint64_t rounded) const {
  return fragdoctor::allocation_size(settings_, rounded);
}

MallocResult Allocator::malloc(std::uint64_t size, std::uint32_t stream, std::uint32_t pool) {
  if (size == 0) return {true, NO_BLOCK, 0};
  if (size >= MAX_REQUEST) {
    // PyTorch refuses before the allocator proper is called: no counter moves.
    last_oom_ = {};
    last_oom_.requested_bytes = size;
    return {};
  }
  if (pool == 0 && !contexts_.empty()) pool = contexts_.back().pool;
  const bool underway = capture_underway(pool);
  if (!underway && !(deferred_.empty() && events_.empty())) process_events();
  const std::uint64_t rounded = round_size(size);
  Request request{rounded, allocation_size(rounded), stream,
                  2 * pool + (rounded <= SMALL_SIZE ? 0 : 1), NO_BLOCK};
  if (!get_free_block(request) && !find_or_fetch(request, underway)) {
    record_oom(request, size);
    return {};
  }
  const BlockId id = take_block(request, size);
  return {true, id, blocks_[id].address};
}

// No cached block fits: everything that is tried before giving up.
bool Allocator::find_or_fetch(Request& request, bool underway) {
  if (fraction_is_set_ && settings_.garbage_collection_threshold > 0.0) garbage_collect();
  if (alloc_block(request, false)) return true;
  const bool in_default_pool = request.pool < 2 && contexts_.empty();
  if (in_default_pool && !settings_.expandable_segments && use_on_oom_pools(request)) return true;
  if (release_available(request) && alloc_block(request, false)) return true;
  if (underway) return false;
  release_cached();
  return alloc_block(request, true);
}

bool Allocator::use_on_oom_pools(Request& request) {
  std::vector<std::uint32_t> candidates;
  for (std::uint32_t pool = 1; pool < private_pools_.size(); ++pool) {
    if (private_pools_[pool].use_on_oom) candidates.push_back(pool);
  }
  std::sort(candidates.begin(), candidates.end(),
            [](std::uint32_t a, std::uint32_t b) { return fibonacci_hash(a) < fibonacci_hash(b); });
  for (const std::uint32_t pool : candidates) {
    Request other = request;
    other.pool = 2 * pool + request.pool % 2;
    if (get_free_block(other)) {
      request = other;
      return true;
    }
  }
  return false;
}

// Best fit, with special rules for expandable and oversize blocks.
bool Allocator::get_free_block(Request& request) {
  BlockPool& pool = pools_[request.pool];
  if (fraction_is_set_ && settings_.garbage_collection_threshold > 0.0) {
    ++pool.get_free_blocks_call_count;
  }
  FreeSet& set = free_set(request.pool, request.stream);
  auto p = set.lower_bound(request.size);
  if (set.at_end(p)) return false;
  if (wanted_address_ != 0) p = prefer_wanted(set, p);
  if (blocks_[set[p]].expandable) {
    if (settings_.expandable_segments) {
      // Prefer the block whose segment has the least room to grow, to leave long tails alone.
      const auto room = [&](BlockId id) {
        const BlockId next = blocks_[id].next;
        if (next == NO_BLOCK || blocks_[next].mapped) return blocks_[id].size;
        const bool is_end = blocks_[next].next == NO_BLOCK;
        if (is_end && config_.device_total_is_least) return UNLIMITED;
        return blocks_[id].size + blocks_[next].size;
      };
      auto next = p;
      set.forward(next);
      while (blocks_[set[p]].expandable && !set.at_end(next) && room(set[next]) < room(set[p])) {
        p = next;
        set.forward(next);
      }
    } else {
      do {
        set.forward(p);
      } while (!set.at_end(p) && blocks_[set[p]].expandable);
      if (set.at_end(p)) return false;
    }
  }
  const BlockId id = set[p];
  const std::uint64_t limit = settings_.max_split_bytes;
  if (request.size < limit && blocks_[id].size >= limit) return false;
  if (request.size >= limit &&
      blocks_[id].size >= request.size + settings_.max_non_split_rounding_bytes) {
    return false;
  }
  request.block = id;
  request.found_in = &set;
  request.found_at = p;
  return true;
}

bool Allocator::alloc_block(Request& request, bool is_retry) {
  if (is_retry) ++counters_.retries;
  const std::uint64_t wanted = counters_.reserved + request.alloc_size;
  if (fraction_is_set_ && wanted > allowed_) {
    lowest_disallowed_ = std::min(lowest_disallowed_, wanted);
    return false;
  }
  highest_allowed_ = std::max(highest_allowed_, wanted);
  if (!settings_.expandable_segments) return cuda_malloc(request);
  request.block = try_allocate_expandable(request);
  return request.block != NO_BLOCK;
}

bool Allocator::cuda_malloc(Request& request) {
  if (!charge(request.alloc_size)) return false;
  const std::uint64_t address =
      place(request.alloc_size, false, request.stream, pools_[request.pool].is_small);
  if (address == 0) {
    uncharge(request.alloc_size);
    return false;
  }
  const std::uint32_t segment =
      new_segment(address, request.alloc_size, request.pool, request.stream, 0);
  request.block = segments_[segment].head;
  add_reserved(request.alloc_size);
  ++counters_.n_malloc;
  emit(Action::segment_alloc, blocks_[request.block], address, request.alloc_size);
  return true;
}

bool Allocator::should_split(const Block& block, std::uint64_t size) const {
  const BlockPool& pool = pools_[block.pool];
  if (private_pools_[pool.owner].no_split) return false;
  const std::uint64_t remaining = block.size - size;
  if (pool.is_small || settings_.expandable_segments) return remaining >= MIN_BLOCK;
  return size < settings_.max_split_bytes && remaining > SMALL_SIZE;
}

// Hand out the found block, or only its front part if it is worth splitting.
BlockId Allocator::take_block(const Request& request, std::uint64_t requested) {
  BlockId id = request.block;
  const Block found = blocks_[id];
  const bool was_split = is_split(found);
  if (found.size > request.size) largest_splittable_ = std::max(largest_splittable_, found.size);
  if (should_split(found, request.size)) {
    const BlockId rest = id;
    id = new_block(found.address, request.size, found.segment);
    splice(id, found.prev, rest);
    blocks_[rest].address += request.size;
    blocks_[rest].size -= request.size;
    if (request.found_in != nullptr) insert_free(rest, *request.found_in, request.found_at);
    else insert_free(rest);
    if (was_split) note_split(blocks_[id], 0, -signed_size(request.size));
    else note_split(blocks_[id], 1, signed_size(found.size - request.size));
  } else {
    if (request.found_in != nullptr) request.found_in->erase(request.found_at);
    if (was_split) note_split(blocks_[id], -1, -signed_size(blocks_[id].size));
  }
  Block& block = blocks_[id];
  block.allocated = true;
  block.requested = requested;
  account_alloc(block);
  return id;
}

void Allocator::account_alloc(const Block& block) {
  Counters& c = counters_;
  c.allocated += block.size;
  c.active += block.size;
  c.requested += block.requested;
  c.peak_allocated = std::max(c.peak_allocated, c.allocated);
  c.peak_active = std::max(c.peak_active, c.active);
  c.peak_requested = std::max(c.peak_requested, c.requested);
  emit(Action::alloc, block, block.address, block.requested);
}

void Allocator::account_free(const Block& block) {
  counters_.allocated -= block.size;
  emit(Action::free_requested, block, block.address, block.requested);
}

void Allocator::free(BlockId id) {
  blocks_[id].allocated = false;
  account_free(blocks_[id]);
  if (!blocks_[id].has_stream_uses) {
    free_block(id);
  } else if (!capture_underway(0)) {
    insert_events(id);
  } else {
    deferred_.push_back(id);
  }
}

void Allocator::free_block(BlockId id) {
  const Block& block = blocks_[id];
  counters_.active -= block.size;
  counters_.requested -= block.requested;
  emit(Action::free_completed, block, block.address, block.requested);
  const std::uint64_t own = block.size;
  std::optional<FreeKey> vacated;
  const int n_merged = (try_merge(id, block.prev, &vacated) ? 1 : 0) +
                       (try_merge(id, block.next, &vacated) ? 1 : 0);
  if (vacated) {
    FreeSet& set = free_set(block.pool, block.stream);
    insert_free(id, set, set.lower_bound(*vacated));
  } else {
    insert_free(id);
  }
  const bool stays = is_split(block);
  note_split(block, (stays ? 1 : 0) - n_merged,
             signed_size(own) - (stays ? 0 : signed_size(block.size)));
}

void Allocator::note_split(const Block& block, std::int64_t n_blocks, std::int64_t bytes) {
  if (observer_ == nullptr || block.expandable || (n_blocks == 0 && bytes == 0)) return;
  observer_->on_split(pools_[block.pool].is_small, n_blocks, bytes);
}

// `dst` takes over the span of its neighbor `src` if both are free, and both mapped or both not.
// If `vacated` is given, the first block to be removed from the free blocks stays there, `vacated`
// says where, and the caller puts `dst` in its place.
bool Allocator::try_merge(BlockId dst_id, BlockId src_id, std::optional<FreeKey>* vacated) {
  if (src_id == NO_BLOCK) return false;
  Block& dst = blocks_[dst_id];
  const Block& src = blocks_[src_id];
  if (src.allocated || src.event_count > 0 || src.has_stream_uses || src.mapped != dst.mapped) {
    return false;
  }
  if (src.mapped) {
    if (vacated != nullptr && !*vacated) *vacated = key_of(src);
    else erase_free(src_id);
  } else {
    pools_[src.pool].unmapped.erase({src.stream, src.address});
  }
  dst.size += src.size;
  if (dst.prev == src_id) {
    dst.address = src.address;
    splice(dst_id, src.prev, dst.next);
  } else {
    splice(dst_id, dst.prev, src.next);
  }
  delete_block(src_id);
  return true;
}

bool Allocator::is_same_under(const Allocator& fresh) const {
  const Settings &ours = settings_, &other = fresh.settings_;
  const bool collects = fraction_is_set_ && ours.garbage_collection_threshold > 0.0;
  const bool other_collects = fresh.fraction_is_set_ && other.garbage_collection_threshold > 0.0;
  if (config_.era != fresh.config_.era || config_.event_delay != fresh.config_.event_delay ||
      ours.expandable_segments != other.expandable_segments ||
      ours.large_segment_bytes != other.large_segment_bytes ||
      ours.max_non_split_rounding_bytes != other.max_non_split_rounding_bytes ||
      collects != other_collects ||
      (collects && (allowed_ != fresh.allowed_ ||
                    ours.garbage_collection_threshold != other.garbage_collection_threshold)))
    return false;
  if (ours.expandable_segments && reservation_bytes() != fresh.reservation_bytes()) return false;
  const bool splits_alike =
      ours.max_split_bytes == other.max_split_bytes ||
      (ours.max_split_bytes == UNLIMITED && other.max_split_bytes > largest_splittable_);
  const bool driver_agrees =
      highest_granted_ <= fresh.config_.capacity_bytes &&
      (lowest_refused_ == UNLIMITED || lowest_refused_ > fresh.config_.capacity_bytes);
  const bool fraction_agrees = (!fresh.fraction_is_set_ || highest_allowed_ <= fresh.allowed_) &&
                               (lowest_disallowed_ == UNLIMITED ||
                                (fresh.fraction_is_set_ && lowest_disallowed_ > fresh.allowed_));
  return splits_alike && driver_agrees && fraction_agrees;
}

void Allocator::go_on_under(const Allocator& fresh) {
  config_ = fresh.config_;
  settings_ = fresh.settings_;
  fraction_is_set_ = fresh.fraction_is_set_;
  allowed_ = fresh.allowed_;
}

void Allocator::empty_cache() {
  if (!capture_underway(0)) release_cached();
}

OomFigures Allocator::last_oom() const {
  OomFigures f = last_oom_;
  if (f.rounded_bytes != 0) f.private_free_bytes = private_free_bytes();
  return f;
}

void Allocator::record_oom(const Request& request, std::uint64_t requested) {
  ++counters_.ooms;
  OomFigures& f = last_oom_;
  f.requested_bytes = requested;
  f.rounded_bytes = request.size;
  f.alloc_bytes = request.alloc_size;
  f.total_bytes = config_.device_total_bytes;
  f.free_bytes = driver_free_bytes();
  f.allocated_bytes = counters_.allocated;
  f.reserved_bytes = counters_.reserved;
  f.fraction_is_set = fraction_is_set_;
  f.allowed_bytes = fraction_is_set_ ? allowed_ : 0;
  f.reserve_bytes = settings_.expandable_segments ? reservation_bytes() : 0;
  if (observer_ == nullptr) return;
  observer_->on_event(
      {Action::oom, f.free_bytes, f.rounded_bytes, request.stream, pools_[request.pool].owner});
}

}  // namespace fragdoctor
