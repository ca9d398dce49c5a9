// Numbers as stored in a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace fragdoctor {

// Eight bytes as a number. If this were written as a loop, GCC would turn it into eight loads.
inline uint64_t load_64(const uint8_t* bytes) {
  uint64_t value = 0;
  std::memcpy(&value, bytes, sizeof value);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  value = __builtin_bswap64(value);
#endif
  return value;
}

inline uint32_t load_32(const uint8_t* bytes) {
  uint32_t value = 0;
  std::memcpy(&value, bytes, sizeof value);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  value = __builtin_bswap32(value);
#endif
  return value;
}

// The lowest n bytes (1 to 8) as a signed number.
inline int64_t sign_extended(uint64_t value, size_t n) {
  const size_t n_unused = 64 - 8 * n;
  return static_cast<int64_t>(value << n_unused) >> n_unused;
}

}  // namespace fragdoctor
