#include "trace_ops.h"

#include <algorithm>

#include "rounding.h"

namespace fragdoctor {
namespace {

constexpr std::uint32_t ABSENT = UndoneTrace::NO_ID;

bool is_segment_event(std::uint8_t action) {
  return action >= event::SEGMENT_ALLOC && action <= event::SEGMENT_UNMAP;
}
bool is_went(std::uint8_t action) {
  return action == event::SEGMENT_FREE || action == event::SEGMENT_UNMAP;
}

bool contains(const std::vector<std::uint32_t>& sorted, std::uint32_t row) {
  return std::binary_search(sorted.begin(), sorted.end(), row);
}

class Builder {
 public:
  Builder(const TraceView& trace, const UndoneTrace& undone, const Settings& settings,
          const Inference& inference)
      : trace_(trace), undone_(undone), settings_(settings), inference_(inference) {}

  TraceOps run();

 private:
  // Segment events and late completions since the last operation of the program.
  struct Group {
    std::vector<std::uint32_t> completed;  // rows
    std::vector<std::uint32_t> went;       // rows of segment_free and segment_unmap
    std::uint64_t came_bytes = 0;          // by segment_alloc and segment_map after the first free
    bool is_empty() const { return completed.empty() && went.empty(); }
    void clear() {
      completed.clear();
      went.clear();
      came_bytes = 0;
    }
  };

  void start();
  void segment_event(std::uint32_t row);
  void request(std::uint32_t row, bool has_failed);
  void free_requested(std::uint32_t row);
  void free_completed(std::uint32_t row);
  // What the group before a row means; true where completions are to wait for the next request.
  bool settle(std::uint32_t row, bool before_request, bool has_failed);
  bool is_flush(std::uint32_t row, bool has_failed);
  void emit_calls();
  void complete_rows(std::uint32_t from, std::uint32_t to);
  void push(OpKind kind, std::uint32_t row, std::uint32_t id, std::uint64_t size = 0) {
    out_.ops.push_back({size, id, row, 0, 0, kind});
  }
  std::int64_t reserved_before(std::uint32_t row) const {
    return undone_.reserved_steps.before(row);
  }
  std::uint16_t pool_at(std::size_t row) const {
    const std::int32_t pool = undone_.pool.empty() ? trace_.pool[row] : undone_.pool[row];
    return pool < 0 ? std::uint16_t{0} : static_cast<std::uint16_t>(pool);
  }
  std::uint16_t stream_at(std::size_t row) const {
    return trace_.stream[row] < 0 ? std::uint16_t{0} : static_cast<std::uint16_t>(trace_.stream[row]);
  }

  const TraceView& trace_;
  const UndoneTrace& undone_;
  const Settings& settings_;
  const Inference& inference_;
  TraceOps out_;
  Group group_;
  std::vector<std::uint32_t> live_;   // address id -> allocation id
  std::vector<bool> is_pending_;      // by address id
  std::vector<bool> pool_is_gone_;
  std::uint64_t limit_ = 0;
  bool has_completions_ = false;
};

void Builder::start() {
  live_.assign(undone_.n_ids, ABSENT);
  is_pending_.assign(undone_.n_ids, false);
  for (std::size_t i = 0; i < undone_.blocks.size(); ++i) {
    live_[undone_.blocks[i].id] = static_cast<std::uint32_t>(i);
    is_pending_[undone_.blocks[i].id] = undone_.blocks[i].is_pending;
  }
  out_.n_ids = undone_.blocks.size();
  const std::int64_t peak = std::max<std::int64_t>(undone_.reserved_steps.peak(), 0);
  out_.peak_reserved_bytes = static_cast<std::uint64_t>(peak);
  limit_ = inference_.limit_bytes > 0 ? inference_.limit_bytes : out_.peak_reserved_bytes;
  for (std::size_t row = 0; row < trace_.n; ++row) {
    out_.n_pools = std::max<std::uint32_t>(out_.n_pools, pool_at(row));
    has_completions_ = has_completions_ || trace_.action[row] == event::FREE_COMPLETED;
  }
  for (const InitialSegment& s : undone_.segments)
    out_.n_pools = std::max(out_.n_pools, static_cast<std::uint32_t>(std::max(s.pool, 0)));
  pool_is_gone_.assign(out_.n_pools + 1, false);
}

TraceOps Builder::run() {
  start();
  const auto n = static_cast<std::uint32_t>(trace_.n);
  out_.ops.reserve(n - n / 4);
  for (std::uint32_t row = 0; row < n; ++row) {
    const std::uint8_t action = trace_.action[row];
    if (is_segment_event(action)) {
      segment_event(row);
    } else if (action == event::OOM) {
      request(row, true);
    } else if (action > event::FREE_COMPLETED) {
      // A snapshot or an annotation is not made inside a request: what went was a call.
      if (!group_.is_empty()) settle(row, false, false);
    } else if (undone_.id[row] == ABSENT) {
      continue;
    } else if (action == event::ALLOC) {
      request(row, false);
    } else if (action == event::FREE_REQUESTED) {
      free_requested(row);
    } else {
      free_completed(row);
    }
  }
  if (!group_.is_empty()) settle(n, false, false);
  return std::move(out_);
}

void Builder::segment_event(std::uint32_t row) {
  const std::uint8_t action = trace_.action[row];
  out_.records.push_back(
      {trace_.address[row], trace_.size[row], row, static_cast<Action>(action)});
  if (is_went(action)) {
    group_.went.push_back(row);
  } else if (!group_.went.empty()) {
    group_.came_bytes += trace_.size[row];
  }
}

void Builder::request(std::uint32_t row, bool has_failed) {
  bool wait = false;
  if (!group_.is_empty()) wait = settle(row, true, has_failed);
  if (has_failed) {
    ++out_.n_flushed;
    const std::uint64_t wanted = allocation_size(settings_, trace_.size[row]);
    const std::uint64_t need = static_cast<std::uint64_t>(undone_.reserved_steps.after(row)) + wanted;
    out_.lowest_need_bytes = std::min(out_.lowest_need_bytes, need);
    out_.ops.push_back({trace_.size[row], static_cast<std::uint32_t>(out_.n_ids++), row,
                        stream_at(row), pool_at(row), OpKind::failed});
  } else {
    const std::uint32_t site = undone_.id[row];
    if (live_[site] != ABSENT)  // a contradiction: the block before it must be gone
      push(is_pending_[site] ? OpKind::complete : OpKind::free, row, live_[site]);
    live_[site] = static_cast<std::uint32_t>(out_.n_ids++);
    is_pending_[site] = false;
    out_.ops.push_back({trace_.size[row], live_[site], row, stream_at(row), pool_at(row),
                        OpKind::malloc});
  }
  if (wait) complete_rows(0, row);
  group_.clear();
}

void Builder::free_requested(std::uint32_t row) {
  const std::uint32_t site = undone_.id[row];
  if (!group_.is_empty()) settle(row, false, false);
  if (live_[site] == ABSENT || is_pending_[site]) return;
  const bool at_once = row + 1 < trace_.n && trace_.action[row + 1] == event::FREE_COMPLETED &&
                       undone_.id[row + 1] == site && !contains(inference_.late_rows, row + 1);
  // Without any completion in the trace (skip_actions) a request is all there is to see.
  if (at_once || !has_completions_) {
    push(OpKind::free, row, live_[site]);
    live_[site] = ABSENT;
  } else {
    push(OpKind::free_pending, row, live_[site]);
    is_pending_[site] = true;
  }
}

void Builder::free_completed(std::uint32_t row) {
  const std::uint32_t site = undone_.id[row];
  if (live_[site] == ABSENT) return;  // the second half of a free done at once
  if (is_pending_[site]) {
    group_.completed.push_back(row);
    return;
  }
  if (!group_.is_empty()) settle(row, false, false);
  push(OpKind::free, row, live_[site]);
  live_[site] = ABSENT;
}

void Builder::complete_rows(std::uint32_t from, std::uint32_t to) {
  for (const std::uint32_t row : group_.completed) {
    if (row < from || row >= to) continue;
    const std::uint32_t site = undone_.id[row];
    if (live_[site] == ABSENT || !is_pending_[site]) continue;
    push(OpKind::complete, row, live_[site]);
    live_[site] = ABSENT;
    is_pending_[site] = false;
  }
}

// Frees before a request are its own flush (or collection) if memory came afterwards, or it
// failed, and if it would have gone above the limit. Then blocks that completed meanwhile did so
// inside the flush, after the look at the free blocks: they must wait until the request is done.
bool Builder::is_flush(std::uint32_t row, bool has_failed) {
  if (has_failed) return true;
  if (group_.went.empty() || group_.came_bytes == 0) return false;
  const std::uint32_t first = group_.went.front();
  if (contains(inference_.empty_cache_rows, first)) return false;
  if (inference_.is_collecting) return true;
  const std::uint64_t rounded = round_size(settings_, trace_.size[row]);
  const std::uint64_t wanted = std::max(group_.came_bytes, allocation_size(settings_, rounded));
  const std::uint64_t need = static_cast<std::uint64_t>(reserved_before(first)) + wanted;
  if (need <= limit_) return false;
  ++out_.n_flushed;
  out_.lowest_need_bytes = std::min(out_.lowest_need_bytes, need);
  return true;
}

// Frees that no request explains were calls: empty_cache(), or the end of a MemPool.
void Builder::emit_calls() {
  if (group_.went.empty()) return;
  bool any_default = false;
  for (const std::uint32_t row : group_.went) any_default = any_default || pool_at(row) == 0;
  for (const std::uint32_t row : group_.went) {
    const std::uint16_t pool = pool_at(row);
    if (pool == 0 || pool_is_gone_[pool]) continue;
    pool_is_gone_[pool] = true;
    out_.ops.push_back({0, 0, group_.went.front(), 0, pool,
                        any_default ? OpKind::pool_release : OpKind::pool_drop});
  }
  if (!any_default) return;
  push(OpKind::empty_cache, group_.went.front(), 0);
  ++out_.n_inferred_empty_cache;
}

bool Builder::settle(std::uint32_t row, bool before_request, bool has_failed) {
  if (before_request && is_flush(row, has_failed)) {
    for (const std::uint32_t went : group_.went) {
      const std::uint16_t pool = pool_at(went);
      if (pool == 0 || pool_is_gone_[pool]) continue;
      pool_is_gone_[pool] = true;
      out_.ops.push_back({0, 0, group_.went.front(), 0, pool, OpKind::pool_release});
    }
    return true;
  }
  const std::uint32_t first = group_.went.empty() ? row : group_.went.front();
  complete_rows(0, first);
  emit_calls();
  complete_rows(first, row);
  group_.clear();
  return false;
}

}  // namespace

TraceOps build_ops(const TraceView& trace, const UndoneTrace& undone, const Settings& settings,
                   const Inference& inference) {
  return Builder(trace, undone, settings, inference).run();
}

}  // namespace fragdoctor
