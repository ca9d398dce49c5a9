// Dense numbers for addresses, in order of first appearance. Open addressing; grows as needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace fragdoctor {

class AddressIds {
 public:
  static constexpr std::uint32_t ABSENT = std::numeric_limits<std::uint32_t>::max();

  AddressIds() : cells_(1024, ABSENT) {}

  std::uint32_t id_of(std::uint64_t address) {
    std::size_t cell = find(address);
    if (cells_[cell] != ABSENT) return cells_[cell];
    const auto id = static_cast<std::uint32_t>(addresses_.size());
    addresses_.push_back(address);
    cells_[cell] = id;
    if (addresses_.size() * 2 > cells_.size()) grow();
    return id;
  }
  std::uint32_t lookup(std::uint64_t address) const { return cells_[find(address)]; }
  std::uint64_t address_of(std::uint32_t id) const { return addresses_[id]; }
  std::size_t size() const { return addresses_.size(); }

 private:
  std::size_t find(std::uint64_t address) const {
    // Finalizer of splitmix64: crafted addresses cannot collide by sharing low bits.
    std::uint64_t h = address;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9ULL;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebULL;
    h ^= h >> 31;
    const std::size_t mask = cells_.size() - 1;
    std::size_t cell = static_cast<std::size_t>(h) & mask;
    while (cells_[cell] != ABSENT && addresses_[cells_[cell]] != address) cell = (cell + 1) & mask;
    return cell;
  }
  void grow() {
    cells_.assign(cells_.size() * 2, ABSENT);
    for (std::uint32_t id = 0; id < addresses_.size(); ++id) cells_[find(addresses_[id])] = id;
  }

  std::vector<std::uint32_t> cells_;
  std::vector<std::uint64_t> addresses_;
};

}  // namespace fragdoctor
