// The ranges of a device's address space that are taken; first fit from a base upward.
#pragma once

#include <cstdint>
#include <map>

namespace fragdoctor {

// Where the model places segments and reservations that no recording places.
constexpr std::uint64_t SEGMENT_BASE = 0x700000000000ULL;
constexpr std::uint64_t RESERVATION_BASE = 0x600000000000ULL;

class AddressSpace {
 public:
  AddressSpace();

  // Take the lowest free range of `size` bytes that starts at a multiple of 2 MiB at or above
  // `base`; return its address, or 0 if there is none.
  std::uint64_t take(std::uint64_t base, std::uint64_t size);
  // Take exactly this range. Return false if a part of it is already taken.
  bool take_at(std::uint64_t address, std::uint64_t size);
  // Give back the range that was taken at this address.
  void release(std::uint64_t address);

 private:
  void split_gap(std::map<std::uint64_t, std::uint64_t>::iterator gap, std::uint64_t address,
                 std::uint64_t size);

  std::map<std::uint64_t, std::uint64_t> taken_;  // address -> end
  std::map<std::uint64_t, std::uint64_t> gaps_;   // address -> end; no two touch
};

}  // namespace fragdoctor
