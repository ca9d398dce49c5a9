// Seeding an initial state, placement by the caller, tickets, address space, free sets.
#include <cstdint>
#include <vector>

#include "allocator.h"
#include "allocator_test.h"

using namespace fragdoctor;

namespace {

SeedSegment plain(std::uint64_t address, std::vector<SeedBlock> blocks) {
  SeedSegment seed;
  seed.address = address;
  for (const SeedBlock& block : blocks) seed.size += block.size;
  seed.blocks = std::move(blocks);
  return seed;
}

void seeded_blocks_are_used_and_freed() {
  Config config;
  config.capacity_bytes = 100 * MIB;
  Allocator a(config);
  std::vector<BlockId> ids;
  REQUIRE(a.seed_segment(plain(0x7f0000000000ULL, {{4 * MIB, 4 * MIB, BlockState::allocated},
                                                   {16 * MIB, 0, BlockState::inactive}}),
                         &ids));
  REQUIRE(ids.size() == 2);
  REQUIRE(a.check() == nullptr);
  REQUIRE(a.counters().reserved == 20 * MIB);
  REQUIRE(a.counters().allocated == 4 * MIB);
  const MallocResult r = a.malloc(10 * MIB);
  REQUIRE(r.address == 0x7f0000000000ULL + 4 * MIB);
  a.free(ids[0]);
  a.free(r.block);
  a.empty_cache();
  REQUIRE(a.counters().reserved == 0);
  REQUIRE(a.seed_segment(plain(0x7f1000000000ULL, {{3 * MIB, 0, BlockState::inactive}})));
  REQUIRE(a.driver_free_bytes() == 96 * MIB);  // physical memory comes in pages of 2 MiB
  a.empty_cache();
  REQUIRE(a.driver_free_bytes() == 100 * MIB);
}

void seeded_reservations_grow() {
  Config config;
  config.settings.expandable_segments = true;
  Allocator a(config);
  SeedSegment seed = plain(0x7f0000000000ULL, {{20 * MIB, 20 * MIB, BlockState::allocated},
                                               {80 * MIB, 0, BlockState::unmapped}});
  seed.is_expandable = true;
  REQUIRE(a.seed_segment(seed));
  REQUIRE(a.counters().reserved == 20 * MIB);
  REQUIRE(a.malloc(30 * MIB).address == 0x7f0000000000ULL + 20 * MIB);
  REQUIRE(a.counters().reserved == 60 * MIB);
  REQUIRE(a.check() == nullptr);
}

void unsound_seeds_are_refused() {
  Allocator a{Config{}};
  REQUIRE(a.seed_segment(plain(0x7f0000000000ULL, {{2 * MIB, 0, BlockState::inactive}})));
  const std::vector<SeedSegment> bad = {
      plain(0x7f0000000000ULL, {{2 * MIB, 0, BlockState::inactive}}),  // overlaps
      plain(0x7f0010000000ULL, {}),
      plain(0x7f0010000001ULL, {{512, 0, BlockState::inactive}}),
      plain(0x7f0010000000ULL, {{0, 0, BlockState::inactive}}),
      plain(0x7f0010000000ULL, {{512, 0, BlockState::unmapped}}),
      plain(0x7f0010000000ULL, {{512, 0, BlockState::pending_free}}),
      plain(0xffffffffffff0000ULL, {{1ULL << 40, 0, BlockState::inactive}}),
  };
  for (const SeedSegment& seed : bad) REQUIRE(!a.seed_segment(seed));
  SeedSegment short_one = plain(0x7f0010000000ULL, {{512, 0, BlockState::inactive}});
  short_one.size = 1024;
  REQUIRE(!a.seed_segment(short_one));
  SeedSegment no_pool = plain(0x7f0010000000ULL, {{512, 0, BlockState::inactive}});
  no_pool.pool = 9;
  REQUIRE(!a.seed_segment(no_pool));
  REQUIRE(a.counters().reserved == 2 * MIB);
  REQUIRE(a.check() == nullptr);
}

struct Recorded : Placement {
  std::vector<std::uint64_t> addresses;
  std::size_t next = 0;
  std::uint64_t place(std::uint64_t, bool, std::uint32_t, bool) override {
    return next < addresses.size() ? addresses[next++] : 0;
  }
};

void recorded_addresses_are_taken_where_they_can_be() {
  Allocator a{Config{}};
  Recorded recorded;
  recorded.addresses = {0x7f0000000000ULL, 0x7f0000000000ULL, 0x7f0000000001ULL};
  a.set_placement(&recorded);
  REQUIRE(a.malloc(20 * MIB).address == 0x7f0000000000ULL);
  REQUIRE(a.malloc(20 * MIB).address == 0x700000000000ULL);             // already taken
  REQUIRE(a.malloc(20 * MIB).address == 0x700000000000ULL + 20 * MIB);  // not a multiple of 512
  REQUIRE(a.malloc(20 * MIB).address == 0x700000000000ULL + 40 * MIB);  // none given
}

void tickets_are_completed_once() {
  Config config;
  config.capacity_bytes = 40 * MIB;
  Allocator a(config);
  const MallocResult first = a.malloc(20 * MIB);
  const MallocResult second = a.malloc(20 * MIB);
  const Ticket one = a.free_pending(first.block);
  const Ticket two = a.free_pending(second.block);
  REQUIRE(a.counters().allocated == 0);
  REQUIRE(a.counters().active == 40 * MIB);
  REQUIRE(a.complete(two));
  REQUIRE(!a.complete(two));
  REQUIRE(!a.complete(99));
  REQUIRE(a.malloc(12 * MIB).ok);
  REQUIRE(a.counters().retries == 0);
  REQUIRE(a.malloc(18 * MIB).ok);  // only the flush frees the first one
  REQUIRE(a.counters().retries == 1);
  REQUIRE(!a.complete(one));
  REQUIRE(a.check() == nullptr);
}

void huge_requests_fail_without_a_trace() {
  Allocator a{Config{}};
  REQUIRE(!a.malloc(UNLIMITED).ok);
  REQUIRE(!a.malloc(MAX_REQUEST).ok);
  REQUIRE(a.counters().ooms == 0);
  REQUIRE(a.malloc(0).ok);
  REQUIRE(!a.malloc(MAX_REQUEST - 1).ok || a.counters().reserved > 0);
}

void free_sets_stay_sorted() {
  FreeSet set;
  const auto key = [](std::uint64_t i) { return FreeKey{i * 7919 % 1000, i, 0}; };
  for (std::uint64_t i = 0; i < 5000; ++i) set.insert({key(i), static_cast<BlockId>(i), i % 700 == 0});
  REQUIRE(set.size() == 5000);
  std::size_t n = 0;
  FreeKey before{0, 0, 0};
  for (auto p = set.begin(); !set.at_end(p); set.forward(p), ++n) {
    const FreeKey at = key(set[p]);
    REQUIRE(n == 0 || before < at);
    before = at;
  }
  REQUIRE(n == 5000);
  std::size_t n_releasable = 0;
  for (auto p = set.begin(); set.find_releasable(p); set.forward(p), ++n_releasable)
    REQUIRE(set[p] % 700 == 0);
  REQUIRE(n_releasable == 8);
  const auto found = set.lower_bound(500);
  REQUIRE(key(set[found]).size == 500);
  for (std::uint64_t i = 0; i < 5000; ++i) REQUIRE(set.erase(key(i)));
  REQUIRE(!set.erase(key(1)));
  REQUIRE(set.empty());
}

void address_space_is_first_fit() {
  AddressSpace space;
  const std::uint64_t base = 0x700000000000ULL;
  REQUIRE(space.take(base, 1) == base);
  REQUIRE(space.take(base, 3 * MIB) == base + 2 * MIB);
  REQUIRE(space.take(base, 2 * MIB) == base + 6 * MIB);
  space.release(base + 2 * MIB);
  REQUIRE(space.take(base, 6 * MIB) == base + 8 * MIB);
  REQUIRE(space.take(base, 4 * MIB) == base + 2 * MIB);
  REQUIRE(!space.take_at(base, 512));
  REQUIRE(space.take(base, ~0ULL) == 0);
  space.release(12345);
}

}  // namespace

int main() {
  seeded_blocks_are_used_and_freed();
  seeded_reservations_grow();
  unsound_seeds_are_refused();
  recorded_addresses_are_taken_where_they_can_be();
  tickets_are_completed_once();
  huge_requests_fail_without_a_trace();
  free_sets_stay_sorted();
  address_space_is_first_fit();
  return 0;
}
