// Random operations under many settings: every invariant holds all the time, two runs are equal,
// and once everything is freed and flushed, nothing is left. Run it under ASan and UBSan;
// tools/fuzz.py makes a libFuzzer target of it.
#include <cstdint>
#include <vector>

#include "allocator.h"
#include "allocator_test.h"
#include "random_source.h"

using namespace fragdoctor;

namespace {

struct Digest : Observer {
  std::uint64_t value = 14695981039346656037ULL;
  std::uint64_t reserved = 0;
  void add(std::uint64_t x) { value = (value ^ x) * 1099511628211ULL; }
  void on_event(const TraceEvent& e) override {
    add(static_cast<std::uint64_t>(e.action));
    add(e.address);
    add(e.size);
    if (e.action == Action::segment_alloc || e.action == Action::segment_map) reserved += e.size;
    if (e.action == Action::segment_free || e.action == Action::segment_unmap) reserved -= e.size;
  }
};

Config config_for(unsigned seed) {
  Config config;
  config.era = static_cast<Era>(seed % 3);
  config.capacity_bytes = (200 + seed % 7 * 300) * MIB;
  config.settings.expandable_segments = seed % 2 == 1;
  if (seed % 5 == 0) config.settings.max_split_bytes = (64 + seed % 64) * MIB;
  if (seed % 4 == 0) config.settings.large_segment_bytes = 64 * MIB;
  if (seed % 3 == 0) config.settings.garbage_collection_threshold = 0.5;
  if (seed % 3 == 0) config.memory_fraction = 0.8;
  if (seed % 6 == 0) config.settings.roundup_power2_divisions.fill(4);
  config.event_delay = seed % 4;
  return config;
}

std::uint64_t run(unsigned seed, RandomSource random) {
  Allocator a(config_for(seed));
  Digest digest;
  a.set_observer(&digest);
  const auto below = [&](std::uint64_t n) { return random() % n; };
  std::vector<BlockId> live;
  std::vector<Ticket> tickets;
  const std::uint32_t pool = a.pool_create(seed % 2 == 0, seed % 5 == 1);
  bool inside = false;
  for (int step = 0; step < 3000 && !random.is_used_up(); ++step) {
    const std::uint64_t what = below(100);
    if (what < 55) {
      const std::uint64_t size = 1 + below(1ULL << (6 + below(22)));
      const auto stream = static_cast<std::uint32_t>(below(3));
      const MallocResult r = a.malloc(size, stream, below(20) == 0 ? pool : 0);
      REQUIRE(r.ok == (r.block != NO_BLOCK));
      if (r.ok) {
        REQUIRE(a.is_allocated(r.block));
        REQUIRE(a.size_of(r.block) >= size);
        live.push_back(r.block);
      } else {
        REQUIRE(a.last_oom().requested_bytes == size);
      }
    } else if (what < 95 && !live.empty()) {
      const std::size_t at = below(live.size());
      const BlockId id = live[at];
      live[at] = live.back();
      live.pop_back();
      if (what < 60) {
        tickets.push_back(a.free_pending(id));
      } else {
        if (what < 66) a.record_stream(id, static_cast<std::uint32_t>(below(4)));
        a.free(id);
      }
    } else if (what < 97) {
      a.empty_cache();
    } else if (what < 98 && !tickets.empty()) {
      a.complete(tickets[below(tickets.size())]);
    } else if (what < 99) {
      inside ? a.context_end() : a.context_begin(pool);
      inside = !inside;
    } else {
      a.synchronize();
    }
    REQUIRE(digest.reserved == a.counters().reserved);
    REQUIRE(a.counters().reserved >= a.counters().active);
    REQUIRE(a.counters().active >= a.counters().allocated);
    REQUIRE(a.counters().reserved <= a.config().capacity_bytes);
    if (step % 50 == 0) REQUIRE(a.check() == nullptr);
  }
  REQUIRE(a.check() == nullptr);
  if (inside) a.context_end();
  for (const BlockId id : live) a.free(id);
  a.pool_release(pool, true);
  a.empty_cache();
  REQUIRE(a.check() == nullptr);
  REQUIRE(a.counters().reserved == 0);
  REQUIRE(a.counters().active == 0);
  REQUIRE(a.counters().requested == 0);
  REQUIRE(a.layout().empty());
  REQUIRE(a.driver_free_bytes() == a.config().capacity_bytes);
  return digest.value;
}

}  // namespace

#ifdef FRAGDOCTOR_FUZZER
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t n) {
  RandomSource random(bytes, n);
  const auto seed = static_cast<unsigned>(random() % 5040);
  run(seed, random);
  return 0;
}
#else
int main() {
  for (unsigned seed = 0; seed < 120; ++seed)
    REQUIRE(run(seed, RandomSource(seed)) == run(seed, RandomSource(seed)));
  return 0;
}
#endif
