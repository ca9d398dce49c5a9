// Replays that start from the checkpoints of others end as they do from the beginning: random
// programs and edits of them, under random conditions, in random order. Run it under ASan and
// UBSan:  checkpoints COUNT SEED.
#include "checkpoints.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <tuple>
#include <vector>

#include "random_source.h"
#include "replay.h"

using namespace fragdoctor;

namespace {

constexpr std::uint32_t N_POOLS = 2;

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("broken: %s\n", what);
  std::abort();
}

std::uint64_t some_size(RandomSource& random) {
  switch (random() % 5) {
    case 0: return 1 + random() % 4096;
    case 1: return 1 + random() % MIB;
    case 2: return MIB + random() % (9 * MIB);
    case 3: return (10 + random() % 50) * MIB + random() % 3 * 700'000;
    default: return (1 + random() % 30) * 4 * MIB;
  }
}

// A program that repeats some sizes, as real ones do; some only those of whole segments.
std::vector<Op> program(RandomSource& random) {
  const bool is_whole = random() % 3 == 0;
  const auto size = [&] { return is_whole ? (6 + random() % 40) * 2 * MIB : some_size(random); };
  std::vector<std::uint64_t> sizes;
  for (auto i = 2 + random() % 12; i > 0; --i) sizes.push_back(size());
  std::vector<Op> ops;
  std::vector<std::uint32_t> live, pending;
  std::uint32_t n_ids = 0;
  const std::uint32_t n = 50 + static_cast<std::uint32_t>(random() % 400);
  for (std::uint32_t row = 0; row < n; ++row) {
    Op op;
    op.row = row;
    const auto what = random() % 20;
    if (what == 0) {
      op.kind = OpKind::empty_cache;
    } else if (what == 1) {
      op.kind = random() % 2 == 0 ? OpKind::pool_drop : OpKind::pool_release;
      op.pool = static_cast<std::uint16_t>(1 + random() % N_POOLS);
    } else if (what == 2 && !pending.empty()) {
      op.kind = OpKind::complete;
      op.id = pending[random() % pending.size()];
    } else if (what < 11 && !live.empty()) {
      const std::size_t at = random() % live.size();
      op.id = live[at];
      op.kind = random() % 8 == 0 ? OpKind::free_pending : OpKind::free;
      if (op.kind == OpKind::free_pending) pending.push_back(op.id);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
    } else {
      op.kind = random() % 16 == 0 ? OpKind::failed : OpKind::malloc;
      op.size = !is_whole && random() % 8 == 0 ? size() : sizes[random() % sizes.size()];
      op.stream = static_cast<std::uint16_t>(random() % 8 == 0);
      op.pool = static_cast<std::uint16_t>(random() % 8 == 0 ? 1 + random() % N_POOLS : 0);
      op.id = n_ids++;
      if (op.kind == OpKind::malloc) live.push_back(op.id);
    }
    ops.push_back(op);
  }
  return ops;
}

Config some_config(RandomSource& random, Era era) {
  Config config;
  config.era = random() % 8 == 0 ? static_cast<Era>(random() % 3) : era;
  if (random() % 3 != 0) config.capacity_bytes = (60 + random() % 20 * 60) * MIB;
  if (random() % 3 == 0) config.memory_fraction = 0.3 + 0.1 * static_cast<double>(random() % 8);
  if (random() % 2 == 0) config.device_total_bytes = 1200 * MIB;
  Settings& s = config.settings;
  s.expandable_segments = random() % 4 == 0;
  if (random() % 3 == 0) s.max_split_bytes = (20 + random() % 10 * 12) * MIB;
  if (random() % 4 == 0) s.garbage_collection_threshold = 0.4 + 0.2 * (random() % 2 == 0 ? 1 : 0);
  if (random() % 8 == 0) s.large_segment_bytes = 32 * MIB;
  if (random() % 3 == 0) s.roundup_power2_divisions.fill(1U << (1 + random() % 4));
  return config;
}

InitialState some_start(RandomSource& random) {
  InitialState initial;
  for (std::uint64_t i = 0; i < random() % 3; ++i) {
    SeedSegment segment;
    segment.address = (i + 1) << 40;
    segment.size = 40 * MIB;
    segment.blocks = {{segment.size, segment.size, BlockState::inactive}};
    initial.segments.push_back(segment);
    initial.ids.push_back({NO_BLOCK});
  }
  return initial;
}

auto facts_of(const ReplayResult& r) {
  const Counters& c = r.counters;
  return std::make_tuple(
      std::array<std::uint64_t, 15>{c.reserved, c.allocated, c.active, c.requested, c.peak_reserved,
                                    c.peak_allocated, c.peak_active, c.peak_requested, c.retries,
                                    c.ooms, c.sync_all_streams, c.n_malloc, c.n_free, c.n_map,
                                    c.n_unmap},
      r.fits, r.first_oom_row, r.first_oom_bytes, r.n_requests, r.driver_calls, r.n_bad_seeds,
      r.same_below_bytes, r.is_cut_short);
}

bool is_same_layout(const std::vector<SegmentView>& a, const std::vector<SegmentView>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].address != b[i].address || a[i].size != b[i].size ||
        a[i].blocks.size() != b[i].blocks.size())
      return false;
    for (std::size_t j = 0; j < a[i].blocks.size(); ++j) {
      const BlockView &x = a[i].blocks[j], &y = b[i].blocks[j];
      if (x.size != y.size || x.state != y.state || x.requested != y.requested || x.id != y.id)
        return false;
    }
  }
  return true;
}

int n_of_recorded = 0;  // programs whose recorded replay left states

// A recording of a program: its events, and where it had its segments.
struct Recorded {
  std::vector<std::uint8_t> action;
  std::vector<std::uint64_t> address, size;
  std::vector<SegmentRecord> records;

  // Every other segment lies elsewhere than the model would have put it, in any order.
  Recorded(const std::vector<Op>& ops, const InitialState& initial, const Config& config,
           RandomSource& random)
      : action(ops.size()), address(ops.size()), size(ops.size()) {
    SimulatedRecording made;
    replay_and_record({ops, &initial, ops.size(), N_POOLS}, config, made);
    std::uint32_t row = 0;
    for (const TraceEvent& e : made.events) {
      if (e.action == Action::alloc || e.action == Action::oom) {
        while (row < ops.size() && ops[row].kind != OpKind::malloc && ops[row].kind != OpKind::failed)
          ++row;
        ++row;
      } else if (e.action == Action::segment_alloc) {
        const std::uint64_t moved = (1ULL << 46) - (random() % (1 << 20)) * (64 * MIB);
        records.push_back({random() % 2 == 0 ? e.address : moved, e.size, row - (row > 0), e.action});
      }
    }
  }

  TraceView view() const { return {action.size(), action.data(), address.data(), size.data()}; }
};

// Return whether the replay started from a checkpoint after the beginning.
bool run(RandomSource& random) {
  const std::vector<Op> ops = program(random);
  const InitialState initial = some_start(random);
  const auto era = static_cast<Era>(random() % 3);
  Checkpoints checkpoints(ops, 1);
  bool was_shared = false;
  if (random() % 2 == 0) {  // the first replay places segments as recorded
    const Config config = some_config(random, era);
    const Recorded recorded(ops, initial, config, random);
    const TraceView view = recorded.view();
    const FinalState end;
    Comparison comparison;
    replay_recorded({ops, &initial, ops.size(), N_POOLS, &checkpoints}, config,
                    {&recorded.records, &view, &end}, comparison, ops.size());
    was_shared = checkpoints.furthest(ops, config, ops.size(), false) != nullptr;
    if (was_shared) ++n_of_recorded;
  }
  for (int i = 0; i < 12; ++i) {
    std::vector<Op> edited = ops;
    const bool is_edited = random() % 3 == 0;
    if (is_edited) {
      Op& op = edited[random() % edited.size()];
      if (op.kind == OpKind::malloc && random() % 2 == 0) {
        op.size = some_size(random);
      } else {
        const Op before = op;
        op = Op{};
        op.row = before.row;
        op.kind = OpKind::empty_cache;
      }
    }
    const OpSpan played = is_edited ? OpSpan(edited) : OpSpan(ops);
    const ReplayInput anew{played, &initial, ops.size(), N_POOLS};
    const ReplayInput shared{played, &initial, ops.size(), N_POOLS, &checkpoints};
    const Config config = some_config(random, era);
    const bool stops = random() % 4 == 0;
    const bool remakes = random() % 8 == 0;
    const auto from = checkpoints.furthest(played, config, played.size(), stops);
    was_shared = was_shared || (from != nullptr && from->n_done > 0);
    require(facts_of(replay(shared, config, {stops, remakes})) ==
                facts_of(replay(anew, config, {stops, remakes})),
            "a replay from a checkpoint ends as one from the beginning");
    const std::size_t n_past = random() % (ops.size() + 1);
    const PlayedRun one = play(shared, config, remakes, n_past);
    const PlayedRun other = play(anew, config, remakes, n_past);
    require(facts_of(one.recorded) == facts_of(other.recorded), "a run ends in the same way");
    require(one.blocks == other.blocks, "a run holds the same blocks");
    require(one.tickets == other.tickets, "a run waits for the same blocks");
    require(is_same_layout(one.allocator.layout(), other.allocator.layout()), "in the same place");
    require(one.allocator.check() == nullptr, "and sound");
  }
  return was_shared;
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 500;
  const auto seed = static_cast<std::uint64_t>(argc > 2 ? std::atoi(argv[2]) : 1);
  int n_shared = 0;
  for (int i = 0; i < count; ++i) {
    RandomSource random(seed * 1000003 + static_cast<std::uint64_t>(i));
    if (run(random)) ++n_shared;
  }
  require(n_shared > count / 2, "most programs have replays that share their beginning");
  require(n_of_recorded > count / 20, "many with the replay that is placed as recorded");
  std::printf("%d programs replayed, %d of them from checkpoints, %d with a recorded one\n", count,
              n_shared, n_of_recorded);
  return 0;
}
