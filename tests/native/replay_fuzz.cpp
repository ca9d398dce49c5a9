// Feeds nonsense to the undoing of traces, the building of operations and the replay. Run it
// under ASan and UBSan:  replay_fuzz COUNT SEED; tools/fuzz.py makes a libFuzzer target of it.
// It fails if the allocator's invariants break, or if the sanitizers find something.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "random_source.h"
#include "replay.h"
#include "trace_ops.h"
#include "undone.h"

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

std::uint64_t odd_number(RandomSource& random) {
  switch (random() % 6) {
    case 0: return random();
    case 1: return random() % 4096;
    case 2: return (random() % 64) * 512;
    case 3: return (random() % 64) * 2 * MIB;
    case 4: return (random() % 16) * 20 * MIB;
    default: return UNLIMITED - random() % 4096;
  }
}

Case make(RandomSource& random) {
  Case c;
  const std::size_t n = random() % 400;
  for (std::size_t i = 0; i < n; ++i) {
    c.action.push_back(static_cast<std::uint8_t>(random() % 12));
    c.address.push_back(odd_number(random));
    c.size.push_back(odd_number(random));
    c.stream.push_back(static_cast<std::int32_t>(random() % 4) - 1);
    c.pool.push_back(static_cast<std::int32_t>(random() % 4) - 1);
    // Often something that fits what came before.
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

Settings some_settings(RandomSource& random) {
  Settings s;
  if (random() % 2 == 0) s.max_split_bytes = (20 + random() % 200) * MIB;
  if (random() % 2 == 0) s.expandable_segments = true;
  if (random() % 3 == 0) s.large_segment_bytes = (11 + random() % 60) * MIB;
  if (random() % 3 == 0) s.garbage_collection_threshold = 0.5;
  for (auto& d : s.roundup_power2_divisions) d = 1U << (random() % 5);
  return s;
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("broken: %s\n", what);
  std::abort();
}

// The totals are the sums over lives and segments, whatever was in the file.
void check_totals(const TraceView& trace, const UndoneTrace& undone) {
  const Lives& lives = undone.lives;
  for (const Total which : {Total::allocated, Total::active, Total::reserved}) {
    const std::vector<std::int64_t> column = total_column(trace, undone, which);
    require(column.size() == trace.n + 1, "a total in every state");
    std::int64_t peak = 0;
    for (std::size_t k = 0; k <= trace.n; ++k) {
      const auto state = static_cast<std::int32_t>(k);
      std::uint64_t sum = 0;
      if (which == Total::reserved) {
        for (const SegmentLife& s : undone.segments)
          if (s.start < state && state <= s.done) sum += s.size;
      } else {
        const auto& end = which == Total::allocated ? lives.free : lives.done;
        for (std::size_t i = 0; i < lives.size_of_all(); ++i)
          if (lives.start[i] < state && state <= end[i]) sum += lives.size[i];
      }
      require(column[k] == static_cast<std::int64_t>(sum), "totals are sums over lives");
      peak = std::max(peak, column[k]);
    }
    const Peak& kept = which == Total::allocated ? undone.peak_allocated
                       : which == Total::active  ? undone.peak_active
                                                 : undone.peak_reserved;
    require(kept.bytes == peak && column[static_cast<std::size_t>(kept.state)] == peak,
            "the peak is the highest total");
    const std::int64_t starts[] = {0, static_cast<std::int64_t>(trace.n / 2)};
    const Envelope e = envelope(trace, undone, which, starts, trace.n > 1 ? 2 : 1);
    std::int64_t highest = e.high[0];
    for (const std::int64_t high : e.high) highest = std::max(highest, high);
    require(highest == peak || peak == 0, "an envelope loses no peak");
  }
}

// At the end, the lives are the blocks of the file, and every layout tiles its segments.
void check_layouts(const TraceView& trace, const FinalState& end, const UndoneTrace& undone) {
  const Lives& lives = undone.lives;
  for (std::size_t i = 0; i < lives.size_of_all(); ++i) {
    require(lives.start[i] <= lives.done[i] && lives.free[i] <= lives.done[i], "rows in order");
    require((lives.done[i] == NEVER) == (lives.block[i] != NO_BLOCK), "who is there at the end");
  }
  for (std::int32_t state = 0; state <= static_cast<std::int32_t>(trace.n); state += 37) {
    const DeviceLayout l = layout_at(trace, end, undone, state);
    std::uint64_t reserved = 0;
    for (std::size_t i = 0; i < l.segment_address.size(); ++i) {
      reserved += l.segment_bytes[i];
      require(i == 0 || l.segment_address[i - 1] + l.segment_bytes[i - 1] <= l.segment_address[i],
              "segments do not overlap");
    }
    const std::int64_t asked[] = {state};
    require(static_cast<std::int64_t>(reserved) == totals_at(trace, undone, asked, 1)[2],
            "a layout has the reserved bytes of its state");
    for (std::size_t i = 0; i < l.free_address.size(); ++i) {
      const auto s = static_cast<std::size_t>(l.free_segment[i]);
      require(l.free_address[i] >= l.segment_address[s] &&
                  l.free_address[i] + l.free_bytes[i] <= l.segment_address[s] + l.segment_bytes[s],
              "free blocks lie in their segments");
    }
    for (const std::uint32_t life : l.live)
      require(lives.is_active_at(life, state), "live blocks live");
  }
}

void run(RandomSource& random) {
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
  check_totals(trace, undone);
  check_layouts(trace, end, undone);
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

#ifdef FRAGDOCTOR_FUZZER
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t n) {
  RandomSource random(bytes, n);
  run(random);
  return 0;
}
#else
int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 2000;
  const auto seed = static_cast<std::uint64_t>(argc > 2 ? std::atoi(argv[2]) : 1);
  for (int i = 0; i < count; ++i) {
    RandomSource random(seed * 1000003 + static_cast<std::uint64_t>(i));
    run(random);
  }
  std::printf("%d nonsensical traces survived\n", count);
  return 0;
}
#endif
