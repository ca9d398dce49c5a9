#include "replay.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "checkpoints.h"
#include "recorder.h"

namespace fragdoctor {
namespace {

constexpr std::size_t MAX_UNEXPLAINED = 1 << 16;
constexpr Ticket NO_TICKET = UNLIMITED;
// Chunks of free blocks visited by flushes and collections, a few seconds' worth. Genuine runs stay
// far below; a crafted trace could make each of many failing requests visit all chunks.
constexpr std::uint64_t MAX_FLUSH_WORK = 4'000'000'000ULL;

class Replay {
 public:
  Replay(const ReplayInput& input, const Config& config, bool remake_initial)
      : input_(input), allocator_(config), blocks_(input.n_ids, NO_BLOCK) {
    for (std::uint32_t i = 0; i < input.n_pools; ++i) allocator_.pool_create();
    pool_is_gone_.assign(input.n_pools + 1, false);
    if (remake_initial) remake();
    else seed();
    for (const std::uint32_t id : input.initial->pending)
      if (id < blocks_.size()) free_pending(id);
  }

  // Go on from where another replay stood.
  Replay(const ReplayInput& input, const Config& config, const Checkpoint& from)
      : input_(input),
        allocator_(from.allocator),
        blocks_(input.n_ids, NO_BLOCK),
        pool_is_gone_(from.pool_is_gone),
        flush_work_(from.flush_work),
        n_live_(from.n_live),
        result_(from.result),
        n_done_(from.n_done) {
    allocator_.go_on_under(Allocator(config));
    for (const auto& [id, block] : from.blocks)
      if (id < blocks_.size()) blocks_[id] = block;
    if (!from.tickets.empty()) tickets_.assign(input.n_ids, NO_TICKET);
    for (const auto& [id, ticket] : from.tickets)
      if (id < tickets_.size()) tickets_[id] = ticket;
  }

  // Play on until this many operations are done, leaving states for other replays to start from.
  void play_to(std::size_t end, bool stop_at_oom, Checkpoints* checkpoints) {
    while (n_done_ < end) {
      const std::size_t next =
          checkpoints == nullptr ? end : std::min(end, checkpoints->next_after(n_done_));
      while (n_done_ < next) {
        apply(input_.ops[n_done_++]);
        if (flush_work_ > MAX_FLUSH_WORK || (stop_at_oom && !result_.fits)) {
          result_.is_cut_short = true;
          return;
        }
      }
      if (checkpoints != nullptr && checkpoints->takes(input_.ops)) checkpoints->add(checkpoint());
    }
  }

  ReplayResult run(bool stop_at_oom, Checkpoints* checkpoints = nullptr) {
    play_to(input_.ops.size(), stop_at_oom, checkpoints);
    return finish();
  }

  PlayedRun run_to(std::size_t n_past, Checkpoints* checkpoints) {
    play_to(std::min(n_past, input_.ops.size()), false, checkpoints);
    Replay recorded_end(*this);
    if (!result_.is_cut_short) recorded_end.play_to(input_.ops.size(), false, checkpoints);
    return {recorded_end.finish(), std::move(allocator_), std::move(blocks_), std::move(tickets_)};
  }

  ReplayResult run_and_record(SimulatedRecording& recording) {
    TraceWriter writer(recording.events);
    allocator_.set_observer(&writer);
    const ReplayResult result = run(false);
    allocator_.set_observer(nullptr);
    recording.segments = allocator_.layout();
    return result;
  }

  ReplayResult run_recorded(const Recording& recording, Comparison& comparison,
                            std::size_t max_ops);
  std::vector<std::uint64_t> learn(const Recording& recording);

 private:
  void seed();
  void remake();
  Checkpoint checkpoint() const;
  Checkpoints* checkpoints_of_any_place() const;
  bool apply(const Op& op);
  bool request(const Op& op);
  // Changes whenever a request may have visited all free blocks.
  std::uint64_t scans_so_far() const {
    const Counters& c = allocator_.counters();
    const bool collects =
        allocator_.fraction_is_set() && allocator_.settings().garbage_collection_threshold > 0.0;
    return c.retries + (collects ? c.n_malloc + c.n_map : 0);
  }
  void free_pending(std::uint32_t id);
  ReplayResult finish() {
    result_.counters = allocator_.counters();
    result_.driver_calls = result_.counters.driver_calls() - driver_calls_before_;
    result_.same_below_bytes = allocator_.lowest_refused_bytes();
    return result_;
  }
  std::size_t group_end(std::size_t op, std::size_t first,
                        const std::vector<SegmentRecord>& records) const;
  void compare_op(const Op& op, bool ok, const Recorder& recorder, const Recording& recording,
                  Comparison& c) const;
  static void note_unexplained(const Recorder& recorder, const std::vector<SegmentRecord>& records,
                               Comparison& c);
  static void note_early_completion(const Op& op, const Recorder& recorder,
                                    const Recording& recording, Comparison& c);
  void compare_layout(const FinalState& end, Comparison& c) const;

  const ReplayInput& input_;
  Allocator allocator_;
  std::vector<BlockId> blocks_;  // by allocation id
  std::vector<Ticket> tickets_;  // by allocation id; only where frees are pending
  std::vector<bool> pool_is_gone_;
  std::uint64_t driver_calls_before_ = 0;
  std::uint64_t flush_work_ = 0;
  std::uint64_t n_live_ = 0;  // blocks handed out; bounds the number of free ones
  ReplayResult result_;
  std::size_t n_done_ = 0;  // operations
};

void Replay::seed() {
  const InitialState& initial = *input_.initial;
  std::vector<BlockId> made;
  for (std::size_t s = 0; s < initial.segments.size(); ++s) {
    made.clear();
    if (!allocator_.seed_segment(initial.segments[s], &made)) {
      ++result_.n_bad_seeds;
      continue;
    }
    for (std::size_t b = 0; b < made.size(); ++b) {
      const std::uint32_t id = initial.ids[s][b];
      if (id == NO_BLOCK || id >= blocks_.size()) continue;
      blocks_[id] = made[b];
      ++n_live_;
    }
  }
  allocator_.set_seed_order(initial.order);
}

void Replay::remake() {
  const InitialState& initial = *input_.initial;
  for (std::size_t s = 0; s < initial.segments.size(); ++s) {
    const SeedSegment& segment = initial.segments[s];
    for (std::size_t b = 0; b < segment.blocks.size(); ++b) {
      const std::uint32_t id = initial.ids[s][b];
      if (id == NO_BLOCK || id >= blocks_.size()) continue;
      Op op;
      op.size = segment.blocks[b].requested;
      // Both are dense numbers that came out of operations.
      op.stream = static_cast<std::uint16_t>(segment.stream);
      op.pool = static_cast<std::uint16_t>(segment.pool);
      op.id = id;
      request(op);
    }
  }
  // Count only the requests and driver calls of the trace.
  result_.n_requests = 0;
  driver_calls_before_ = allocator_.counters().driver_calls();
}

Checkpoint Replay::checkpoint() const {
  Checkpoint made{n_done_, allocator_, {}, {}, pool_is_gone_, flush_work_, n_live_, result_};
  constexpr std::size_t N = 32;  // most allocations are over, or still to come
  for (std::size_t first = 0; first < blocks_.size(); first += N) {
    const std::size_t end = std::min(first + N, blocks_.size());
    BlockId all = NO_BLOCK;
    for (std::size_t id = first; id < end; ++id) all &= blocks_[id];
    for (std::size_t id = first; all != NO_BLOCK && id < end; ++id)
      if (blocks_[id] != NO_BLOCK)
        made.blocks.emplace_back(static_cast<std::uint32_t>(id), blocks_[id]);
  }
  for (std::size_t id = 0; id < tickets_.size(); ++id)
    if (tickets_[id] != NO_TICKET)
      made.tickets.emplace_back(static_cast<std::uint32_t>(id), tickets_[id]);
  return made;
}

// The checkpoints of these operations, empty, if the run is the same wherever segments lie: a replay
// that places them itself may then start from states of one that places them as recorded.
Checkpoints* Replay::checkpoints_of_any_place() const {
  constexpr std::uint64_t AMPLE = 1ULL << 50;  // above it, a place for a segment may be hard to find
  const Config& config = allocator_.config();
  if (input_.checkpoints == nullptr || config.era == Era::address ||
      config.settings.expandable_segments || config.capacity_bytes > AMPLE)
    return nullptr;
  input_.checkpoints->clear();  // of another attempt to reproduce the recording
  return input_.checkpoints;
}

void Replay::free_pending(std::uint32_t id) {
  if (blocks_[id] == NO_BLOCK) return;
  if (tickets_.empty()) tickets_.assign(input_.n_ids, NO_TICKET);
  tickets_[id] = allocator_.free_pending(blocks_[id]);
  blocks_[id] = NO_BLOCK;
}

bool Replay::request(const Op& op) {
  ++result_.n_requests;
  if (op.pool != 0 && pool_is_gone_[op.pool]) {  // it is there after all
    allocator_.pool_retain(op.pool);
    pool_is_gone_[op.pool] = false;
  }
  const std::uint64_t calls_before = scans_so_far();
  const MallocResult made = allocator_.malloc(op.size, op.stream, op.pool);
  if (scans_so_far() != calls_before)
    flush_work_ += 1 + (n_live_ + input_.initial->segments.size()) / FreeSet::MIN_CHUNK;
  if (made.ok) {
    if (made.block != NO_BLOCK) ++n_live_;
    // What a recorded run did with a request that failed there is unknown: free it at once.
    if (op.kind == OpKind::failed) {
      if (made.block != NO_BLOCK) {
        allocator_.free(made.block);
        --n_live_;
      }
    } else {
      blocks_[op.id] = made.block;
    }
  } else if (result_.fits) {
    result_.fits = false;
    result_.first_oom_row = op.row;
    result_.first_oom_bytes = op.size;
  }
  return made.ok;
}

// Return whether a request was served; true for everything else.
bool Replay::apply(const Op& op) {
  switch (op.kind) {
    case OpKind::malloc:
    case OpKind::failed: return request(op);
    case OpKind::free:
      if (blocks_[op.id] != NO_BLOCK) {
        allocator_.free(blocks_[op.id]);
        --n_live_;
      }
      blocks_[op.id] = NO_BLOCK;
      return true;
    case OpKind::free_pending: free_pending(op.id); return true;
    case OpKind::complete:
      // A flush may have completed it already; then the ticket is void.
      if (!tickets_.empty() && tickets_[op.id] != NO_TICKET) allocator_.complete(tickets_[op.id]);
      return true;
    case OpKind::empty_cache: allocator_.empty_cache(); return true;
    case OpKind::pool_drop:
    case OpKind::pool_release:
      if (!pool_is_gone_[op.pool]) allocator_.pool_release(op.pool, op.kind == OpKind::pool_drop);
      pool_is_gone_[op.pool] = true;
      return true;
  }
  return true;
}

// The recorded segment events from `first` on that belong to an operation: those before its own
// row; for a call, which has no row of its own, the frees that begin there.
std::size_t Replay::group_end(std::size_t op, std::size_t first,
                              const std::vector<SegmentRecord>& records) const {
  const OpSpan& ops = input_.ops;
  std::size_t last = first;
  const OpKind kind = ops[op].kind;
  if (kind != OpKind::empty_cache && kind != OpKind::pool_drop) {
    if (kind != OpKind::malloc && kind != OpKind::failed) return last;
    while (last < records.size() && records[last].row < ops[op].row) ++last;
    return last;
  }
  std::uint32_t limit = NONE;
  for (std::size_t next = op + 1; next < ops.size(); ++next) {
    if (ops[next].kind == OpKind::complete) continue;
    if (ops[next].row > ops[op].row) limit = ops[next].row;
    break;
  }
  while (last < records.size() && records[last].row < limit &&
         is_segment_loss(records[last].action))
    ++last;
  return last;
}

void Replay::note_unexplained(const Recorder& recorder, const std::vector<SegmentRecord>& records,
                              Comparison& c) {
  for (const auto& e : recorder.emitted())
    if (is_segment_loss(e.action)) return;
  for (std::size_t i = recorder.first(); i < recorder.last(); ++i) {
    if (!is_segment_loss(records[i].action)) continue;
    if (c.unexplained_frees.size() < MAX_UNEXPLAINED) c.unexplained_frees.push_back(records[i].row);
    return;
  }
}

void Replay::note_early_completion(const Op& op, const Recorder& recorder,
                                   const Recording& recording, Comparison& c) {
  const TraceView& t = *recording.trace;
  const std::uint32_t end =
      recorder.first() < recorder.last() ? (*recording.records)[recorder.first()].row : op.row;
  if (end < 2 || end > t.n || c.early_completions.size() >= MAX_UNEXPLAINED) return;
  const std::uint32_t row = end - 1;
  if (t.action_at(row) == Action::free_completed &&
      t.action_at(row - 1) == Action::free_requested && t.address[row] == t.address[row - 1])
    c.early_completions.push_back(row);
}

void Replay::compare_op(const Op& op, bool ok, const Recorder& recorder, const Recording& recording,
                        Comparison& c) const {
  const std::size_t n_recorded = recorder.last() - recorder.first();
  const std::size_t n_emitted = recorder.emitted().size();
  if (n_recorded + n_emitted > 0) {
    const std::size_t n_equal = recorder.count_equal();
    c.n_emitted += n_emitted;
    c.n_equal += n_equal;
    if ((n_equal < n_recorded || n_equal < n_emitted) &&
        c.first_difference_row == ReplayResult::NO_ROW)
      c.first_difference_row = op.row;
    if (n_equal < n_recorded && op.kind == OpKind::malloc)
      note_unexplained(recorder, *recording.records, c);
  }
  if (ok && n_emitted == 0 && (n_recorded > 0 || op.kind == OpKind::failed))
    note_early_completion(op, recorder, recording, c);
  if (op.kind == OpKind::failed) {
    ++c.n_failed_recorded;
    if (!ok) ++c.n_failed_agreed;
  } else if (op.kind == OpKind::malloc) {
    ++c.n_requests;
    if (!ok) ++c.n_failed_invented;
    else if (blocks_[op.id] != NO_BLOCK &&
             allocator_.address_of(blocks_[op.id]) == recording.trace->address[op.row])
      ++c.n_same_address;
    else if (c.first_difference_row == ReplayResult::NO_ROW) c.first_difference_row = op.row;
  }
}

void Replay::compare_layout(const FinalState& end, Comparison& c) const {
  using Cell = std::tuple<std::uint64_t, std::uint64_t, int>;
  std::vector<Cell> recorded, modelled;
  for (std::size_t i = 0; i < end.n_blocks; ++i)
    recorded.emplace_back(end.block_address[i], end.block_size[i], end.block_state[i]);
  for (const SegmentView& s : allocator_.layout()) {
    for (const BlockView& b : s.blocks) {
      modelled.emplace_back(b.address, b.size, static_cast<int>(b.state));
    }
  }
  std::sort(recorded.begin(), recorded.end());
  std::sort(modelled.begin(), modelled.end());
  c.n_layout = std::max(recorded.size(), modelled.size());
  std::size_t i = 0, j = 0;
  while (i < recorded.size() && j < modelled.size()) {
    if (recorded[i] == modelled[j]) {
      ++c.n_layout_equal;
      ++i;
      ++j;
    } else if (recorded[i] < modelled[j]) {
      ++i;
    } else {
      ++j;
    }
  }
}

ReplayResult Replay::run_recorded(const Recording& recording, Comparison& c, std::size_t max_ops) {
  const std::vector<SegmentRecord>& records = *recording.records;
  const OpSpan& ops = input_.ops;
  Recorder recorder(records, allocator_.address_space());
  allocator_.set_observer(&recorder);
  allocator_.set_placement(&recorder);
  c.n_recorded = records.size();
  std::size_t at = 0;
  const std::size_t n = std::min(ops.size(), max_ops);
  Checkpoints* const checkpoints = n == ops.size() ? checkpoints_of_any_place() : nullptr;
  std::size_t next = checkpoints == nullptr ? n : checkpoints->next_after(0);
  for (std::size_t i = 0; i < n && flush_work_ <= MAX_FLUSH_WORK; ++i) {
    const std::size_t last = group_end(i, at, records);
    recorder.expect(at, last);
    at = last;
    const bool ok = apply(ops[i]);
    compare_op(ops[i], ok, recorder, recording, c);
    n_done_ = i + 1;
    if (n_done_ != next || checkpoints == nullptr) continue;
    next = checkpoints->next_after(next);
    if (recorder.is_lost() || flush_work_ > MAX_FLUSH_WORK || !checkpoints->takes(ops)) continue;
    Checkpoint made = checkpoint();
    made.allocator.set_observer(nullptr);
    made.allocator.set_placement(nullptr);
    made.allocator.move_segments(recorder.own_places(), recorder.own_space());
    checkpoints->add(std::move(made));
  }
  allocator_.set_observer(nullptr);
  allocator_.set_placement(nullptr);
  if (n == ops.size()) compare_layout(*recording.end, c);
  else result_.is_cut_short = true;
  return finish();
}

std::vector<std::uint64_t> Replay::learn(const Recording& recording) {
  const std::vector<SegmentRecord>& records = *recording.records;
  const OpSpan& ops = input_.ops;
  Recorder recorder(records, allocator_.address_space());
  allocator_.set_observer(&recorder);
  allocator_.set_placement(&recorder);
  std::size_t at = 0;
  for (std::size_t i = 0; i < ops.size() && flush_work_ <= MAX_FLUSH_WORK; ++i) {
    const std::size_t last = group_end(i, at, records);
    recorder.expect(at, last);
    at = last;
    const bool is_served = ops[i].kind == OpKind::malloc && ops[i].row < recording.trace->n;
    allocator_.set_wanted_address(is_served ? recording.trace->address[ops[i].row] : 0);
    apply(ops[i]);
  }
  return allocator_.learned_seed_order();
}

// A replay from the furthest state that it would go through in its first `most` operations.
Replay furthest(const ReplayInput& input, const Config& config, Checkpoints* checkpoints,
                std::size_t most, bool fits) {
  std::shared_ptr<const Checkpoint> from;
  if (checkpoints != nullptr) from = checkpoints->furthest(input.ops, config, most, fits);
  return from == nullptr ? Replay(input, config, false) : Replay(input, config, *from);
}

}  // namespace

std::vector<std::uint64_t> learn_seed_order(const ReplayInput& input, const Config& config,
                                            const Recording& recording) {
  return Replay(input, config, false).learn(recording);
}

ReplayResult replay(const ReplayInput& input, const Config& config, const ReplayOptions& options) {
  if (options.remake_initial) return Replay(input, config, true).run(options.stop_at_oom);
  Checkpoints* const checkpoints = input.checkpoints;
  return furthest(input, config, checkpoints, input.ops.size(), options.stop_at_oom)
      .run(options.stop_at_oom, checkpoints);
}

PlayedRun play(const ReplayInput& input, const Config& config, bool remake_initial,
               std::size_t n_past) {
  if (remake_initial) return Replay(input, config, true).run_to(n_past, nullptr);
  return furthest(input, config, input.checkpoints, n_past, false)
      .run_to(n_past, input.checkpoints);
}

LookOn look_on(const PlayedRun& run, const Future& future, const LookOnLimits& limits) {
  if (!run.recorded.fits || run.recorded.is_cut_short) return {};
  Allocator allocator(run.allocator);
  return look_on(allocator, run.blocks, run.tickets, future, limits);
}

ReplayResult replay_and_record(const ReplayInput& input, const Config& config,
                               SimulatedRecording& recording) {
  return Replay(input, config, false).run_and_record(recording);
}

ReplayResult replay_recorded(const ReplayInput& input, const Config& config,
                             const Recording& recording, Comparison& comparison,
                             std::size_t max_ops) {
  return Replay(input, config, false).run_recorded(recording, comparison, max_ops);
}

}  // namespace fragdoctor
