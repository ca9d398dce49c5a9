#include "rounding.h"

#include <algorithm>

namespace fragdoctor {
namespace {

unsigned floor_log2(std::uint64_t value) {
#if defined(__GNUC__)
  return value == 0 ? 0 : 63U - static_cast<unsigned>(__builtin_clzll(value));
#else
  unsigned log = 0;
  for (unsigned step = 32; step > 0; step /= 2) {
    if (value >> step == 0) continue;
    value >>= step;
    log += step;
  }
  return log;
#endif
}

std::uint64_t round_up_to_division(std::uint64_t size, std::uint32_t divisions) {
  if ((size & (size - 1)) == 0) return size;
  const std::uint64_t floor = 1ULL << floor_log2(size);
  const std::uint64_t step = floor >> floor_log2(divisions);
  return step == 0 ? floor << 1 : round_up(size, step);
}

}  // namespace

std::uint64_t round_size(const Settings& settings, std::uint64_t size) {
  if (size < MIN_BLOCK) return MIN_BLOCK;
  const unsigned log = std::clamp(floor_log2(size), 20U, 35U);
  const std::uint32_t divisions = settings.roundup_power2_divisions[log - 20];
  if (divisions > 1 && size > MIN_BLOCK * divisions) return round_up_to_division(size, divisions);
  return round_up(size, MIN_BLOCK);
}

std::uint64_t allocation_size(const Settings& settings, std::uint64_t rounded) {
  if (rounded <= SMALL_SIZE) return SMALL_BUFFER;
  if (rounded < MIN_LARGE_ALLOC) return settings.large_segment_bytes;
  return round_up(rounded, ROUND_LARGE);
}

}  // namespace fragdoctor
