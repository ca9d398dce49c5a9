// Converts the size that a program asks for to the size of its block and of a new segment.
#pragma once

#include <cstdint>

#include "allocator_types.h"

namespace fragdoctor {

inline std::uint64_t round_up(std::uint64_t size, std::uint64_t step) {
  return (size + step - 1) / step * step;
}

// Size of the block for a request (> 0, at most MAX_REQUEST): a multiple of 512, or of a fraction
// of a power of two if roundup_power2_divisions is on.
std::uint64_t round_size(const Settings& settings, std::uint64_t size);

// Bytes that cudaMalloc is asked for when a block of this rounded size needs a new segment.
std::uint64_t allocation_size(const Settings& settings, std::uint64_t rounded);

}  // namespace fragdoctor
