#include "address_space.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace fragdoctor {
namespace {

constexpr std::uint64_t ALIGN = 2ULL << 20;
constexpr std::uint64_t TOP = std::numeric_limits<std::uint64_t>::max() / ALIGN * ALIGN;

}  // namespace

AddressSpace::AddressSpace() { gaps_.emplace(ALIGN, TOP); }

void AddressSpace::split_gap(std::map<std::uint64_t, std::uint64_t>::iterator gap,
                             std::uint64_t address, std::uint64_t size) {
  const std::uint64_t start = gap->first;
  const std::uint64_t end = gap->second;
  gaps_.erase(gap);
  if (start < address) gaps_.emplace(start, address);
  if (address + size < end) gaps_.emplace(address + size, end);
  taken_.emplace(address, address + size);
}

std::uint64_t AddressSpace::take(std::uint64_t base, std::uint64_t size) {
  if (size == 0 || size > TOP - ALIGN) return 0;
  size = (size + ALIGN - 1) / ALIGN * ALIGN;
  auto gap = gaps_.upper_bound(base);
  if (gap != gaps_.begin()) --gap;  // the gap that may contain the base
  for (; gap != gaps_.end(); ++gap) {
    const std::uint64_t from = std::max(gap->first, base);
    const std::uint64_t address = (from + ALIGN - 1) / ALIGN * ALIGN;
    if (address < gap->second && gap->second - address >= size) {
      split_gap(gap, address, size);
      return address;
    }
  }
  return 0;
}

bool AddressSpace::take_at(std::uint64_t address, std::uint64_t size) {
  auto gap = gaps_.upper_bound(address);
  if (size == 0 || gap == gaps_.begin()) return false;
  --gap;
  if (address >= gap->second || gap->second - address < size) return false;
  split_gap(gap, address, size);
  return true;
}

void AddressSpace::release(std::uint64_t address) {
  const auto range = taken_.find(address);
  if (range == taken_.end()) return;
  std::uint64_t start = range->first;
  std::uint64_t end = range->second;
  taken_.erase(range);
  auto after = gaps_.lower_bound(start);
  if (after != gaps_.end() && after->first == end) {
    end = after->second;
    after = gaps_.erase(after);
  }
  if (after != gaps_.begin() && std::prev(after)->second == start) {
    start = std::prev(after)->first;
    gaps_.erase(std::prev(after));
  }
  gaps_.emplace(start, end);
}

}  // namespace fragdoctor
