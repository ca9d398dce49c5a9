#include "trace_ops.h"

#include <algorithm>

#include "rounding.h"

namespace fragdoctor {
namespace {

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
  // Segment events and late completions since the program's last operation.
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
  void request(std::uint32_t row, std::uint32_t life);
  void failed_request(std::uint32_t row);
  void free_requested(std::uint32_t row, std::uint32_t life);
  void free_completed(std::uint32_t row, std::uint32_t life);
  void end_silently(std::uint32_t row);
  // Interpret the group before a row; true if completions have to wait for the next request.
  bool settle(std::uint32_t row, bool before_request, bool has_failed);
  bool is_flush(std::uint32_t row, bool has_failed);
  void emit_calls();
  void complete_rows(std::uint32_t from, std::uint32_t to);
  void push(OpKind kind, std::uint32_t row, std::uint32_t id, std::uint64_t size = 0) {
    out_.ops.push_back({size, id, row, 0, 0, kind});
  }
  std::int64_t reserved_before(std::uint32_t row) const { return undone_.reserved.before(row); }
  std::uint16_t pool_at(std::size_t row) const {
    const std::int32_t pool = undone_.pool.empty() ? trace_.pool[row] : undone_.pool[row];
    return pool < 0 ? std::uint16_t{0} : static_cast<std::uint16_t>(pool);
  }
  std::uint16_t stream_at(std::size_t row) const {
    return trace_.stream[row] < 0 ? std::uint16_t{0}
                                  : static_cast<std::uint16_t>(trace_.stream[row]);
  }

  const TraceView& trace_;
  const UndoneTrace& undone_;
  const Settings& settings_;
  const Inference& inference_;
  TraceOps out_;
  Group group_;
  std::vector<bool> is_live_, is_pending_;  // by life; pending ones are live too
  std::size_t next_silent_ = 0;
  std::vector<bool> pool_is_gone_;
  std::uint64_t limit_ = 0;
};

void Builder::start() {
  const Lives& lives = undone_.lives;
  out_.n_ids = lives.n_regular;
  is_live_.assign(lives.n_regular, false);
  is_pending_.assign(lives.n_regular, false);
  for (std::size_t i = 0; i < lives.n_initial; ++i) {
    is_live_[i] = true;
    is_pending_[i] = lives.free[i] == BEFORE;
  }
  const std::int64_t peak = std::max<std::int64_t>(undone_.peak_reserved.bytes, 0);
  out_.peak_reserved_bytes = static_cast<std::uint64_t>(peak);
  limit_ = inference_.limit_bytes > 0 ? inference_.limit_bytes : out_.peak_reserved_bytes;
  for (std::size_t row = 0; row < trace_.n; ++row) {
    out_.n_pools = std::max<std::uint32_t>(out_.n_pools, pool_at(row));
  }
  for (const InitialSegment& s : undone_.initial_segments)
    out_.n_pools = std::max(out_.n_pools, static_cast<std::uint32_t>(std::max(s.kind.pool, 0)));
  pool_is_gone_.assign(out_.n_pools + 1, false);
}

TraceOps Builder::run() {
  start();
  const auto n = static_cast<std::uint32_t>(trace_.n);
  out_.ops.reserve(n - n / 4);
  for (std::uint32_t row = 0; row < n; ++row) {
    const Action action = trace_.action_at(row);
    const std::uint32_t life = undone_.life[row];
    if (is_segment_action(action)) {
      segment_event(row);
    } else if (action == Action::oom) {
      failed_request(row);
    } else if (action > Action::free_completed) {
      // A snapshot or annotation is not made inside a request: the freed segments were a call's.
      if (!group_.is_empty()) settle(row, false, false);
    } else if (life >= out_.n_ids) {  // ignored, or not inside any segment
      continue;
    } else if (action == Action::alloc) {
      request(row, life);
    } else if (action == Action::free_requested) {
      free_requested(row, life);
    } else {
      free_completed(row, life);
    }
  }
  if (!group_.is_empty()) settle(n, false, false);
  return std::move(out_);
}

void Builder::segment_event(std::uint32_t row) {
  const Action action = trace_.action_at(row);
  out_.records.push_back({trace_.address[row], trace_.size[row], row, action});
  if (is_segment_loss(action)) {
    group_.went.push_back(row);
  } else if (!group_.went.empty()) {
    group_.came_bytes += trace_.size[row];
  }
}

void Builder::request(std::uint32_t row, std::uint32_t life) {
  const bool wait = !group_.is_empty() && settle(row, true, false);
  if (row + 1 < trace_.n) end_silently(row);
  is_live_[life] = true;
  out_.ops.push_back({trace_.size[row], life, row, stream_at(row), pool_at(row), OpKind::malloc});
  if (wait) complete_rows(0, row);
  group_.clear();
}

void Builder::failed_request(std::uint32_t row) {
  const bool wait = !group_.is_empty() && settle(row, true, true);
  ++out_.n_flushed;
  const std::uint64_t wanted = allocation_size(settings_, trace_.size[row]);
  const std::uint64_t need = static_cast<std::uint64_t>(undone_.reserved.after(row)) + wanted;
  out_.lowest_need_bytes = std::min(out_.lowest_need_bytes, need);
  out_.ops.push_back({trace_.size[row], 0, row, stream_at(row), pool_at(row), OpKind::failed});
  if (wait) complete_rows(0, row);
  group_.clear();
}

// A block was handed out where another was live: that one must be gone. Blocks that are only gone
// at the end stay: nothing says when they went.
void Builder::end_silently(std::uint32_t row) {
  const auto& silent = undone_.silent;
  const auto at = static_cast<std::int32_t>(row);
  for (; next_silent_ < silent.size() && silent[next_silent_].row <= at; ++next_silent_) {
    const std::uint32_t life = silent[next_silent_].life;
    if (life >= out_.n_ids || !is_live_[life] || undone_.lives.done[life] != at) continue;
    push(OpKind::free, row, life);
    is_live_[life] = false;
  }
}

void Builder::free_requested(std::uint32_t row, std::uint32_t life) {
  if (!group_.is_empty()) settle(row, false, false);
  const std::int32_t own = static_cast<std::int32_t>(row), done = undone_.lives.done[life];
  if (!is_live_[life] || undone_.lives.free[life] != own) return;
  const bool at_once = done == own || (done == own + 1 && !contains(inference_.late_rows, row + 1));
  push(at_once ? OpKind::free : OpKind::free_pending, row, life);
  is_live_[life] = !at_once;
  is_pending_[life] = !at_once;
}

void Builder::free_completed(std::uint32_t row, std::uint32_t life) {
  if (!is_live_[life]) return;  // the second half of a free done at once
  if (is_pending_[life]) {
    group_.completed.push_back(row);
    return;
  }
  if (!group_.is_empty()) settle(row, false, false);
  push(OpKind::free, row, life);
  is_live_[life] = false;
}

void Builder::complete_rows(std::uint32_t from, std::uint32_t to) {
  for (const std::uint32_t row : group_.completed) {
    if (row < from || row >= to) continue;
    const std::uint32_t life = undone_.life[row];
    if (!is_pending_[life]) continue;
    push(OpKind::complete, row, life);
    is_live_[life] = is_pending_[life] = false;
  }
}

// Frees before a request are its own flush (or collection) if memory came afterward or the request
// failed, and if it would have exceeded the limit. Blocks that completed meanwhile then did so
// inside the flush, after the search of the free blocks: they must wait until the request is done.
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
