// Which ranges of a device's address space are taken; first fit from the bottom.
#pragma once

#include <cstdint>
#include <map>

namespace fragdoctor {

class AddressSpace {
 public:
  explicit AddressSpace(std::uint64_t base) : base_(base) {}

  // Take the lowest free range of `size` bytes at a multiple of 2 MiB; 0 if there is none.
  std::uint64_t take(std::uint64_t size);
  // Take exactly this range. Return false where it overlaps one that is taken.
  bool take_at(std::uint64_t address, std::uint64_t size);
  void release(std::uint64_t address);
  bool is_free(std::uint64_t address, std::uint64_t size) const;

 private:
  std::uint64_t base_;
  std::map<std::uint64_t, std::uint64_t> taken_;  // address -> size
  // Every range that take() could return for `size` >= hint_size_ lies at or above hint_.
  std::uint64_t hint_ = 0;
  std::uint64_t hint_size_ = 0;
};

}  // namespace fragdoctor
