// Feeds nonsense to the undoing of traces, the building of operations and the replay. Run it
// under ASan and UBSan:  replay_fuzz COUNT SEED
// It fails if the allocator's invariants break, or the sanitizers find something.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "replay.h"
#include "trace_ops.h"
#include "trace_undo.h"

using namespace fragdoctor;

namespace {

struct Case {
  std::vector<std::uint8_t> action;
  std::vector<std::uint64_t> address, size;
  std::vector<std::int32_t> stream, pool;
  std::vector<std::uint64_t> segment_address, segment_size;
  std::vector<std::int32_t> segment_stream, segment_pool;
  std::vector<std::uint8_t> segment_kind, segment_expandable;
  std::vector<std::uint64_t> block_address, block_size, block_requested;
  std::vector<std::uint8_t> block_state;
};

std::uint64_t odd_number(std::mt19937_64& random) {
  switch (random() % 6) {
    case 0:
      return random();
    case 1:
      return random() % 4096;
    case 2:
      return (random() % 64) * 512;
    case 3:
      return (random() % 64) * 2 * MIB;
    case 4:
      return (random() % 16) * 20 * MIB;
    default:
      return UNLIMITED - random() % 4096;
  }
}

Case make(std::mt19937_64& random) {
  Case c;
  const std::size_t n = random() % 400;
  for (std::size_t i = 0; i < n; ++i) {
    c.action.push_back(static_cast<std::uint8_t>(random() % 12));
    c.address.push_back(odd_number(random));
    c.size.push_back(odd_number(random));
    c.stream.push_back(static_cast<std::int32_t>(random() % 4) - 1);
    c.pool.push_back(static_cast<std::int32_t>(random() % 4) - 1);
    // Often something that fits what came before it.
    if (i > 0 && random() % 2 == 0) c.address[i] = c.address[i - 1];
    if (i > 0 && random() % 2 == 0) c.size[i] = c.size[i - 1];
  }
  const std::size_t n_segments = random() % 8;
  for (std::size_t i = 0; i < n_segments; ++i) {
    c.segment_address.push_back(odd_number(random));
    c.segment_size.push_back(odd_number(random));
    c.segment_stream.push_back(static_cast<std::int32_t>(random() % 4) - 1);
    c.segment_pool.push_back(static_cast<std::int32_t>(random() % 4) - 1);
    c.segment_kind.push_back(static_cast<std::uint8_t>(random() % 4));
    c.segment_expandable.push_back(static_cast<std::uint8_t>(random() % 2));
    std::uint64_t at = c.segment_address.back();
    for (std::size_t b = random() % 5; b > 0; --b) {
      c.block_address.push_back(random() % 8 == 0 ? odd_number(random) : at);
      c.block_size.push_back(odd_number(random));
      c.block_requested.push_back(odd_number(random));
      c.block_state.push_back(static_cast<std::uint8_t>(random() % 4));
      at += c.block_size.back();
    }
  }
  return c;
}

Settings some_settings(std::mt19937_64& random) {
  Settings s;
  if (random() % 2 == 0) s.max_split_bytes = (20 + random() % 200) * MIB;
  if (random() % 2 == 0) s.expandable_segments = true;
  if (random() % 3 == 0) s.large_segment_bytes = (11 + random() % 60) * MIB;
  if (random() % 3 == 0) s.garbage_collection_threshold = 0.5;
  for (auto& d : s.roundup_power2_divisions) d = 1U << (random() % 5);
  return s;
}

// What is kept of a trace says the same as the columns that are made on demand.
void check_totals(const TraceView& trace, const FinalState& end, const Settings& settings,
                  const UndoneTrace& undone) {
  const UndoneTrace full = undo_trace(trace, end, settings, {true, true, true, true});
  bool same = full.block_bytes.size() == trace.n && full.allocated.size() == trace.n &&
              undone.reserved.empty() && undone.block_bytes.empty();
  std::int64_t peak_reserved = undone.initial_reserved, peak_active = undone.initial_active;
  for (std::size_t row = 0; row < trace.n && same; ++row) {
    same = undone.reserved_steps.after(row) == full.reserved[row] &&
           undone.reserved_steps.before(row) ==
               (row == 0 ? full.initial_reserved : full.reserved[row - 1]);
    peak_reserved = std::max(peak_reserved, full.reserved[row]);
    peak_active = std::max(peak_active, full.active[row]);
  }
  if (same && peak_reserved == undone.reserved_steps.peak() && peak_active == undone.peak_active)
    return;
  std::printf("totals differ\n");
  std::abort();
}

void run(std::mt19937_64& random) {
  const Case c = make(random);
  const TraceView trace{c.action.size(), c.action.data(), c.address.data(),
                        c.size.data(),   c.stream.data(), c.pool.data()};
  FinalState end;
  end.n_segments = c.segment_address.size();
  end.segment_address = c.segment_address.data();
  end.segment_size = c.segment_size.data();
  end.segment_stream = c.segment_stream.data();
  end.segment_pool = c.segment_pool.data();
  end.segment_kind = c.segment_kind.data();
  end.segment_expandable = c.segment_expandable.data();
  end.n_blocks = c.block_address.size();
  end.block_address = c.block_address.data();
  end.block_size = c.block_size.data();
  end.block_requested = c.block_requested.data();
  end.block_state = c.block_state.data();
  const Settings settings = some_settings(random);
  const UndoneTrace undone = undo_trace(trace, end, settings);
  check_totals(trace, end, settings, undone);
  Inference inference;
  inference.limit_bytes = random() % 2 == 0 ? 0 : odd_number(random);
  inference.is_collecting = random() % 2 == 0;
  const TraceOps made = build_ops(trace, undone, settings, inference);
  const InitialState initial =
      initial_state(trace, undone, settings, random() % 2 == 0 ? 0 : 1ULL << 32);
  const ReplayInput input{made.ops, &initial, made.n_ids, made.n_pools};
  Config config;
  config.settings = some_settings(random);
  config.era = static_cast<Era>(random() % 3);
  if (random() % 2 == 0) config.capacity_bytes = random() % (4ULL << 30);
  if (random() % 3 == 0) config.memory_fraction = 0.5;
  replay(input, config, {random() % 2 == 0, random() % 2 == 0});
  Comparison comparison;
  replay_recorded(input, config, {&made.records, &trace, &end}, comparison, UNLIMITED);
  InitialState learned = initial;
  learned.order = learn_seed_order(input, config, {&made.records, &trace, &end});
  replay({made.ops, &learned, made.n_ids, made.n_pools}, config, {});
  SimulatedRecording recording;
  replay_and_record(input, config, recording);
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 2000;
  const auto seed = static_cast<std::uint64_t>(argc > 2 ? std::atoi(argv[2]) : 1);
  for (int i = 0; i < count; ++i) {
    std::mt19937_64 random(seed * 1000003 + static_cast<std::uint64_t>(i));
    run(random);
  }
  std::printf("%d nonsensical traces survived\n", count);
  return 0;
}
